"""Options under `sglang:` and `sync:`: SGLang servers and how weights travel to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlmca.config.fields import option

_SYNC_LATER = ("distributed", "nccl", "delta", "shard_direct", "ipc", "p2p", "auto")


@dataclass(frozen=True)
class SglangOptions:
    """Servers that the run starts and how they are spoken to; `timeout` and `api_key` hold for `sglang_base_urls` too."""

    python: str | None = option(None, "Python of the environment that has sglang; found by itself when not set.")
    num_engines: int = option(1, "Servers to start; requests are shared out among them.", at_least=1)
    tp: int = option(1, "Ranks over which a server splits each layer.", at_least=1)
    ep: int = option(1, "Ranks over which a server splits experts; a divisor of tp.", at_least=1)
    mem_fraction_static: float | None = option(None, "Share of a GPU's memory for weights and cache.", above=0, below=1)
    context_length: int | None = option(None, "Longest prompt and reply together; the model's own when not set.", at_least=2)
    max_running_requests: int | None = option(None, "Replies that a server writes at the same time.", at_least=1)
    deterministic: bool | None = option(None, "Draw by the seed of each reply; when not set: on a CPU yes, on CUDA no (it costs speed).")
    start_timeout: float = option(300.0, "Seconds that a server may take to start.", above=0)
    timeout: float = option(1800.0, "Seconds that one reply or one weight update may take.", above=0)
    api_key: str | None = option(None, "Key of the servers; servers that the run starts get one of their own.", secret=True)
    extra_args: dict[str, Any] = option({}, "Further flags of sglang.launch_server, name: value; true is a flag without a value.")


@dataclass(frozen=True)
class SyncOptions:
    """How new weights reach SGLang servers."""

    method: str = option(
        "disk",
        "disk: files in shared memory or dir; tensor: inside requests.",
        choices=("disk", "tensor"),
        refused={name: f"{name}: not in this version; write disk or tensor" for name in _SYNC_LATER},
    )
    bucket_mb: float = option(128.0, "Size of one request of method tensor, in 10^6 bytes; a larger tensor travels alone.", above=0)
    dir: str | None = option(None, "Folder for the files of method disk, which every server must see; shared memory when not set.")


LATER: Mapping[type, Mapping[str, str]] = {
    SyncOptions: {"delta": "sending only what changed is not in this version; leave it out"},
}
"""Names that come later, by the mapping in which they would stand."""

OWN_FLAGS: Mapping[str, str] = {
    "model": "write model_name_or_path",
    "model-path": "write model_name_or_path",
    "tokenizer-path": "the servers read and write token ids only",
    "skip-tokenizer-init": "the servers read and write token ids only",
    "host": "servers listen on 127.0.0.1",
    "port": "a free port is taken",
    "dtype": "it follows from bf16 and fp16",
    "device": "it follows from use_cpu and the machine",
    "random-seed": "write seed",
    "tp": "write sglang: {tp: ...}",
    "tp-size": "write sglang: {tp: ...}",
    "tensor-parallel-size": "write sglang: {tp: ...}",
    "ep": "write sglang: {ep: ...}",
    "ep-size": "write sglang: {ep: ...}",
    "expert-parallel-size": "write sglang: {ep: ...}",
    "dp": "write sglang: {num_engines: ...}",
    "dp-size": "write sglang: {num_engines: ...}",
    "data-parallel-size": "write sglang: {num_engines: ...}",
    "base-gpu-id": "it follows from num_engines and tp",
    "mem-fraction-static": "write sglang: {mem_fraction_static: ...}",
    "context-length": "write sglang: {context_length: ...}",
    "max-running-requests": "write sglang: {max_running_requests: ...}",
    "enable-deterministic-inference": "write sglang: {deterministic: true}",
    "api-key": "write sglang: {api_key: ...}",
    "admin-api-key": "write sglang: {api_key: ...}",
    "load-format": "it follows from the model's folder",
    "weight-version": "it counts the updates",
    "trust-remote-code": "write trust_remote_code at the top level",
}
"""Flags of `sglang.launch_server` that the program sets, and what to write instead."""


def flag_name(name: str) -> str:
    """`mem_fraction_static`, `--mem-fraction-static` and `mem-fraction-static` are one flag."""
    return name.lstrip("-").replace("_", "-")


def server_flags(extra_args: Mapping[str, Any]) -> list[str]:
    """Command-line flags; true is a flag without a value, false and nothing leave it out, a list gives several values."""
    flags: list[str] = []
    for name, value in extra_args.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        flags += [f"--{flag_name(name)}", *map(str, values)]
    return flags


def extra_args_problems(extra_args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `sglang: {extra_args: ...}`."""
    for name, value in extra_args.items():
        if flag_name(name) in OWN_FLAGS:
            yield f"extra_args.{name} is set by the program: {OWN_FLAGS[flag_name(name)]}"
        elif not all(isinstance(item, (str, int, float, bool, type(None))) for item in (value if isinstance(value, list) else [value])):
            yield f"extra_args.{name}: write text, a number, true, false, or a list of those"
