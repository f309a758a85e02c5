"""What must hold between the keys of adapters and partial training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmca.config.finetuning import FinetuningConfig
from rlmca.config.schema import RunConfig

Finding = tuple[tuple[str, ...], str]
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "create_new_adapter")
FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
OF_AN_ADAPTER = ("lora_rank", "lora_alpha", "lora_target", "use_rslora")
"""Keys that an adapter which is trained further answers by itself."""


def findings(cfg: RunConfig, command: str) -> Iterator[Finding]:
    """Every contradiction of these keys."""
    own, kind = cfg.finetuning, cfg.finetuning.finetuning_type
    if command != "train":
        return
    for names, of in ((LORA, "lora"), (FREEZE, "freeze")):
        # a resolved file gives all of them; what is at its default asks for nothing
        strange = [name for name in names if getattr(own, name) != getattr(FinetuningConfig(), name)]
        if kind != of and strange:
            yield ("finetuning_type", *strange), f"{', '.join(strange)}: for finetuning_type: {of}, and it is {kind}: leave it out"
    if own.adapter_name_or_path and not own.lora:
        yield (
            ("finetuning_type", "adapter_name_or_path"),
            f"adapter_name_or_path: only finetuning_type: lora trains on an adapter, and it is {kind}; "
            "merge the adapter into its model first: rlmca-cli export with model_name_or_path and adapter_name_or_path",
        )
    if kind == "freeze" and own.freeze_trainable_layers == 0 and not own.freeze_extra_modules:
        yield (
            ("freeze_trainable_layers", "freeze_extra_modules"),
            "freeze_trainable_layers: 0 trains nothing; write n for the last n layers, -n for the first n, or freeze_extra_modules",
        )
    elif kind == "freeze" and not own.freeze_trainable_modules and not own.freeze_extra_modules:
        yield (
            ("freeze_trainable_modules", "freeze_extra_modules"),
            "freeze_trainable_modules is empty and trains nothing; write all, or parts of a layer such as self_attn,mlp, "
            "or freeze_extra_modules",
        )
    if own.lora:
        yield from _lora(cfg)


def _lora(cfg: RunConfig) -> Iterator[Finding]:
    own = cfg.finetuning
    if not own.lora_target:
        yield ("lora_target",), "lora_target is empty: write all, or names of linear layers such as q_proj,v_proj"
    if "all" in own.lora_target and len(own.lora_target) > 1:
        yield ("lora_target",), "lora_target: all and names of layers exclude each other: write one of them"
    if own.create_new_adapter and not own.adapter_name_or_path:
        yield (
            ("create_new_adapter", "adapter_name_or_path"),
            "create_new_adapter: true merges adapter_name_or_path and trains a new adapter, and there is none: leave it out",
        )
    if own.adapter_name_or_path and not own.create_new_adapter:
        changed = [name for name in OF_AN_ADAPTER if getattr(own, name) != getattr(FinetuningConfig(), name)]
        if changed:
            yield (
                ("adapter_name_or_path", *changed),
                f"{', '.join(changed)}: adapter_config.json of {own.adapter_name_or_path[-1]}, which is trained further, says it already: "
                "leave it out, or write create_new_adapter: true",
            )
    if inside := [name for name in own.adapter_name_or_path if _is_inside(name, cfg.train.output_dir)]:
        yield (
            ("adapter_name_or_path", "output_dir"),
            f"adapter_name_or_path: {', '.join(inside)} lies in output_dir, where this run writes and removes adapters: "
            "name another output_dir, or copy the adapter to a folder of its own",
        )
    if cfg.model.train_from_scratch:
        yield (
            ("train_from_scratch", "finetuning_type"),
            "train_from_scratch: true and finetuning_type: lora exclude each other: an adapter of weights that nobody keeps is lost",
        )
    if cfg.megatron.transformer_impl == "transformer_engine":
        yield (
            ("transformer_impl", "finetuning_type"),
            "transformer_impl: transformer_engine has no adapters in this version; write transformer_impl: local, or leave it out",
        )


def _is_inside(name: str, folder: str | None) -> bool:
    """Whether a path is a folder or lies in it."""
    return bool(folder) and Path(name).expanduser().resolve().is_relative_to(Path(str(folder)).expanduser().resolve())
