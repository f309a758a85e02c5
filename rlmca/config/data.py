"""Keys of the data: which sets, how rows become tokens, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option

MIX_STRATEGIES = ("concat", "interleave_under", "interleave_over", "interleave_once")


@dataclass(frozen=True)
class DataConfig:
    """Data sets and how their rows are read."""

    dataset: list[str] = option([], "Training sets: names in dataset_info.json or reasoning_gym:TASK?size=N&seed=S; a list or a,b.")
    eval_dataset: list[str] = option([], "Evaluation sets, written like dataset.")
    dataset_dir: str = option("data", "Folder with dataset_info.json and the files it names.")
    cutoff_len: int = option(
        2048, "Longest supervised row in tokens; longer rows are cut, and texts of stage pt become several rows.", at_least=2
    )
    packing: bool | None = option(
        None,
        "Rows behind each other instead of padded. Each still sees itself alone, so no row's loss changes. In stages pt and sft rows "
        "are put together up to cutoff_len tokens, and batch sizes count such packs. Stage pt packs unless told otherwise.",
    )
    neat_packing: bool | None = option(None, "LLaMA-Factory's name for packing that keeps rows apart, as packing always does here.")
    train_on_prompt: bool = option(False, "Train on prompt tokens too, not on replies alone.")
    mask_history: bool = option(False, "Train on the last turn of a conversation only.")
    max_samples: int | None = option(None, "Read at most this many rows of each set.", at_least=1)
    val_size: float = option(0.0, "Rows (or share of rows, below 1) held out of dataset for evaluation.", at_least=0)
    eval_on_each_dataset: bool = option(False, "Report every set of eval_dataset by itself.")
    default_system: str | None = option(None, "System message for rows that have none.")
    enable_thinking: bool = option(True, "Render replies of thinking models with their thought.")
    disable_shuffling: bool = option(False, "Keep rows in the order of the files.")
    data_seed: int | None = option(None, "Seed of the data order; seed when not set.", at_least=0, at_most=2**32 - 1)
    mix_strategy: str = option(
        "concat",
        "How several training sets become one: behind each other, or taken in turns until the first is used up (under), until all "
        "are, beginning again with those that were (over), or until all are, each row once (once).",
        choices=MIX_STRATEGIES,
    )
    interleave_probs: list[float] = option([], "Chance of each training set to give the next row; in turns when not set.", at_least=0)
    streaming: bool = option(False, "Read the training sets row by row while training, in bounded memory; needs max_steps.")
    buffer_size: int = option(16384, "Rows among which streaming draws the next one; 1 keeps the order of the files.", at_least=1)
    tokenized_path: str | None = option(None, "Folder for the tokenised rows: written when it is not there, read when it is.")
    overwrite_cache: bool = option(False, "Write tokenized_path anew.")
    preprocessing_batch_size: int = option(1000, "Rows that are tokenised at a time.", at_least=1)
    data_shared_file_system: bool = option(
        False, "With several processes one tokenises for all nodes, through output_dir, instead of one on each node."
    )

    @property
    def packs(self) -> bool:
        """Whether rows are packed."""
        return bool(self.packing or self.neat_packing)
