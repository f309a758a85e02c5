"""What this room reads from the configuration, and where the hub is told about credentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Log = Callable[[str], None]


def no_log(message: str) -> None:
    """A `Log` that says nothing."""


class DataOptions(Protocol):
    """The fields of the configuration's data section that are used here."""

    @property
    def dataset(self) -> Sequence[str]: ...
    @property
    def eval_dataset(self) -> Sequence[str]: ...
    @property
    def dataset_dir(self) -> str: ...
    @property
    def cutoff_len(self) -> int: ...
    @property
    def train_on_prompt(self) -> bool: ...
    @property
    def mask_history(self) -> bool: ...
    @property
    def max_samples(self) -> int | None: ...
    @property
    def val_size(self) -> float: ...
    @property
    def eval_on_each_dataset(self) -> bool: ...
    @property
    def mix_strategy(self) -> str: ...
    @property
    def interleave_probs(self) -> Sequence[float]: ...
    @property
    def preprocessing_batch_size(self) -> int: ...


class TokenizerOptions(Protocol):
    """The fields of the configuration's model section that say which tokenizer to load."""

    @property
    def model_name_or_path(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def cache_dir(self) -> str | None: ...
    @property
    def model_revision(self) -> str: ...
    @property
    def hf_hub_token(self) -> str | None: ...


@dataclass(frozen=True)
class Hub:
    """How data sets are fetched from the Hugging Face hub; the endpoint is huggingface_hub's own affair."""

    cache_dir: str | None = None
    token: str | None = None
