"""The command line as a user meets it: real processes, exit statuses, and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD = "model_name_or_path: ./no_model\ndataset: no_set\noutput_dir: {out}\n"
FIVE = """
learning_rte: 1e-5
learning_rate: abc
save_strategy: often
streaming: true
sequence_parallel: true
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("USE_MCA", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC_PER_NODE")}
    command = [sys.executable, "-m", "rlmca.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**clean, "OMP_NUM_THREADS": "1", **(env or {})}, timeout=300
    )


def write(folder: Path, text: str) -> str:
    path = folder / "x.yaml"
    path.write_text(GOOD.format(out=folder / "out") + text)
    return str(path)


def test_five_mistakes_print_five_errors_and_start_nothing(tmp_path: Path) -> None:
    done = run("train", write(tmp_path, FIVE), env={"USE_MCA": "1", "NPROC_PER_NODE": "2"})
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "5 errors, nothing was started:"
    starts = [
        "learning_rte: unknown key",
        "learning_rate: 'abc'",
        "save_strategy: 'often'",
        "streaming: ",
        "sequence_parallel: true splits",
    ]
    assert len(lines) == 6
    assert all(line.startswith(f"  {number}. {start}") for number, (line, start) in enumerate(zip(lines[1:], starts, strict=True), 1))
    assert not (tmp_path / "out").exists() and "Traceback" not in done.stderr


def test_a_mistake_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import json, sys; from rlmca.cli.main import main; status = main(sys.argv[1:]); "
        "print(json.dumps([status, [m for m in ('torch', 'transformers', 'megatron') if m in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", write(tmp_path, FIVE)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert json.loads(done.stdout) == [2, []]


def test_what_only_a_look_at_the_files_shows_is_collected_too(tmp_path: Path) -> None:
    done = run("train", write(tmp_path, "tensor_model_parallel_size: 2\n"), env={"USE_MCA": "1", "NPROC_PER_NODE": "3"})
    assert done.returncode == 2
    assert "world size 3 is not a multiple of tensor 2 x pipeline 1 = 2" in done.stderr
    assert "no_model" in done.stderr and "dataset_info.json" in done.stderr and "3 errors" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"USE_MCA": "yes!"}, "write USE_MCA=1 or USE_MCA=0"),
        ({"NNODES": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NODE_RANK"),
    ],
)
def test_the_environment_is_checked(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    done = run("train", write(tmp_path, ""), env=variables)
    assert done.returncode == 2 and words in done.stderr


def test_rl_over_several_processes_of_torchrun_is_refused(tmp_path: Path) -> None:
    """Ranks of RL are Ray actors: what the environment says of torchrun's nodes must not be ignored."""
    path = write(tmp_path, "stage: grpo\nrewards: exact\n")
    done = run("train", path, env={"USE_MCA": "1", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert done.returncode == 2 and "on Ray start the run once and write ray_address" in done.stderr
    done = run("train", path, "use_ray=false", env={"USE_MCA": "1", "NPROC_PER_NODE": "2"})
    assert done.returncode == 2 and "use_ray: false, but stage grpo over several processes needs Ray" in done.stderr


def test_overrides_may_stand_before_and_after_options(tmp_path: Path) -> None:
    done = run("train", write(tmp_path, ""), "seed=x", "--dry_run", "bf16=x", "--gpus", "2", "save_steps=x", env={"USE_MCA": "1"})
    assert [line.split(":")[0] for line in done.stderr.splitlines()[1:]] == ["  1. seed", "  2. bf16", "  3. save_steps"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["version"], 0, "rlmca "),
        (["help"], 0, "known keys without effect"),
        (["help", "kl_coef", "fp8"], 0, "Weight of the KL"),
        (["help", "kl_coeff"], 2, "did you mean kl_coef?"),
        (["--help"], 0, "rlmca-cli COMMAND"),
        ([], 2, "rlmca-cli COMMAND"),
        (["serve", "x.yaml"], 2, "command serve: not in this version"),
        (["trian", "x.yaml"], 2, "trian: unknown command"),
        (["train", "nowhere.yaml"], 2, "nowhere.yaml: there is no such file"),
        (["train"], 2, "required: config"),
    ],
)
def test_small_commands(arguments: list[str], status: int, words: str) -> None:
    done = run(*arguments)
    assert done.returncode == status and words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_env_names_versions_and_what_is_missing() -> None:
    import torch

    done = run("env")
    assert done.returncode == 0 and torch.__version__ in done.stdout
    assert (
        "without it there is no transformer_impl: transformer_engine" in done.stdout
        or "transformer-engine" not in done.stdout.split("missing")[-1]
    )


@pytest.mark.parametrize(
    ("command", "missing"), [("eval", "rewards is missing"), ("generate", "eval_dataset is missing"), ("export", "export_dir is missing")]
)
def test_other_commands_ask_for_their_keys_and_check_the_rest(tmp_path: Path, command: str, missing: str) -> None:
    (tmp_path / "x.yaml").write_text(f"model_name_or_path: m\noutput_dir: {tmp_path / 'o'}\nlearning_rate: abc\n")
    done = run(command, str(tmp_path / "x.yaml"))
    assert done.returncode == 2 and missing in done.stderr and "learning_rate: 'abc'" in done.stderr
