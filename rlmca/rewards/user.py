"""User functions by path: `path/file.py:function` or `package.module:function`, plain or async."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Failure, Reward, Verdict

if TYPE_CHECKING:
    from rlmca.types import Sample


class BadReward(ValueError):
    """A function whose result has the wrong length or holds something that is no number: a mistake to mend, not a bad sample."""


def load_function(name: str, what: str = "reward") -> Callable[..., Any]:
    """The function that `name` points to. Raises ValueError saying which part is not there; `what` it is for begins the message."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).expanduser()
        if not path.is_file():
            raise ValueError(f"{what} {name!r}: there is no file {path.resolve()}")
        module_name = f"rlmca_user_reward_{abs(hash(path.resolve())):x}_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{what} {name!r}: {path.resolve()} cannot be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look a function's module up by name
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ValueError(f"{what} {name!r}: importing {path.resolve()} failed: {type(error).__name__}: {error}") from error
    else:
        try:
            module = importlib.import_module(where)
        except Exception as error:
            raise ValueError(f"{what} {name!r}: importing module {where!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{what} {name!r}: {where} has no function {attribute!r}; it has {', '.join(public) or 'none'}")
    return function


def user_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """The function `name` as a reward; `options` are passed to it as keyword arguments.

    It takes a list of samples and returns one float or None for each. When it raises, every sample is scored
    by itself, so that one bad sample does not take the others with it: a function that compares the samples
    of a batch must not raise. Raises `BadReward` for a result of the wrong length or kind.
    """
    function = load_function(name)
    try:
        inspect.signature(function).bind([], **options)
    except TypeError as error:
        raise ValueError(f"reward {name!r}: it cannot be called as function(samples, **options) with these options: {error}") from None
    except ValueError:
        pass  # some functions written in C tell no signature; a wrong option shows at the first call

    def checked(value: Any, count: int) -> list[Verdict]:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            raise BadReward(f"reward function {name} returned {type(value).__name__} for {count} samples; it must return a list of {count}")
        if len(value) != count:
            raise BadReward(f"reward function {name} returned {len(value)} values for {count} samples")
        return [_number(item, name, at) for at, item in enumerate(value)]

    async def together(samples: Sequence[Sample]) -> list[Verdict]:
        try:
            return checked(await function(list(samples), **options), len(samples))
        except BadReward:
            raise
        except Exception as error:
            if len(samples) == 1:
                return [Failure.of(error)]
        alone = await asyncio.gather(*(together([sample]) for sample in samples))
        return [verdict for verdicts in alone for verdict in verdicts]

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        if not samples:
            return []
        if inspect.iscoroutinefunction(function):
            return run_async(together(samples))
        try:
            value = function(list(samples), **options)
            if inspect.isawaitable(value):
                value = run_async(_awaited(value))
        except Exception as error:
            if len(samples) == 1:
                return [Failure.of(error)]
        else:
            return checked(value, len(samples))
        return [verdict for sample in samples for verdict in score([sample])]  # outside: a traceback of its own for each

    return score


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine's result, also when the calling thread runs an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _number(value: Any, name: str, at: int) -> Verdict:
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise BadReward(f"reward function {name} returned {value!r} ({type(value).__name__}) for sample {at}; it must be a float or None")
    number = float(value)
    if not math.isfinite(number):
        return Failure("error", f"the function returned {number}")
    return number
