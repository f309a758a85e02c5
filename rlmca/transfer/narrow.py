"""Weights in a narrower type than they came in."""

from __future__ import annotations

import torch
from torch import Tensor

from rlmca.transfer.hf_folder import HFFolderError


def check_fits(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """HFFolderError when a finite number of the tensor would become infinite in float16; other types are wide enough."""
    if dtype != torch.float16 or tensor.dtype == torch.float16 or not tensor.numel():
        return
    top = float(tensor.detach().abs().max())
    if top > torch.finfo(torch.float16).max:
        raise HFFolderError(f"{name} holds {top:g}, more than float16 can (65504): write bf16: true instead of fp16: true")
