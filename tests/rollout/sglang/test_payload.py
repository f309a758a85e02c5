"""What travels: buckets, payloads, the names and shapes that must come, folders of files."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlmca.rollout.base import RolloutError
from rlmca.rollout.sglang import weights
from rlmca.rollout.sglang.expected import ExpectedTensors
from rlmca.rollout.sglang.payload import buckets, own_copy, tensor_payload, tensor_request
from rlmca.rollout.sglang.weights import files_parent, update_folder, write_files
from rlmca.transfer.hf_folder import HFFolderError
from tests.helpers.models import save_model

ALLOWED = {("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"), ("collections", "OrderedDict")}
"""What SGLang's restricted unpickler lets through, as far as it is needed; anything else ends the server."""


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 40))
def test_buckets_hold_the_stream_once_in_order_and_no_more_than_allowed(sizes: list[int], limit: int) -> None:
    stream = [(f"w{i}", torch.full((n,), float(i))) for i, n in enumerate(sizes)]
    made = list(buckets(stream, limit))
    assert [(n, t.tolist()) for bucket in made for n, t in bucket] == [(n, t.tolist()) for n, t in stream]
    assert all(bucket for bucket in made)
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= limit for bucket in made)
    for one, two in zip(made, made[1:], strict=False):
        assert sum(t.nbytes for _, t in one) + two[0][1].nbytes > limit, "a bucket was closed too early"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_payload_is_a_plain_pickle_of_allowed_globals_with_the_bytes_inside(dtype: torch.dtype) -> None:
    big = torch.randn(1000, 7).to(dtype)
    named = [("a", own_copy(big[10:12].T)), ("b", own_copy(torch.nn.Parameter(big[0, 0]))), ("c", own_copy(big[:0]))]
    raw = base64.b64decode(tensor_payload(named), validate=True)
    strings, used = [], set()
    for code, value, _ in pickletools.genops(raw):
        if code.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(value)
        elif code.name == "STACK_GLOBAL":
            used.add((strings[-2], strings[-1]))
        assert code.name not in ("GLOBAL", "INST")
    assert used <= ALLOWED
    assert len(raw) < 4000, "the whole storage of a view was sent"
    back = pickle.loads(raw)
    assert [name for name, _ in back] == ["a", "b", "c"]
    assert all(torch.equal(x, y) and x.dtype == dtype for (_, x), (_, y) in zip(back, named, strict=True))


def test_what_is_not_a_tensor_with_a_storage_of_its_own_is_refused() -> None:
    for wrong in (torch.zeros(9)[2:4], torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(ValueError, match="w is not a CPU tensor"):
            tensor_payload([("w", wrong)])


def test_a_request_has_one_payload_per_rank() -> None:
    assert json.loads(tensor_request(b"QUJD", 2)) == {"flush_cache": True, "serialized_named_tensors": ["QUJD", "QUJD"]}


def test_expected_tensors_are_those_of_the_folder(tmp_path: Path) -> None:
    tied = ExpectedTensors.of_folder(save_model("qwen3_tied", tmp_path / "tied"))
    untied = ExpectedTensors.of_folder(save_model("qwen3_untied", tmp_path / "untied"))
    assert tied.shapes is not None and untied.shapes is not None
    assert set(untied.shapes) - set(tied.shapes) == {"lm_head.weight"}
    assert untied.bytes_at_most == sum(4 * torch.zeros(shape).numel() for shape in untied.shapes.values())
    whole = [(name, torch.zeros(shape)) for name, shape in untied.shapes.items()]
    assert list(untied.checked(whole)) == whole
    with pytest.raises(RolloutError, match=r"nothing came for lm_head\.weight"):
        list(untied.checked([item for item in whole if item[0] != "lm_head.weight"]))


def test_without_weights_in_the_folder_the_first_whole_update_says_what_must_come(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    expected = ExpectedTensors.of_folder(tmp_path)
    assert expected.shapes is None and expected.bytes_at_most is None
    list(expected.checked([("a", torch.zeros(2)), ("b", torch.zeros(3))]))
    with pytest.raises(RolloutError, match="nothing came for b"):
        list(expected.checked([("a", torch.zeros(2))]))
    with pytest.raises(RolloutError, match="c is not a tensor"):
        list(expected.checked([("c", torch.zeros(2))]))


def test_a_broken_folder_is_not_taken_for_one_without_weights(tmp_path: Path) -> None:
    folder = save_model("qwen2", tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(HFFolderError, match="not a whole safetensors file"):
        ExpectedTensors.of_folder(folder)


def test_an_update_folder_is_private_unless_it_is_for_others(tmp_path: Path) -> None:
    with update_folder(tmp_path) as mine, update_folder(tmp_path, for_others=True) as shared:
        assert [oct(folder.stat().st_mode)[-3:] for folder in (mine, shared)] == ["700", "755"]


def test_files_are_a_hugging_face_folder(tmp_path: Path) -> None:
    named = [(f"w{i}", torch.randn(3, 5)) for i in range(7)]
    write_files(iter(named), tmp_path, {"model_type": "x"}, shard_bytes=130)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(tmp_path / file) for file in set(index.values())}
    assert len(shards) == 4 and json.loads((tmp_path / "config.json").read_text()) == {"model_type": "x"}
    assert all(torch.equal(shards[index[name]][name], value) for name, value in named)


def test_a_folder_that_a_killed_process_left_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    left, used = tmp_path / "rlmca-weights-left", tmp_path / "rlmca-weights-used"
    for folder in (left, used):
        folder.mkdir()
        (folder / "model-00000.safetensors").write_text("x")
    handle = os.open(used, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with update_folder(tmp_path) as mine:
            with update_folder(tmp_path) as another:
                assert mine.is_dir() and another.is_dir()
            assert mine.is_dir() and used.is_dir() and not left.exists() and not another.exists()
    finally:
        os.close(handle)
    assert list(tmp_path.iterdir()) == [used]


def test_files_go_to_shared_memory_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path / "shm")
    assert files_parent(None, 10, tmp_path / "other") == tmp_path / "other", "there is no shared memory"
    (tmp_path / "shm").mkdir()
    assert files_parent(None, 10, tmp_path / "other") == tmp_path / "shm"
    assert files_parent(None, 10**18, tmp_path / "other") == tmp_path / "other"
    assert files_parent(str(tmp_path / "dir"), 10, tmp_path / "other") == tmp_path / "dir"
