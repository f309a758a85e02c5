"""The demo's data: no question in two splits, the same bytes every time, answers that are right."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmca.bench import demo_assets
from rlmca.bench.demo_assets import AssetOptions

SMALL = AssetOptions(sft_rows=600, rl_rows=500, validation_rows=60, test_rows=120)


def operands(instruction: str) -> tuple[int, int]:
    a, b = re.fullmatch(r"State the final answer to the following arithmetic problem: (\d+) \+ (\d+) =", instruction).groups()
    return int(a), int(b)


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    return json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "assets"
    assert demo_assets.prepare(folder, SMALL)
    return folder


@pytest.mark.parametrize("options", [SMALL, AssetOptions(), AssetOptions(seed=3)], ids=["small", "as shipped", "other seed"])
def test_no_question_is_in_two_splits(options: AssetOptions) -> None:
    splits = demo_assets.make_splits(options)
    pairs = {name: {frozenset(operands(q.text)) for q in questions} for name, questions in splits.items()}
    names = sorted(pairs)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not pairs[one] & pairs[other], f"{one} and {other} share a question or its mirror image"
    for name, questions in splits.items():
        assert len(questions) == getattr(options, f"{name}_rows")
    for name in ("validation", "test"):
        assert len({q.text for q in splits[name]}) == len(splits[name]), f"{name} asks a question twice"
    assert min(min(operands(q.text)) for q in splits["rl"]) >= 10, "RL questions have two digits in both terms"


def test_answers_are_right_and_rl_rows_show_no_reply(made: Path) -> None:
    for split in demo_assets.SPLITS:
        for row in rows(made, split):
            total = str(sum(operands(row["instruction"])))
            assert row["output"] == ("" if split == "rl" else total)
            assert row.get("answer") == (None if split == "sft" else total)


def test_dataset_info_names_every_file(made: Path) -> None:
    info = json.loads((made / "dataset_info.json").read_text(encoding="utf-8"))
    assert sorted(info) == ["demo_rl", "demo_sft", "demo_test", "demo_validation"]
    assert all((made / entry["file_name"]).is_file() for entry in info.values())


def test_same_bytes_in_another_process(made: Path, tmp_path: Path) -> None:
    code = f"import sys; from pathlib import Path; from rlmca.bench import demo_assets as d;d.prepare(Path(sys.argv[1]), d.{SMALL!r})"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, env=env, capture_output=True)
    assert digests(tmp_path / "again") == digests(made)


def test_up_to_date_assets_are_left_alone_and_changed_options_are_not(made: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    assert not demo_assets.prepare(made, SMALL)
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == before
    assert demo_assets._key(SMALL) != demo_assets._key(replace(SMALL, seed=1))


def test_half_made_assets_are_made_again(tmp_path: Path) -> None:
    out = tmp_path / "assets"
    (tmp_path / "assets.partial").mkdir()
    out.mkdir()
    (out / "sft.json").write_text("[", encoding="utf-8")
    assert demo_assets.prepare(out, SMALL)
    assert len(rows(out, "sft")) == SMALL.sft_rows
    assert not (tmp_path / "assets.partial").exists()


def test_too_few_questions_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="too few"):
        demo_assets.make_splits(AssetOptions(test_rows=9000))


def test_model_and_tokenizer_are_what_the_recipe_says(made: Path) -> None:
    folder = made / demo_assets.MODEL_FOLDER
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 1.16e6 < sum(p.numel() for p in model.parameters()) < 1.18e6
    assert model.config.vocab_size == 448 >= len(tokenizer)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12 + 34 ="}], add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n12 + 34 =<|im_end|>\n<|im_start|>assistant\n"
    digits = [tokenizer.decode([i]) for i in tokenizer(" 12 + 34 =")["input_ids"]]
    assert [d for d in digits if d.strip().isdigit()] == ["1", "2", "3", "4"]
