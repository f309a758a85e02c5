"""Keys of the model: where its weights come from and how its tokenizer talks."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from."""

    model_name_or_path: str = option("", "Folder of a Hugging Face model, or its name on the hub.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the hub.")
    cache_dir: str | None = option(None, "Folder for downloads from the hub; the hub client's own default when not set.")
    hf_hub_token: str | None = option(None, "Token for private models on the hub.", secret=True)
    trust_remote_code: bool = option(False, "Allow code that comes with a model or a tokenizer to run.")
    template: str | None = option(None, "Name of a chat template; the tokenizer's own template when not set.")
    flash_attn: str = option(
        "auto",
        "Attention kernel of training. auto: the engine takes the fastest it has, and Megatron always does; Hugging Face engine: "
        "sdpa is torch's, disabled is plain matrix products, fa2 and fa3 are FlashAttention's packages.",
        choices=("auto", "sdpa", "disabled", "fa2", "fa3"),
    )
    train_from_scratch: bool = option(False, "Start from fresh random weights of the model's config.json instead of its weights.")
    ref_model: str | None = option(
        None, "Folder or hub name of the model that the KL or stage dpo compares with; the starting weights when not set."
    )
    use_mca: bool | None = option(None, "Megatron-Core engine; set by the environment variable USE_MCA=1, a file may only agree with it.")
