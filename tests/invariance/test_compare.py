"""The comparison can fail, and says where; the table and the draws hold what they promise."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.helpers.engine import Layout
from tests.invariance.compare import CHOICES, Difference, Numbers, assert_same
from tests.invariance.draws import SEED_VARIABLE, random_layout, sample, seed_of_this_run
from tests.invariance.numbers import make_batch
from tests.invariance.reference import transformers_numbers
from tests.invariance.table import EXPERTS, TABLE, kinds, kinds_of_experts, layout_of, layouts

TENSOR = "sft: gradient of model.layers.3.self_attn.q_proj.weight"
ALLOWED = Difference(absolute=1e-9, relative=1e-9)
WHERE = "layout tp2_rows2 (qwen2, float64)"


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    return transformers_numbers("qwen2", make_batch(), torch.float64)


def changed(numbers: Numbers, name: str, change: float) -> Numbers:
    """One entry of one tensor changed by this part of the tensor's largest entry."""
    tensor = numbers[name].clone()
    tensor.view(-1)[5 if tensor.numel() > 5 else 0] += change * tensor.abs().max()
    return {**numbers, name: tensor}


def test_a_gradient_that_is_off_by_one_part_in_1e8_is_reported(numbers: Numbers) -> None:
    with pytest.raises(AssertionError) as failure:
        assert_same(changed(numbers, TENSOR, 1e-8), numbers, ALLOWED, WHERE)
    first, second = str(failure.value).split("\n")
    assert first.startswith(f"{WHERE}: 1 of {len(numbers)} tensors differ")
    assert re.match(rf"  {re.escape(TENSOR)}: \S+e-\d+ \(1\.0e-08 of its largest entry\), at \[0, 5\] -?\d\S+ instead of -?\d", second)


@pytest.mark.parametrize("name", ["log-prob", "entropy", "sft: loss", "policy: loss", "policy: gradient of lm_head.weight"])
def test_every_kind_of_number_is_compared(numbers: Numbers, name: str) -> None:
    with pytest.raises(AssertionError, match=f"  {name}: "):
        assert_same(changed(numbers, name, 1e-7), numbers, ALLOWED, WHERE)


def test_rounding_is_no_difference_and_its_size_is_returned(numbers: Numbers) -> None:
    assert assert_same(changed(numbers, TENSOR, 1e-12), numbers, ALLOWED, WHERE).relative == pytest.approx(1e-12, rel=1e-2)


def test_what_is_no_number_comes_first(numbers: Numbers) -> None:
    found = changed(changed(numbers, "log-prob", 1.0), TENSOR, math.nan)
    with pytest.raises(AssertionError, match=f"2 of .*\n  {TENSOR}: nan .*, at .*\n  log-prob: "):
        assert_same(found, numbers, ALLOWED, WHERE)


def test_other_choices_of_experts_are_named_before_what_they_change(numbers: Numbers) -> None:
    before = {**numbers, CHOICES: torch.tensor([[3.0, 5.0]])}
    found = changed({**before, CHOICES: torch.tensor([[2.0, 6.0]])}, TENSOR, 1.0)
    with pytest.raises(AssertionError, match="2 of .*\n  tokens chose other experts: a near tie"):
        assert_same(found, before, ALLOWED, WHERE)
    with pytest.raises(AssertionError) as caught:
        assert_same(changed(before, TENSOR, 1.0), before, ALLOWED, WHERE)
    assert "experts" not in str(caught.value).replace(TENSOR, "")


def test_missing_tensors_and_other_types_are_differences(numbers: Numbers) -> None:
    with pytest.raises(AssertionError, match=TENSOR):
        assert_same({name: tensor for name, tensor in numbers.items() if name != TENSOR}, numbers, ALLOWED, WHERE)
    with pytest.raises(AssertionError, match="float32"):
        assert_same({**numbers, TENSOR: numbers[TENSOR].float()}, numbers, ALLOWED, WHERE)


def test_the_table_has_forty_layouts_of_every_kind() -> None:
    table = layouts()
    assert len({layout.name for layout in table}) == len(table) >= 40
    assert {layout.world for layout in table} == {1, 2, 4, 8}
    assert kinds(table[0]) == {"1 processes", "micro-batches of 9 rows"}


def test_layouts_of_experts_have_both_exchanges_and_the_losses_of_routers() -> None:
    table = layouts(EXPERTS)
    assert len({layout.name for layout in table}) == len(table) >= 40
    assert {layout.ep for layout in table} == {1, 2, 4} and {layout.world for layout in table} == {1, 2, 4, 8}
    small = [layout for layout in table if layout.world <= 4]
    everything = set().union(*map(kinds_of_experts, table))
    assert everything == set().union(*map(kinds_of_experts, sample(small, 0, 1, kinds_of_experts)))
    assert all(layout.sp for layout in table if layout.tp > 1)


def test_a_line_that_is_no_layout_is_refused_with_the_head() -> None:
    with pytest.raises(ValueError, match="tp sp pp vpp cp"):
        layout_of("2 yes 1 1 1 - 1 2 - -")
    assert "tp sp pp vpp cp" in TABLE


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_every_kind_and_is_the_same_again(seed: int) -> None:
    table = layouts()
    chosen = sample(table, 18, seed)
    assert set().union(*map(kinds, chosen)) == set().union(*map(kinds, table))
    assert 18 <= len(chosen) < len(table) and chosen == sample(table, 18, seed)


def test_random_layouts_come_again_with_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "17")
    assert seed_of_this_run() == 17
    drawn: list[Layout] = [random_layout(17, number) for number in range(200)]
    assert drawn == [random_layout(17, number) for number in range(200)] != [random_layout(18, number) for number in range(200)]
    assert {layout.world for layout in drawn} == {2, 4, 8}
    assert all(layout.tp <= 4 and layout.pp * layout.vpp <= 8 for layout in drawn)
    everywhere = {kind for kind in set().union(*map(kinds, layouts())) if "process" not in kind}
    assert everywhere <= set().union(*map(kinds, drawn))
