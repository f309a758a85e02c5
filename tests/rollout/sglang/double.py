"""A stand-in for a server that can be told to fail. It is used to inject faults only; `test_protocol` holds it to the real one."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlmca.rollout.sglang.server import SglangServer

Fault = Callable[[str, dict[str, Any]], Awaitable[web.StreamResponse | None] | web.StreamResponse | dict[str, Any] | None]


@dataclass
class Double:
    """`fault(path, body)` may answer in the double's place: a response, or a dict to be merged into the right answer."""

    version: str = "default"
    fault: Fault | None = None
    older: bool = False
    """As 0.5.9: no session around updates, no versions of tokens."""
    open_update: bool = False
    tp: int = 1
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    url: str = ""

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def received(self) -> list[list[str]]:
        """Names in each bucket that came."""
        bodies = [body for path, body in self.calls if path == "/update_weights_from_tensor"]
        return [[name for name, _ in pickle.loads(base64.b64decode(body["serialized_named_tensors"][-1]))] for body in bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, body))
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            answer = self.fault(request.path, body) if self.fault is not None else None
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, web.StreamResponse):
                return answer
            status, right = self.answer(request.path, body)
            if request.path == "/generate":
                await asyncio.sleep(0.01)
            return web.json_response({**right, **(answer or {})}, status=status)
        finally:
            self.busy -= 1

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        good: tuple[int, dict[str, Any]] = (200, {"success": True, "message": "Success"})
        if path == "/generate":
            return 200, self.reply(body)
        if path in ("/model_info", "/get_model_info"):
            return 200, {"model_path": "m", "weight_version": self.version}
        if path in ("/server_info", "/get_server_info"):
            return 200, {"tp_size": self.tp}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        elif path in ("/begin_weight_update", "/end_weight_update"):
            begins = path.startswith("/begin")
            if self.older:
                return 404, {"detail": "Not Found"}
            if begins == self.open_update:
                return 400, {"success": False, "message": "a weight-update session is already open" if begins else "none is open"}
            self.open_update = begins
        return good

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        n = body["sampling_params"]["max_new_tokens"]
        ids = [(body["input_ids"][-1] + t) % 60 for t in range(n)]
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": n}, "output_token_logprobs": [[-1.5, i, None] for i in ids]}
        if not self.older:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": n}]
        return {"output_ids": ids, "meta_info": meta}

    @contextmanager
    def serving(self) -> Iterator[SglangServer]:
        """Runs on a port of its own in a thread; gives the attached server."""
        started, stop = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            app = web.Application(client_max_size=2**30)
            app.router.add_route("*", "/{tail:.*}", self.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        started.wait()
        try:
            yield SglangServer.attach(self.url)
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join()
