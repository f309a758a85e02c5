"""Stage pt: the loss of texts is Transformers' own of each text alone, packed or not, on both engines, read or streamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmca.data.supervised import load_rows
from rlmca.data.texts import TextEncoder
from rlmca.types import Batch, batch_of_examples
from tests.helpers.datafiles import Options
from tests.helpers.engine import Layout, gradients_on_rank
from tests.helpers.huggingface import hf_gradients_on_rank
from tests.helpers.models import make_model
from tests.helpers.ranks import rank_pool
from tests.helpers.runs import log_lines
from tests.helpers.stages import run_stage
from tests.helpers.tokenizers import tiny_tokenizer

TEXTS = ["What is 3 + 4 = ?", "seven", "4 + 4 = 8 please", "1", "the sum of 12 and 7 is 19"]
CUTOFF = 12


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None  # a base model: stage pt renders nothing
    make_model("qwen3_tied", vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "c4_demo.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "data" / "wiki_demo.txt").write_text("\n".join(TEXTS))
    info = {
        name: {"file_name": name + suffix, "columns": {"prompt": "text"}} for name, suffix in (("c4_demo", ".jsonl"), ("wiki_demo", ".txt"))
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return folder


def pieces(project: Path, cutoff: int) -> list[list[int]]:
    """The rows of the texts by the rule of the documentation, written out plainly: each begins with the last token of the one before."""
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    found = []
    for text in TEXTS:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        while len(ids) > cutoff:
            found.append(ids[:cutoff])
            ids = ids[cutoff - 1 :]
        found.append(ids)
    return found


def oracle(project: Path, cutoff: int) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean loss over all targets, gradients) in float64, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(project / "model", dtype=torch.float64)
    rows = pieces(project, cutoff)
    targets = sum(len(row) - 1 for row in rows)
    total = 0.0
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch_of(project: Path) -> Batch:
    options = Options(dataset=["c4_demo"], dataset_dir=str(project / "data"), cutoff_len=CUTOFF)
    rows = load_rows(options, TextEncoder(options, AutoTokenizer.from_pretrained(project / "model")))
    return batch_of_examples([row.ids for row in rows], [row.mask for row in rows])


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("engine", ["huggingface", "megatron"])
def test_loss_and_gradients_are_those_of_each_text_alone(project: Path, engine: str, packing: bool) -> None:
    expected, gradients = oracle(project, CUTOFF)
    batch = batch_of(project)
    assert len(batch.ids_BT) > len(TEXTS), "some texts have several rows"
    most = 64 if packing else None
    if engine == "huggingface":
        found = hf_gradients_on_rank(project / "model", {"packing": packing, "max_tokens_per_microbatch": most}, batch)
    else:
        found = gradients_on_rank(project / "model", Layout("one", packing=packing, max_tokens=most), batch) or {}
    assert abs(found["loss"] - expected) < 1e-5
    ours = {name.removeprefix("module."): value for name, value in found["gradients"].items()}
    for name, value in gradients.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def options_of(project: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """LLaMA-Factory's example of stage pt with LoRA, key by key, but for sizes, names and what a tiny model needs."""
    return {
        "model_name_or_path": str(project / "model"), "trust_remote_code": True,
        "stage": "pt", "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
        "dataset": "c4_demo", "dataset_dir": str(project / "data"), "cutoff_len": 128, "max_samples": 1000,
        "preprocessing_num_workers": 16, "dataloader_num_workers": 4,
        "output_dir": str(output), "logging_steps": 1, "save_steps": 500, "plot_loss": True, "overwrite_output_dir": True,
        "save_only_model": False, "report_to": "none",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 0, "num_train_epochs": 2.0,
        "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "ddp_timeout": 180000000, "resume_from_checkpoint": None,
        **changes,
    }  # fmt: skip


@pytest.mark.serial
def test_the_stage_has_the_loss_of_the_oracle_and_its_files(project: Path, tmp_path: Path) -> None:
    """A step is all texts in one pack, the rate is 0: one known loss. The second run reads the tokens of the first."""
    expected, _ = oracle(project, 128)
    cache = {"tokenized_path": str(tmp_path / "tokens"), "eval_dataset": "wiki_demo", "do_eval": True}
    for engine in (True, False):
        output = tmp_path / str(engine)
        rank_pool(1).run(run_stage, options_of(project, output, **cache), engine)
        lines = log_lines(output)
        assert len(lines) == 2 and all(abs(line["loss"] - expected) < 1e-5 for line in lines)
        assert lines[0]["total_tokens"] == sum(map(len, pieces(project, 128)))
        assert abs(log_lines(output, "eval_loss")[-1]["eval_loss"] - expected) < 1e-5
        for name in ("adapter_model.safetensors", "hf/model.safetensors", "training_loss.png", "all_results.json"):
            assert (output / name).exists(), name
    assert (tmp_path / "tokens" / "cache.json").exists()


@pytest.mark.serial
def test_a_streamed_run_trains_and_resumes_exactly(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    streamed = {
        "streaming": True, "buffer_size": 3, "max_steps": 4, "val_size": 1, "eval_strategy": "steps", "eval_steps": 2, "cutoff_len": 16,
        "finetuning_type": "full", "learning_rate": 1e-2, "save_steps": 2, "overwrite_output_dir": False, "max_samples": None,
        "dataset": "c4_demo,wiki_demo", "mix_strategy": "interleave_under", "interleave_probs": "0.5, 0.5",
    }  # fmt: skip
    options = {
        k: v for k, v in options_of(project, output, **streamed).items() if k not in ("lora_rank", "lora_target", "num_train_epochs")
    }
    rank_pool(1).run(run_stage, options, False)
    whole = log_lines(output)
    assert [line["current_steps"] for line in whole] == [1, 2, 3, 4] and whole[-1]["total_tokens"] <= 4 * 16
    assert len(log_lines(output, "eval_loss")) == 2
    shutil.rmtree(output / "checkpoint-4")
    (output / "train_results.json").unlink()
    rank_pool(1).run(run_stage, options, False)
    again = log_lines(output)[-2:]
    assert [(line["current_steps"], line["loss"], line["total_tokens"]) for line in again] == [
        (line["current_steps"], line["loss"], line["total_tokens"]) for line in whole[2:]
    ]


def rows_on_rank(values: dict[str, Any]) -> tuple[str, bool, list[str]]:
    """(fingerprint, whether the rows are memory-mapped, what was said) of this rank's rows."""
    import os

    import numpy

    from rlmca.config import Environment, make_config
    from rlmca.data import Hub
    from rlmca.parallel import groups
    from rlmca.run.source import open_source
    from rlmca.supervised import rows

    cfg = make_config(values, env=Environment())
    parallel = groups.start(rank=int(os.environ["RANK"]), world_size=2)
    source = open_source(cfg)
    calls: list[str] = []

    class Counting(TextEncoder):
        def encode(self, entry: Any, records: Any) -> Any:
            calls.append(entry.name)
            return super().encode(entry, records)

    train, _ = rows.shared_rows(cfg, parallel, source, Counting(cfg.data, source.tokenizer), 1, Hub())
    return train.fingerprint, isinstance(train.arrays["ids"], numpy.memmap), calls


@pytest.mark.serial
@pytest.mark.parametrize("shared", [False, True])
def test_one_process_tokenises_and_the_other_reads(project: Path, tmp_path: Path, shared: bool) -> None:
    options = options_of(project, tmp_path, data_shared_file_system=shared)
    (first, second) = rank_pool(2).run(rows_on_rank, options)
    assert first[0] == second[0] and first[1] and second[1]
    assert (first[2], second[2]) == (["c4_demo"], []), "rank 0 makes the rows"
    assert not list(tmp_path.glob("rlmca-rows-*")), "and nothing of them is left"
