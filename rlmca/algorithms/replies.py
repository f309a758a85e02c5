"""Where a generated reply ends.

Shape legend: B replies, T generated positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor


def reply_lengths(ids_BT: Tensor, stop_ids: Collection[int], generated_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(length [B] int64, stopped [B] bool) of padded replies.

    The length counts up to and including the first of *any* of the stop ids; without one it is `generated_B`
    (tokens really generated; None: all T). What follows is padding, whatever its id: the pad id may be a
    stop id, or a token that replies use, so it is never looked for.
    """
    B, T = ids_BT.shape
    position_T = torch.arange(T, device=ids_BT.device)
    limit_B = torch.full((B,), T, device=ids_BT.device) if generated_B is None else generated_B.to(ids_BT.device)
    stop_BT = torch.isin(ids_BT, torch.tensor(sorted(stop_ids), dtype=ids_BT.dtype, device=ids_BT.device))
    stop_BT &= position_T < limit_B[:, None]
    stopped_B = stop_BT.any(1)
    first_B = torch.where(stop_BT, position_T, T).amin(1) if T else limit_B
    return torch.where(stopped_B, first_B + 1, limit_B), stopped_B


def reply_mask(ids_BT: Tensor, stop_ids: Collection[int], generated_B: Tensor | None = None) -> Tensor:
    """Bool [B, T]: the tokens of each reply, the stop token included, nothing after it (see `reply_lengths`)."""
    length_B, _ = reply_lengths(ids_BT, stop_ids, generated_B)
    return torch.arange(ids_BT.shape[1], device=ids_BT.device) < length_B[:, None]


def finish_of(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[int, Literal["stop", "length"]]:
    """(length, finish) of one reply: "stop" up to and including the first stop token, else "length" and all of it."""
    for at, token in enumerate(ids):
        if token in stop_ids:
            return at + 1, "stop"
    return len(ids), "length"
