"""The SGLang engine: one or several servers as a rollout engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rlmca.config.sglang import SyncOptions
from rlmca.layouts import Form
from rlmca.rollout.base import Reply, Request, RolloutError, SamplingParams
from rlmca.rollout.requests import check_requests
from rlmca.rollout.sglang.client import ServerClient, generate_all, open_clients, run_watched, together
from rlmca.rollout.sglang.expected import ExpectedTensors
from rlmca.rollout.sglang.server import SglangServer, without_end_tokens
from rlmca.rollout.sglang.streaming import stream_tokens
from rlmca.rollout.sglang.weights import files_parent, load_files, send_tensors, update_folder, write_files

IN_FLIGHT = 256
NO_VERSION = -1


@dataclass(frozen=True)
class ServedModel:
    """What the engine knows of the model: its config.json, its tensors, and how long prompt and reply may be together."""

    config: dict[str, Any]
    expected: ExpectedTensors
    max_length: int | None

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a server dies of another one."""
        inner = self.config.get("text_config")
        return int((inner if isinstance(inner, dict) and "vocab_size" in inner else self.config)["vocab_size"])


class SglangEngine:
    """Servers as a rollout engine (see `base.RolloutEngine`): request i goes to server i mod n, all get every update.

    It owns the servers: `close` ends those that we started. `in_flight` bounds the requests that are under way at once,
    `timeout` the seconds of one. `scratch` takes the files of method disk where shared memory has no room. Neither
    `generate` nor `update_weights` may be called inside a running event loop.
    """

    form: Form | None = None
    """Servers take what files of the folder that they started from hold."""

    def __init__(
        self,
        servers: Sequence[SglangServer],
        model: ServedModel,
        *,
        sync: SyncOptions | None = None,
        scratch: Path,
        in_flight: int = IN_FLIGHT,
        timeout: float = 1800.0,
        version: int = NO_VERSION,
    ) -> None:
        if not servers:
            raise ValueError("an SGLang engine needs at least one server")
        self.servers, self.model = list(servers), model
        self.sync, self.scratch = sync or SyncOptions(), scratch
        self.in_flight, self.timeout = in_flight, timeout
        self._version = NO_VERSION
        self._closed = False
        if version != NO_VERSION:
            self._run(self._name_weights(version))

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first, and after an update that failed."""
        return self._version

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Reply]]:
        """Replies to every request, `result[i][k]` for `requests[i].seeds[k]`."""
        self._check(requests, params)
        work = [(i % len(self.servers), request.prompt_ids, seed) for i, request in enumerate(requests) for seed in request.seeds]
        replies = iter(self._run(self._generate(work, params)))
        return [[self._trusted(next(replies), i) for _ in request.seeds] for i, request in enumerate(requests)]

    def stream(self, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Iterator[int]:
        """The ids of one reply of the first server, as they come; those that `generate` gives for this prompt and seed."""
        self._check([Request(prompt_ids, [seed])], params)
        with asyncio.Runner() as runner:
            tokens = self._stream(prompt_ids, seed, params)

            async def following() -> int | None:
                return await anext(tokens, None)

            try:
                while (token := runner.run(following())) is not None:
                    yield token
            finally:
                runner.run(_closed(tokens))

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives every server the weights of the stream, each tensor exactly once, and names them `version`.

        Whatever goes wrong, the engine has version -1 then and generates nothing before an update that succeeds.
        """
        self._check_open()
        self._version = NO_VERSION
        if version < 0:
            raise ValueError(f"version is {version}: write 0 or more")
        self._run(self._update(self.model.expected.checked(stream), version))
        self._version = version

    def close(self) -> None:
        """Ends the servers that are ours. The engine cannot be used afterwards; calling it again changes nothing."""
        self._closed, self._version = True, NO_VERSION
        for server in self.servers:
            server.close()

    def __enter__(self) -> SglangEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _stream(self, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> AsyncIterator[int]:
        async with open_clients(self.servers[:1], self.timeout) as (client,):
            async for token in stream_tokens(client, prompt_ids, seed, params, self._version):
                yield token

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        self._check_open()
        if self._version == NO_VERSION:
            raise RolloutError("the SGLang engine has no weights that can be trusted: call update_weights before generate")
        check_requests(
            requests, params, vocab_size=self.model.vocab_size, longest=self.model.max_length, limit="the servers' context_length"
        )

    def _run(self, work: Any) -> Any:
        return run_watched(self.servers, work)

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the SGLang engine is closed")

    async def _generate(self, work: Sequence[tuple[int, Sequence[int], int]], params: SamplingParams) -> list[Reply]:
        async with open_clients(self.servers, self.timeout) as clients:
            return await generate_all(clients, work, params, self.in_flight)

    async def _update(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        async with open_clients(self.servers, self.timeout) as clients:
            await together(client.set_version(NO_VERSION) for client in clients)  # half-updated weights have no name
            if self.sync.method == "tensor":
                await send_tensors(clients, stream, self.sync.bucket_mb * 1e6)
            else:
                await self._update_by_files(clients, stream)
            await together(client.set_version(version) for client in clients)

    async def _update_by_files(self, clients: Sequence[ServerClient], stream: Iterable[tuple[str, Tensor]]) -> None:
        parent = files_parent(self.sync.dir, self.model.expected.bytes_at_most, self.scratch)
        try:
            with update_folder(parent, for_others=not all(server.own for server in self.servers)) as folder:
                write_files(stream, folder, without_end_tokens(self.model.config))
                await load_files(clients, folder)
        except (OSError, SafetensorError) as error:
            raise RolloutError(f"weights cannot be written to {parent}: {error}; write sync: {{dir: ...}}") from error

    async def _name_weights(self, version: int) -> None:
        async with open_clients(self.servers, self.timeout) as clients:
            await together(client.set_version(version) for client in clients)
        self._version = version

    def _trusted(self, reply: Reply, request: int) -> Reply:
        if reply.finish == "abort":
            raise RolloutError(f"request {request}: its server aborted a reply after {len(reply.ids)} tokens")
        stale = next((v for v in reply.versions if v != self._version), None)
        if stale is not None:
            raise RolloutError(f"request {request}: a reply holds tokens of version {stale}, and the weights are version {self._version}")
        return reply


async def _closed(tokens: AsyncIterator[int]) -> None:
    """Ends a stream that may be under way: its connection closes, and the server gives up the reply."""
    await tokens.aclose()  # type: ignore[attr-defined]
