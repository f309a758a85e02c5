"""Samples and batches: alignment, padding, checks at the border."""

from __future__ import annotations

import pytest
import torch

from rlmca.types import Sample, batch_of_examples, batch_of_samples, pad_rows


def sample(prompt: list[int], reply: list[int], **kwargs: object) -> Sample:
    return Sample(prompt, reply, [-0.5 * i for i in range(len(reply))], [3] * len(reply), "stop", **kwargs)  # type: ignore[arg-type]


def test_samples_are_aligned_with_their_tokens() -> None:
    batch = batch_of_samples([sample([11, 12, 13], [21, 22, 2], advantage=1.5), sample([7], [2], advantage=-1.0)])
    assert batch.ids_BT.tolist() == [[11, 12, 13, 21, 22, 2], [7, 2, 0, 0, 0, 0]]
    assert batch.mask_BT.tolist() == [[False] * 3 + [True] * 3, [False, True] + [False] * 4]
    assert batch.rollout_logp_BT is not None and batch.rollout_logp_BT[0].tolist() == [0, 0, 0, 0, -0.5, -1.0]
    assert batch.advantage_BT is not None and batch.advantage_BT.tolist() == [[0] * 3 + [1.5] * 3, [0, -1.0, 0, 0, 0, 0]]
    assert batch.length_B.tolist() == [6, 2] and batch.num_tokens == 8


def test_the_first_token_is_never_a_target() -> None:
    assert batch_of_examples([[1, 2]], [[True, True]]).mask_BT.tolist() == [[False, True]]


def test_padding_adds_only_zero_weight() -> None:
    batch = batch_of_examples([[1, 2, 3], [4, 5]], [[False, True, True], [False, True]])
    grown = batch.pad_to(4, 7)
    assert grown.ids_BT.shape == (4, 7) and int(grown.mask_BT.sum()) == 3 and grown.length_B.tolist() == [3, 2, 0, 0]
    assert torch.equal(grown.rows([0, 1]).pad_to(2, 3).ids_BT, batch.ids_BT)
    with pytest.raises(ValueError, match="cannot pad"):
        batch.pad_to(2, 2)


def test_shapes_and_types_are_checked_where_a_batch_is_made() -> None:
    batch = batch_of_examples([[1, 2, 3]], [[False, True, True]])
    with pytest.raises(ValueError, match="Batch.old_logp_BT has shape"):
        batch.replace(old_logp_BT=torch.zeros(1, 4))
    with pytest.raises(TypeError, match="must be bool"):
        batch.replace(mask_BT=torch.ones(1, 3))


def test_rows_are_written_where_they_belong() -> None:
    """Against a plain loop: empty rows, rows that fill the width, offsets."""
    rows, offset = [[1.5, 2.5], [], [3.5, 4.5, 5.5, 6.5], [7.5]], [2, 4, 0, 1]
    expected = torch.zeros(4, 4)
    for b, row in enumerate(rows):
        for t, value in enumerate(row):
            expected[b, offset[b] + t] = value
    assert torch.equal(pad_rows(rows, dtype=torch.float32, width=4, offset=offset), expected)
    assert pad_rows([[], []], dtype=torch.bool, width=2).tolist() == [[False] * 2] * 2
    assert pad_rows([], dtype=torch.int64, width=3).shape == (0, 3)


def test_a_row_that_does_not_fit_is_an_error() -> None:
    """It must not run on into the next row."""
    with pytest.raises(ValueError, match="ends at 5, beyond the width 4"):
        pad_rows([[1, 2, 3], [4]], dtype=torch.int64, width=4, offset=[2, 0])
