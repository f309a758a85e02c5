"""The adapters of the Hugging Face engine, by PEFT: attach them, fill them, merge them on the way out.

Shape legend: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmca.engines.adapter_start import AdapterStart
from rlmca.engines.base import AdapterUse
from rlmca.layouts.adapters import ALL, PREFIX, UnknownTarget
from rlmca.models.options import LoraOptions
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.module import ModuleWeights
from rlmca.transfer.peft import AdapterFolder, initial_matrix, lora_config, save_adapter


class HuggingFaceAdapters:
    """PEFT's layers around the linear layers of a model, which keeps its class; their matrices alone need a gradient.

    `parameters` are the matrices under the names of PEFT's files, `base` the model's own parameters under its own names.
    """

    def __init__(self, module: PreTrainedModel, options: LoraOptions) -> None:
        """Raises UnknownTarget, with the names that exist, and HFFolderError for an adapter to start from that does not fit."""
        from peft import get_peft_model  # takes seconds, and only a run that has an adapter needs it

        self.options = options
        self.base: dict[str, nn.Parameter] = dict(module.named_parameters())
        layers = _chosen(module, options.targets)
        self.target_modules = sorted({name.rsplit(".", 1)[-1] for name in layers} if ALL in options.targets else options.targets)
        device = next(module.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # what PEFT draws is overwritten
            self._peft: Any = get_peft_model(module, lora_config(options, self.target_modules))
        self._pairs = _pairs(module)
        if strange := sorted(set(self._pairs) ^ {f"{name}.weight" for name in layers}):
            raise UnknownTarget(f"lora_target: PEFT takes {', '.join(strange[:4])} in another way; write longer ends of the layers' names")
        self.parameters: dict[str, nn.Parameter] = {
            f"{PREFIX}{name.removesuffix('.weight')}.{matrix}.weight": parameter
            for name, pair in self._pairs.items()
            for matrix, parameter in zip(("lora_A", "lora_B"), pair, strict=True)
        }
        if options.start is None:
            self._fill(lambda name: initial_matrix(name, tuple(self.parameters[name].shape), options.seed))
        else:
            self.load(options.start)
        self.start = AdapterStart(self.parameters, options)

    @contextlib.contextmanager
    def used(self, use: AdapterUse) -> Iterator[None]:
        """The model as its base inside the block (False), or as it was when the run started ("start"); True: as it is."""
        if not use or (use == "start" and self.start.is_base):
            with self._peft.disable_adapter():
                yield
        else:
            with self.start.restored() if use == "start" else contextlib.nullcontext():
                yield

    def delta(self, name: str) -> Tensor | None:
        """What merging adds to a parameter of the base, [O, I] in float64; None for one without an adapter."""
        if name not in self._pairs:
            return None
        a_RI, b_OR = (matrix.detach().to(torch.float64) for matrix in self._pairs[name])
        return (b_OR @ a_RI) * self.options.scaling

    def merged(self, hf_config: Mapping[str, Any], group: dist.ProcessGroup | None, readable: Callable[[], None]) -> ModuleWeights:
        """The base with the adapters merged into what is read."""
        return ModuleWeights(self.base, hf_config, group, readable, self.delta)

    def weights(
        self,
        hf_config: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        readable: Callable[[], None],
        params: Mapping[str, Tensor] | None = None,
    ) -> ModuleWeights:
        """The adapters under PEFT's names (or `params`, such as their gradients, in place of their values)."""
        return ModuleWeights(self.parameters if params is None else params, hf_config, group, readable)

    def export(self, weights: ModuleWeights, path: Path, base: str) -> None:
        """Write the adapters as PEFT does, into the existing folder `path`; collective over the group of `weights`."""
        save_adapter(weights, path, self.options, self.target_modules, base)

    def load(self, path: Path, *, same_scaling: bool = False) -> None:
        """Fill the adapters from a folder. HFFolderError when it does not fit, or (`same_scaling`) counts otherwise than this run's."""
        with AdapterFolder(path) as folder:
            folder.check_shapes({name: tuple(parameter.shape) for name, parameter in self.parameters.items()})
            if same_scaling and folder.adapter.scaling != self.options.scaling:
                raise HFFolderError(
                    f"the adapter {path} counts {folder.adapter.scaling:g} times, and lora_alpha, lora_rank and use_rslora of this run say "
                    f"{self.options.scaling:g}; write those of the run that saved it"
                )
            self._fill(folder.read)

    @torch.no_grad()
    def _fill(self, values: Callable[[str], Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values(name))


def _chosen(module: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that `targets` means (PEFT: equal, or the end of the dotted name); never the head."""
    head = module.get_output_embeddings()
    known = [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head]
    found = {target: [name for name in known if target == ALL or f".{name}".endswith(f".{target}")] for target in targets}
    if unknown := [target for target, names in found.items() if not names]:
        leaves = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in known))
        raise UnknownTarget(
            f"lora_target: {', '.join(unknown)} is no linear layer of {module.config.model_type}; write all, or some of {leaves}"
            if leaves
            else f"lora_target: {type(module).__name__} has no linear layers besides its head; write finetuning_type: full"
        )
    chosen = {name for names in found.values() for name in names}
    return [name for name in known if name in chosen]


def _pairs(module: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """{name of a weight: A and B of its adapter}, of every layer that PEFT made."""
    from peft.tuners.lora import LoraLayer

    found = {f"{name}.weight": part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
    return {name: (_matrix(part.lora_A), _matrix(part.lora_B)) for name, part in found.items()}


def _matrix(of_adapters: nn.ModuleDict) -> nn.Parameter:
    only: Any = of_adapters["default"]
    return only.weight
