#!/usr/bin/env python3
"""Convert a model folder: `convert.py IN OUT`. This version rewrites Hugging Face folders (type, shard size) and checks them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from rlmca.layouts import LayoutError, UnsupportedField
from rlmca.transfer.convert.rewrite import is_megatron_checkpoint, rewrite_hf
from rlmca.transfer.hf_folder import HFFolderError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with one message on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="Hugging Face folder to read")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--to", choices=["hf", "torch_dist", "ranks"], default="hf", help="what to write (only hf in this version)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="type of the weights (default: as stored)")
    parser.add_argument("--shard_gb", type=float, default=5.0, help="largest file in 10^9 bytes (default 5)")
    options = parser.parse_args(argv)
    try:
        if options.to != "hf":
            raise ValueError(f"--to {options.to}: writing Megatron checkpoints is not in this version; only --to hf")
        if is_megatron_checkpoint(options.source):
            raise ValueError(f"{options.source} is a Megatron checkpoint: reading those is not in this version; give a Hugging Face folder")
        count = rewrite_hf(options.source, options.out, DTYPES.get(options.dtype), options.shard_gb)
    except (HFFolderError, UnsupportedField, LayoutError, ValueError, FileExistsError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}: {count} tensors, read back bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
