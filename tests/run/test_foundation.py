"""What an adapter stands on: a resumed run has the same, its user is told, and the run needs its start no more than once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmca.config import ConfigError, Environment, make_config
from rlmca.run.foundation import foundation
from rlmca.transfer.merged import MergedFolder
from tests.helpers.lora import ALL, draw_adapter, save_adapter
from tests.helpers.models import make_model
from tests.helpers.ranks import rank_pool
from tests.helpers.runs import make_project, run, sft_options
from tests.helpers.stages import run_stage

FURTHER = {"finetuning_type": "lora", "learning_rate": 2e-2, "save_strategy": "steps", "save_steps": 3}
NEW = {**FURTHER, "create_new_adapter": True, "lora_rank": 2}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


@pytest.fixture
def adapter(project: Path, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", draw_adapter(make_model("qwen3_tied")), ALL)


def change(file: Path, name: str) -> None:
    tensors = load_file(file)
    tensors[name] = tensors[name] + 0.01
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.serial
def test_a_run_resumes_on_the_weights_that_it_started_on(project: Path, adapter: Path, tmp_path: Path) -> None:
    values = sft_options(project, tmp_path / "run", **NEW, adapter_name_or_path=str(adapter))
    rank_pool(1).run(run_stage, values, True)
    again = {**values, "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-3")}
    rank_pool(1).run(run_stage, {**again, "output_dir": str(tmp_path / "same")}, True)
    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "same"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    one = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    change(adapter / "adapter_model.safetensors", one)
    out = run("train", {**again, "output_dir": str(tmp_path / "adapter_changed")}, status=2).replace("\n", " ")
    assert "the merged adapters of adapter_name_or_path changed since it was written" in out and "Traceback" not in out
    change(project / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    out = run("train", {**again, "output_dir": str(tmp_path / "both_changed")}, status=2).replace("\n", " ")
    assert "the model of model_name_or_path and the merged adapters of adapter_name_or_path changed since" in out


def test_digests_are_of_what_computes(project: Path, adapter: Path, tmp_path: Path) -> None:
    cfg = make_config(sft_options(project, tmp_path / "run", **NEW, adapter_name_or_path=str(adapter)), env=Environment())
    first = foundation(cfg)
    shutil.move(adapter, tmp_path / "elsewhere")
    moved = make_config(sft_options(project, tmp_path / "run", **NEW, adapter_name_or_path=str(tmp_path / "elsewhere")), env=Environment())
    assert foundation(moved).stands_on == first.stands_on and not first.changed({}) and not first.changed(first.stands_on)
    config = tmp_path / "elsewhere" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 7', '"lora_alpha": 8'))
    assert len(foundation(moved).changed(first.stands_on)) == 1


@pytest.mark.serial
def test_the_user_of_an_adapter_over_others_is_told(project: Path, adapter: Path, tmp_path: Path) -> None:
    out = run("train", sft_options(project, tmp_path / "run", **NEW, adapter_name_or_path=str(adapter)))
    told = f"use it with adapter_name_or_path: [{adapter}, this folder]"
    assert told.replace(" ", "") in "".join(out.split())
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-3"):
        assert told in (folder / "README.md").read_text()
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    for adapters, right in (([adapter, tmp_path / "run"], True), ([tmp_path / "run"], False)):
        with MergedFolder(project / "model", adapters) as files:
            assert all(torch.allclose(files.read(name), exported[name], rtol=0, atol=1e-6) for name in files.shapes) == right


def test_no_note_where_there_is_nothing_to_tell(project: Path, adapter: Path, tmp_path: Path) -> None:
    plain = sft_options(project, tmp_path / "run", **FURTHER, adapter_name_or_path=str(adapter))
    assert foundation(make_config(plain, env=Environment())).notes == ()
    experts = make_project(tmp_path / "experts", family="qwen2_moe")
    values = sft_options(experts, tmp_path / "run", **FURTHER)
    (note,) = foundation(make_config(values, env=Environment())).notes
    assert "PEFT 0.21 leaves out, without an error, the adapters of the experts" in note


def losing_its_start(values: dict[str, Any], adapter: Path) -> dict[str, float]:
    """A run whose starting adapter is gone once its ranks are built."""
    from rlmca.run.session import Session

    enter = Session.__enter__

    def lose(self: Session) -> Session:
        shutil.rmtree(adapter)
        return enter(self)

    Session.__enter__ = lose  # type: ignore[method-assign]
    try:
        return run_stage(values, True)
    finally:
        Session.__enter__ = enter  # type: ignore[method-assign]


@pytest.mark.serial
@pytest.mark.parametrize("options", [FURTHER, NEW], ids=["further", "new"])
def test_a_run_reads_its_starting_adapter_once(options: dict[str, Any], project: Path, adapter: Path, tmp_path: Path) -> None:
    values = sft_options(project, tmp_path / "run", **options, adapter_name_or_path=str(adapter))
    rank_pool(1).run(losing_its_start, values, adapter)
    assert not adapter.exists()
    for folder in ("checkpoint-3", "checkpoint-6", "."):
        assert (tmp_path / "run" / folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("place", [".", "checkpoint-3"])
def test_an_adapter_that_the_run_itself_would_remove_is_refused(place: str, project: Path, tmp_path: Path) -> None:
    values = sft_options(project, tmp_path / "run", **FURTHER, adapter_name_or_path=str(tmp_path / "run" / place))
    with pytest.raises(ConfigError, match="lies in output_dir, where this run writes and removes adapters"):
        make_config(values, env=Environment())
