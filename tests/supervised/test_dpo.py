"""Stage dpo as a whole run, in this process: the reference's log-probs, evaluation, resume, adapters, both engines."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmca.config import Environment, LateError, make_config
from rlmca.data import ChatTemplate, Pairs, load_tokenizer, load_train_eval_pairs
from rlmca.parallel.groups import Parallel
from rlmca.supervised import dpo
from rlmca.supervised.reference import ReferenceLogProbs
from tests.helpers.models import make_model
from tests.helpers.preferences import dpo_options, make_pairs_project, plain_preference
from tests.helpers.runs import log_lines


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs_project(tmp_path_factory.mktemp("project"))


def train(options: dict[str, Any], *, use_mca: bool = False) -> dict[str, float]:
    return dpo.run(make_config(options, env=Environment(use_mca=use_mca)))


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in log_lines(output)]


HELD = {"eval_dataset": "held", "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with evaluations and checkpoints; the others are compared with it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    train(dpo_options(project, output, max_steps=4, save_strategy="steps", save_steps=2, save_hf_model=True, **HELD))
    return output


def test_a_run_begins_at_ln_2_and_learns_the_preference(whole: Path) -> None:
    lines = log_lines(whole)
    assert abs(lines[0]["loss"] - math.log(2)) < 1e-6 and abs(lines[0]["rewards/margins"]) < 1e-6
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.02 and lines[-1]["rewards/accuracies"] == 1.0
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm"}
    assert names <= set(lines[-1])


def test_evaluation_is_the_formula_on_the_exported_model(project: Path, whole: Path) -> None:
    """Every held-out pair counts once, the shorter last batch too; the reference is the model that the run started from."""
    from transformers import AutoModelForCausalLM

    cfg = make_config(dpo_options(project, whole, **HELD), env=Environment())
    template = ChatTemplate(load_tokenizer(cfg.model))
    held = load_train_eval_pairs(cfg.data, template)[1]["eval"]
    trained = AutoModelForCausalLM.from_pretrained(whole / "hf").double()
    start = AutoModelForCausalLM.from_pretrained(project / "model").double()
    from rlmca.data import batch_of_pairs

    loss, metrics = plain_preference(trained, start, batch_of_pairs(list(held)), "sigmoid", beta=0.1)
    line = log_lines(whole, "eval_loss")[-1]
    assert abs(line["eval_loss"] - loss.item()) < 1e-5
    for name, value in metrics.items():
        assert abs(line[f"eval_{name}"] - value) < 1e-4, name


@pytest.mark.parametrize(
    "changes",
    [
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "packing": True, "max_tokens_per_microbatch": 128},
    ],
    ids=["one_microbatch", "packed"],
)
def test_splits_give_the_same_run(changes: dict[str, Any], project: Path, whole: Path, tmp_path: Path) -> None:
    train(dpo_options(project, tmp_path / "run", max_steps=4, **{**HELD, **changes}))
    for mine, expected in zip(losses(tmp_path / "run"), losses(whole), strict=True):
        assert abs(mine - expected) < 1e-6


def test_megatron_gives_the_run_of_the_other_engine(project: Path, whole: Path, tmp_path: Path) -> None:
    train(dpo_options(project, tmp_path / "run", max_steps=4, **HELD), use_mca=True)
    for key in ("loss", "eval_loss"):
        for mine, expected in zip(log_lines(tmp_path / "run", key), log_lines(whole, key), strict=True):
            assert set(mine) == set(expected)
            assert abs(mine[key] - expected[key]) < 1e-5


def test_resume_is_exact_and_reads_the_reference_again(project: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    train(dpo_options(project, output, max_steps=2, save_strategy="steps", save_steps=2, **HELD))
    (output / "train_results.json").unlink()  # a run that was stopped has none
    monkeypatch.setattr(ReferenceLogProbs, "compute", lambda *_: pytest.fail("the reference was asked again"))
    train(dpo_options(project, output, max_steps=4, save_strategy="steps", save_steps=2, **HELD))
    assert losses(output) == losses(whole)


def test_weights_that_were_written_anew_are_another_reference(project: Path, tmp_path: Path) -> None:
    """Where the change is does not matter: of a model only a part is read to tell it from others."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(project / "model", folder)
    options = dpo_options(project, tmp_path / "run", model_name_or_path=str(folder), max_steps=1)
    train(options)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][-20:] += 1.0
    tensors["model.layers.0.mlp.up_proj.weight"][1:] *= 3.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    train({**options, "overwrite_output_dir": True})
    assert abs(losses(tmp_path / "run")[0] - math.log(2)) < 1e-6, "the reference is the policy as it starts"


def test_a_stop_metric_that_no_evaluation_has_is_said(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(dpo_options(project, tmp_path / "run", **{**HELD, "eval_steps": 1}, stop_value=0.1, stop_metric="eval_margin"))
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("stop_metric eval_margin is none of") == 1 and "eval_rewards/margins" in said


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_losses_without_a_reference_write_none(kind: str, project: Path, tmp_path: Path) -> None:
    train(dpo_options(project, tmp_path / "run", pref_loss=kind, pref_ftx=0.1))
    assert not list((tmp_path / "run").glob("reference-*"))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_a_reference_of_its_own_is_asked_and_let_go_before_the_policy_is_built(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of other weights; the log's first line says what the policy is worth beside it."""
    import weakref

    from rlmca.workers import SpmdRanks

    other = tmp_path / "reference"
    make_model("qwen3_tied", seed=5, **_sizes(project)).save_pretrained(other)
    built: list[Any] = []
    build = SpmdRanks.build

    def watched(self: SpmdRanks, role: str, folder: Path, *, trainable: bool = True) -> Any:
        assert all(alive() is None for _, alive in built), f"{role} is built beside {built}"
        group = build(self, role, folder, trainable=trainable)
        built.append((role, weakref.ref(group.engine)))
        return group

    monkeypatch.setattr(SpmdRanks, "build", watched)
    train(dpo_options(project, tmp_path / "run", ref_model=str(other), max_steps=1))
    assert [role for role, _ in built] == ["reference", "policy"]
    assert abs(losses(tmp_path / "run")[0] - math.log(2)) > 1e-3


def _sizes(project: Path) -> dict[str, Any]:
    config = json.loads((project / "model" / "config.json").read_text())
    return {"vocab_size": config["vocab_size"], "eos_token_id": config["eos_token_id"]}


@pytest.mark.parametrize("use_mca", [False, True], ids=["huggingface", "megatron"])
def test_adapters_compare_with_the_policy_as_it_starts(use_mca: bool, project: Path, tmp_path: Path) -> None:
    lora = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 3e-2}
    train(dpo_options(project, tmp_path / "run", **lora), use_mca=use_mca)
    found = log_lines(tmp_path / "run")
    assert abs(found[0]["loss"] - math.log(2)) < 1e-6 and found[-1]["loss"] < found[0]["loss"]
    again = {**lora, "adapter_name_or_path": str(tmp_path / "run")}
    del again["lora_rank"]
    train(dpo_options(project, tmp_path / "again", max_steps=1, **again), use_mca=use_mca)
    assert abs(losses(tmp_path / "again")[0] - math.log(2)) < 1e-6, "the adapter that is trained further is part of the reference"


class Counted:
    """A model whose log-probs are the tokens' ids over 1000, negative."""

    def __init__(self, fail_after: int = 10**9) -> None:
        self.calls, self.fail_after = 0, fail_after

    def log_probs(self, batch: Any, **_: Any) -> Any:
        from rlmca.algorithms.contract import TokenOutputs

        self.calls += 1
        if self.calls > self.fail_after:
            raise OSError("the disk is full")
        return TokenOutputs(torch.where(batch.mask_BT, -batch.ids_BT / 1000, 0.0), None)


@pytest.fixture
def pairs() -> Pairs:
    from rlmca.data import Encoded, Pair

    def side(*ids: int) -> Encoded:
        return Encoded([1, *ids], [False] + [True] * len(ids))

    return Pairs([Pair(side(5, 6), side(7)), Pair(side(8), side(9, 10, 11)), Pair(side(12, 13, 14, 15), side(16))])


def test_the_file_gives_each_pair_its_own_numbers(pairs: Pairs, tmp_path: Path) -> None:
    reference = ReferenceLogProbs(pairs, tmp_path, "weights")
    assert not reference.there
    reference.compute(Counted(), 2, Parallel.alone())  # type: ignore[arg-type]
    assert reference.there
    reference.open()
    batch = dpo.pair_batch(pairs, [2, 0], reference)
    expected = torch.where(batch.mask_BT, -batch.ids_BT / 1000, 0.0)
    torch.testing.assert_close(batch.ref_logp_BT, expected, rtol=0, atol=0)
    assert isinstance(reference._values, np.memmap)


def test_a_file_of_other_data_or_weights_or_cut_short_is_never_read(pairs: Pairs, tmp_path: Path) -> None:
    first = ReferenceLogProbs(pairs, tmp_path, "weights")
    first.compute(Counted(), 2, Parallel.alone())  # type: ignore[arg-type]
    assert not ReferenceLogProbs(pairs, tmp_path, "other weights").there
    assert not ReferenceLogProbs(pairs.take([0, 1]), tmp_path, "weights").there
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-4])
    assert not ReferenceLogProbs(pairs, tmp_path, "weights").there
    first.path.write_bytes(whole)
    assert ReferenceLogProbs(pairs, tmp_path, "weights").there


def test_a_reference_that_fails_half_way_leaves_nothing(pairs: Pairs, tmp_path: Path) -> None:
    reference = ReferenceLogProbs(pairs, tmp_path, "weights")
    with pytest.raises(OSError, match="the disk is full"):
        reference.compute(Counted(fail_after=1), 1, Parallel.alone())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [] and not reference.there


def test_a_reference_that_is_not_finite_is_named(pairs: Pairs, tmp_path: Path) -> None:
    class Broken(Counted):
        def log_probs(self, batch: Any, **_: Any) -> Any:
            out = super().log_probs(batch)
            out.logp_BT[batch.ids_BT == 9] = float("nan")
            return out

    with pytest.raises(LateError, match="pair 1 "):
        ReferenceLogProbs(pairs, tmp_path, "weights").compute(Broken(), 3, Parallel.alone())  # type: ignore[arg-type]


@pytest.mark.serial
def test_two_processes_give_the_run_of_one(project: Path, whole: Path, tmp_path: Path) -> None:
    """Through the command line: data-parallel ranks, an evaluation with fewer pairs than ranks at its end, one file for both."""
    from tests.helpers.runs import run
    from tests.helpers.stages import PLAIN

    options = dpo_options(project, tmp_path / "run", max_steps=4, gradient_accumulation_steps=1, **{**HELD, "max_samples": 16})
    run("train", {**options, "per_device_eval_batch_size": 1}, NPROC_PER_NODE="2", **PLAIN)
    for key in ("loss", "eval_loss"):
        for mine, expected in zip(log_lines(tmp_path / "run", key), log_lines(whole, key), strict=True):
            assert abs(mine[key] - expected[key]) < 1e-6
