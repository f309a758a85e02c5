"""The yardstick itself: its replies against Transformers, its arithmetic against numbers worked out by hand, its learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlmca.bench import demo_assets, plain_loop
from rlmca.bench.demo_assets import AssetOptions
from rlmca.bench.plain_loop import PlainOptions

SMALL = PlainOptions(rollout_batch_size=4, num_generations=3)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "assets"
    demo_assets.prepare(folder, AssetOptions(sft_rows=600, rl_rows=300, validation_rows=60, test_rows=120))
    return folder


@pytest.fixture
def loop(assets: Path) -> plain_loop.PlainGrpo:
    return plain_loop.load(assets / demo_assets.MODEL_FOLDER, assets / "rl.json", SMALL)


def test_log_probs_of_a_rollout_are_the_models(loop: plain_loop.PlainGrpo) -> None:
    """One row at a time, without padding and without a cache."""
    prompts = [loop.pool[0][0], loop.pool[1][0][:-2], loop.pool[2][0]]  # unequal lengths
    rollout = loop.generate(prompts)
    assert rollout.reply_BK.shape == (9, rollout.mask_BK.shape[1])
    for row in range(9):
        length = int(rollout.mask_BK[row].sum())
        reply = rollout.reply_BK[row, :length]
        prompt = prompts[row // 3]
        ids = torch.cat([torch.tensor(prompt), reply])[None]
        with torch.no_grad():
            logp = loop.model(ids).logits[0].log_softmax(-1)
        expected = logp[torch.arange(len(prompt) - 1, ids.shape[1] - 1), reply]
        assert torch.allclose(rollout.logp_BK[row, :length], expected, atol=1e-5)


def test_mask_ends_with_the_stop_token(loop: plain_loop.PlainGrpo) -> None:
    stop = loop.tokenizer.eos_token_id
    with torch.no_grad():  # the tied output row of the stop token grows, so that some replies end early
        loop.model.model.embed_tokens.weight[stop] *= 3
    rollout = loop.generate([prompt for prompt, _ in loop.pool[:40]])
    ended = 0
    for reply, mask in zip(rollout.reply_BK.tolist(), rollout.mask_BK.tolist(), strict=True):
        length = reply.index(stop) + 1 if stop in reply else len(reply)
        ended += stop in reply
        assert mask == [True] * length + [False] * (len(reply) - length)
    assert 0 < ended < len(rollout.reply_BK)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.7, 0.7, 0.7, 0.7])
    got = plain_loop.group_advantages(rewards, 4, eps=0.0)
    assert got[:4].tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])
    assert got[4:].tolist() == [0.0] * 4


def test_first_update_has_ratio_one(loop: plain_loop.PlainGrpo) -> None:
    """Then the loss is minus the token mean of the advantages, less the entropy bonus."""
    prompts = [prompt for prompt, _ in loop.pool[:4]]
    rollout = loop.generate(prompts)
    advantage = torch.linspace(-1, 1, 12)
    mask = rollout.mask_BK
    weighted = (advantage[:, None] * mask).sum() / mask.sum()
    entropies = []
    for row in range(12):
        length = int(mask[row].sum())
        ids = torch.cat([torch.tensor(prompts[row // 3]), rollout.reply_BK[row, :length]])[None]
        with torch.no_grad():
            logp = loop.model(ids).logits[0, -length - 1 : -1].log_softmax(-1)
        entropies.append(-(logp.exp() * logp).sum(-1))
    expected = -weighted - SMALL.entropy_coef * torch.cat(entropies).mean()
    before = [p.detach().clone() for p in loop.model.parameters()]
    assert loop.update(rollout, advantage, torch.arange(12)) == pytest.approx(expected.item(), abs=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_rewarded_replies_become_likelier(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that a random model learns in a few steps: replies that start with a token of even number."""
    options = PlainOptions(rollout_batch_size=16, num_generations=4, max_new_tokens=2, learning_rate=2e-3)
    loop = plain_loop.load(assets / demo_assets.MODEL_FOLDER, assets / "rl.json", options)
    monkeypatch.setattr(loop, "texts", lambda rollout: [("yes", "no")[row[0] % 2] for row in rollout.reply_BK.tolist()])
    loop.pool = [(prompt, "yes") for prompt, _ in loop.pool]
    rewards = [loop.step().reward for _ in range(15)]
    assert rewards[0] < 0.7 and sum(rewards[-3:]) / 3 > 0.9


def test_command_writes_a_line_a_step(assets: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    model = assets / demo_assets.MODEL_FOLDER
    arguments = ["--model", str(model), "--data", str(assets / "rl.json"), "--steps", "2", "--out", str(out)]
    plain_loop.main([*arguments, "--rollout_batch_size", "3", "--num_generations", "2"])
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["samples"] for line in lines] == [6, 6]
