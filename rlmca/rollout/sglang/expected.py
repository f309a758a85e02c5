"""Which tensors an update of all weights must bring: a server would keep its old weights for one that is missing or misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import AutoConfig

from rlmca.rollout.base import RolloutError
from rlmca.transfer.hf_folder import INDEX, ROTARY_TABLE, open_hf_folder, read_config

HEAD = "lm_head.weight"


def _tied(folder: Path) -> bool:
    """Whether the head is the embedding. A config.json may leave it out, and what that means depends on the model."""
    try:
        return bool(AutoConfig.from_pretrained(folder).tie_word_embeddings)
    except (ValueError, OSError, AttributeError):  # code that comes with the model decides nothing here
        return bool(read_config(folder).get("tie_word_embeddings", False))


class ExpectedTensors:
    """Names and shapes of a model's tensors: those of its folder or, without weights there, those of the first whole update.

    A tied head need not come: the server's head is its embedding.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None, *, tied: bool = False) -> None:
        self.shapes = dict(shapes) if shapes is not None else None
        self._optional = {HEAD} if tied else set()

    @classmethod
    def of_folder(cls, folder: Path) -> ExpectedTensors:
        """What the folder's weight files hold, rotary tables aside (servers compute them). Raises HFFolderError for a broken one."""
        tied = _tied(folder)
        if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", INDEX, "*.bin")):
            return cls(None, tied=tied)
        with open_hf_folder(folder) as files:
            return cls({name: shape for name, shape in files.shapes.items() if not name.endswith(ROTARY_TABLE)}, tied=tied)

    @property
    def bytes_at_most(self) -> int | None:
        """Bytes of all tensors in float32; None when the shapes are not known yet."""
        if self.shapes is None:
            return None
        total = 0
        for shape in self.shapes.values():
            count = 4
            for side in shape:
                count *= side
            total += count
        return total

    def checked(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream itself; RolloutError at a tensor that is unknown, misshapen or came already, and at the end for missing ones."""
        came: dict[str, tuple[int, ...]] = {}
        for name, tensor in stream:
            if name in came:
                raise RolloutError(f"weights: {name} came twice")
            came[name] = tuple(tensor.shape)
            if self.shapes is not None and name not in self._optional:
                if name not in self.shapes:
                    raise RolloutError(f"weights: {name} is not a tensor of the model that the servers hold")
                if came[name] != self.shapes[name]:
                    raise RolloutError(f"weights: {name} has shape {came[name]}, the servers' model has {self.shapes[name]}")
            yield name, tensor
        missing = sorted((self.shapes or {}).keys() - came.keys() - self._optional)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise RolloutError(f"weights: nothing came for {', '.join(missing[:5])}{more}; the servers would keep the old values")
        if not came:
            raise RolloutError("weights: the update is empty")
        if self.shapes is None:
            self.shapes = came
