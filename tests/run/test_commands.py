"""eval, generate and export on a tiny model and a tiny data set, against Transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from rlmca.config import ConfigError, Environment, RunConfig, make_config
from rlmca.observe.jsonl import read_lines
from rlmca.run.commands import run_eval, run_export, run_generate
from tests.helpers.models import save_model
from tests.helpers.tokenizers import tiny_tokenizer

QUESTIONS = ("What is 3 + 4 ?", "7", "What is 3 + 4 = ? The answer is", "a")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer fits, and a data set whose answers are right for two of its four greedy replies."""
    path = tmp_path_factory.mktemp("commands")
    tokenizer = tiny_tokenizer()
    model = save_model("qwen3_tied", path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path / "model")
    rows = []
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for i, question in enumerate(QUESTIONS):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        out = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        out = out[: out.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in out else out
        reply = tokenizer.decode(out)
        rows.append({"instruction": question, "output": reply if i % 2 else "certainly not this", "greedy": reply})
    (path / "rows.json").write_text(json.dumps(rows))
    (path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    (path / "rewards.py").write_text("def exact(samples):\n    return [float(s.reply == s.row['answer']) for s in samples]\n")
    return path


def config(folder: Path, command: str, **changes: object) -> RunConfig:
    values = {
        "model_name_or_path": str(folder / "model"),
        "dataset": "rows",
        "dataset_dir": str(folder),
        "max_new_tokens": 5,
        "use_cpu": True,
    }
    return make_config({**values, **changes}, env=Environment(), command=command)


def test_eval_is_greedy_and_counts_right_replies(folder: Path, tmp_path: Path) -> None:
    console = quiet()
    cfg = config(folder, "eval", rewards=[f"{folder}/rewards.py:exact"], output_dir=str(tmp_path))
    metrics = run_eval(cfg, console=console)
    assert metrics["accuracy"] == metrics["reward"] == 0.5 and metrics["replies"] == 4
    assert "accuracy" in console.file.getvalue() and "0.5000" in console.file.getvalue()
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["eval_accuracy"] == 0.5 and results == json.loads((tmp_path / "eval_results.json").read_text())
    assert [row["predict"] for row in read_lines(tmp_path / "eval_predictions.jsonl")] == [
        row["greedy"] for row in json.loads((folder / "rows.json").read_text())
    ]


def test_eval_samples_when_asked(folder: Path, tmp_path: Path) -> None:
    cfg = config(folder, "eval", rewards=[f"{folder}/rewards.py:exact"], do_sample=True, num_generations=4, rollout_batch=3)
    metrics = run_eval(cfg, console=quiet())
    assert metrics["replies"] == 16 and "pass@4" in metrics


def test_generate_writes_the_replies_whatever_the_batch(folder: Path, tmp_path: Path) -> None:
    cfg = config(folder, "generate", output_dir=str(tmp_path / "a"), do_sample=False)
    path = run_generate(cfg, console=quiet())
    want = json.loads((folder / "rows.json").read_text())
    rows = list(read_lines(path))
    assert path.name == "generated_predictions.jsonl"
    assert [(row["predict"], row["label"]) for row in rows] == [(row["greedy"], row["output"]) for row in want]
    assert all(question in row["prompt"] and len(row["ids"]) == len(row["logp"]) for question, row in zip(QUESTIONS, rows, strict=True))
    sampled = [
        [
            row["ids"]
            for row in read_lines(
                run_generate(
                    config(folder, "generate", output_dir=str(tmp_path / "b"), num_generations=3, rollout_batch=batch), console=quiet()
                )
            )
        ]
        for batch in (1, 5)
    ]
    assert sampled[0] == sampled[1] and len(sampled[0]) == 12


def test_export_keeps_every_bit_and_cuts_shards(folder: Path, tmp_path: Path) -> None:
    out = run_export(config(folder, "export", export_dir=str(tmp_path / "out")), console=quiet())
    one, two = (AutoModelForCausalLM.from_pretrained(str(path), dtype="auto").state_dict() for path in (folder / "model", out))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert (out / "tokenizer.json").exists()
    half = run_export(config(folder, "export", export_dir=str(tmp_path / "half"), bf16=True), console=quiet())
    assert AutoModelForCausalLM.from_pretrained(str(half), dtype="auto").dtype == torch.bfloat16
    half = run_export(config(folder, "export", export_dir=str(tmp_path / "fp16"), fp16=True), console=quiet())
    assert AutoModelForCausalLM.from_pretrained(str(half), dtype="auto").dtype == torch.float16


@pytest.mark.parametrize("command", ("eval", "generate", "export"))
def test_what_a_command_needs_is_named_before_it_starts(command: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config({}, env=Environment(), command=command)
    needed = {"eval": ("eval_dataset", "rewards"), "generate": ("eval_dataset", "output_dir"), "export": ("export_dir",)}[command]
    assert all(any(key in line for line in error.value.errors) for key in ("model_name_or_path", *needed))


def test_eval_tells_sets_apart(folder: Path, tmp_path: Path) -> None:
    """Each set's own figures; the first set is answered rightly by half, the second, its right rows alone, wholly."""
    rows = json.loads((folder / "rows.json").read_text())
    (tmp_path / "all.json").write_text(json.dumps(rows))
    (tmp_path / "good.json").write_text(json.dumps([{**row, "dataset": "a column of the user's"} for row in rows[1::2]]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({name: {"file_name": f"{name}.json"} for name in ("all", "good")}))
    cfg = config(
        folder, "eval", rewards=[f"{folder}/rewards.py:exact"], dataset=None, eval_dataset="all,good", eval_on_each_dataset=True,
        dataset_dir=str(tmp_path), output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    metrics = run_eval(cfg, console=quiet())
    assert (metrics["accuracy"], metrics["all_accuracy"], metrics["good_accuracy"]) == (pytest.approx(4 / 6), 0.5, 1.0)
    assert (metrics["all_prompts"], metrics["good_prompts"], metrics["good_reward/exact"]) == (4, 2, 1.0)
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_good_accuracy"] == 1.0
