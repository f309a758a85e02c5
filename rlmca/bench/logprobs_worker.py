"""One measurement of `bench logprobs`, in this process (or, tensor-parallel, in one a rank).

Shape legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from rlmca.models.logprobs_head import head_log_probs

ENTROPY_WEIGHT = 0.01


def inputs(options: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden_NH, weight_VH, target_N, gradient of the log-probs); targets are anything from unlikely to nearly certain."""
    torch.manual_seed(0)
    weight_VH = (0.02 * torch.randn(options.vocab, options.hidden)).bfloat16()
    target_N = torch.randint(0, options.vocab, (tokens,))
    toward_NH = weight_VH[target_N].float()
    hidden_NH = 0.5 * torch.randn(tokens, options.hidden) + 16 * torch.rand(tokens, 1) * toward_NH / toward_NH.square().sum(1, True)
    return hidden_NH.bfloat16(), weight_VH, target_N, torch.randn(tokens)


def naive(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
    """All logits at once, as most training loops have it."""
    logits_NV = hidden_NH @ weight_VH.t()
    logp_NV = torch.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), -1)
    logp_N = logp_NV.gather(1, target_N[:, None])[:, 0]
    if entropy == "none":
        return logp_N, None
    if entropy == "gradient":
        return logp_N, -(logp_NV.exp() * logp_NV).sum(1)
    with torch.no_grad():
        return logp_N, -logp_NV.exp().mul_(logp_NV).sum(1)


def step(run: Callable[[], tuple[Tensor, Tensor | None]], of_logp_N: Tensor) -> float:
    """Seconds of a forward and backward."""
    start = time.perf_counter()
    logp_N, entropy_N = run()
    loss = (logp_N * of_logp_N).sum()
    if entropy_N is not None and entropy_N.requires_grad:
        loss = loss + ENTROPY_WEIGHT * entropy_N.sum()
    loss.backward()
    return time.perf_counter() - start


def measure(options: argparse.Namespace, group: dist.ProcessGroup | None, rank: int) -> dict[str, Any]:
    """Seconds of each counted step, of the first one, and the peak of resident memory above the inputs'."""
    hidden_NH, weight_VH, target_N, of_logp_N = inputs(options, options.tokens)
    if group is not None:
        width = -(-options.vocab // options.ranks)
        padded_VH = torch.nn.functional.pad(weight_VH, (0, 0, 0, width * options.ranks - options.vocab))
        weight_VH = padded_VH[rank * width : (rank + 1) * width].clone()
        del padded_VH
    hidden_NH.requires_grad_(), weight_VH.requires_grad_()
    chosen = torch.compile(naive) if options.kind == "compiled" else naive

    def run() -> tuple[Tensor, Tensor | None]:
        if options.kind == "ours":
            return head_log_probs(hidden_NH, weight_VH, target_N, vocab_size=options.vocab, group=group)
        return chosen(hidden_NH, weight_VH, target_N, options.entropy)

    gc.collect()
    before = _status("VmRSS")
    first, seconds = step(run, of_logp_N), []
    for number in range(options.steps):
        hidden_NH.grad = weight_VH.grad = None
        if number == 0:
            gc.collect()
            _reset_peak()
        seconds.append(step(run, of_logp_N))
    return {"seconds": seconds, "first": first, "extra_bytes": _status("VmHWM") - before}


def _status(name: str) -> int:
    """Bytes that /proc says of this process; where there is no /proc, its largest size so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    """Compiling is not what is measured. Where the kernel does not allow it, the first step counts too."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def errors(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Mean error of the log-probs (nats), and relative error (Frobenius) of the gradients of a loss of them and the entropies.

    In bf16 against all logits in float64.
    """
    hidden_NH, weight_VH, target_N, of_logp_N = inputs(options, options.error_tokens)

    def results(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
        hidden, weight = (x.to(dtype, copy=True).requires_grad_() for x in (hidden_NH, weight_VH))
        found: list[Tensor] = []

        def run() -> tuple[Tensor, Tensor | None]:
            if kind == "ours":
                out = head_log_probs(hidden, weight, target_N, vocab_size=options.vocab)
            else:
                out = naive(hidden, weight, target_N, "gradient")
            found.append(out[0].detach().double())
            return out

        step(run, of_logp_N)
        gradients = {name: x.grad.double() for name, x in (("hidden", hidden), ("weight", weight)) if x.grad is not None}
        return {"logp": found[0], **gradients}

    exact, names = results("naive", torch.float64), {"naive": "all logits", "ours": "rlmca"}
    table: dict[str, dict[str, float]] = {}
    for kind, name in names.items():
        off = {part: value - exact[part] for part, value in results(kind, torch.bfloat16).items()}
        relative = {part: float(off[part].norm() / exact[part].norm()) for part in ("hidden", "weight")}
        table[name] = {"logp": float(off["logp"].abs().mean()), **relative}
    return table


def _on_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    result = measure(options, dist.group.WORLD, rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """The slowest rank of every step, the largest of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (options, folder), nprocs=options.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(options.ranks)]
    seconds = [max(steps) for steps in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    largest = {name: max(rank[name] for rank in ranks) for name in ("first", "extra_bytes")}
    return {"seconds": seconds, **largest}


def main() -> None:
    """Measure and write the figures to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m rlmca.bench.logprobs_worker")
    parser.add_argument("--kind", choices=("naive", "compiled", "ours", "errors"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--entropy", choices=("none", "value", "gradient"), required=True)
    for name in ("ranks", "tokens", "hidden", "vocab", "steps", "threads", "error_tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.kind == "errors":
        result: dict[str, Any] = errors(options)
    else:
        result = _on_ranks(options) if options.ranks > 1 else measure(options, None, 0)
    options.out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
