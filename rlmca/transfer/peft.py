"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmca.layouts.adapters import AdapterLayout
from rlmca.layouts.boxes import Shape
from rlmca.models.options import LoraOptions
from rlmca.transfer.hf_folder import HFFolder, HFFolderError, open_file
from rlmca.transfer.hf_writer import HFWriter
from rlmca.transfer.stream import Weights, agree

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora"})
"""Fields of PEFT's configuration that `read_adapter_config` looks at."""
_FREE = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",  # the name of a module
        "qalora_group_size",  # of use_qalora
        "runtime_config",
    }
)
"""Fields that may say anything: they change nothing about what a finished adapter computes."""
_RESIDUAL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights that take the first A and B out of the weights, or put others in their place."""


def _plain(name: str, value: Any) -> bool:
    """Whether a field, also one of another version of PEFT, says nothing beyond plain LoRA."""
    if value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
        return True
    if name == "init_lora_weights":
        return value is True or (isinstance(value, str) and value.lower() == "gaussian")
    return name == "bias" and value == "none"


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says about the arithmetic."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scaling(self) -> float:
        """See `LoraOptions.scaling`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdapterFolder(HFFolder):
    """An open adapter; like `HFFolder` it gives `shapes` and reads slices. Raises HFFolderError for what is no plain LoRA."""

    def __init__(self, path: Path) -> None:
        self.adapter = read_adapter_config(Path(path))
        super().__init__(path)

    def _locate(self) -> dict[str, str]:
        if not (self.path / TENSORS).is_file():
            hint = (
                "; pickled .bin weights are not read: load the adapter with peft and save it again" if list(self.path.glob("*.bin")) else ""
            )
            raise HFFolderError(f"adapter_name_or_path: {self.path} has no {TENSORS}{hint}")
        with open_file(self.path / TENSORS) as file:
            return dict.fromkeys(file.keys(), TENSORS)

    def __enter__(self) -> AdapterFolder:
        return self

    def check(self, layout: AdapterLayout) -> None:
        """Raises HFFolderError when the tensors are not those of the layout."""
        self.check_shapes(layout.hf_tensors())

    def check_shapes(self, want: Mapping[str, Shape]) -> None:
        """Raises HFFolderError when the tensors are not exactly these."""
        problems = [f"missing: {name}" for name in want if name not in self.shapes]
        problems += [f"unexpected: {name}" for name in self.shapes if name not in want]
        problems += [
            f"{name} has shape {self.shapes[name]}, the model and {CONFIG} say {want[name]}"
            for name in want
            if name in self.shapes and self.shapes[name] != want[name]
        ]
        if problems:
            more = f"\nand {len(problems) - 8} more" if len(problems) > 8 else ""
            raise HFFolderError(f"the adapter {self.path} does not fit the model:\n" + "\n".join(problems[:8]) + more)


def read_adapter_config(path: Path) -> AdapterConfig:
    """What adapter_config.json in the folder says. HFFolderError when it is absent or asks for more than plain LoRA."""
    file = path / CONFIG
    if not file.is_file():
        raise HFFolderError(f"adapter_name_or_path: {path} has no {CONFIG}: it is no adapter in PEFT's format")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        kind, targets = raw["peft_type"], raw["target_modules"]
        config = AdapterConfig(int(raw["r"]), float(raw["lora_alpha"]), (), bool(raw.get("use_rslora", False)))
    except (ValueError, KeyError, TypeError) as error:
        raise HFFolderError(f"{file} is not a LoRA configuration of PEFT: {error!r}") from None
    if kind != "LORA":
        raise HFFolderError(f"{file}: peft_type {kind} is not in this version; LORA is")
    odd = [name for name, value in raw.items() if name not in _READ | _FREE and not _plain(name, value)]
    if str(raw.get("init_lora_weights")).lower().startswith(_RESIDUAL):
        raise HFFolderError(
            f"{file}: init_lora_weights: {raw['init_lora_weights']!r}: the adapter belongs to weights that PEFT changed before it trained; "
            "save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes it plain LoRA"
        )
    if odd:
        raise HFFolderError(f"{file}: {', '.join(f'{name}: {raw[name]!r}' for name in odd)}: only plain LoRA is read")
    if not isinstance(targets, list) or not targets:
        raise HFFolderError(f"{file}: target_modules is {targets!r}; write the list of names of layers")
    return AdapterConfig(config.rank, config.alpha, tuple(sorted(map(str, targets))), config.rslora)


def initial_matrix(name: str, shape: Shape, seed: int) -> Tensor:
    """PEFT's initial weights in float32: A uniform in +-1/sqrt(inputs) (its kaiming_uniform_ with a = sqrt(5)), B zero.

    They follow from the seed and the tensor's name alone, so every layout and both engines start alike.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def save_adapter(weights: Weights, path: Path, options: LoraOptions, targets: Sequence[str], base: str, dst_rank: int = 0) -> None:
    """Write `weights` (tensors under PEFT's names) and their configuration into the existing folder `path`; collective."""
    error: Exception | None = None
    writes = weights.group is None or dist.get_rank() == dst_rank
    stream = weights.tensors(dst_rank)
    if writes:
        try:
            with HFWriter(path, weights.shapes(), weights.dtype, single=TENSORS) as writer:
                for name, tensor in stream:
                    writer.write(name, tensor)
            _write_config(path, options, targets, base)
        except Exception as caught:
            error = caught
    for _ in stream:
        pass
    agree(weights.group, error)


def _write_config(path: Path, options: LoraOptions, targets: Sequence[str], base: str) -> None:
    lora_config(options, targets, base, inference=True).save_pretrained(str(path))


def lora_config(options: LoraOptions, targets: Sequence[str], base: str | None = None, *, inference: bool = False) -> LoraConfig:
    """PEFT's configuration of these options; `inference` freezes the adapter that it makes."""
    from peft import LoraConfig  # takes seconds, and only a run that has an adapter needs it

    return LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if float(options.alpha).is_integer() else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=list(targets),
        use_rslora=options.rslora,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=inference,
    )
