"""The CPU platform changes nothing for Transformers, which lives in the same process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmca.parallel import groups, megatron, platform
from tests.helpers.models import FAMILIES, save_model

ROOT = Path(__file__).parents[2]
CODE = """
import sys, json, torch
if sys.argv[2] == "platform":
    import rlmca.parallel.megatron
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(json.dumps(model(torch.arange(3, 15)[None]).logits.double().sum((0, 1)).tolist()))
"""


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f == "qwen3_tied" else pytest.mark.whole) for f in sorted(FAMILIES)])
def test_transformers_loads_the_same_model_with_and_without_it(family: str, tmp_path: Path) -> None:
    """A wrapped constructor that misses a meta-device context leaves rotary buffers uninitialised, silently."""
    folder = save_model(family, tmp_path / "model")
    found = [
        json.loads(
            subprocess.run([sys.executable, "-c", CODE, str(folder), kind], capture_output=True, text=True, cwd=ROOT, check=True).stdout
        )
        for kind in ("platform", "nothing")
    ]
    assert found[0] == found[1] and any(found[0])


def test_installing_twice_wraps_once() -> None:
    before = torch.empty, torch.Tensor.type
    assert platform.install_platform() is not torch.cuda.is_available()
    assert (torch.empty, torch.Tensor.type) == before


def test_constructors_named_cuda_land_on_the_device_of_the_platform() -> None:
    assert torch.zeros(2, device="cuda").device.type == platform.device().type
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


def test_a_world_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="world size 12 is not a multiple of tensor 4 x pipeline 2 = 8"):
        megatron.start(tp=4, pp=2, world_size=12)


def test_megatron_starts_again_after_a_run_of_the_other_engine_in_one_process() -> None:
    megatron.start()
    groups.close()  # what the other engine ends with: Megatron still remembers groups that are gone
    groups.start()
    assert megatron.start().pp_rank == 0
    megatron.close()
