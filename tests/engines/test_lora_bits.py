"""Merged weights of the ranks and of `export`: the same bits where the folder is stored in the run's type, and not elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmca.transfer.convert.rewrite import rewrite_hf
from tests.helpers.engine import Layout, make_engine
from tests.helpers.huggingface_lora import start_folder
from tests.helpers.lora import ALL, ALPHA, RANK
from tests.helpers.models import make_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
BF16, FLOAT32 = torch.bfloat16, torch.float32


def merged_on_rank(model: Path, layout: Layout, out: Path) -> dict[str, torch.Tensor] | None:
    """The merged weights as the ranks hold them, and their adapter in `out`."""
    engine = make_engine(model, layout)
    if engine.parallel.rank == 0:
        out.mkdir()
    engine.parallel.barrier()
    engine.export_adapter(out, "the base")
    found = {name: tensor.clone() for name, tensor in engine.weights().tensors()}
    return found if engine.parallel.rank == 0 else None


@pytest.mark.parametrize("layout", [Layout("one"), Layout("tp2_sp", tp=2, sp=True)], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("stored", "run"), [(FLOAT32, FLOAT32), (BF16, BF16), (FLOAT32, BF16)], ids=str)
def test_export_has_the_bits_of_the_ranks(stored: torch.dtype, run: torch.dtype, layout: Layout, tmp_path: Path) -> None:
    make_model("qwen3_untied").to(stored).save_pretrained(tmp_path / "model")
    start = start_folder(tmp_path / "start", "qwen3_untied")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ALL, "start": start}
    whole = Layout(layout.name, tp=layout.tp, sp=layout.sp, lora=lora, options={"dtype": run})
    ours = rank_pool(layout.world).run(merged_on_rank, tmp_path / "model", whole, tmp_path / "adapter")[0]
    rewrite_hf(tmp_path / "model", tmp_path / "out", run, adapters=[tmp_path / "adapter"])
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == ours.keys() and {tensor.dtype for tensor in exported.values()} == {run}
    different = [name for name, tensor in exported.items() if not torch.equal(tensor, ours[name])]
    if stored == run:
        assert not different
        return
    # the ranks round W when they read it and the sum once more: at most half a step each, and one step where they add up
    assert different and all("_proj." in name for name in different)
    for name in different:
        torch.testing.assert_close(ours[name].float(), exported[name].float(), rtol=2**-7, atol=2**-9)
