"""What flows between rooms: `Sample` (one reply) and `Batch` (padded tensors of a training step).

Shape legend: B rows (sequences), T token positions of the padded row, N selected tokens.

Every per-token tensor is *aligned with the token it speaks of*: `mask_BT[b, t]` says that token t is a
target (a trainable action), `old_logp_BT[b, t]` is the log-probability of token t given the tokens before
it. The shift by one between a hidden state and the token it predicts happens in exactly one place, the
model's head, so no collator and no loss ever shifts anything. Position 0 has no prediction and is never
a target.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

Finish = Literal["stop", "length", "abort"]
_NUMPY: dict[torch.dtype, type] = {torch.int64: numpy.int64, torch.float32: numpy.float32, torch.bool: numpy.bool_}


@dataclass
class Sample:
    """One reply to one prompt, from generation to update.

    `reply_ids` are the sampled ids, the stop token included; they are never re-tokenised. `reply_logp` is
    what the rollout engine reported for them (at the sampling temperature, before top-p and top-k), and
    `versions` the policy version that sampled each token.
    """

    prompt_ids: list[int]
    reply_ids: list[int]
    reply_logp: list[float]
    versions: list[int]
    finish: Finish
    reply: str = ""
    """Text of the reply, decoded for reward functions, without the stop token."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data row: `messages`, `answer` and every extra column, handed to reward functions."""
    group: int = 0
    """Replies to one prompt in one rollout share a group id."""
    k: int = 0
    """Number of the reply inside its group."""
    reward: float | None = None
    """Weighted sum of the parts; None is *invalid*: outside every statistic and every update."""
    raw_reward: float | None = None
    """Where rewards are shaped: what it was before. `reward` is what is learnt from."""
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    """Of every reply token, or the mean of `advantages`."""
    advantages: list[float] | None = None
    """One for each reply token, where they differ; None: `advantage` for all."""
    old_logp: list[float] | None = None
    """Of the reply tokens, by the trainer before the first update of the rollout; None: not computed."""
    ref_logp: list[float] | None = None
    """Of the reply tokens, by the reference model; None: not computed."""

    @property
    def length(self) -> int:
        """Tokens of prompt and reply together."""
        return len(self.prompt_ids) + len(self.reply_ids)

    @property
    def truncated(self) -> bool:
        """True when the reply ran into the length limit without a stop token."""
        return self.finish == "length"


@dataclass
class Batch:
    """Right-padded sequences with everything a loss needs, all of shape [B, T] unless named otherwise.

    `ids_BT` int64; `length_B` int64, real tokens of each row; `mask_BT` bool, the targets. The optional
    tensors are float32 and hold anything where `mask_BT` is False; `unit_B` int64: rows with the same number (the two
    of a preference pair) go to the same rank and micro-batch.
    """

    ids_BT: Tensor
    length_B: Tensor
    mask_BT: Tensor
    unit_B: Tensor | None = None
    old_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None
    rollout_logp_BT: Tensor | None = None
    advantage_BT: Tensor | None = None

    def __post_init__(self) -> None:
        """The border check: shapes, types and the rules of the alignment, once, where a batch is made."""
        B, T = self.ids_BT.shape
        for name, value in self.tensors():
            want = (B,) if name.endswith("_B") else (B, T)
            if tuple(value.shape) != want:
                raise ValueError(f"Batch.{name} has shape {tuple(value.shape)}, expected {want}")
        if self.mask_BT.dtype != torch.bool or self.ids_BT.dtype != torch.int64:
            raise TypeError("Batch.mask_BT must be bool and Batch.ids_BT int64")

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every field that is set."""
        return [(f.name, v) for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None]

    def __len__(self) -> int:
        return self.ids_BT.shape[0]

    @property
    def num_tokens(self) -> int:
        """Real tokens in the batch, padding left out."""
        return int(self.length_B.sum())

    def rows(self, index: Tensor | slice | Sequence[int]) -> Batch:
        """The chosen rows, in the order given."""
        pick = index if isinstance(index, (Tensor, slice)) else torch.as_tensor(index, dtype=torch.int64)
        return Batch(**{name: value[pick] for name, value in self.tensors()})

    def pad_to(self, B: int, T: int) -> Batch:
        """Grown (or cut back to the real tokens) to [B, T] with rows and positions of zero weight."""
        have = len(self)
        if have > B or int(self.length_B.max() if have else 0) > T:
            raise ValueError(f"cannot pad a batch of {have} rows, {self.ids_BT.shape[1]} wide, to [{B}, {T}]")
        out: dict[str, Tensor] = {}
        for name, value in self.tensors():
            if name == "unit_B":  # what is added belongs to nobody
                grown = torch.cat([value, torch.arange(B - have, device=value.device) + (int(value.max()) + 1 if have else 0)])
            elif name.endswith("_B"):
                grown = value.new_zeros(B)  # a row that is added has no real token
                grown[:have] = value
            else:
                grown = value.new_zeros(B, T)
                width = min(T, value.shape[1])
                grown[:have, :width] = value[:, :width]
            out[name] = grown
        return Batch(**out)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with all tensors on `device`."""
        return Batch(**{name: value.to(device) for name, value in self.tensors()})

    def replace(self, **tensors: Any) -> Batch:
        """A copy with some fields set (tensors, or None to leave a field out)."""
        return dataclasses.replace(self, **tensors)


def pad_rows(rows: Sequence[Sequence[float]], *, dtype: torch.dtype, width: int, offset: Sequence[int] | None = None) -> Tensor:
    """[B, width] with row b's values written from position `offset[b]` (0 without offsets), zero elsewhere.

    Raises ValueError for a row that does not fit. All rows are written at once: a tensor for each would cost more than
    its values.
    """
    length_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    start_B = torch.zeros_like(length_B) if offset is None else torch.tensor(offset, dtype=torch.int64)
    if len(rows) and int((start_B + length_B).max()) > width:
        raise ValueError(f"a row ends at {int((start_B + length_B).max())}, beyond the width {width}")
    out = torch.zeros(len(rows), width, dtype=dtype)
    end_B = length_B.cumsum(0)
    total = int(end_B[-1]) if len(rows) else 0
    shift_B = torch.arange(len(rows)) * width + start_B - (end_B - length_B)
    place_N = torch.arange(total) + shift_B.repeat_interleave(length_B)
    values: numpy.ndarray[Any, Any] = numpy.fromiter(itertools.chain.from_iterable(rows), dtype=_NUMPY[dtype], count=total)
    out.view(-1)[place_N] = torch.from_numpy(values)
    return out


def batch_of_examples(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Batch:
    """A `Batch` of token rows and their target masks (same lengths), for supervised stages."""
    width = max(len(row) for row in ids)
    mask_BT = pad_rows(masks, dtype=torch.bool, width=width)
    mask_BT[:, 0] = False  # nothing predicts the first token
    return Batch(
        ids_BT=pad_rows(ids, dtype=torch.int64, width=width),
        length_B=torch.tensor([len(row) for row in ids]),
        mask_BT=mask_BT,
    )


def batch_of_samples(samples: Sequence[Sample]) -> Batch:
    """A `Batch` of prompt + reply rows; reply tokens are the targets. An advantage of the whole reply is spread over them.

    Log-probs that only some of the samples have are left out.
    """
    width = max(s.length for s in samples)
    start = [len(s.prompt_ids) for s in samples]
    start_B, length_B = torch.tensor(start), torch.tensor([s.length for s in samples])
    place_T = torch.arange(width)
    mask_BT = (place_T >= start_B[:, None]) & (place_T < length_B[:, None])
    advantages = [[s.advantage] * len(s.reply_ids) if s.advantages is None else s.advantages for s in samples]

    def logp_BT(rows: list[list[float] | None]) -> Tensor | None:
        there = [row for row in rows if row is not None]
        return pad_rows(there, dtype=torch.float32, width=width, offset=start) if len(there) == len(rows) else None

    return Batch(
        ids_BT=pad_rows([s.prompt_ids + s.reply_ids for s in samples], dtype=torch.int64, width=width),
        length_B=length_B,
        mask_BT=mask_BT,
        rollout_logp_BT=pad_rows([s.reply_logp for s in samples], dtype=torch.float32, width=width, offset=start),
        old_logp_BT=logp_BT([s.old_logp for s in samples]),
        ref_logp_BT=logp_BT([s.ref_logp for s in samples]),
        advantage_BT=pad_rows(advantages, dtype=torch.float32, width=width, offset=start),
    )
