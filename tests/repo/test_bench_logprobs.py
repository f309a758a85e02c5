"""`bench logprobs` on a problem of a moment, and its arithmetic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from rlmca.bench import logprobs_worker
from rlmca.bench.logprobs import NAIVE, VARIANTS
from rlmca.bench.registry import run_bench
from rlmca.config import ConfigError

TINY = ["tokens=40", "hidden=16", "vocab=101", "rounds=1", "steps=2", "error_tokens=20"]


@pytest.mark.serial
@pytest.mark.whole
def test_a_tiny_run_writes_every_figure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_bench("logprobs", tmp_path / "out.json", TINY) == 0
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(figures["results"]) == set(VARIANTS) and figures["options"]["vocab"] == 101
    assert figures["results"][NAIVE]["time_ratio"] == figures["results"][NAIVE]["memory_ratio"] == 1.0
    for row in figures["results"].values():
        assert 0 < row["fastest_seconds"] <= row["seconds"] <= row["slowest_seconds"] and row["extra_gb"] > 0
    for error in figures["errors"].values():
        assert all(0 < error[part] < 0.05 for part in ("logp", "hidden", "weight"))
    assert "without its gradient" in figures["all_logits_compute"]
    shown = capfd.readouterr().out
    assert all(name in shown for name in VARIANTS)


WRONG = [("entropy=some", "none of none, value, gradient"), ("tokens=0", "at least 1"), ("vocabulary=3", "did you mean vocab")]


@pytest.mark.parametrize(("extra", "part"), WRONG)
def test_wrong_options_are_refused_before_anything_runs(extra: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        run_bench("logprobs", None, [extra])


def test_the_yardstick_is_right_and_ours_is_no_worse() -> None:
    """Entropy and log-probs by hand; then gradients in bfloat16 against float64, where targets are likely and unlikely."""
    options = argparse.Namespace(hidden=64, vocab=3000, error_tokens=64)
    hidden_NH, weight_VH, target_N, _ = logprobs_worker.inputs(options, 64)
    p_NV = torch.softmax((hidden_NH.double() @ weight_VH.double().T), -1)
    for entropy in ("none", "value", "gradient"):
        logp_N, entropy_N = logprobs_worker.naive(hidden_NH.double(), weight_VH.double(), target_N, entropy)
        torch.testing.assert_close(logp_N.exp(), p_NV[torch.arange(64), target_N])
        assert (entropy_N is None) == (entropy == "none")
        if entropy_N is not None:
            torch.testing.assert_close(entropy_N, -(p_NV * p_NV.log()).sum(1))
    assert p_NV[torch.arange(64), target_N].min() < 0.01 < 0.9 < p_NV[torch.arange(64), target_N].max()
    errors = logprobs_worker.errors(options)
    assert all(errors["rlmca"][part] <= 0.8 * errors["all logits"][part] for part in ("logp", "hidden", "weight")), errors
