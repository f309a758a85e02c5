"""Triton's kernels through Triton's interpreter, which runs them on a CPU, against torch in float64; built for GPUs without one.

The interpreter must be chosen before Triton is imported, so it has a process of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.models import logprobs_head, logprobs_passes
from rlmca.models.logprobs_head import Tiles
from tests.helpers.ranks import RankPool
from tests.models.test_logprobs_head import check, expected, ours, problem

Run = Callable[..., Any]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install -r requirements/dev.txt (on Linux)"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 3, 64, 100, 4096 + 130]
"""One column, less than a block, a whole block, no multiple of one, more than one."""
SHAPES = ["rows", "view", "transposed"]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of one number of the type; the interpreter cuts bfloat16 off, where GPUs round."""


def in_a_process(interpret: bool) -> Iterator[Run]:
    pool = RankPool(1)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:  # read where the process starts: on the first run, and after a failure
            if interpret:
                patch.setenv("TRITON_INTERPRET", "1")
            else:
                patch.delenv("TRITON_INTERPRET", raising=False)
            return pool.run(function, *args)[0]

    yield run
    pool.close()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    yield from in_a_process(interpret=True)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Run]:
    yield from in_a_process(interpret=False)


# ---- one tile


def layout(logits_RC: Tensor, shape: str) -> tuple[Tensor, Tensor]:
    """(the same logits with other strides, the memory that they are part of, all 7.0 beside them)."""
    rows, columns = logits_RC.shape
    if shape == "transposed":
        around = torch.full((columns + 1, rows), 7.0, dtype=logits_RC.dtype)
        tile_RC = around[:columns].t()
    else:
        spare = 5 if shape == "view" else 0
        around = torch.full((rows + 1, columns + spare), 7.0, dtype=logits_RC.dtype)
        tile_RC = around[:rows, spare // 2 : spare // 2 + columns]
    tile_RC.copy_(logits_RC)
    return tile_RC, around


def scalar(temperature: float | None) -> Tensor | None:
    return None if temperature is None else torch.tensor(temperature)


def run_statistics(logits_RC: Tensor, shape: str, temperature: float | None, entropy: bool) -> Any:
    from rlmca.models.logprobs_triton import TRITON

    return TRITON.statistics(layout(logits_RC, shape)[0], scalar(temperature), entropy)


def run_gradient(logits_RC: Tensor, shape: str, temperature: float | None, *vectors: Tensor | None) -> Any:
    """(the gradient, the logits after it, what is beside them)."""
    from rlmca.models.logprobs_triton import TRITON

    tile_RC, around = layout(logits_RC, shape)
    found_RC = TRITON.gradient(tile_RC, scalar(temperature), *vectors)
    inside = torch.zeros(around.shape, dtype=torch.bool)
    inside.as_strided(tile_RC.shape, tile_RC.stride(), tile_RC.storage_offset()).fill_(True)
    return found_RC.clone(), tile_RC.clone(), around[~inside]


def exact_sums(z_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `Passes.statistics` promises, from torch's log-sum-exp and entropy."""
    top_R, log_total_R = z_RC.amax(1), z_RC.logsumexp(1) - z_RC.amax(1)
    entropy_R = torch.distributions.Categorical(logits=z_RC).entropy()
    return top_R, log_total_R.exp(), log_total_R.exp() * (log_total_R - entropy_R)


def cases() -> list[Any]:
    """Every type with every width, the strides and temperatures in turn."""
    pairs = [(dtype, columns) for dtype in DTYPES for columns in WIDTHS]
    return [(*pair, SHAPES[number % 3], (None, 0.6)[number % 2]) for number, pair in enumerate(pairs)]


@pytest.mark.cases(6)
@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize(("dtype", "columns", "shape", "temperature"), cases())
def test_statistics_equal_log_sum_exp_and_entropy(
    interpreted: Run, dtype: torch.dtype, columns: int, shape: str, temperature: float | None
) -> None:
    logits_RC = (6 * torch.randn(3, columns)).to(dtype)
    exact = exact_sums(logits_RC.double() / (temperature or 1.0))
    found = interpreted(run_statistics, logits_RC, shape, temperature, True)
    for value, right in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), right, rtol=3e-6, atol=3e-6)
    top_R, total_R, weighted_R = interpreted(run_statistics, logits_RC, shape, temperature, False)
    assert torch.equal(top_R, found[0]) and torch.equal(total_R, found[1]) and not weighted_R.any()


@pytest.mark.cases(8)
@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("dtype", "columns", "shape", "temperature"), cases())
def test_gradient_equals_autograds(
    interpreted: Run, dtype: torch.dtype, columns: int, shape: str, temperature: float | None, entropy: bool
) -> None:
    """Of a tile inside wider rows; targets at both ends of the tile, before it, after it, in the middle."""
    before, after = 3, 2
    logits_RV = (4 * torch.randn(5, before + columns + after)).to(dtype)
    column_R = torch.tensor([0, columns - 1, -2, columns + 1, columns // 2])
    of_logp_R, of_entropy_R = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64) * entropy
    exact_RV = logits_RV.double().requires_grad_()
    logp_RV = torch.log_softmax(exact_RV / (temperature or 1.0), -1)
    entropy_R = -(logp_RV.exp() * logp_RV).sum(1)
    ((logp_RV.gather(1, before + column_R[:, None])[:, 0] * of_logp_R).sum() + (entropy_R * of_entropy_R).sum()).backward()
    assert exact_RV.grad is not None
    right_RC = exact_RV.grad[:, before : before + columns].clone()
    here_R = (column_R >= 0) & (column_R < columns)
    right_RC[here_R, column_R[here_R]] = 0

    top_R, total_R, _ = exact_sums(exact_RV.detach() / (temperature or 1.0))
    unit_R = 1 / (total_R * (temperature or 1.0))
    constant_R = (of_logp_R + of_entropy_R * (entropy_R.detach() - total_R.log())) * unit_R
    vectors = [column_R, top_R.float(), constant_R.float(), (of_entropy_R * unit_R).float() if entropy else None]
    tile_RC = logits_RV[:, before : before + columns]
    found_RC, after_RC, beside = interpreted(run_gradient, tile_RC, shape, temperature, *vectors)
    assert found_RC.dtype == dtype and torch.equal(found_RC, after_RC), "in place"
    assert (beside == 7).all(), "nothing beside the tile is touched"
    torch.testing.assert_close(found_RC.double(), right_RC, rtol=ROUNDING[dtype] + 3e-6, atol=3e-6)
    assert not found_RC[here_R, column_R[here_R]].any()


@pytest.mark.serial
@needs_triton
def test_a_logit_of_minus_infinity_has_probability_zero_and_other_such_values_are_seen(interpreted: Run) -> None:
    inf, nan = float("inf"), float("nan")
    logits_RC = torch.randn(4, 4096 + 9)
    logits_RC[0, [0, 7, 4100]] = -inf
    logits_RC[1] = -inf
    logits_RC[2, 4099], logits_RC[3, 5] = nan, inf
    top_R, total_R, weighted_R = interpreted(run_statistics, logits_RC, "rows", None, True)
    kept_RC = logits_RC[:1, logits_RC[0] > -inf].double()
    for value, right in zip((top_R, total_R, weighted_R), exact_sums(kept_RC), strict=True):
        torch.testing.assert_close(value[:1].double(), right, rtol=3e-6, atol=3e-6)
    assert (top_R[1], total_R[1], weighted_R[1]) == (-inf, 0, 0), "as if the tile had no column"
    assert total_R[2:].isnan().all() and weighted_R[2:].isnan().all()
    ones_R = torch.ones(4)
    grad_RC, _, _ = interpreted(run_gradient, logits_RC, "rows", None, torch.full((4,), -1), torch.full((4,), 2.0), ones_R, ones_R)
    assert torch.equal(grad_RC[0] == 0, logits_RC[0] == -inf) and grad_RC[0].isfinite().all()
    assert grad_RC[2].isnan().sum() == 1 and not grad_RC[3, 5].isfinite()


@pytest.mark.serial
@needs_triton
def test_tiles_without_rows_or_columns_and_float64(interpreted: Run) -> None:
    none_R, one_R = torch.zeros(0), torch.ones(1)
    assert [x.shape for x in interpreted(run_statistics, torch.zeros(0, 5), "rows", None, True)] == [(0,)] * 3
    assert [float(x) for x in interpreted(run_statistics, torch.zeros(1, 0), "rows", None, True)] == [float("-inf"), 0, 0]
    assert interpreted(run_gradient, torch.zeros(0, 5), "rows", None, none_R.long(), none_R, none_R, none_R)[0].shape == (0, 5)
    assert interpreted(run_gradient, torch.zeros(1, 0), "rows", None, one_R.long(), one_R, one_R, None)[0].shape == (1, 0)
    logits_RC = torch.randn(3, 50, dtype=torch.float64)
    for value, right in zip(interpreted(run_statistics, logits_RC, "view", None, True), exact_sums(logits_RC), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)
    zero_R = torch.zeros(3, dtype=torch.float64)
    found_RC, _, _ = interpreted(run_gradient, logits_RC, "view", None, torch.tensor([-1, 2, 50]), zero_R, zero_R + 1, None)
    right_RC = -logits_RC.exp()
    right_RC[1, 2] = 0
    torch.testing.assert_close(found_RC, right_RC, rtol=1e-12, atol=1e-12)


# ---- the whole head


def run_head(given: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """`head_log_probs` forward and backward with Triton's passes, as on CUDA; and how many kernels that started."""
    from rlmca.models.logprobs_triton import TRITON

    started: list[str] = []

    def counted(name: str) -> Any:
        return lambda *args: (started.append(name), getattr(TRITON, name)(*args))[1]

    passes = logprobs_passes.Passes(counted("statistics"), counted("gradient"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_head, "choose_passes", lambda *_: passes)
        return ours(given, **options), len(started)


@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tiles", [Tiles(5, 1), Tiles(3, 4), Tiles(100, 1000)], ids=lambda t: f"{t.tokens}x{t.columns}")
def test_the_head_with_these_passes_equals_log_softmax(interpreted: Run, tiles: Tiles, temperature: float) -> None:
    given = problem(torch.float32, rows=5)
    mine, started = interpreted(run_head, given, {"temperature": temperature, "tiles": tiles})
    check(mine, expected(given, temperature=temperature), 4e-6)
    assert started == 2 * -(-5 // tiles.tokens) * -(-23 // tiles.columns) and not mine[3][23:].any()


@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize(("logp", "entropy"), [(True, False), (False, True)])
def test_the_head_with_one_output_and_with_extreme_logits(interpreted: Run, logp: bool, entropy: bool) -> None:
    given = problem(torch.float32, rows=5)
    mine, _ = interpreted(run_head, given, {"logp": logp, "entropy": entropy, "tiles": Tiles(3, 8)})
    check(mine, expected(given, logp=logp, entropy=entropy), 4e-6)
    given["hidden"] *= 300  # logits of some thousands: exp alone would overflow, most probabilities are zero
    mine, _ = interpreted(run_head, given, {"logp": logp, "entropy": entropy, "tiles": Tiles(3, 8)})
    check((*mine[:2], None, None), expected(given), 1e-4)
    assert all(value.isfinite().all() for value in mine if value is not None)


@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_in_half_precision(interpreted: Run, dtype: torch.dtype) -> None:
    """Errors of the logits' type, not more: relative to the whole of each result."""
    given = problem(dtype, rows=6, width=300, real=290)
    mine, _ = interpreted(run_head, given, {"real": 290, "temperature": 0.8, "tiles": Tiles(6, 128)})
    assert [value.dtype for value in mine] == [torch.float32, torch.float32, dtype, dtype]
    for value, right in zip(mine, expected(given, real=290, temperature=0.8), strict=True):
        assert (value.double() - right).norm() <= 2 * ROUNDING[dtype] * right.norm()


# ---- real kernels, and who takes them


def build(kernel: str, dtype: str, capability: int, temperature: bool, last: bool, folder: str) -> dict[str, int]:
    """Bytes of each form that Triton's compiler gives a kernel; `last` is the entropy, or a slope."""
    import os

    os.environ["TRITON_CACHE_DIR"] = folder
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlmca.models import logprobs_triton

    function = getattr(logprobs_triton, kernel)
    types = {"logits": f"*{dtype}", "temperature": "*fp32", "column_R": "*i64", "columns": "i32", "row_stride": "i32"}
    fixed = {"column_stride": 1, "ENTROPY": last, "BLOCK": 4096}
    fixed |= {} if temperature else {"temperature": None}
    fixed |= {} if last else {"slope_R": None}
    fixed = {name: value for name, value in fixed.items() if name in function.arg_names}
    signature = {name: "constexpr" if name in fixed else types.get(name, "*fp32") for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=fixed)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    return {name: len(text) for name, text in built.asm.items()}


@pytest.mark.serial
@needs_triton
@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel"])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_build_for_gpus(compiled: Run, kernel: str, capability: int, dtype: str, tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses; the compiler needs no GPU."""
    for temperature, last in ((False, False), (True, True)):
        assert compiled(build, kernel, dtype, capability, temperature, last, str(tmp_path))["cubin"] > 0


@pytest.fixture
def unknown() -> Iterator[None]:
    """Nothing is known yet of Triton, and nothing afterwards."""
    logprobs_passes.triton_passes.cache_clear()
    yield
    logprobs_passes.triton_passes.cache_clear()


CUDA = torch.device("cuda", 0)


@needs_triton
@pytest.mark.usefixtures("unknown")
def test_on_cuda_every_size_takes_the_kernels_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_passes, "_missing_for_triton", lambda: None)  # whatever compiler this machine has
    from rlmca.models.logprobs_triton import TRITON

    assert all(logprobs_passes.choose_passes(CUDA, size, start) is TRITON for size in (1, 10**12) for start in (None, 100))
    assert logprobs_passes.choose_passes(torch.device("cpu"), 1, None) is logprobs_passes.PLAIN


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("lacking", ["package triton", "C compiler", "Python.h"])
def test_without_what_triton_needs_cuda_goes_the_other_way_and_says_so_once(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if lacking == "package triton" else object())
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "C compiler" else f"/usr/bin/{name}")
    headers = tmp_path / "none" if lacking == "Python.h" else tmp_path
    monkeypatch.setattr(logprobs_passes.sysconfig, "get_path", lambda *_: str(headers))
    with caplog.at_level(logging.INFO, logger=logprobs_passes.logger.name):
        assert logprobs_passes.choose_passes(CUDA, 100, 101) is logprobs_passes.PLAIN
        assert logprobs_passes.choose_passes(CUDA, 101, 101) is logprobs_passes.compiled_passes()
    (line,) = caplog.messages
    assert line.startswith(f"log-probs go on without Triton: no {lacking}")
