"""Whitening: values far from zero, too few values, and values that lie on several ranks (reference values: test_vectors)."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

from rlmca.algorithms import whiten
from tests.helpers.ranks import rank_pool

TOGETHER = [-0.7808, -0.6430, -0.5053, -0.3675, 0.4593, 1.8373]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_far_from_zero_keep_their_spread(dtype: torch.dtype) -> None:
    far = whiten(torch.tensor([[1e4 + 64, 1e4, 1e4 - 64]]).to(dtype), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(far, torch.tensor([[1.0, 0.0, -1.0]], dtype=far.dtype), rtol=0, atol=1e-3)


# ---- D5: raises at one valid token; context shards whitened apart, or one that is empty hangs


@pytest.mark.parametrize("live", [0, 1, 2])
def test_with_fewer_than_two_values_nothing_changes(live: int) -> None:
    mask = torch.arange(4)[None] < live
    out = whiten(torch.tensor([[3.0, 5.0, 7.0, 9.0]]), mask)
    expected = [[0.0] * 4, [3.0, 0.0, 0.0, 0.0], [-0.70711, 0.70711, 0.0, 0.0]][live]
    torch.testing.assert_close(out, torch.tensor([expected]) if live else torch.zeros(1, 4), rtol=0, atol=1e-5)


def whiten_on_rank(shares: list[list[float]]) -> tuple[Tensor, float]:
    """This rank's values of a pool of two, and the seconds it took."""
    import torch.distributed as dist

    from rlmca.parallel import groups

    rank = int(os.environ["RANK"])
    groups.start(rank=rank, world_size=2)

    def total(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    own = torch.tensor([shares[rank]]).reshape(1, -1)
    start = time.monotonic()
    return whiten(own, torch.ones_like(own, dtype=torch.bool), reduce=total), time.monotonic() - start


ALL = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0]


@pytest.mark.serial
@pytest.mark.parametrize("shares", [[ALL[:3], ALL[3:]], [[], ALL], [ALL, []]])
def test_shards_are_whitened_together_also_an_empty_one(shares: list[list[float]]) -> None:
    found = rank_pool(2).run(whiten_on_rank, shares)
    torch.testing.assert_close(torch.cat([values[0] for values, _ in found]), torch.tensor(TOGETHER), rtol=0, atol=1e-4)
