"""Weights in a narrower type than they came in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlmca.transfer.hf_folder import HFFolderError

WIDER = {torch.float16: "bf16 instead of fp16 (bf16: true, --dtype bf16)", torch.bfloat16: "fp32", torch.float32: "they are (float64)"}
"""What to do instead."""


def check_fits(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """HFFolderError when a finite number of the tensor would become infinite in a narrower type."""
    if not tensor.dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or not tensor.numel():
        return
    value = tensor.detach()
    top = float(value.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    if not math.isfinite(float(torch.tensor(top, dtype=value.dtype).to(dtype))):
        kind = str(dtype).removeprefix("torch.")
        raise HFFolderError(f"{name} holds {top:g}, more than {kind} can ({torch.finfo(dtype).max:g}): write them as {WIDER[dtype]}")
