"""Packing and micro-batches by tokens: what contradicts what, and sizes that ranks cannot split."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import ROW_STAGES, RunConfig

Finding = tuple[tuple[str, ...], str]


def length_multiple(cfg: RunConfig) -> int:
    """What the tokens of a micro-batch's row must be a multiple of, so that context and sequence parallelism can split it."""
    m = cfg.megatron
    context = 2 * m.context_parallel_size if m.context_parallel_size > 1 else 1
    return context * (m.tensor_model_parallel_size if m.sequence_parallel else 1)


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Contradictions between packing, row lengths and token budgets."""
    yield from _neat_packing(cfg)
    yield from _multiples(cfg)
    most = cfg.train.max_tokens_per_microbatch
    if most is None:
        return
    if cfg.stage == "dpo":
        longest, keys = 2 * cfg.data.cutoff_len, ["cutoff_len"]
        written = f"a pair of 2 x cutoff_len {cfg.data.cutoff_len} = {longest}"
    elif cfg.stage in ROW_STAGES:
        longest, keys = cfg.data.cutoff_len, ["cutoff_len"]
        written = f"a sequence of cutoff_len {longest}"
    else:
        longest = cfg.generation.max_prompt_len + cfg.generation.max_new_tokens
        keys = ["max_prompt_len", "max_new_tokens"]
        parts = f"max_prompt_len {cfg.generation.max_prompt_len} + max_new_tokens {cfg.generation.max_new_tokens}"
        written = f"a sequence of {parts} = {longest}"
    if most < longest:
        yield (
            ("max_tokens_per_microbatch", *keys),
            f"max_tokens_per_microbatch: {most} tokens cannot hold {written} tokens; write at least {longest}",
        )


def notes(cfg: RunConfig) -> Iterator[str]:
    """Keys that the token budget leaves without effect, and packing that gains nothing."""
    if cfg.engine == "huggingface" and cfg.data.packs and cfg.model.flash_attn not in ("fa2", "fa3"):
        yield (
            "packing: without flash_attn: fa2 or fa3 attention of the Hugging Face engine still does the work of a whole packed row "
            "for each row in it: keep micro-batches small"
        )
    by_tokens = cfg.train.max_tokens_per_microbatch is not None or (cfg.data.packs and cfg.stage in ROW_STAGES)
    if by_tokens and "per_device_eval_batch_size" in cfg.given:
        yield "per_device_eval_batch_size: how many rows an evaluation reads at once; tokens decide its micro-batches"
    if cfg.stage == "grpo" and cfg.train.max_tokens_per_microbatch is not None and "per_device_train_batch_size" in cfg.given:
        yield "per_device_train_batch_size has no effect: max_tokens_per_microbatch decides the micro-batches of stage grpo"


def _neat_packing(cfg: RunConfig) -> Iterator[Finding]:
    data = cfg.data
    if data.neat_packing is False and data.packing:
        yield (
            ("packing", "neat_packing"),
            "neat_packing: false would let packed rows see each other, so that a row's loss depends on its neighbours; "
            "rows are always kept apart here: leave it out",
        )
    if data.neat_packing and data.packing is False:
        yield ("packing", "neat_packing"), "neat_packing: true packs rows, and packing is false: write packing: true, or leave both out"


def _multiples(cfg: RunConfig) -> Iterator[Finding]:
    multiple, m = length_multiple(cfg), cfg.megatron
    split = [f"2 x context_parallel_size {m.context_parallel_size}"] if m.context_parallel_size > 1 else []
    split += [f"tensor_model_parallel_size {m.tensor_model_parallel_size} (sequence_parallel)"] if m.sequence_parallel else []
    sizes = {"max_tokens_per_microbatch": cfg.train.max_tokens_per_microbatch}
    if cfg.data.packs and cfg.stage in ROW_STAGES:
        sizes["cutoff_len"] = cfg.data.cutoff_len
    for name, size in sizes.items():
        if size is not None and size % multiple:
            what = "packed rows" if name == "cutoff_len" else "micro-batches"
            below, above = size // multiple * multiple, -(-size // multiple) * multiple
            yield (
                (name, "context_parallel_size", "tensor_model_parallel_size", "sequence_parallel"),
                f"{name}: {what} of {size} tokens cannot be split into {' x '.join(split)} = {multiple} equal parts; "
                f"write a multiple of {multiple}, {f'{below} or ' if below else ''}{above}",
            )
