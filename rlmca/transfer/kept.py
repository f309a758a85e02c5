"""Tensors of a model's folder that no part of the model reads: its exports carry them along bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlmca.layouts.boxes import Shape
from rlmca.transfer.hf_folder import HFFolderError, open_hf_folder


class KeptTensors:
    """Those tensors of `folder` whose names begin with one of `prefixes`, in the order of their names.

    They stay in the files, which stay open: whoever renames, removes or replaces them takes nothing away. Files that are
    written over in place are found out (HFFolderError) rather than read. Raises HFFolderError for a folder that cannot be read.
    """

    def __init__(self, folder: str | Path, prefixes: tuple[str, ...]) -> None:
        self._folder = open_hf_folder(folder)
        names = sorted(kept_names(self._folder.shapes, prefixes))
        self.shapes: dict[str, Shape] = {name: self._folder.shapes[name] for name in names}
        self.dtypes: dict[str, torch.dtype] = {name: self._folder.dtypes[name] for name in names}
        self._held = {path: os.open(path, os.O_RDONLY) for path in self._folder.files_of(names)}
        self._seen = self._marks()
        if not names:
            self.close()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor as it is stored, on the CPU)."""
        for name in self.shapes:
            if self._marks() != self._seen:
                raise HFFolderError(f"{self._folder.path} was written over during the run: {name} cannot be copied from it any more")
            yield name, self._folder.read(name)

    def close(self) -> None:
        """Let go of the files."""
        for number in self._held.values():
            os.close(number)
        self._held = {}
        self._folder.close()

    def _marks(self) -> list[tuple[int, int]]:
        """Size and time of change of the very files that are open, whatever their names point to by now."""
        return [(state.st_size, state.st_mtime_ns) for state in map(os.fstat, self._held.values())]


def kept_names(names: Mapping[str, Shape], prefixes: tuple[str, ...]) -> list[str]:
    """Those of the names that begin with one of the prefixes."""
    return [name for name in names if name.startswith(prefixes)] if prefixes else []


def kept_note(folder: str | Path, prefixes: tuple[str, ...]) -> str | None:
    """What becomes of layers that config.json declares and training leaves alone, in one line; None where it declares none."""
    if not prefixes:
        return None
    with open_hf_folder(folder) as opened:
        lacking = [prefix for prefix in prefixes if not kept_names(opened.shapes, (prefix,))]
    held = [prefix for prefix in prefixes if prefix not in lacking]
    parts = [f"{_layers(held)} for multi-token prediction not trained; exports carry the tensors along as they are"] if held else []
    if lacking:
        parts.append(f"{_layers(lacking)} for multi-token prediction in config.json and not in {folder}: left out, as in Transformers")
    return "; ".join(parts)


def _layers(prefixes: list[str]) -> str:
    return f"{', '.join(prefix.rstrip('.') for prefix in prefixes)} {'is' if len(prefixes) == 1 else 'are'}"
