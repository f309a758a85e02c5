"""Layouts by chance: a sample of the table, and layouts that no table names."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from tests.helpers.engine import Layout
from tests.invariance.table import LAYERS, kinds, layout_of

SEED_VARIABLE = "RLMCA_INVARIANCE_SEED"


def sample(layouts: list[Layout], size: int, seed: int, kinds: Callable[[Layout], set[str]] = kinds) -> list[Layout]:
    """At least `size` of the layouts, in their order: every one of the `kinds` that any of them has is in one of these.

    Those of eight processes, which cost the most, only as far as it takes them.
    """
    order = sorted(random.Random(seed).sample(layouts, len(layouts)), key=lambda layout: layout.world > 4)
    chosen: list[Layout] = []
    covered: set[str] = set()
    for layout in order:
        if kinds(layout) - covered:
            chosen.append(layout)
            covered |= kinds(layout)
    chosen += [layout for layout in order if layout not in chosen][: max(0, size - len(chosen))]
    return [layout for layout in layouts if layout in chosen]


def seed_of_this_run() -> int:
    """The seed of the random layouts: a new one each run, or that of the environment variable."""
    return int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(10**6))


def how_to_repeat(seed: int) -> str:
    return f"random layouts of seed {seed}; to have them again, set {SEED_VARIABLE}={seed}"


def random_layout(seed: int, number: int, *, experts: bool = False) -> Layout:
    """The `number`-th random layout of a seed: on 2, 4 or 8 processes, everything that the table has, in any product.

    Those of `experts` are dealt out and split too, and may have the routers' losses.
    """
    draw = random.Random(f"{seed} {number}")
    sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    for _ in range(draw.choice([1, 2, 2, 3])):  # the world is shared out a factor of two at a time
        sizes[draw.choice([key for key, size in sizes.items() if (key, size) != ("tp", 4)])] *= 2  # the models have four KV heads
    vpp = draw.choice([n for n in (1, 2, 4) if sizes["pp"] * n <= LAYERS]) if sizes["pp"] > 1 else 1
    also = [f"recompute={how}" for how in ("full", "block", "parts") if draw.random() < 0.15][:1]
    if sizes["pp"] > 1 and draw.random() < 0.3:
        also.append(f"stages={_random_stages(draw, sizes['pp'] * vpp)}")
    also += [draw.choice(["replicated", "overlap"])] if draw.random() < 0.5 else []
    sp = "x" if sizes["tp"] > 1 and (draw.random() < 0.5 or experts) else "-"
    by = draw.choice(["gather", "a2a"]) if sizes["cp"] > 1 else "-"
    rows, tokens = draw.choice(["1", "2", "3", "4", "all"]), draw.choice(["-", "16", "32"])
    if experts:
        also += _random_experts(draw, sizes["tp"], sizes["tp"] * sizes["cp"] * sizes["dp"])
    words = [sizes["tp"], sp, sizes["pp"], vpp, sizes["cp"], by, sizes["dp"], rows, tokens, *also]
    return layout_of(" ".join(map(str, words)), packed=draw.random() < 0.5)


def _random_experts(draw: random.Random, tp: int, ranks: int) -> list[str]:
    """How the `ranks` of a pipeline stage share the experts."""
    split = draw.choice([n for n in (1, 2, 4) if ranks % n == 0])
    groups = draw.choice([n for n in (1, 2, 4, 8) if ranks % (split * n) == 0])
    words = [f"ep={groups}"] if groups > 1 else []
    words += [f"etp={split}"] if split != tp else []
    return words + [word for word in ("alltoall", "balance") if draw.random() < 0.5]


def _random_stages(draw: random.Random, chunks: int) -> str:
    """All layers dealt out to the chunks at random, at least one each."""
    borders = sorted(draw.sample(range(1, LAYERS), chunks - 1))
    sizes = [end - start for start, end in zip([0, *borders], [*borders, LAYERS], strict=True)]
    return "E" + "|".join("t" * size for size in sizes) + "L"
