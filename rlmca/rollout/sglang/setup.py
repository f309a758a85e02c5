"""From a configuration to a ready SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmca.config import ConfigError, RunConfig
from rlmca.config.sglang import SglangOptions, server_flags
from rlmca.rollout.sglang.attention import attention_error
from rlmca.rollout.sglang.engine import IN_FLIGHT, NO_VERSION, ServedModel, SglangEngine
from rlmca.rollout.sglang.environment import sglang_python, uses_cuda
from rlmca.rollout.sglang.expected import ExpectedTensors
from rlmca.rollout.sglang.mixtures import mixture_error
from rlmca.rollout.sglang.server import ServerOptions, SglangServer
from rlmca.transfer.hf_folder import open_hf_folder, read_config

_CONTEXT_ROOM = 16
"""A server cuts replies a few tokens before its context ends: servers get this much more than is asked of them."""
_CPU_POOL = 16384
"""Tokens of the cache on a CPU, unless one reply needs more."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def sglang_engine(cfg: RunConfig, folder: Path, *, dtype: torch.dtype, log_dir: Path) -> SglangEngine:
    """The servers of the configuration with the model in `folder`, ready; each writes `log_dir/sglang-N.log`.

    Version 0 when the folder holds weights: servers that ran already get them first, since nobody knows theirs. Without
    weights (a bare config.json) the version is -1. Blocks for the seconds that servers take to start. Raises ConfigError
    and RolloutError; nothing is left running then.
    """
    rollout = cfg.rollout
    model = served_model(folder, rollout.sglang.context_length)
    if error := attention_error(model.config, cfg.generation):
        raise ConfigError(error)
    has_weights = model.expected.shapes is not None
    servers: list[SglangServer] = []
    try:
        if rollout.sglang_base_urls:
            servers = [SglangServer.attach(url, rollout.sglang.api_key, _DTYPES[dtype]) for url in rollout.sglang_base_urls]
        else:
            for number in range(rollout.sglang.num_engines):
                servers.append(SglangServer.launch(server_options(cfg, folder, model, dtype, log_dir, number)))
        for server in servers:
            server.wait_until_ready()
        engine = SglangEngine(
            servers,
            model,
            sync=rollout.sync,
            scratch=log_dir,
            in_flight=rollout.rollout_batch or IN_FLIGHT,
            timeout=rollout.sglang.timeout,
            version=0 if has_weights and not rollout.sglang_base_urls else NO_VERSION,
        )
        if has_weights and rollout.sglang_base_urls:
            engine.update_weights(_folder_weights(folder, model), 0)
        return engine
    except BaseException:
        for server in servers:
            server.close()
        raise


def served_model(folder: Path, context_length: int | None) -> ServedModel:
    """What the engine must know of the model in `folder`."""
    config = read_config(folder)
    inner = config.get("text_config")
    longest = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    if context_length is not None and longest is not None and context_length > longest:
        raise ConfigError(f"sglang: context_length {context_length} is more than the model's max_position_embeddings {longest}")
    expected = ExpectedTensors.of_folder(folder)
    if error := mixture_error(config, expected.shapes or ()):
        raise ConfigError(error)
    return ServedModel(config, expected, context_length or longest)


def server_options(cfg: RunConfig, folder: Path, model: ServedModel, dtype: torch.dtype, log_dir: Path, number: int) -> ServerOptions:
    """How server `number` of the run is started."""
    options, cuda = cfg.rollout.sglang, uses_cuda(cfg)
    return ServerOptions(
        python=sglang_python(options.python),
        model=folder,
        log=log_dir / f"sglang-{number}.log",
        cuda=cuda,
        dtype=_DTYPES[dtype],
        seed=cfg.train.seed,
        tp=options.tp,
        deterministic=options.deterministic if options.deterministic is not None else not cuda,
        flags=_flags(options, model, cuda, number, cfg.model.trust_remote_code),
        start_timeout=options.start_timeout,
        api_key=options.api_key,
    )


def _flags(options: SglangOptions, model: ServedModel, cuda: bool, number: int, trust_remote_code: bool) -> list[str]:
    flags: list[Any] = []
    if model.expected.shapes is None:
        flags += ["--load-format", "dummy"]
    if model.max_length is not None:
        flags += ["--context-length", model.max_length + _CONTEXT_ROOM]
        if not cuda:
            flags += ["--max-total-tokens", max(_CPU_POOL, model.max_length + 2 * _CONTEXT_ROOM)]
    if options.ep > 1:
        flags += ["--ep-size", options.ep]
    if options.mem_fraction_static is not None:
        flags += ["--mem-fraction-static", options.mem_fraction_static]
    if options.max_running_requests is not None:
        flags += ["--max-running-requests", options.max_running_requests]
    if cuda:
        flags += ["--base-gpu-id", number * options.tp]
    if trust_remote_code:
        flags.append("--trust-remote-code")
    return [*map(str, flags), *server_flags(options.extra_args)]


def _folder_weights(folder: Path, model: ServedModel) -> Iterator[tuple[str, Tensor]]:
    with open_hf_folder(folder) as files:
        for name in model.expected.shapes or ():
            yield name, files.read(name)
