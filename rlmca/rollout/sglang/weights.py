"""How weights reach servers: as files that they map (`disk`), or inside requests (`tensor`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlmca.rollout.base import RolloutError
from rlmca.rollout.sglang.client import ServerClient, together
from rlmca.rollout.sglang.payload import Named, buckets, tensor_payload, tensor_request
from rlmca.transfer.hf_folder import INDEX

SHARED_MEMORY = Path("/dev/shm")
SHARD_BYTES = 2e9
_PREFIX = "rlmca-weights-"
_ROOM = 1.1
"""Free bytes wanted per byte to write."""


async def send_tensors(clients: Sequence[ServerClient], stream: Iterable[Named], bucket_bytes: float) -> None:
    """Every tensor of the stream to every server, bucket by bucket, between begin and end of an update."""
    opened: list[ServerClient] = []
    try:
        for client in clients:
            if await _begin(client):
                opened.append(client)
        for bucket in buckets(stream, bucket_bytes):
            payload = tensor_payload(bucket)
            await together(c.post("/update_weights_from_tensor", tensor_request(payload, c.server.tp)) for c in clients)
        while opened:
            await opened[0].post("/end_weight_update", {})
            opened.pop(0)
    except BaseException:
        for client in opened:  # a session left open would block the next update; what went wrong is raised already
            if client.server.alive:
                with contextlib.suppress(RolloutError):
                    await client.ask("POST", "/end_weight_update", {})
        raise


async def _begin(client: ServerClient) -> bool:
    """Opens an update; False for a server from before there were any. One that was left open is ended first."""
    status, _ = await client.ask("POST", "/begin_weight_update", {})
    if status == 404:
        return False
    if status == 400:
        await client.post("/end_weight_update", {})
        status = 0
    if status != 200:
        await client.post("/begin_weight_update", {})
    return True


async def load_files(clients: Sequence[ServerClient], folder: Path) -> None:
    """Every server reads the weight files of `folder`."""
    body: dict[str, Any] = {"model_path": str(folder), "load_format": "auto", "flush_cache": True}
    await together(client.post("/update_weights_from_disk", body) for client in clients)


def write_files(stream: Iterable[Named], folder: Path, config: dict[str, Any], shard_bytes: float = SHARD_BYTES) -> None:
    """The stream as a Hugging Face folder: config.json, shards and their index. At most one shard is held in memory."""
    place: dict[str, str] = {}
    for number, shard in enumerate(buckets(stream, shard_bytes)):
        file = f"model-{number:05d}.safetensors"
        save_file(dict(shard), folder / file, metadata={"format": "pt"})
        place |= {name: file for name, _ in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextlib.contextmanager
def update_folder(parent: Path, *, for_others: bool = False) -> Iterator[Path]:
    """A fresh folder in `parent` that is removed afterwards. One that a killed process left behind is removed by the next.

    Only its owner can look into it, unless it is `for_others`: for servers that another user runs. A lock says that a folder
    is in use: process numbers would say nothing where containers share the memory.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_left_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix="." + _PREFIX, dir=parent))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        folder = folder.rename(parent / folder.name.removeprefix("."))  # only now others may ask whether it is locked
        folder.chmod(0o755 if for_others else 0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left_folders(parent: Path) -> None:
    """Removes folders of updates that nobody is writing or reading any more."""
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def files_parent(configured: str | None, need: int | None, otherwise: Path) -> Path:
    """Where update folders go: the configured folder, else shared memory if it has room for `need` bytes, else `otherwise`."""
    if configured is not None:
        return Path(configured).expanduser().resolve()
    if SHARED_MEMORY.is_dir() and (need is None or shutil.disk_usage(SHARED_MEMORY).free > _ROOM * need):
        return SHARED_MEMORY
    return otherwise.resolve()
