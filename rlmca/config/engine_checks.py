"""What the choice of an engine allows: keys of the other one, and contradictions among its own."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig, keys

Finding = tuple[tuple[str, ...], str]

MEGATRON_ONLY = tuple(name for name, key in keys().items() if key.section == "megatron")
HUGGINGFACE_ONLY = tuple(name for name, key in keys().items() if key.section == "huggingface")
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
    if cfg.train.fp16:
        yield ("fp16",), "fp16: float16 is not in this version; write bf16: true, or leave it out for float32"
    if command == "train":
        yield from _megatron(cfg) if cfg.engine == "megatron" else _huggingface(cfg)


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
    if kernel in ("fa2", "fa3") and not cfg.train.bf16:
        yield ("flash_attn", "bf16"), f"flash_attn: {kernel} computes in bfloat16 alone: write bf16: true, or flash_attn: sdpa"
