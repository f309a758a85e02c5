"""Folders of tiny models, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.models import FAMILIES, make_model


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{family name: fp32 folder}, and "<name>_bf16" with a bfloat16 copy."""
    root = tmp_path_factory.mktemp("hf")
    folders = {}
    for name in FAMILIES:
        model = make_model(name)
        for suffix, dtype in (("", torch.float32), ("_bf16", torch.bfloat16)):
            folders[name + suffix] = root / (name + suffix)
            model.to(dtype).save_pretrained(folders[name + suffix])
            model.float()
    return folders
