"""Faults that users of comparable systems reported, on both engines: shifted targets, and temperature where it does not belong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlmca.algorithms.losses import SftLoss
from rlmca.config import Environment, make_config
from rlmca.rl.update import update_policy
from rlmca.types import Sample, batch_of_examples
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, hf_reference, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import make_model, save_model

Make = Callable[..., Any]


def megatron(folder: Path, **settings: Any) -> Any:
    return make_engine(folder, Layout("tp1"), **settings)


@pytest.fixture(params=[make_hf_engine, megatron], ids=["huggingface", "megatron"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def lookup_model(folder: Path, logits_VV: torch.Tensor, hidden: int) -> Path:
    """A model whose logits after token i are row i of `logits_VV`: layers add nothing, token i's state is the i-th unit vector."""
    V = logits_VV.shape[0]
    config = LlamaConfig(
        vocab_size=V, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, rms_norm_eps=1e-12, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V, hidden))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :V] = logits_VV.T / math.sqrt(hidden)  # the last norm makes the unit vector sqrt(hidden) long
    model.save_pretrained(folder)
    return folder


# ---- C4: labels shifted by the collator and again by the model


def test_a_model_that_knows_the_next_token_has_no_loss(make: Make, tmp_path: Path) -> None:
    """One-hot logits on the next token: a shift too many or too few costs 40 nats a token."""
    V = 61
    folder = lookup_model(tmp_path / "oracle", 40.0 * torch.roll(torch.eye(V), 1, dims=1), hidden=64)
    rows = [[(start + i) % V for i in range(length)] for start, length in ((0, 9), (50, 15), (7, 2))]
    masks = [[i >= 4 for i in range(9)], [i % 3 > 0 for i in range(15)], [False, True]]
    engine, batch = make(folder), batch_of_examples(rows, masks)
    out = engine.log_probs(batch)
    assert out.logp_BT[batch.mask_BT].min() > -1e-6
    assert engine.train_batch(batch, SftLoss(), 0.0)["loss"] < 1e-6
    moved = batch.replace(ids_BT=torch.where(batch.mask_BT, (batch.ids_BT + 1) % V, batch.ids_BT))
    assert engine.train_batch(moved, SftLoss(), 0.0)["loss"] > 10, "the oracle must be able to fail"


def test_one_row_has_one_loss_on_both_engines(tmp_path: Path) -> None:
    folder = save_model("qwen3_untied", tmp_path / "model")
    batch = random_batch(rows=1, seed=11)
    expected = hf_reference(make_model("qwen3_untied"), batch)
    losses = []
    for engine in (make_hf_engine(folder), megatron(folder)):
        out = engine.log_probs(batch)
        assert torch.equal(out.logp_BT != 0, batch.mask_BT), "the same (position, target) pairs"
        torch.testing.assert_close(out.logp_BT, expected["logp_BT"], rtol=0, atol=1e-5)
        losses.append(engine.train_batch(batch, SftLoss(), 0.0)["loss"])
    assert abs(losses[0] - losses[1]) < 1e-5 and abs(losses[0] - expected["loss"]) < 1e-5


# ---- F1: the sampling temperature in the ratio, and none in SFT


@pytest.fixture
def coin(tmp_path: Path) -> Path:
    """Two tokens, logits [2, 0] after either."""
    return lookup_model(tmp_path / "coin", torch.tensor([[2.0, 0.0], [2.0, 0.0]]), hidden=16)


def test_old_new_and_reference_log_probs_are_at_the_sampling_temperature(make: Make, coin: Path) -> None:
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", "rollout_batch_size": 2,
              "num_generations": 2, "mini_batch_size": 1, "temperature": 0.5, "kl_coef": 0.1, "max_new_tokens": 2}  # fmt: skip
    cfg = make_config(values, env=Environment())
    policy, reference = make(coin), make(coin, trainable=False)
    batch = batch_of_examples([[0, 0]], [[False, True]])
    for engine in (policy, reference):
        assert engine.log_probs(batch, temperature=0.5).logp_BT[0, 1].item() == pytest.approx(-0.018150, abs=1e-6)
        assert engine.log_probs(batch).logp_BT[0, 1].item() == pytest.approx(-0.126928, abs=1e-6)
    steps: list[dict[str, float]] = []

    class Recorder(SpmdGroup):
        def train_batch(self, *args: Any) -> dict[str, float]:
            steps.append(super().train_batch(*args))
            return steps[-1]

    drawn = [(group, k) for group in range(2) for k in range(2)]
    samples = [Sample([0], [0], [-0.018150], [0], "stop", group=g, k=k, reward=float(k), advantage=k - 0.5) for g, k in drawn]
    update_policy(Recorder(policy, policy.parallel), SpmdGroup(reference, reference.parallel), samples, cfg, step=1, learning_rate=0.0)
    assert len(steps) == 2
    for step in steps:  # the second mini-batch takes its baseline from a forward of its own
        assert step["ratio"] == pytest.approx(1.0, abs=1e-5) and step["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert step["logp_gap_max"] < 1e-5 and abs(step["kl"]) < 1e-9


def test_the_supervised_loss_knows_no_temperature(make: Make, coin: Path) -> None:
    batch = batch_of_examples([[0, 0], [1, 0]], [[False, True]] * 2)
    assert SftLoss.temperature == 1.0
    assert make(coin).train_batch(batch, SftLoss(), 0.0)["loss"] == pytest.approx(0.126928, abs=1e-6)


def test_temperature_zero_is_never_a_divisor(make: Make, coin: Path) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        make(coin).log_probs(batch_of_examples([[0, 0]], [[False, True]]), temperature=0.0)
