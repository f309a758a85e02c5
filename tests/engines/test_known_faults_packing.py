"""Faults that users of comparable systems reported: packed rows that see each other, and sequences that ranks cannot split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from rlmca.config import ConfigError, Environment, make_config
from rlmca.engines.microbatch import micro_batches
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, make_engine
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import make_model, save_model

Make = Callable[[Path], Any]
A, B = [1, 2, 3], [4, 5, 6, 7, 8]


@pytest.fixture(params=["huggingface", "megatron"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "huggingface":
        return lambda folder: make_hf_engine(folder, packing=True, max_tokens_per_microbatch=64)
    return lambda folder: make_engine(folder, Layout("packed", packing=True, max_tokens=64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


def documents(*rows: list[int]) -> Batch:
    return batch_of_examples(list(rows), [[True] * len(row) for row in rows])


# ---- C6: attention, positions and labels cross the borders of documents; the last token of one is no target


def test_two_packed_documents_have_the_loss_of_each(make: Make, folder: Path) -> None:
    engine, model = make(folder), make_model("qwen2")
    batch = documents(A, B)
    (piece,) = micro_batches(batch, engine.cutting(8), engine.parallel)
    assert piece.borders == (0, 3, 8) and piece.ids_BT.tolist() == [A + B], "one row, and where its documents begin"
    assert int(piece.mask_BT.sum()) == 6 and not piece.mask_BT[0, 3], "six targets, and 3 does not predict 4"
    assert piece.mask_BT[0, [2, 7]].all(), "the last token of each document is a target"
    expected = torch.tensor(0.0)
    for row in (A, B):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        expected = expected + torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum")
    out = engine.log_probs(batch)
    assert abs(-float(out.logp_BT.sum()) - expected.item()) < 1e-5
    loss = engine.train_batch(batch, SftLoss(), 0.0)["loss"]
    assert abs(loss - expected.item() / 6) < 1e-5


def test_editing_one_document_leaves_the_other_alone(make: Make, folder: Path) -> None:
    engine = make(folder)
    before = engine.log_probs(documents(A, B)).logp_BT
    after = engine.log_probs(documents([9, 2, 10], B)).logp_BT
    assert (before[0] - after[0]).abs().max() > 1e-2
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-6)


# ---- B4: sizes that context and sequence parallelism cannot split (layouts of short sequences: test_microbatch.py, tests/invariance)


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("cutoff_len", {"packing": True, "context_parallel_size": 4}, "packed rows of 4098 tokens cannot be split into"),
        ("max_tokens_per_microbatch", {"context_parallel_size": 4}, "micro-batches of 4098 tokens cannot be split into"),
        (
            "max_tokens_per_microbatch",
            {
                "context_parallel_size": 2,
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
                "neat_packing": True,
                "cutoff_len": 64,
            },
            "2 x context_parallel_size 2 x tensor_model_parallel_size 4 (sequence_parallel) = 16",
        ),
    ],
)
def test_a_length_that_cannot_be_split_is_an_error_with_the_numbers(key: str, changes: dict[str, Any], words: str) -> None:
    base = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
    with pytest.raises(ConfigError) as caught:
        make_config({**base, key: 4098, **changes}, env=Environment(use_mca=True))
    (error,) = caught.value.errors
    assert error.startswith(key) and words in error and ("multiple of 8, 4096 or 4104" in error or "multiple of 16, 4096 or 4112" in error)
    make_config({**base, key: 4096, **changes}, env=Environment(use_mca=True))
