"""A Transformers model that can be trained and written back: loaded whole or not at all, under the names of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlmca.engines.options import HuggingFaceOptions
from rlmca.parallel import platform
from rlmca.transfer.hf_folder import ROTARY_TABLE, HFFolder, HFFolderError, open_hf_folder
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.source import adapter_beside

_LATER = "such models are not in this version, rollouts and exports need the names of the files"


def build_module(folder: Path, options: HuggingFaceOptions, *, fresh: bool) -> PreTrainedModel:
    """The model of a Hugging Face folder in float32 on this process's device; with `fresh` its weights are newly drawn.

    HFFolderError names the tensors when the folder's are not exactly those of the model: Transformers alone would draw
    missing ones at random and drop the others. Loading leaves the random state as it was. The adapters of
    `options.lora.merged` are merged into the weights.
    """
    if (text := adapter_beside(folder)) is not None:
        raise HFFolderError(text)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        module = _fresh(config, options) if fresh else _load(folder, config, options)
    except HFFolderError:
        raise
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        raise HFFolderError(f"{folder}: Transformers cannot make its model: {error}") from error
    _check_buffers(folder, module)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            # Transformers sets it to pad_token_id, and torch then drops the gradient of that row. Padding is never trained
            # on here, but a real token may have the same id: many models pad with the token that ends a reply.
            part.padding_idx = None
    return module.to(platform.device())


def _build(config: PreTrainedConfig, options: HuggingFaceOptions) -> PreTrainedModel:
    own = {} if options.attention is None else {"attn_implementation": options.attention}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=options.trust_remote_code, **own)


def _fresh(config: PreTrainedConfig, options: HuggingFaceOptions) -> PreTrainedModel:
    module = _build(config, options)
    state = module.state_dict()
    if moved := sorted(set(state) ^ set(revert_weight_conversion(module, dict(state)))):
        raise HFFolderError(f"Transformers renames or fuses weights of this model ({_some(moved)}): {_LATER}")
    return module


def _load(folder: Path, config: PreTrainedConfig, options: HuggingFaceOptions) -> PreTrainedModel:
    with open_hf_folder(folder) as files, torch.device("meta"):
        _check_names(files, _build(config, options))
    own = {} if options.attention is None else {"attn_implementation": options.attention}
    devices = [torch.cuda.current_device()] if platform.is_cuda() else []
    with torch.random.fork_rng(devices=devices):  # a resumed run builds models after its random state is restored
        module, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=options.trust_remote_code, output_loading_info=True, **own
        )
    wrong = [f"{kind.replace('_', ' ')}: {_some(sorted(map(str, report[kind])))}" for kind in report if report[kind]]
    if wrong:
        raise HFFolderError(f"{folder} was not loaded whole: {'; '.join(wrong)}")
    if options.lora is not None and options.lora.merged:
        _merge(folder, options.lora.merged, module)
    return module


@torch.no_grad()
def _merge(folder: Path, adapters: Sequence[Path], module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    with MergedFolder(folder, adapters) as files:
        if tied := [name for name in files.changed if name not in parameters]:
            raise HFFolderError(f"{_some(tied)} is tied to another weight of {folder}: an adapter of it cannot be merged")
        for name in files.changed:
            parameters[name].copy_(files.read(name))


def _check_names(files: HFFolder, module: nn.Module) -> None:
    """Raises HFFolderError unless the files hold every parameter once, under its name and in its shape, and nothing else."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    copies = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    want = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    have = {name: shape for name, shape in files.shapes.items() if not name.endswith(ROTARY_TABLE)}
    missing = [name for name in want if name not in have]
    surplus = [name for name in have if name not in want and name not in copies]
    problems = [f"missing: {_some(missing)}"] if missing else []
    problems += [f"unexpected: {_some(surplus)}"] if surplus else []
    if missing and surplus:
        problems.append(f"should Transformers load this folder all the same, then by renaming or fusing weights: {_LATER}")
    problems += [f"{n} has shape {have[n]}, config.json says {want[n]}" for n in want if n in have and have[n] != want[n]]
    problems += [
        f"tie_word_embeddings is true, but {copy} differs from {name}; write tie_word_embeddings: false"
        for copy, name in copies.items()
        if copy in have and name in have and not torch.equal(_cpu(files, copy), _cpu(files, name))
    ]
    if problems:
        raise HFFolderError(f"the tensors in {files.path} do not fit its config.json:\n" + "\n".join(problems))


def _check_buffers(folder: Path, module: nn.Module) -> None:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if buffers := sorted(set(module.state_dict()) - parameters):
        raise HFFolderError(
            f"{folder}: {_some(buffers)}: weights that the model keeps as buffers are not in this version: "
            "rollouts and exports would lack them"
        )


def _cpu(files: HFFolder, name: str) -> torch.Tensor:
    with torch.device("cpu"):
        return files.read(name)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
