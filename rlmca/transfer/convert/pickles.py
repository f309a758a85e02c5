"""Reading what torch pickled without running any of it: every class and function in a pickle becomes an inert stand-in.

Nothing that a file names is imported, so a file of a stranger can do no more than say something odd.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlmca.transfer.convert.base import ConvertError

STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64",
    "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip


class Inert:
    """An object of a pickle: its attributes are here, nothing of what its class does. `origin` is the class's name."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def append(self, value: Any) -> None:
        return None

    def extend(self, values: Any) -> None:
        return None

    def add(self, value: Any) -> None:
        return None


class InertDict(dict[Any, Any]):
    """An OrderedDict or defaultdict of a pickle, with its entries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(arg for arg in args[:1] if isinstance(arg, list | tuple | dict)))

    def __setstate__(self, state: Any) -> None:
        return None


class Storage(NamedTuple):
    """A storage that a pickle refers to: the name of its record, of its torch type, and how many elements it has."""

    key: str
    dtype: str
    numel: int


class View(NamedTuple):
    """A tensor of a pickle: a part of a storage, with offset and strides in elements. `dtype` is the name of a torch type."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8", errors="replace")
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _KNOWN:
            return _KNOWN[whole]
        if whole in ("collections.OrderedDict", "collections.defaultdict"):
            return self._classes.setdefault(whole, type(name, (InertDict,), {}))  # a class of its own: a pickle may change it
        return self._classes.setdefault(whole, type(name.rsplit(".", 1)[-1], (Inert,), {"origin": whole}))

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, numel = pid
        name = storage.origin.removeprefix("torch.").removeprefix("storage.")
        if kind != "storage" or name not in STORAGES:
            raise ConvertError(f"it has a storage of an unknown kind: {kind} {name}")
        return Storage(str(key), STORAGES[name], int(numel))


def _view(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> View:
    """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)."""
    return View(storage, storage.dtype, int(offset), tuple(shape), tuple(stride))


def _typed_view(storage: Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> View:
    """torch._utils._rebuild_tensor_v3(..., dtype, metadata), of types without a storage class, like float8."""
    return View(storage, dtype.origin.removeprefix("torch."), int(offset), tuple(shape), tuple(stride))


def _first(value: Any, *_: Any) -> Any:
    """torch._utils._rebuild_parameter(data, requires_grad, hooks)."""
    return value


def _of_subclass(function: Callable[..., Any], _: Any, args: Any, *__: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2(function, type, args, state): a Parameter with attributes of its own."""
    return function(*args)


def _size(value: Any = ()) -> tuple[int, ...]:
    return tuple(value)


_KNOWN: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _typed_view,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _of_subclass,
    "torch.Size": _size,
}


def unpickle(raw: bytes, what: str) -> Any:
    """The object in `raw`: plain values, containers, `View`s for tensors and `Inert` for everything else.

    Raises ConvertError, which names `what`, when it is no whole pickle.
    """
    try:
        return _Unpickler(raw).load()
    except Exception as error:  # whatever a damaged pickle makes of the machine that reads it
        raise ConvertError(f"{what} cannot be read: {error}; is the file whole?") from error
