"""Filters of the user's and prompts with thinking on and off."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmca.config import Environment, RunConfig, make_config
from rlmca.data import DataError, Prompts, load_prompts
from rlmca.rl.choice import choose_thinking, other_renderings, row_filter, thinking_templates
from tests.helpers.datafiles import write_set
from tests.helpers.tokenizers import CHATML, THINKING, tiny_tokenizer

ROWS = [{"instruction": f"{i} + 1", "output": str(i + 1)} for i in range(30)]
FILTERS = """
def even(row): return int(row["answer"]) % 2 == 0
def none(row): return False
def forgets(row): row["answer"] == "2"
def breaks(row): return row["level"] > 2
"""


def config(**changes: object) -> RunConfig:
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", **changes}
    return make_config(values, env=Environment(use_mca=True))


def thinking_prompts(tmp_path: Path, max_prompt_len: int = 100) -> Prompts:
    on, off = thinking_templates(config(thinking_ratio=0.5), tiny_tokenizer(THINKING))
    return load_prompts(write_set(tmp_path, ROWS), on, max_prompt_len, other=off)


def test_a_filter_drops_rows_and_they_are_counted(tmp_path: Path) -> None:
    (tmp_path / "filters.py").write_text(FILTERS)
    on, _ = thinking_templates(config(), tiny_tokenizer(THINKING))
    options = write_set(tmp_path, ROWS)

    def load(name: str) -> Prompts:
        return load_prompts(options, on, 100, keep=row_filter(f"{tmp_path}/filters.py:{name}"))

    prompts = load("even")
    assert [int(p.row["answer"]) for p in prompts] == list(range(2, 31, 2))
    assert prompts.dropped.counts() == {"prompt_filter even says no": 15}
    assert prompts.dropped.indices("prompt_filter even says no")[:3] == [0, 2, 4]
    with pytest.raises(DataError, match="no usable row.*30 × prompt_filter none says no"):
        load("none")
    with pytest.raises(DataError, match=r"forgets' returned None for the row .*'1'.*; it must return True"):
        load("forgets")
    with pytest.raises(DataError, match="breaks' raised KeyError"):
        load("breaks")
    with pytest.raises(DataError, match=r"prompt_filter .*has no function 'evn'; it has even, none"):
        load("evn")


def test_both_renderings_are_the_templates_own(tmp_path: Path) -> None:
    prompts = thinking_prompts(tmp_path)
    tokenizer = tiny_tokenizer(THINKING)
    for prompt in prompts:
        for ids, thinking in ((prompt.ids, True), (prompt.other_ids, False)):
            text = tokenizer.apply_chat_template(
                prompt.row["messages"], add_generation_prompt=True, tokenize=False, enable_thinking=thinking
            )
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [p.ids for p in other_renderings(prompts)] == [p.other_ids for p in prompts]
    longest_on = max(len(p.ids) for p in prompts)
    with pytest.raises(DataError, match="max_prompt_len"):
        thinking_prompts(tmp_path, longest_on)  # every prompt fits with thinking on, none with the empty thought


def test_the_share_with_thinking_is_drawn_for_each_step_and_row(tmp_path: Path) -> None:
    prompts, rows = thinking_prompts(tmp_path), list(range(30))

    def draw(ratio: float | None, step: int, seed: int = 1) -> list[bool]:
        chosen = choose_thinking(prompts, rows, ratio, seed=seed, step=step)
        assert all(c.ids == (p.ids if c.row["enable_thinking"] else p.other_ids) for c, p in zip(chosen, prompts, strict=True))
        return [c.row["enable_thinking"] for c in chosen]

    assert draw(0.9, 3) == draw(0.9, 3) and len({tuple(draw(0.9, 3)), tuple(draw(0.9, 4)), tuple(draw(0.9, 3, seed=2))}) == 3
    assert draw(1.0, 1) == [True] * 30 and draw(0.0, 1) == [False] * 30
    share = sum(sum(draw(0.9, step)) for step in range(100)) / 3000
    assert abs(share - 0.9) < 0.02
    alone = choose_thinking([prompts[17]], [17], 0.5, seed=1, step=9)[0]
    assert alone.row["enable_thinking"] == draw(0.5, 9)[17], "whatever else is in the batch"
    assert choose_thinking(prompts, rows, None, seed=1, step=1) == list(prompts)


@pytest.mark.parametrize(("source", "name"), [(CHATML, None), (THINKING, "qwen3_nothink")])
def test_a_template_without_the_switch_is_refused(source: str, name: str | None) -> None:
    with pytest.raises(DataError, match="thinking_ratio: .*no switch for thinking"):
        thinking_templates(config(thinking_ratio=0.9, template=name), tiny_tokenizer(source))
