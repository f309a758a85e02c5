"""What the choice of an engine allows: keys of the other one, and contradictions among its own."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig, keys
from rlmca.config.train import TrainConfig

Finding = tuple[tuple[str, ...], str]

MEGATRON_ONLY = tuple(name for name, key in keys().items() if key.section == "megatron")
HUGGINGFACE_ONLY = tuple(name for name, key in keys().items() if key.section == "huggingface")
LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
ON_MEGATRON = {
    "gradient_checkpointing": "write recompute_granularity: full",
    "gradient_checkpointing_kwargs": "leave it out: recompute is Megatron's own, see recompute_granularity",
    "ddp_find_unused_parameters": "leave it out: the models of the Megatron engine use all of their parameters",
    "ddp_bucket_cap_mb": "leave it out: Megatron's DDP chooses its buckets by itself",
}
"""Keys of the Hugging Face engine -> what to do about them on Megatron."""


def findings(cfg: RunConfig, command: str) -> Iterator[Finding]:
    """Every contradiction between the keys and the engine that the environment chooses."""
    wants = cfg.model.use_mca
    if wants is not None and wants != cfg.env.use_mca:
        yield ("use_mca",), f"use_mca: {str(wants).lower()} and the environment disagree: set USE_MCA={int(wants)}"
    yield from _precision(cfg)
    if command == "train":
        yield from _megatron(cfg) if cfg.engine == "megatron" else _huggingface(cfg)


def _precision(cfg: RunConfig) -> Iterator[Finding]:
    train = cfg.train
    if train.fp16 and train.bf16:
        yield ("fp16", "bf16"), "fp16 and bf16 exclude each other: leave one out"
    default = TrainConfig()
    # a resolved file gives all of them; what is at its default (a constant of 0 is none) asks for nothing
    given = [name for name in LOSS_SCALE if (getattr(train, name) or None) != getattr(default, name)]
    if given and not train.fp16:
        yield ("fp16", *given), f"{', '.join(given)}: only float16 needs its loss scaled: write fp16: true, or leave it out"
    elif train.loss_scale and (dynamic := [name for name in given if name != "loss_scale"]):
        yield (
            ("loss_scale", *dynamic),
            f"loss_scale: {train.loss_scale:g} is constant, and {', '.join(dynamic)} is for one that is found by itself: leave one out",
        )
    elif train.min_loss_scale > train.initial_loss_scale:
        yield (
            ("min_loss_scale", "initial_loss_scale"),
            f"min_loss_scale: {train.min_loss_scale:g} is above initial_loss_scale {train.initial_loss_scale:g}; write less",
        )


def _megatron(cfg: RunConfig) -> Iterator[Finding]:
    for name, instead in ON_MEGATRON.items():
        if getattr(cfg.huggingface, name):  # what is off asks for nothing
            yield (name,), f"{name}: only the Hugging Face engine has this key, and USE_MCA=1 chooses Megatron; {instead}"
    kernel = cfg.model.flash_attn
    if kernel != "auto":
        yield ("flash_attn",), f"flash_attn: {kernel} chooses a kernel of the Hugging Face engine, Megatron takes its own; write auto"


def _huggingface(cfg: RunConfig) -> Iterator[Finding]:
    given = [name for name in MEGATRON_ONLY if name in cfg.given]
    if given:
        yield (), f"{', '.join(given)}: only the Megatron engine has {'these keys' if len(given) > 1 else 'this key'}: set USE_MCA=1"
    own, kernel = cfg.huggingface, cfg.model.flash_attn
    for name, value in own.gradient_checkpointing_kwargs.items():
        if name != "use_reentrant":
            yield (
                ("gradient_checkpointing_kwargs",),
                f"gradient_checkpointing_kwargs.{name}: not in this version; the one part that may be written is use_reentrant",
            )
        elif not isinstance(value, bool):
            yield ("gradient_checkpointing_kwargs",), f"gradient_checkpointing_kwargs.use_reentrant: {value!r} is neither true nor false"
    if own.gradient_checkpointing_kwargs.get("use_reentrant") is True and own.ddp_find_unused_parameters:
        yield (
            ("gradient_checkpointing_kwargs", "ddp_find_unused_parameters"),
            "gradient_checkpointing_kwargs: {use_reentrant: true} and ddp_find_unused_parameters: true exclude each other in torch: "
            "write use_reentrant: false",
        )
    if own.gradient_checkpointing_kwargs and not own.gradient_checkpointing:
        yield (
            ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
            "gradient_checkpointing_kwargs needs gradient_checkpointing: true",
        )
    if kernel in ("fa2", "fa3") and not (cfg.train.bf16 or cfg.train.fp16):
        yield (
            ("flash_attn", "bf16", "fp16"),
            f"flash_attn: {kernel} computes in 16 bits alone: write bf16: true or fp16: true, or flash_attn: sdpa",
        )
