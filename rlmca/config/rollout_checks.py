"""What must hold between the keys of the rollout engine; findings and notes in the form of `checks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from urllib.parse import urlsplit

from rlmca.config.schema import RunConfig
from rlmca.config.sglang import SglangOptions, SyncOptions, extra_args_problems

Finding = tuple[tuple[str, ...], str]

_FOR_EVERY_SERVER = ("timeout", "api_key")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def changed(options: SglangOptions | SyncOptions) -> list[str]:
    """Names whose values are not the defaults."""
    fresh = type(options)()
    return [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(fresh, f.name)]


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Every contradiction among the keys of the rollout engine."""
    rollout = cfg.rollout
    urls, own = rollout.sglang_base_urls, [name for name in changed(rollout.sglang) if name not in _FOR_EVERY_SERVER]
    if urls and own:
        yield (
            ("sglang_base_urls", "sglang"),
            f"sglang_base_urls names servers that run already, and sglang: {{{', '.join(own)}}} belongs to servers that the run starts: "
            "leave one out",
        )
    if urls and rollout.rollout_engine == "local":
        yield ("sglang_base_urls", "rollout_engine"), "sglang_base_urls and rollout_engine: local contradict each other: leave one out"
    yield from _sglang(cfg)
    yield from _sync(cfg)


def _sglang(cfg: RunConfig) -> Iterator[Finding]:
    options = cfg.rollout.sglang
    if options.tp % options.ep:
        yield ("sglang",), f"sglang: tp {options.tp} is not a multiple of ep {options.ep}: experts are split over the ranks of tp"
    if options.mem_fraction_static is not None and cfg.train.use_cpu:
        yield (
            ("sglang", "use_cpu"),
            "sglang: mem_fraction_static is a share of a GPU's memory, and use_cpu is true: write extra_args: {max-total-tokens: ...}",
        )
    for problem in extra_args_problems(options.extra_args):
        yield ("sglang",), f"sglang: {problem}"


def _sync(cfg: RunConfig) -> Iterator[Finding]:
    sync = cfg.rollout.sync
    if sync.method == "tensor" and sync.dir is not None:
        yield ("sync",), "sync: dir belongs to method disk, and method is tensor: leave it out"
    far = [url for url in cfg.rollout.sglang_base_urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and sync.method == "disk" and sync.dir is None:
        yield (
            ("sync", "sglang_base_urls"),
            f"sync: method disk and {far[0]} on another machine: write dir, a folder that both see, or method: tensor",
        )


def notes(cfg: RunConfig) -> Iterator[str]:
    """One sentence for each option that the chosen engine or method does not use."""
    rollout = cfg.rollout
    if rollout.rollout_engine == "auto" and not rollout.sglang_base_urls:
        for name in ("sglang", "sync"):
            if changed(getattr(rollout, name)) and name in cfg.given:
                yield f"{name} is used only where rollout_engine: auto means sglang (with a CUDA device); write rollout_engine: sglang"
    if rollout.rollout_engine == "local":
        for name, options in (("sglang", rollout.sglang), ("sync", rollout.sync)):
            if changed(options) and name in cfg.given:
                yield f"{name} has no effect: rollout_engine is local"
    elif rollout.sync.method == "disk" and "bucket_mb" in changed(rollout.sync):
        yield "sync.bucket_mb has no effect: sync.method is disk"
