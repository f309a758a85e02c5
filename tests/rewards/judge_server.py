"""A real chat-completions endpoint on loopback that fails as a reply asks it to."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


class JudgeServer:
    """Gives the marks that replies name: `mark=7`. Replies with `fail=KIND:N` meet that failure on their first N requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.seen: Counter[str] = Counter()
        self.now = self.most = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._answer(request, body["messages"][0]["content"])
        finally:
            self.now -= 1

    async def _answer(self, request: web.Request, prompt: str) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        self.seen[prompt] += 1
        fail = re.search(r"fail=(\w+):(\d+)", prompt)
        kind = fail[1] if fail and self.seen[prompt] <= int(fail[2]) else ""
        if kind.isdigit():
            return web.Response(status=int(kind), text=f"no: {request.headers.get('Authorization')}", headers={"Retry-After": "0"})
        if kind == "hang":
            await asyncio.sleep(30)
        if kind == "close":
            assert request.transport is not None
            request.transport.abort()
        if kind == "garbage":
            return web.Response(text="<html>")
        mark = re.search(r"mark=(-?[\d.]+)", prompt)
        said = f"<think>Score: 1</think> Fine.\nScore: {mark[1]}" if mark and kind != "silent" else "I cannot say."
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said}}]})


@contextmanager
def serving() -> Iterator[JudgeServer]:
    """The endpoint on a port of its own, in a thread of its own, for as long as the block lasts."""
    server, loop = JudgeServer(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
