"""Sources whose tensors are not stored as they come: weights in 8 bits with scales, and adapters merged into weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmca.layouts.boxes import Box, Shape
from rlmca.transfer.convert.base import Around, ConvertError, Part, Slot, Source
from rlmca.transfer.convert.execute import read_hf, read_tensor
from rlmca.transfer.convert.storage import Files
from rlmca.transfer.merged import Merge

SCALE = "_scale_inv"
"""What the name of a scale ends in, after the name of its weight."""


class BlockScaled:
    """Weights in FP8 with one scale for each block: W = code * scale, as DeepSeek-V3 and Qwen3 publish them.

    `quantization` is `quantization_config` of config.json. Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2; its
    weights' README: `weight_scale_inv` is multiplied. ConvertError for other kinds, a scale without weight or of another shape.
    """

    def __init__(self, path: Path, quantization: Mapping[str, Any], slots: Mapping[str, Slot]) -> None:
        kind, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        if kind != "fp8" or not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise ConvertError(
                f"{path / 'config.json'}: quantization_config has quant_method {kind!r} and weight_block_size {block!r}; "
                "only fp8 with scales of blocks is read, convert the folder with the tool that made it"
            )
        self.block = (block[0], block[1])
        self._files = Files()
        self._scales = {name.removesuffix(SCALE): slot for name, slot in slots.items() if name.endswith(SCALE)}
        self._codes = {name: slot for name, slot in slots.items() if slot.dtype == "F8_E4M3"}
        problems = [f"{name} has no {name}{SCALE}" for name in self._codes if name not in self._scales]
        problems += [f"{name}{SCALE} has no FP8 weight" for name in self._scales if name not in self._codes]
        for name, slot in self._codes.items():
            want = tuple(-(-n // b) for n, b in zip(slot.shape, self.block, strict=False))
            if name in self._scales and (len(slot.shape) != 2 or self._scales[name].shape != want):
                problems.append(
                    f"{name} of shape {slot.shape} has scales of shape {self._scales[name].shape}, blocks of {block} need {want}"
                )
        if problems:
            raise ConvertError(f"{path}: " + "; ".join(problems[:8]))

    def __contains__(self, name: str) -> bool:
        return name in self._codes

    def is_scale(self, name: str) -> bool:
        """Whether the tensor is a scale, which nothing but `read` reads."""
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self._codes

    def read(self, name: str, box: Box) -> Tensor:
        """The weight inside `box`, in float32."""
        (top, bottom), (left, right) = box
        (rows, columns) = self.block
        over = ((top // rows, -(-bottom // rows)), (left // columns, -(-right // columns)))
        scale = read_tensor(self._files, self._scales[name], over).float()
        row = torch.arange(top, bottom) // rows - over[0][0]
        column = torch.arange(left, right) // columns - over[1][0]
        return read_tensor(self._files, self._codes[name], box).float() * scale[row][:, column]

    def close(self) -> None:
        """Close the files."""
        self._files.close()


class MergedSource(Around):
    """A source with adapters merged into it."""

    def __init__(self, source: Source, adapters: Sequence[Path]) -> None:
        shapes: dict[str, Shape] = {name: stored.shape for name, stored in source.tensors.items()}
        self._merge = Merge(source.path, source.layout.hf_config, shapes, adapters)
        super().__init__(source)
        self._files = Files()

    def parts(self, name: str) -> Sequence[Part] | None:
        """See `Source`."""
        return None if self._merge.touches(name) else super().parts(name)

    def read(self, name: str, box: Box) -> Tensor:
        """See `Source`."""
        value = read_hf(self._files, self._source, name, box)
        return self._merge.merged(name, value, box) if self._merge.touches(name) else value

    def close(self) -> None:
        """See `Source`."""
        self._merge.close()
        self._files.close()
        super().close()
