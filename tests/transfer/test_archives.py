"""Torch's archives: payloads found without reading them, archives written without payloads, and nothing of a file run."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import os
import pickle
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.transfer.convert.archives import Empty, Unreadable, hollow, leaves, load, records, tensors_of
from rlmca.transfer.convert.base import DTYPES, ConvertError, Slot
from rlmca.transfer.convert.pickles import Inert

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "vector": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(2, 0, 3, dtype=torch.float16),
    "eight": torch.arange(7).to(torch.float8_e4m3fn),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "long": torch.arange(4),
}


def value(slot: Slot) -> torch.Tensor:
    raw = bytearray(slot.path.read_bytes()[slot.offset :])
    count = int(torch.Size(slot.shape).numel())
    return torch.frombuffer(raw, dtype=DTYPES[slot.dtype], count=count).reshape(slot.shape) if count else torch.empty(slot.shape)


def same(slot: Any, tensor: torch.Tensor) -> None:
    assert isinstance(slot, Slot) and slot.shape == tuple(tensor.shape) and DTYPES[slot.dtype] == tensor.dtype
    assert torch.equal(value(slot).float(), tensor.float())


def test_tensors_are_found_where_torch_put_them(tmp_path: Path) -> None:
    tree = {"model": dict(TENSORS), "more": [TENSORS["matrix"], {"deep": torch.nn.Parameter(torch.ones(2))}], "iteration": 3}
    torch.save(tree, tmp_path / "file.pt")
    found = tensors_of(tmp_path / "file.pt")
    assert list(found) == [*(("model", name) for name in TENSORS), ("more", 0), ("more", 1, "deep")]
    for name, tensor in TENSORS.items():
        same(found["model", name], tensor)
    assert found["more", 0] == found["model", "matrix"], "one storage"
    assert dict(leaves(load(tmp_path / "file.pt")))[("iteration",)] == 3


def test_views_are_parts_of_their_storage_and_others_are_refused(tmp_path: Path) -> None:
    buffer = torch.arange(40, dtype=torch.float32)
    torch.save(
        {"a": buffer[4:16].view(3, 4), "b": buffer[20:25], "t": buffer.view(5, 8).t(), "row": buffer.view(5, 8)[2:3, :]}, tmp_path / "f.pt"
    )
    found = load(tmp_path / "f.pt")
    for name, tensor in {"a": buffer[4:16].view(3, 4), "b": buffer[20:25], "row": buffer.view(5, 8)[2:3]}.items():
        same(found[name], tensor)
    assert isinstance(found["t"], Unreadable)
    with pytest.raises(ConvertError, match=r"t: it is stored with strides \(1, 8\)"):
        tensors_of(tmp_path / "f.pt")
    assert set(tensors_of(tmp_path / "f.pt", lambda keys: keys != ("t",))) == {("a",), ("b",), ("row",)}


class Kind(enum.Enum):
    DECODER = 1


def test_objects_of_other_classes_are_inert(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'sprung'}",)

    arguments = argparse.Namespace(num_layers=2, kind=Kind.DECODER, dtype=torch.bfloat16)
    torch.save({"args": arguments, "trap": Trap(), "w": TENSORS["matrix"], "random": [torch.get_rng_state()]}, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    assert found["args"].num_layers == 2 and found["args"].origin == "argparse.Namespace"
    assert isinstance(found["trap"], Inert) and found["trap"].origin == f"{os.system.__module__}.system"
    assert not (tmp_path / "sprung").exists()
    same(found["w"], TENSORS["matrix"])


@pytest.mark.parametrize("attack", ["setattr", "eval", "import"])
def test_a_pickle_cannot_reach_what_reads_it(tmp_path: Path, attack: str) -> None:
    code = {
        "setattr": b"\x80\x02cbuiltins\nsetattr\n(cargparse\nNamespace\nX\x04\x00\x00\x00evilK\x01tR.",
        "eval": b"\x80\x02cbuiltins\neval\nX\x16\x00\x00\x00__import__('os').abort\x85R.",
        "import": b"\x80\x02cantigravity\nnothing\n).",
    }[attack]
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("archive/data.pkl", code)
    with contextlib.suppress(ConvertError):
        load(tmp_path / "file.pt")
    assert not hasattr(argparse.Namespace, "evil")
    assert "antigravity" not in sys.modules


def written(path: Path, tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    made = hollow(tree)
    with path.open("w+b") as file:
        file.truncate(made.size)
        made.write(file.fileno())
        for name, payload in made.payloads.items():
            raw = (
                bytes(tensors[name].contiguous().view(torch.uint8).flatten().tolist())
                if tensors[name].dim()
                else tensors[name].numpy().tobytes()
            )
            assert len(raw) == payload.size and payload.offset % 64 == 0
            os.pwrite(file.fileno(), raw, payload.offset)
    return made


def test_hollow_archives_are_what_torch_would_have_written(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tree = {"model": {name: Empty(name, tuple(t.shape), code(t)) for name, t in TENSORS.items()}, "iteration": 3, "plain": [None, 2.5, "x"]}
    made = written(path, tree, TENSORS)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None, "checksums are still to come"
    assert torch.load(path, weights_only=True)["iteration"] == 3, "torch reads it all the same"
    with path.open("r+b") as file:
        crc32 = {n: zlib.crc32(path.read_bytes()[p.offset : p.offset + p.size]) for n, p in made.payloads.items()}
        made.seal(file.fileno(), crc32)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        mine = archive.read("archive/data.pkl")
    read = torch.load(path, weights_only=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(read["model"][name].float(), tensor.float()) and read["model"][name].dtype == tensor.dtype
    for found, tensor in zip(tensors_of(path).values(), TENSORS.values(), strict=True):
        same(found, tensor)
    buffer = io.BytesIO()
    torch.save({**tree, "model": TENSORS}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        assert archive.read("archive/data.pkl") == mine
    assert torch.equal(torch.load(path, mmap=True)["model"]["matrix"], TENSORS["matrix"])


def code(tensor: torch.Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def test_archives_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Nearly all of it a hole of the file."""
    path, last = tmp_path / "large.pt", torch.tensor([1.5, -2.0])
    made = hollow({"large": Empty("large", (5 << 30,), "U8"), "last": Empty("last", (2,), "F32")})
    with path.open("w+b") as file:
        file.truncate(made.size)
        made.write(file.fileno())
        os.pwrite(file.fileno(), last.numpy().tobytes(), made.payloads["last"].offset)
        made.seal(file.fileno(), {"last": zlib.crc32(last.numpy().tobytes())})
        assert records(file.fileno(), 0, made.size)["data/0"][1] == 5 << 30
    found = tensors_of(path)
    assert found[("last",)].offset == made.payloads["last"].offset > 5 << 30 and found[("large",)].shape == (5 << 30,)
    read = torch.load(path, mmap=True, weights_only=True)
    assert torch.equal(read["last"], last) and read["large"].shape == (5 << 30,)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == last.numpy().tobytes()


def test_an_archive_inside_a_file(tmp_path: Path) -> None:
    raw = io.BytesIO()
    torch.save(TENSORS["matrix"], raw)
    (tmp_path / "file").write_bytes(b"x" * 77 + raw.getvalue() + b"y" * 99)
    same(load(tmp_path / "file", None, 77, len(raw.getvalue())), TENSORS["matrix"])


@pytest.mark.parametrize("damage", ["cut", "text", "compressed", "legacy", "empty"])
def test_what_is_no_archive_of_torch_is_said(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=damage != "legacy")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    if damage in ("text", "empty"):
        path.write_text("no archive" * 20 if damage == "text" else "")
    if damage == "compressed":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({}) * 20)
    with pytest.raises(ConvertError, match="file.pt"):
        load(path)
