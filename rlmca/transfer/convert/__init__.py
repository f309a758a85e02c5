"""Files -> files: Hugging Face folders and Megatron checkpoints into each other, without a model, a GPU or a process group."""
