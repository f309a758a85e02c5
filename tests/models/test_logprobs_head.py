"""Log-probs from hidden states and the head's weight, tile by tile, against torch's log_softmax of all logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlmca.models import logprobs_passes
from rlmca.models.logprobs_head import Tiles, default_tiles, head_log_probs
from tests.helpers.ranks import rank_pool

N, H, V, REAL = 13, 6, 29, 23
TILES = [Tiles(1, 1), Tiles(5, 4), Tiles(4, 23), Tiles(13, 29), Tiles(100, 1000), default_tiles(torch.device("cpu"))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def problem(dtype: torch.dtype = torch.float64, *, rows: int = N, width: int = V, real: int = REAL, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, weight, targets and the gradients of both outputs; targets include the first and the last real token."""
    draw = torch.Generator().manual_seed(seed)
    target_N = torch.randint(0, real, (rows,), generator=draw)
    target_N[: min(rows, 2)] = torch.tensor([0, real - 1])[: min(rows, 2)]
    return {
        "hidden": torch.randn(rows, H, generator=draw, dtype=torch.float64).to(dtype),
        "weight": torch.randn(width, H, generator=draw, dtype=torch.float64).to(dtype),
        "target": target_N,
        "of_logp": torch.randn(rows, generator=draw, dtype=torch.float64),
        "of_entropy": torch.randn(rows, generator=draw, dtype=torch.float64),
    }


def expected(given: dict[str, Tensor], *, real: int = REAL, temperature: float = 1.0, logp: bool = True, entropy: bool = True) -> Any:
    """(log-probs, entropy, gradient of the hidden states, of the weight), all by torch in float64."""
    hidden, weight = (given[name].detach().double().requires_grad_() for name in ("hidden", "weight"))
    full_NV = torch.log_softmax(hidden @ weight[:real].T / temperature, -1)
    logp_N = full_NV[torch.arange(len(hidden)), given["target"]]
    entropy_N = torch.distributions.Categorical(logits=full_NV).entropy()
    ((logp_N * given["of_logp"]).sum() * logp + (entropy_N * given["of_entropy"]).sum() * entropy).backward()
    return logp_N.detach(), entropy_N.detach(), hidden.grad, weight.grad


def ours(given: dict[str, Tensor], *, logp: bool = True, entropy: bool = True, real: int = REAL, **options: Any) -> Any:
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    logp_N, entropy_N = head_log_probs(hidden, weight, given["target"], vocab_size=real, **options)
    total = torch.zeros(())
    if logp:
        total = total + (logp_N * given["of_logp"]).sum()
    if entropy:
        total = total + (entropy_N * given["of_entropy"]).sum()
    total.backward()
    return logp_N.detach(), None if entropy_N is None else entropy_N.detach(), hidden.grad, weight.grad


def check(mine: Any, theirs: Any, tolerance: float) -> None:
    for name, value, right in zip(("logp", "entropy", "hidden", "weight"), mine, theirs, strict=True):
        if value is not None:
            torch.testing.assert_close(value.double(), right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tiles", TILES, ids=lambda t: f"{t.tokens}x{t.columns}")
def test_values_and_gradients_equal_log_softmax(tiles: Tiles, temperature: float, dtype: torch.dtype) -> None:
    given = problem(dtype)
    mine = ours(given, temperature=temperature, tiles=tiles)
    assert [value.dtype for value in mine] == [dtype] * 4
    check(mine, expected(given, temperature=temperature), TOLERANCE[dtype])
    assert not mine[3][REAL:].any(), "padding rows have no gradient"


@pytest.mark.parametrize(("logp", "entropy"), [(True, False), (False, True)])
def test_either_output_alone(logp: bool, entropy: bool) -> None:
    given = problem()
    check(ours(given, logp=logp, entropy=entropy, tiles=Tiles(5, 4)), expected(given, logp=logp, entropy=entropy), 1e-12)


def test_without_entropy_there_is_none() -> None:
    given = problem()
    check(ours(given, entropy=False, tiles=Tiles(5, 4)), expected(given, entropy=False), 1e-12)
    assert head_log_probs(given["hidden"], given["weight"], given["target"], vocab_size=REAL, entropy=False)[1] is None


@pytest.mark.parametrize("of", ["hidden", "weight"])
def test_a_gradient_that_nobody_wants_is_not_computed(of: str) -> None:
    given = problem()
    inputs = {name: given[name].clone().requires_grad_(name == of) for name in ("hidden", "weight")}
    logp_N, entropy_N = head_log_probs(inputs["hidden"], inputs["weight"], given["target"], vocab_size=REAL)
    assert entropy_N is not None
    ((logp_N * given["of_logp"]).sum() + (entropy_N * given["of_entropy"]).sum()).backward()
    right = dict(zip(("hidden", "weight"), expected(given)[2:], strict=True))
    assert {name: x.grad is not None for name, x in inputs.items()} == {"hidden": of == "hidden", "weight": of == "weight"}
    torch.testing.assert_close(inputs[of].grad, right[of], rtol=1e-12, atol=1e-12)


def test_gradcheck_and_extreme_logits() -> None:
    given = problem(rows=3)
    inputs = (given["hidden"].requires_grad_(), given["weight"].requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: head_log_probs(h, w, given["target"], vocab_size=REAL, temperature=0.8, tiles=Tiles(2, 3)), inputs
    )
    given = problem(torch.float32)
    given["hidden"] *= 300  # logits of some thousands: exp alone would overflow, most probabilities are zero
    check(ours(given, tiles=Tiles(5, 4))[:2] + (None, None), expected(given), 1e-4)
    assert all(value.isfinite().all() for value in ours(given, tiles=Tiles(5, 4)))


def test_no_tokens_and_bad_arguments() -> None:
    given = problem(rows=0)
    logp_N, entropy_N, grad_hidden, grad_weight = ours(given)
    assert logp_N.shape == entropy_N.shape == (0,) and grad_hidden.shape == (0, H)
    assert grad_weight.shape == (V, H) and not grad_weight.any(), "data parallelism waits for every parameter's gradient"
    with pytest.raises(ValueError, match="temperature must be positive"):
        ours(given, temperature=0.0)
    with pytest.raises(ValueError, match="a tile needs at least one token"):
        Tiles(0, 5)


def test_tokens_without_a_gradient_take_no_part_in_the_backward() -> None:
    """Also where their states are not finite: a masked token must not poison the weight's gradient."""
    given = problem()
    dead = [1, 4, 12]
    given["of_logp"][dead] = given["of_entropy"][dead] = 0
    right = expected(given)
    given["hidden"][dead] = float("nan")
    mine = ours(given, tiles=Tiles(5, 4))
    torch.testing.assert_close(mine[2], right[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[3], right[3], rtol=1e-12, atol=1e-12)
    assert mine[0].isnan().nonzero()[:, 0].tolist() == dead, "their values show what they are"
    given["of_logp"][4] = float("nan")
    assert ours(given)[3].isnan().any(), "a gradient that is not finite must be seen, or the step would be taken"


# ---- precision


def naive(given: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (given[name].to(dtype, copy=True).requires_grad_() for name in ("hidden", "weight"))
    full_NV = torch.log_softmax((hidden @ weight.T).to(torch.promote_types(dtype, torch.float32)), -1)
    logp_N, entropy_N = full_NV.gather(1, given["target"][:, None])[:, 0], -(full_NV.exp() * full_NV).sum(1)
    ((logp_N * given["of_logp"]).sum() + 0.01 * (entropy_N * given["of_entropy"]).sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return logp_N.detach().double(), hidden.grad.double(), weight.grad.double()


def test_bf16_numbers_are_no_worse_than_those_of_all_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, width, hidden = 96, 1500, 64
    given = {
        "hidden": torch.randn(rows, hidden, generator=draw).bfloat16(),
        "weight": (0.2 * torch.randn(width, hidden, generator=draw)).bfloat16(),
        "target": torch.randint(0, width, (rows,), generator=draw),
        "of_logp": torch.randn(rows, generator=draw),
        "of_entropy": torch.randn(rows, generator=draw),
    }
    right, theirs = naive(given, torch.float64), naive(given, torch.bfloat16)
    small = {**given, "of_entropy": 0.01 * given["of_entropy"]}
    mine = ours(small, real=width, tiles=Tiles(32, 200))
    assert [value.dtype for value in mine] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for value, other, exact in zip((mine[0], *mine[2:]), theirs, right, strict=True):
        assert (value.double() - exact).norm() <= (other - exact).norm()


def test_autocast_decides_the_type_of_products_alone() -> None:
    """As in a product of torch: float32 weights, bfloat16 logits; the weight's gradient is float32."""
    given = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = ours(given, tiles=Tiles(5, 4))
    assert [value.dtype for value in mine] == [torch.float32] * 4
    rough = problem(torch.float32)
    rough["hidden"], rough["weight"] = rough["hidden"].bfloat16(), rough["weight"].bfloat16()
    torch.testing.assert_close(mine[0], ours(rough, tiles=Tiles(5, 4))[0])
    torch.testing.assert_close(mine[3], expected(given)[3].float(), rtol=0.05, atol=0.05)


# ---- memory


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives, views of given tensors included."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() > torch.Size(self.shape).numel():
                self.shape = tuple(leaf.shape)
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(autocast: bool) -> None:
    given = problem(torch.float32, rows=300, width=400, real=390)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), Largest() as ours_:
        ours(given, real=390, tiles=Tiles(64, 128), temperature=0.7)
    assert torch.Size(ours_.shape).numel() <= 64 * 128
    with Largest() as theirs:
        naive(given, torch.float32)
    assert torch.Size(theirs.shape).numel() == 300 * 400, "the yardstick sees what it must not see"


# ---- Megatron's main_grad


@pytest.mark.parametrize("kind", ["plain", "tied", "bf16_buffer"])
def test_the_weights_gradient_goes_into_main_grad(kind: str) -> None:
    """Added to what is there, in fp32, call after call; autograd is told as Megatron's DDP expects it."""
    given = problem(torch.float32)
    right = expected(given)[3]
    weight: Any = given["weight"].clone().requires_grad_()
    weight.main_grad = torch.ones(V, H, dtype=torch.bfloat16 if kind == "bf16_buffer" else torch.float32)
    weight.grad_added_to_main_grad = False
    if kind == "tied":
        weight.zero_out_wgrad = True
    for _ in range(2):
        weight.grad = None
        logp_N, entropy_N = head_log_probs(given["hidden"], weight, given["target"], vocab_size=REAL, tiles=Tiles(5, 4))
        assert entropy_N is not None
        ((logp_N * given["of_logp"]).sum() + (entropy_N * given["of_entropy"]).sum()).backward()
        assert weight.grad_added_to_main_grad and (weight.grad is None) == (kind == "tied")
    tolerance = 0.1 if kind == "bf16_buffer" else 1e-5
    torch.testing.assert_close(weight.main_grad.double(), 1 + 2 * right, rtol=tolerance, atol=tolerance)


# ---- tensor parallelism


def shards_on_rank(cases: list[tuple[int, int, float, str]]) -> list[Any]:
    """For each (rows of the padded head, real ones, temperature, type): this rank's results, hidden gradient summed as callers do."""
    from rlmca.parallel import groups

    rank, size = _rank_and_size()
    groups.start(rank=rank, world_size=size, seed=0)
    group, results = dist.new_group(), []
    for width, real, temperature, dtype in cases:
        given = problem(getattr(torch, dtype), width=width, real=real)
        given["weight"] = given["weight"].chunk(size)[rank].clone()
        mine = ours(given, real=real, temperature=temperature, group=group, tiles=Tiles(5, 4))
        dist.all_reduce(mine[2], group=group)
        results.append(mine)
    return results


def _rank_and_size() -> tuple[int, int]:
    import os

    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@pytest.mark.serial
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_vocabulary_changes_no_number(size: int) -> None:
    """Full shards, a padded last one, ranks with nothing but padding; every rank has the same log-probs and entropy."""
    cases = [(24, 24, 1.0, "float64"), (32, 25, 0.6, "float64"), (32, 7, 1.3, "float64"), (32, 25, 1.0, "float32")]
    ranks = rank_pool(size).run(shards_on_rank, cases)
    for number, (width, real, temperature, dtype) in enumerate(cases):
        given = problem(getattr(torch, dtype), width=width, real=real)
        right = expected(given, real=real, temperature=temperature)
        parts = [rank[number] for rank in ranks]
        whole = (*parts[0][:3], torch.cat([part[3] for part in parts]))
        check(whole, right, 1e-12 if dtype == "float64" else 5e-6)
        for part in parts[1:]:
            assert torch.equal(part[0], parts[0][0]) and torch.equal(part[1], parts[0][1])


# ---- compiled passes


def test_compiled_passes_give_the_same_numbers() -> None:
    """Where torch cannot compile, the plain passes take over and this still holds."""
    given = problem(torch.float32, rows=70, width=90, real=81)
    mine = ours(given, real=81, temperature=0.7, tiles=Tiles(32, 40, compile_from=0))
    check(mine, expected(given, real=81, temperature=0.7), 5e-6)


@pytest.mark.parametrize("when", ["building", "running"])
def test_without_a_compiler_the_plain_passes_take_over_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def broken(function: Callable[..., Any], **options: Any) -> Any:
        def run(*args: Any) -> Any:
            tries.append(function.__name__)
            raise RuntimeError("no C++ compiler")

        return run(function) if when == "building" else run

    monkeypatch.setattr(torch, "compile", broken)
    logprobs_passes.compiled_passes.cache_clear()
    try:
        given = problem(torch.float32)
        check(ours(given, tiles=Tiles(5, 4, compile_from=0)), expected(given), 2e-6)
        assert sorted(tries) == ["gradient", "statistics"]
    finally:
        logprobs_passes.compiled_passes.cache_clear()


def test_small_problems_are_not_compiled() -> None:
    cpu = torch.device("cpu")
    assert logprobs_passes.choose_passes(cpu, 100, 101) is logprobs_passes.PLAIN is logprobs_passes.choose_passes(cpu, 10**12, None)
    assert logprobs_passes.choose_passes(cpu, 101, 101) is logprobs_passes.compiled_passes()
