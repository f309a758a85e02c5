"""Requests to SGLang servers: one per reply, a bounded number in flight, every answer checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp

from rlmca.rollout.base import Reply, RolloutError, SamplingParams
from rlmca.rollout.sglang.reply import UNTOLD, BadAnswer, generate_request, read_reply, read_version
from rlmca.rollout.sglang.server import SglangServer, authorization

T = TypeVar("T")

_DEATH_S = 15.0
"""Seconds to wait for the exit status of a server of ours that broke a connection."""
_WATCH_S = 0.2


class ServerClient:
    """The requests that one server understands. Made by `open_clients`."""

    def __init__(self, server: SglangServer, session: aiohttp.ClientSession, timeout: float) -> None:
        self.server, self._session, self._timeout = server, session, timeout

    async def generate(self, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Reply:
        """One reply; raises RolloutError when the server gives none that can be trusted."""
        answer = await self.post("/generate", generate_request(prompt_ids, seed, params))
        try:
            return read_reply(answer, params)
        except BadAnswer as error:
            raise RolloutError(f"{self.server.name}: its answer to /generate cannot be used: {error}") from error

    async def version(self) -> int:
        """Version of the weights that the server says it has; -1 when it is none of ours."""
        status, answer = await self.ask("GET", "/model_info")
        if status == 404:
            status, answer = await self.ask("GET", "/get_model_info")
        if status != 200 or not isinstance(answer, dict):
            raise self._refused("/model_info", status, answer)
        return read_version(answer.get("weight_version"))

    async def set_version(self, version: int) -> None:
        """Names the weights in use, without ending anybody's request, and reads the name back."""
        await self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        told = await self.version()
        if told != version:
            raise RolloutError(f"{self.server.name} says that its weights have version {told}, after it was told {version}")

    async def post(self, path: str, body: dict[str, Any] | bytes) -> Any:
        """The answer to a POST. Raises RolloutError unless it is 200 and does not say `success: false`."""
        status, answer = await self.ask("POST", path, body)
        if status != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise self._refused(path, status, answer)
        return answer

    async def ask(self, method: str, path: str, body: dict[str, Any] | bytes | None = None) -> tuple[int, Any]:
        """(HTTP status, answer); raises RolloutError when no whole answer comes, saying so of a server of ours that died."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            async with asyncio.timeout(self._timeout):
                async with self._session.request(method, self.server.url + path, data=data, headers=self._headers()) as response:
                    raw = await response.read()
                    status = response.status
        except TimeoutError:
            raise RolloutError(f"{self.server.name} did not answer {path} within {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if self.server.process is not None and await asyncio.to_thread(self.server.process.wait, _DEATH_S):
                raise dead(self.server, path) from error
            raise RolloutError(f"{self.server.name} broke off at {path}: {error or type(error).__name__}") from error
        try:
            return status, json.loads(raw) if raw else None
        except ValueError:
            if status == 200:
                raise RolloutError(f"{self.server.name} answered {path} with something that is not JSON: {raw[:200]!r}") from None
            return status, raw[:500].decode(errors="replace")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The `data:` lines of a streamed answer to a POST, up to `[DONE]`; raises RolloutError when it is refused or breaks off."""
        waiting = aiohttp.ClientTimeout(total=None, sock_read=self._timeout)
        try:
            async with self._session.post(
                self.server.url + path, data=json.dumps(body).encode(), headers=self._headers(), timeout=waiting
            ) as response:
                if response.status != 200:
                    raise self._refused(path, response.status, (await response.read())[:500].decode(errors="replace"))
                async for line in response.content:
                    text = line.strip().removeprefix(b"data:").strip()
                    if text == b"[DONE]":
                        return
                    if text:
                        yield json.loads(text)
        except TimeoutError:
            raise RolloutError(f"{self.server.name} did not go on with {path} within {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if self.server.process is not None and await asyncio.to_thread(self.server.process.wait, _DEATH_S):
                raise dead(self.server, path) from error
            raise RolloutError(f"{self.server.name} broke off at {path}: {error or type(error).__name__}") from error
        raise RolloutError(f"{self.server.name} ended its answer to {path} before it was whole")

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **authorization(self.server.api_key)}

    def _refused(self, path: str, status: int, answer: Any) -> RolloutError:
        text = answer.get("message") or answer.get("error") or answer if isinstance(answer, dict) else answer
        hint = "; its key is sglang: {api_key: ...}" if status in (401, 403) else ""
        return RolloutError(f"{self.server.name} refused {path} with status {status}: {str(text)[:500]}{hint}")


@contextlib.asynccontextmanager
async def open_clients(servers: Sequence[SglangServer], timeout: float) -> AsyncIterator[list[ServerClient]]:
    """A client per server; `timeout` is the most seconds of one request.

    Proxy variables of the environment are not read, and every request has a connection of its own: one that lay idle may
    be closed by the server at the moment it is used again.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield [ServerClient(server, session, timeout) for server in servers]


async def generate_all(
    clients: Sequence[ServerClient], work: Sequence[tuple[int, Sequence[int], int]], params: SamplingParams, in_flight: int
) -> list[Reply]:
    """The reply to each (server number, prompt ids, seed), in order, at most `in_flight` at once; one failure ends all.

    For servers that give no version per token, the version before must be the version after, and is every token's.
    """
    gate = asyncio.Semaphore(in_flight)

    async def one(server: int, prompt_ids: Sequence[int], seed: int) -> Reply:
        async with gate:
            return await clients[server].generate(prompt_ids, seed, params)

    before = await together(client.version() for client in clients)
    replies = await together(one(*item) for item in work)
    if any(UNTOLD in reply.versions for reply in replies):
        after = await together(client.version() for client in clients)
        for (server, _, _), reply in zip(work, replies, strict=True):
            if UNTOLD in reply.versions:
                if before[server] != after[server]:
                    raise RolloutError(f"{clients[server].server.name} went from version {before[server]} to {after[server]} meanwhile")
                reply.versions = [before[server]] * len(reply.versions)
    return replies


async def together(coroutines: Any) -> list[Any]:
    """All results in order. The first failure cancels the rest, waits until they are gone and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_watched(servers: Sequence[SglangServer], work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and returns its result; RolloutError at once when a server of ours ends meanwhile."""
    return asyncio.run(_watched(servers, work))


async def _watched(servers: Sequence[SglangServer], work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_WATCH_S)
            gone = next((server for server in servers if not server.alive), None)
            if gone is not None and not (task.done() and task.exception() is None):
                raise dead(gone)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def dead(server: SglangServer, path: str = "") -> RolloutError:
    """The error for a server of ours that has ended."""
    return RolloutError(f"{server.name} is gone{' (at ' + path + ')' if path else ''}: {server.how_it_ended()}")
