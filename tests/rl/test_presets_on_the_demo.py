"""The demo's questions with the presets that its own recipe is not: accuracy rises within its budget of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlmca.bench import demo
from tests.helpers.runs import ROOT, log_lines, run

pytestmark = [pytest.mark.serial, pytest.mark.whole]

RECIPE = ("advantage_std", "policy_loss", "loss_agg", "clip_ratio_low", "clip_ratio_high", "old_logp", "kl_coef", "entropy_coef",
          "drop_zero_std_groups", "mini_batch_size")  # fmt: skip
"""What the demo's file says of the algorithm, left to the preset here."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo's supervised stage has run."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        demo.prepare_assets()
        demo.train_sft(demo.DemoOptions())
    return folder


@pytest.mark.parametrize("name", ["grpo", "cispo", "gspo", "nemotron_grpo"])
def test_accuracy_rises(name: str, started: Path, tmp_path: Path) -> None:
    options = yaml.safe_load((ROOT / demo.GRPO_YAML).read_text(encoding="utf-8"))
    options = {key: value for key, value in options.items() if key not in RECIPE}
    options |= {
        "rl_algorithm": name, "model_name_or_path": str(started / demo.SFT_FOLDER), "dataset_dir": str(started / demo.ASSETS),
        "output_dir": str(tmp_path / "run"), "save_hf_model": False, "log_rollouts": False, "plot_loss": False, "stop_value": 0.8,
        **({} if name == "nemotron_grpo" else {"mini_batch_size": 64}),
    }  # fmt: skip
    run("train", options)
    accuracy = [line["eval_accuracy"] for line in log_lines(tmp_path / "run", "eval_accuracy")]
    rewards = [line["reward"] for line in log_lines(tmp_path / "run")]
    assert accuracy[-1] >= 0.8 and len(rewards) <= 150
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards
