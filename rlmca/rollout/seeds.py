"""Random numbers of rollouts: a pure function of (seed, step, prompt, reply, position).

No generator object carries a state from one draw to the next, so a reply does not depend on which other replies
were in its batch, on the order of requests or on the number of workers. The function is the output mix of
SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants of Vigna's
splitmix64.c) applied to a counter, which is how that generator is defined: draw i = mix(seed + (i + 1) * gamma).

Shape legend: B replies.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """The int64 with the same 64 bits (torch has no full uint64 arithmetic)."""
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def reply_seed(seed: int, step: int, prompt: int, k: int) -> int:
    """The seed of reply `k` to prompt `prompt` (its index in the data set) in rollout step `step`, as an int64.

    Every argument passes through the mix on its own, so that (step, prompt, k) = (1, 0, 0) and (0, 1, 0) are as
    unrelated as any other pair.
    """
    word = _mix((seed + _GAMMA) & _WORD)
    for part in (step, prompt, k):
        word = _mix((word + _GAMMA + (part & _WORD)) & _WORD)
    return _signed(word)


def _shift_right(word_B: Tensor, bits: int) -> Tensor:
    """Logical shift: the arithmetic one of int64, with the copies of the sign bit cleared."""
    return (word_B >> bits) & ((1 << (64 - bits)) - 1)


def uniform_B(seed_B: Tensor, position: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [B]: draw `position` of every reply's seed (int64 [B]). 53 random bits each."""
    word_B = seed_B + _signed(((position + 1) * _GAMMA) & _WORD)  # int64 addition and multiplication wrap
    word_B = (word_B ^ _shift_right(word_B, 30)) * _signed(_MIX_1)
    word_B = (word_B ^ _shift_right(word_B, 27)) * _signed(_MIX_2)
    word_B = word_B ^ _shift_right(word_B, 31)
    return _shift_right(word_B, 11).to(torch.float64) * 2.0**-53
