"""Whether two sets of numbers are the same, and which are not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Numbers = dict[str, Tensor]
"""What a model computes on the batch, by name: losses, gradients under HF names, log-probs and entropy of the targets."""
CHOICES = "experts chosen"
"""Name of how often the batch's tokens chose each expert of each layer, [layers, experts]."""


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart, or may be: the largest difference, by itself and over the tensor's largest entry."""

    absolute: float
    relative: float

    def within(self, allowed: Difference) -> bool:
        """Both are (nan is not)."""
        return self.absolute <= allowed.absolute and self.relative <= allowed.relative

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e} of its largest entry)"


def differences(found: Numbers, expected: Numbers) -> dict[str, Difference]:
    """By name; AssertionError where the two are not of the same names, shapes and types."""
    assert set(found) == set(expected), f"only one of both has {sorted(set(found) ^ set(expected))}"
    result = {}
    for name, wanted in expected.items():
        got = found[name]
        kind, wanted_kind = (got.shape, got.dtype), (wanted.shape, wanted.dtype)
        assert kind == wanted_kind, f"{name} is {kind} and not {wanted_kind}"
        size, largest = (got - wanted).abs().max().item(), wanted.abs().max().item()
        result[name] = Difference(size, size / largest if largest else math.inf if size else 0.0)
    return result


def largest(found: dict[str, Difference]) -> Difference:
    """The largest of each kind."""
    return Difference(max(d.absolute for d in found.values()), max(d.relative for d in found.values()))


def assert_same(found: Numbers, expected: Numbers, allowed: Difference, where: str) -> Difference:
    """The largest differences of all; AssertionError with the worst tensors when one is more than `allowed`, or no number."""
    sizes = differences(found, expected)
    wrong = {name: size for name, size in sizes.items() if not size.within(allowed)}
    if wrong:
        worst = sorted(wrong, key=lambda name: -wrong[name].relative if math.isfinite(wrong[name].relative) else -math.inf)
        more = f"by more than {allowed.absolute:g}, or {allowed.relative:g} of their largest entry"
        lines = [f"{where}: {len(wrong)} of {len(sizes)} tensors differ {more}"]
        lines += [f"  {name}: {wrong[name]}, {_place(found[name], expected[name])}" for name in worst[:5]]
        if CHOICES in wrong:
            lines.insert(1, "  tokens chose other experts: a near tie that rounding decides, or a wrong router")
        raise AssertionError("\n".join(lines + [f"  and {len(worst) - 5} more"] * (len(worst) > 5)))
    return largest(sizes)


def _place(got: Tensor, wanted: Tensor) -> str:
    at = torch.unravel_index((got - wanted).abs().nan_to_num(torch.inf).argmax(), got.shape)
    return f"at {[int(i) for i in at]} {got[at].item()!r} instead of {wanted[at].item()!r}"
