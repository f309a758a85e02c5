"""What the repository promises in words is there: commands, files, keys, the order of the rooms."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rlmca.config import Environment, load_config
from rlmca.config.schema import keys

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_make_commands_of_the_documents_exist(document: Path) -> None:
    named = set(
        re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(re.findall(r"`[^`\n]+`|^    .*$", document.read_text(encoding="utf-8"), re.M)))
    )
    assert named <= make_targets()


def test_readme_names_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_keys_in_the_documents_are_keys() -> None:
    """Every fenced YAML block of the documents is made of keys that the configuration knows."""
    known = set(keys()) | {"stage"}
    blocks = 0
    for document in DOCUMENTS:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            blocks += 1
            unknown = set(yaml.safe_load(block)) - known
            assert not unknown, f"{document.name}: {sorted(unknown)}"
    assert blocks, "the documents show no YAML"


def test_every_key_is_in_the_configuration_document() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [name for name in keys() if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid_configurations(path: Path) -> None:
    cfg = load_config(path, env=Environment.from_environ({"USE_MCA": "1"}))
    assert cfg.stage in ("pt", "sft", "dpo", "grpo") and cfg.engine == "megatron"
    assert not cfg.notes, "an example should not set a key without effect"


def test_examples_that_need_no_demo_assets_pass_a_dry_run() -> None:
    for name, more in (("qwen3_full_sft", ["--gpus", "8"]), ("qwen3_moe_full", ["--gpus", "16"]), ("qwen3_grpo", [])):
        command = [sys.executable, "-m", "rlmca.cli.main", "train", f"examples/megatron/{name}.yaml", "--dry_run", *more]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "USE_MCA": "1"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_is_described() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert EXAMPLES and all(path.name in text for path in EXAMPLES)


def test_demo_has_the_recipe_of_the_plain_loop() -> None:
    """`bench demo` compares the same work only while these agree."""
    from rlmca.bench.plain_loop import PlainOptions

    demo = yaml.safe_load((ROOT / "examples/megatron/demo_grpo.yaml").read_text(encoding="utf-8"))
    plain = PlainOptions()
    same = ("rollout_batch_size", "num_generations", "max_new_tokens", "temperature", "learning_rate", "entropy_coef", "max_grad_norm")
    assert {name: demo[name] for name in (*same, "adam_beta1", "adam_beta2")} == {
        name: getattr(plain, name) for name in (*same, "adam_beta1", "adam_beta2")
    }
    assert demo["rollout_batch_size"] // demo["mini_batch_size"] == plain.num_mini_batches
    assert demo["clip_ratio_low"] == demo["clip_ratio_high"] == plain.clip_ratio
    assert (demo["advantage_std"], demo["loss_agg"], demo["kl_coef"], demo["weight_decay"]) == ("sample", "token_mean", 0.0, 0.0)
    assert demo["drop_zero_std_groups"] is True


def test_every_package_is_a_room_of_the_layer_contract() -> None:
    layers = next(c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    named = {room for line in layers["layers"] for room in re.split(r"\s*[|:]\s*", line)}
    there = {p.name for p in (ROOT / "rlmca").iterdir() if (p / "__init__.py").is_file()} | {"types"}
    assert named == there


def test_every_pinned_requirement_is_exact_and_covers_the_package() -> None:
    pins: dict[str, str] = {}
    for name in ("sglang-cpu.txt", "sglang-cpu-nodeps.txt", "cpu.txt", "dev.txt"):
        for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                pin, _, marker = line.partition("; ")
                assert marker in ("", 'platform_system == "Linux"'), line
                package, version = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^\]]+\])?==([0-9][\w.+]*)", pin).groups()
                pins[re.sub(r"[-_.]+", "-", package).lower()] = version
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"], *extras["megatron"], *extras["dev"]]
    for requirement in wanted:
        package = re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9_.-]+", requirement)[0]).lower()
        assert package in pins, f"{package} is a dependency and has no pin"


def test_make_refuses_an_interpreter_it_cannot_use(tmp_path: Path) -> None:
    """And says which to name, before it touches the environment."""
    fake = tmp_path / "python2.7"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 2.7.18" && exit 0\nexit 1\n', encoding="utf-8")
    fake.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "setup.py", "requirements"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    done = subprocess.run(["make", "venv", f"PYTHON={fake}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 2.7.18" in done.stderr and "3.11 or 3.12" in done.stderr
    assert not (tmp_path / ".venv").exists() and not (tmp_path / ".venv-sglang").exists()


def test_make_takes_only_a_finished_install_for_done(tmp_path: Path) -> None:
    """A stand-in interpreter whose installs fail, then work: the first leaves no stamp, the second is not repeated."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "requirements"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  --version) echo "Python 3.11.7";;\n'
        '  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;\n'
        f'  *"pip install"*) echo "$*" >> {tmp_path}/installs; [ -e {tmp_path}/works ];;\n'
        "esac\n",
        encoding="utf-8",
    )
    fake.chmod(0o755)

    def make() -> int:
        return subprocess.run(["make", "venv", f"PYTHON={fake}"], cwd=tmp_path, capture_output=True, check=False).returncode

    def installs() -> int:
        return len((tmp_path / "installs").read_text(encoding="utf-8").splitlines())

    assert make() != 0 and installs() == 1
    (tmp_path / "works").touch()
    assert make() == 0 and installs() == 5
    assert make() == 0 and installs() == 5, "nothing changed, nothing is installed"
    with (tmp_path / "requirements" / "dev.txt").open("a", encoding="utf-8") as pins:
        pins.write("# another content\n")
    assert make() == 0 and installs() == 7, "the pins changed, the environment is made anew"
    with (tmp_path / "requirements" / "sglang-cpu-nodeps.txt").open("a", encoding="utf-8") as pins:
        pins.write("# another content\n")
    assert make() == 0 and installs() == 9, "the other pins changed, the other environment is made anew"


def test_ci_runs_the_readmes_commands() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert all(command in text for command in ("make test", "make lint", "make demo"))


def test_hooks_and_licence() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {"ruff", "mypy", "lint-imports"}
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_pins_are_the_ones_that_ran_here() -> None:
    """The environment of this test run is the one that requirements/ describes, as far as it is installed."""
    from importlib.metadata import version

    for line in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(("torch==", "megatron-core==", "transformers==")):
            package, _, pinned = line.partition("==")
            assert version(package).split("+")[0] == pinned


def test_json_of_a_bench_and_its_errors(tmp_path: Path) -> None:
    from rlmca.bench.base import Bench, parse_extra
    from rlmca.bench.compare import CompareOptions
    from rlmca.bench.registry import BENCHES, run_bench
    from rlmca.config import ConfigError

    with pytest.raises(ConfigError, match="there is: convert, demo"):
        run_bench("dmo")
    with pytest.raises(ConfigError) as caught:
        run_bench("demo", None, ["step=3", "rounds=two", "threads"])
    assert [part in error for part, error in zip(("did you mean steps", "rounds='two'", "threads"), caught.value.errors, strict=True)]
    assert len(caught.value.errors) == 3
    with pytest.raises(ConfigError, match="warmup"):
        run_bench("demo", None, ["steps=2", "warmup=2"])
    assert parse_extra(CompareOptions(), ["steps=30", "model=x/y"], where="bench demo") == CompareOptions(steps=30, model="x/y")
    BENCHES["echo"] = Bench("echo", CompareOptions(), lambda options: {"steps": options.steps})
    try:
        assert run_bench("echo", tmp_path / "deep" / "out.json", ["steps=9"]) == 0
    finally:
        del BENCHES["echo"]
    assert json.loads((tmp_path / "deep" / "out.json").read_text(encoding="utf-8")) == {"steps": 9}
