"""Stage sft through the command line: layouts, evaluation, resume, outputs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.runs import kill_when, log_lines, make_project, run, sft_options, start

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps in one process; the others are compared with it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    held = {"eval_dataset": "held", "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
    run("train", sft_options(project, output, plot_loss=True, report_to="tensorboard", **held))
    return output


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in log_lines(output)]


def test_a_run_leaves_what_it_promises(whole: Path) -> None:
    lines = log_lines(whole)
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time", "throughput", "total_tokens"} <= set(
        lines[-1]
    )
    assert lines[-1]["percentage"] == 100 and lines[-1]["epoch"] == 0.6 and lines[0]["lr"] == 0.0 and lines[2]["lr"] == 0.01
    for name in ("train_results.json", "eval_results.json", "all_results.json", "trainer_state.json"):
        assert json.loads((whole / name).read_text())
    assert (whole / "training_loss.png").stat().st_size > 1000
    assert list(whole.rglob("events.out.tfevents*"))
    assert "hf_hub_token" not in (whole / "config.yaml").read_text()


def test_the_exported_folder_is_what_was_evaluated(project: Path, whole: Path) -> None:
    """Evaluation counts every held-out row, the shorter last batch too: it equals Transformers on the exported folder."""
    model = AutoModelForCausalLM.from_pretrained(whole / "hf")
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    total, count = 0.0, 0
    for row in json.loads((project / "data" / "held.json").read_text()):
        messages = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        end = max(i for i, token in enumerate(ids) if token == tokenizer.eos_token_id)
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        targets = range(len(prompt), end + 1)
        total -= sum(logp[t - 1, ids[t]].item() for t in targets)
        count += len(targets)
    found = log_lines(whole, "eval_loss")
    assert [line["current_steps"] for line in found] == [3, 6]
    assert abs(found[-1]["eval_loss"] - total / count) < 1e-5
    assert abs(found[-1]["eval_perplexity"] - math.exp(total / count)) < 1e-3


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|L"}),
        (2, {"context_parallel_size": 2}),
        (2, {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 3, "max_tokens_per_microbatch": 72}),
        (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1}),
    ],
    ids=["tp2_sp", "pp2", "pp2_head_alone", "cp2", "dp2", "one_microbatch"],
)
def test_layouts_and_splits_give_the_same_run(processes: int, changes: dict, project: Path, whole: Path, tmp_path: Path) -> None:  # type: ignore[type-arg]
    output = tmp_path / "run"
    held = {"eval_dataset": "held", "eval_strategy": "steps", "eval_steps": 3}
    run("train", sft_options(project, output, **{**held, **changes}), NPROC_PER_NODE=str(processes))
    for mine, expected in zip(losses(output), losses(whole), strict=True):
        assert abs(mine - expected) < 1e-5
    for mine, expected in zip(log_lines(output, "eval_loss"), log_lines(whole, "eval_loss"), strict=True):
        assert abs(mine["eval_loss"] - expected["eval_loss"]) < 1e-5
        assert mine["total_tokens"] == expected["total_tokens"]


@pytest.mark.whole
def test_packed_rows_give_the_same_run_on_every_layout_and_engine(project: Path, tmp_path: Path) -> None:
    """Packs are made from the data alone; how many rows a step has is what a plain count of the packs says."""
    packed = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    outputs = {}
    for name, engine, processes, more in (
        ("one", "1", 1, {}),
        ("tp2_sp", "1", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "max_tokens_per_microbatch": 80}),
        ("huggingface_dp2", "0", 2, {"gradient_accumulation_steps": 1}),
    ):
        outputs[name] = tmp_path / name
        text = run("train", sft_options(project, outputs[name], **{**packed, **more}), NPROC_PER_NODE=str(processes), USE_MCA=engine)
        assert "packs of 64 tokens" in text
    expected = log_lines(outputs["one"])
    assert expected[-1]["total_tokens"] > 4 * 2 * 40, "packs hold several rows"
    for name in outputs:
        for mine, other in zip(log_lines(outputs[name]), expected, strict=True):
            assert abs(mine["loss"] - other["loss"]) < 1e-5 and mine["total_tokens"] == other["total_tokens"], name


@pytest.mark.whole
def test_experts_on_two_ranks_give_the_run_of_one_process(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", family="qwen3_moe")
    expected = tmp_path / "one"
    run("train", sft_options(project, expected, max_steps=3))
    mine = tmp_path / "ep2"
    experts = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "gradient_accumulation_steps": 1}
    run("train", sft_options(project, mine, max_steps=3, **experts), NPROC_PER_NODE="2")
    for a, b in zip(losses(mine), losses(expected), strict=True):
        assert abs(a - b) < 1e-5
    model, other = (AutoModelForCausalLM.from_pretrained(folder / "hf") for folder in (mine, expected))
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.cases(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_resume_after_a_kill_is_the_uninterrupted_run(processes: int, project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    own = {} if processes == 1 else {"tensor_model_parallel_size": 2}
    options = sft_options(project, output, save_strategy="steps", save_steps=2, save_total_limit=1, **own)
    process = start("train", options, NPROC_PER_NODE=str(processes))
    status = kill_when(process, lambda: (output / "trainer_log.jsonl").exists() and len(losses(output)) >= 3)
    assert status != 0
    text = run("train", options, NPROC_PER_NODE=str(processes))
    assert "checkpoint-" in text
    lines = log_lines(output)
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4, 5, 6], "every step once"
    expected = losses(whole)
    for mine, other in zip(losses(output), expected, strict=True):
        assert abs(mine - other) < (1e-12 if processes == 1 else 1e-5)
    assert [p.name for p in output.glob("checkpoint-*")] == ["checkpoint-6"]
    assert lines[-1]["total_tokens"] == log_lines(whole)[-1]["total_tokens"]


def test_a_signal_saves_and_stops_and_the_run_goes_on(project: Path, whole: Path, tmp_path: Path) -> None:
    import signal

    output = tmp_path / "run"
    options = sft_options(project, output, save_strategy="steps", save_steps=100)
    process = start("train", options)
    status = kill_when(process, lambda: (output / "trainer_log.jsonl").exists() and losses(output), number=signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert list(output.glob("checkpoint-*"))
    run("train", options)
    assert all(abs(a - b) < 1e-12 for a, b in zip(losses(output), losses(whole), strict=True))


def test_accuracy_of_replies_stops_the_run_and_the_best_model_is_kept(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    scored = {"rewards": "exact", "max_new_tokens": 4, "eval_dataset": "add", "eval_strategy": "steps", "eval_steps": 2}
    options = sft_options(project, output, stop_metric="eval_loss", stop_value=2.5, max_steps=60, learning_rate=3e-2, **scored)
    text = run("train", options)
    lines = log_lines(output, "eval_loss")
    assert lines[-1]["eval_loss"] <= 2.5 and all(line["eval_loss"] > 2.5 for line in lines[:-1])
    assert "reached stop_value 2.5: the run ends at step" in " ".join(text.split())
    assert json.loads((output / "train_results.json").read_text())["train_loss"] == pytest.approx(sum(losses(output)) / len(losses(output)))
    assert len(losses(output)) < 60 and {"eval_accuracy", "eval_reward/exact"} <= set(lines[-1])


def test_resuming_in_another_layout_is_refused_by_name(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = sft_options(project, output, max_steps=4, save_strategy="steps", save_steps=2)
    run("train", options)
    text = run("train", {**options, "max_steps": 6, "tensor_model_parallel_size": 2}, status=2, NPROC_PER_NODE="2")
    assert "resuming in another layout is not in this version" in " ".join(text.split())


def test_the_best_model_is_one_that_was_saved(project: Path, tmp_path: Path) -> None:
    """Evaluations between two checkpoints name no best: there would be nothing to load."""
    output = tmp_path / "run"
    options = sft_options(
        project, output, max_steps=4, learning_rate=0.3, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0,
        eval_dataset="held", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    run("train", options)
    assert json.loads((output / "trainer_state.json").read_text())["best_global_step"] in (2, 4)


def test_load_best_model_at_end_exports_the_best_evaluation(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = sft_options(
        project, output, max_steps=4, learning_rate=0.3, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0,
        eval_dataset="held", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    run("train", options)
    evals = [line["eval_loss"] for line in log_lines(output, "eval_loss")]
    best = min(range(len(evals)), key=evals.__getitem__)
    assert best != len(evals) - 1, "a rate this high must end worse than its best"
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["best_global_step"] == best + 1
    other = tmp_path / "again"
    run("train", {**options, "output_dir": str(other), "max_steps": best + 1, "load_best_model_at_end": False, "eval_strategy": "no"}
        )  # fmt: skip
    from safetensors.torch import load_file

    mine, theirs = load_file(output / "hf" / "model.safetensors"), load_file(other / "hf" / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
