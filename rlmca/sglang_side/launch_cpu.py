"""Starts an unmodified SGLang server (0.5.9 to 0.5.23) on a machine without a GPU: `python launch_cpu.py PARENT_PID [flags]`.

SGLang has a CPU path, but its wheel takes compiled kernels (`sgl_kernel`) for granted and refuses some settings there. This
file changes the process around SGLang, not SGLang, in the six places that `ServerShims` lists. SGLang starts its workers
with the spawn method, which imports this file again under another name: so the shims go in when the file is imported, in
every process, and what is inside `main` runs in the server alone. Workers end with the server by SGLang's own means.

Everything is in this one file because it runs in the server's environment, where the rest of the package is not installed.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

API_KEY_VARIABLE = "RLMCA_SGLANG_API_KEY"
_PR_SET_PDEATHSIG = 1

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # SGLang's own switch for its CPU path
    "OMP_NUM_THREADS": "1",  # small models on few busy cores: about 10 times faster than SGLang's default
    "TORCHDYNAMO_DISABLE": "1",  # its seeded sampler is compiled at the first request: 20 s of waiting for nothing
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the model is a local folder
}
"""Defaults; what the caller has set stays."""

FLAGS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    "--disable-cuda-graph",
    "--mem-fraction-static", "0.05",
    "--max-total-tokens", "16384",
    "--max-running-requests", "128",
    "--sleep-on-idle",
    "--skip-server-warmup",
    "--host", "127.0.0.1",
)  # fmt: skip
"""Flags that a CPU needs; the caller's come later on the command line and win."""


class MissingKernel:
    """Stands for anything in `sgl_kernel`: it can be named and passed on, and says so when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> MissingKernel:
        if part.startswith("__"):
            raise AttributeError(part)
        return MissingKernel(f"{self._name}.{part}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a compiled kernel, which this CPU environment has not")


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 (32 bits, seed 0) of the words (seed low, seed high, position, column): uint32 [rows, columns].

    The one kernel that is needed: SGLang draws seeded samples with it. Constants: Appleby, MurmurHash3.cpp, public domain.
    Arguments are integer tensors: seed [rows] uint64, positions [rows], col_indices [columns].
    """
    import numpy
    import torch

    u32 = numpy.uint32

    def rotate(word: Any, bits: int) -> Any:
        return (word << u32(bits)) | (word >> u32(32 - bits))

    def mix(state: Any, word: Any) -> Any:
        word = rotate(word * u32(0xCC9E2D51), 15) * u32(0x1B873593)
        return rotate(state ^ word, 13) * u32(5) + u32(0xE6546B64)

    with numpy.errstate(over="ignore"):
        word = seed.view(torch.int64).numpy().astype(numpy.uint64)
        state = numpy.zeros((len(word), 1), u32)
        for block in ((word & numpy.uint64(0xFFFFFFFF)).astype(u32), (word >> numpy.uint64(32)).astype(u32), positions.numpy().astype(u32)):
            state = mix(state, block[:, None])
        state = mix(state, col_indices.numpy().astype(u32)[None, :]) ^ u32(16)  # 16: bytes hashed
        state ^= state >> u32(16)
        state = state * u32(0x85EBCA6B)
        state ^= state >> u32(13)
        state = state * u32(0xC2B2AE35)
        state ^= state >> u32(16)
    return torch.from_numpy(state)


def _allow_deterministic(module: types.ModuleType) -> None:
    """`--enable-deterministic-inference` accepts the CPU's attention: without the flag SGLang ignores a request's seed."""
    for name in ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"):
        choices = getattr(module, name, None)
        if choices is not None and "torch_native" not in choices:
            choices.append("torch_native")


def _no_batch_invariant_kernels(module: Any) -> None:
    """The deterministic flag would install Triton kernels. Seeds work without; log-probs then depend on the batch by rounding."""
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _no_pinned_memory(module: Any) -> None:
    """Returning routed experts would pin host memory with CUDA."""
    module._cuda_host_register = lambda *args, **kwargs: None


class ServerShims(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import hook that adapts the process.

    1. `sgl_kernel` imports as a package of `MissingKernel`s; 2. its op `murmur_hash32_cpu` exists; 3. two op schemas of
    torchvision exist, which its Python part needs (the compiled part of PyPI's wheel is for CUDA and does not load);
    4. to 6. the functions in `after_import` run on SGLang's modules.
    """

    def __init__(self) -> None:
        self.after_import: dict[str, Callable[[Any], None]] = {
            "sglang.srt.arg_groups.choices": _allow_deterministic,
            "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_batch_invariant_kernels,
            "sglang.srt.mem_cache.pool_host.common": _no_pinned_memory,
        }
        self._seen: set[str] = set()
        self._libraries: list[Any] = []  # an op lives as long as its library object

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answers for `sgl_kernel`, wraps the modules to adapt, and leaves everything else to the other finders."""
        if name == "sgl_kernel" or name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in self._seen or (name != "torchvision" and name not in self.after_import):
            return None
        self._seen.add(name)
        if name == "torchvision":
            self._define_torchvision_ops()
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run, adapt = spec.loader.exec_module, self.after_import[name]

            def run_and_adapt(module: types.ModuleType) -> None:
                run(module)
                adapt(module)

            spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An ordinary module object."""
        return

    def exec_module(self, module: types.ModuleType) -> None:
        """Fills a module of `sgl_kernel`."""
        name = module.__name__
        vars(module)["__version__"] = "0.0.0"

        def missing(part: str) -> MissingKernel:
            if part.startswith("__"):
                raise AttributeError(part)
            return MissingKernel(f"{name}.{part}")

        vars(module)["__getattr__"] = missing
        if name == "sgl_kernel":
            self._define("sgl_kernel", "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor").impl(
                "murmur_hash32_cpu", murmur_hash32, "CPU"
            )

    def _define_torchvision_ops(self) -> None:
        for op in ("nms", "qnms"):
            self._define("torchvision", f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def _define(self, namespace: str, schema: str) -> Any:
        import torch

        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        self._libraries.append(library)
        return library


def install() -> None:
    """Sets the environment's defaults and puts the import hook first. Must run before torch and sglang are imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, ServerShims())


def end_with_parent(parent: int) -> None:
    """Be killed when process `parent` ends; at once when it has ended already (Linux: the kernel sees to it)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def server_arguments(arguments: list[str], api_key: str | None) -> list[str]:
    """Flags for `sglang.launch_server`: a CPU's own, the caller's, the API key."""
    return [*FLAGS, *arguments, *([f"--api-key={api_key}"] if api_key else [])]


def main(arguments: list[str]) -> None:
    """`arguments`: the parent's process id, then flags of `sglang.launch_server`."""
    end_with_parent(int(arguments[0]))
    sys.argv[1:] = server_arguments(arguments[1:], os.environ.pop(API_KEY_VARIABLE, None))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ in ("__main__", "__mp_main__"):  # __mp_main__: the name under which spawned workers import it
    install()
if __name__ == "__main__":
    main(sys.argv[1:])
