"""Mixtures of several sets: `datasets.interleave_datasets` is what both ways of mixing are held to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from datasets import Dataset as Table
from datasets import interleave_datasets

from rlmca.data import ChatTemplate, DataError, load_train_eval
from rlmca.data.mixing import STOPPING, mix, mix_streams
from tests.helpers.datafiles import write_set
from tests.helpers.tokenizers import tiny_tokenizer

SIZES = [(3, 4, 5), (5, 3, 4), (1, 6), (4,), (2, 2)]


@pytest.mark.parametrize("strategy", list(STOPPING))
@pytest.mark.parametrize("chances", [False, True])
def test_streams_are_mixed_as_tables_are(strategy: str, chances: bool) -> None:
    for sizes in SIZES:
        sets = [list(range(100 * place, 100 * place + size)) for place, size in enumerate(sizes)]
        weights = [size + 1 for size in sizes]
        probabilities = [weight / sum(weights) for weight in weights] if chances else None
        table = interleave_datasets(
            [Table.from_dict({"row": rows}) for rows in sets], probabilities=probabilities, seed=5, stopping_strategy=STOPPING[strategy]
        )
        assert mix(sets, strategy, probabilities, 5) == list(table["row"])
        streamed = list(mix_streams([lambda rows=rows: iter(rows) for rows in sets], strategy, probabilities, 5))  # type: ignore[misc]
        assert streamed == list(table["row"]), (sizes, strategy)


def test_concatenation_and_an_empty_source() -> None:
    assert mix([[1, 2], [3]], "concat", None, 0) == list(mix_streams([lambda: [1, 2], lambda: [3]], "concat", None, 0)) == [1, 2, 3]
    for strategy in STOPPING:
        once = list(mix_streams([lambda: [1, 2], list], strategy, None, 0))
        assert once == ([] if strategy == "interleave_under" else [1, 2])


def test_rows_that_are_held_out_are_in_no_mixture(tmp_path: Path) -> None:
    template = ChatTemplate(tiny_tokenizer())
    for name, size in (("a", 8), ("b", 3)):
        rows = [{"instruction": f"{name} {i}", "output": str(i)} for i in range(size)]
        options = write_set(tmp_path, rows, name=name, file=f"{name}.jsonl")
    options = dataclasses.replace(options, dataset=["a", "b"], mix_strategy="interleave_over", val_size=4)
    train, evals = load_train_eval(options, template, seed=1)
    seen, held = ({tuple(row.ids) for row in rows} for rows in (train, evals["eval"]))
    assert len(held) == 4 and not seen & held and len(seen) == 7 and len(train) > 7
    again = load_train_eval(options, template, seed=1)[0]
    assert again.fingerprint == train.fingerprint
    with pytest.raises(DataError, match="leaves nothing of data set"):
        load_train_eval(dataclasses.replace(options, dataset=["b", "a"], val_size=10), template, seed=1)
