"""Lets megatron-core 0.16 run on a CPU with gloo; on a machine with CUDA it changes nothing.

megatron-core names `torch.cuda` literally: devices, streams, random states, tensor types. On a machine
without CUDA `install_platform()` answers those calls with their CPU meaning. It must run before the first
`import megatron.core`, in spawned children too, which is why `rlmca.parallel` calls it when imported and
why only rooms above it import megatron.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

CONSTRUCTORS = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn",
    "empty_like", "zeros_like", "ones_like", "full_like",
)  # fmt: skip


class _InOrderQueue:
    """Stands for Stream and Event: a CPU has one queue and it is in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __enter__(self) -> _InOrderQueue:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event or _InOrderQueue()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def wait_stream(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_event = synchronize = record = wait = wait_stream


def device() -> torch.device:
    """The device of this process: its CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def is_cuda() -> bool:
    """True on a machine with CUDA (the CPU platform never pretends to be one here)."""
    return torch.cuda.is_available()


def backend() -> str:
    """The collective backend of the platform."""
    return "nccl" if is_cuda() else "gloo"


def install_platform() -> bool:
    """Make megatron-core run on this machine; True when the CPU platform is in place. Safe to call twice."""
    if is_cuda():
        return False
    if not getattr(torch.cuda, "_rlmca_cpu_platform", False):
        torch.cuda._rlmca_cpu_platform = True  # type: ignore[attr-defined]
        _patch_devices_and_streams()
        _patch_random_state()
        _patch_constructors()
        _patch_type_names()
        _patch_megatron()
    return True


def _nothing() -> Callable[..., None]:
    # a new object each time: torch._dynamo rejects one function registered under two torch names
    return lambda *args, **kwargs: None


def _patch_devices_and_streams() -> None:
    cuda: Any = torch.cuda
    cpu, queue = torch.device("cpu"), _InOrderQueue()
    cuda.current_device, cuda.device_count = lambda: cpu, lambda: 1
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, _nothing())
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.Stream = cuda.Event = _InOrderQueue
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.current_stream, cuda.default_stream = (lambda *a, **k: queue), (lambda *a, **k: queue)
    tensor_class: Any = torch.Tensor
    tensor_class.record_stream = lambda self, stream: None


def _patch_random_state() -> None:
    """The "cuda" generator is the CPU generator."""
    cuda: Any = torch.cuda
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _patch_constructors() -> None:
    """Literal device="cuda", pin_memory=True and .cuda()."""
    # Torch caches its device constructors on first use. With our wrappers in that cache `with torch.device("meta")`
    # no longer reaches them and Transformers leaves rotary buffers uninitialised without an error: fill it first.
    from torch.utils._device import _device_constructors

    _device_constructors()

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return wrapped

    for name in CONSTRUCTORS:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(owner, name, lambda self, *args, **kwargs: self)


def _patch_type_names() -> None:
    """Megatron's optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor'; they alone see that name."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not args and not kwargs and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]


def quiet_megatron() -> None:
    """Silence advice of megatron-core and torch that no user of this package can follow."""
    for message in (
        ".*Apex (is|are) not installed.*",  # our torch parts take their place
        ".*Transformer Engine and Apex are not installed.*",
        "full scope is deprecated.*",
        "The .grad attribute of a Tensor that is not a leaf.*",
        ".*(reduce_scatter_tensor|all_gather_into_tensor|load_state_dict). is deprecated.*",
        ".*ShardedTensor.*deprecated.*",
        ".*deprecating ShardedTensor.*",
        ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _patch_unequal_parts(mappings: Any) -> None:
    """Gathering and scattering along the first axis in parts of unequal size, which gloo does not know (experts get as many
    tokens as chose them)."""
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_any(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_any(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_any, scatter_any


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    random_module: Any = random
    random_module._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random_module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    if not hasattr(random, "FP8GlobalStateManager"):  # recompute asks Transformer Engine even with fp8 off
        random_module.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        random_module.activation_recompute_forward = random_module.fp8_autocast = lambda *a, **k: contextlib.nullcontext()
    _patch_unequal_parts(mappings)
    to_cpu: Any = dispatcher
    to_cpu.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.detach().numpy() if as_numpy and torch.is_tensor(t) else t
    )
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
