"""The fusion keys reach the part that they speak of, and machines that lack a kernel say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlmca.layouts import ModelLayout, Topology
from rlmca.models.build import transformer_config
from rlmca.models.options import BuildOptions
from rlmca.models.spec import kernel_errors
from rlmca.parallel import platform
from tests.helpers.config_mutations import base_config


def config(**options: Any) -> Any:
    return transformer_config(ModelLayout(base_config("qwen3")), BuildOptions(**options), Topology())


class Operators(TorchDispatchMode):
    """Names of what torch runs, and the sizes of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
        self.seen.setdefault(func.overloadpacket.__name__, []).append(shape)
        return result


def test_every_fusion_reaches_megatron() -> None:
    names = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion")
    for name in names:
        assert [getattr(config(**{name: value}), name) for value in (True, False)] == [True, False]
    plain = config()
    assert [getattr(plain, name) for name in names] == [False, False, True, True]


@pytest.mark.parametrize("groups", [2, 4])
def test_unfused_attention_makes_the_matrix_of_scores(groups: int) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from rlmca.models.attention import TorchCoreAttention

    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, 3, heads, 16, generator=draw) for heads in (4, groups, groups))
    outputs = []
    for fused in (True, False):
        part = TorchCoreAttention(config(masked_softmax_fusion=fused), 1, AttnMaskType.causal, "self")
        with Operators() as ran:
            outputs.append(part(query, key, value, None))
        scores = [shape for shapes in ran.seen.values() for shape in shapes if shape[-2:] == (6, 6) and len(shape) > 2]
        assert bool(scores) is not fused, ran.seen
        assert any("flash" in name for name in ran.seen) is fused, ran.seen
    torch.testing.assert_close(*outputs)


def test_an_unfused_head_makes_all_logits(tmp_path: Any) -> None:
    from tests.helpers.engine import Layout, make_engine, random_batch
    from tests.helpers.models import save_model

    folder, batch = save_model("qwen3_tied", tmp_path), random_batch()
    targets = int(batch.mask_BT.sum())
    for fused in (True, False):
        engine = make_engine(folder, Layout("tp1", options={"cross_entropy_loss_fusion": fused}), trainable=False)
        (model,) = engine.chunks
        with torch.enable_grad():
            model.requires_grad_(True)
            raw_2N = model(batch.ids_BT, batch.mask_BT, 0.7, True)
        made = raw_2N.grad_fn.next_functions[0][0].name()
        assert raw_2N.shape == (2, targets) and ("_HeadLogProbs" in made) is fused and ("_TokenLogProbs" in made) is not fused


# ---- what is missing here


def test_a_machine_without_the_kernels_says_what_is_missing() -> None:
    assert kernel_errors(BuildOptions()) == kernel_errors(BuildOptions(masked_softmax_fusion=False)) == []
    if not platform.is_cuda():
        (error,) = kernel_errors(BuildOptions(apply_rope_fusion=True))
        assert error.startswith("apply_rope_fusion: true takes Transformer Engine's fused kernel, and a CUDA device")
        assert "the package transformer-engine are missing here" in error and "write apply_rope_fusion: false" in error
        both = kernel_errors(BuildOptions(apply_rope_fusion=True, transformer_impl="transformer_engine"))
        assert len(both) == 2 and both[0].startswith("transformer_impl: transformer_engine needs a CUDA device")


def test_transformer_engine_has_no_unfused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule, on a machine that says it has everything."""
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "transformer_engine" else found(name, *a))
    (error,) = kernel_errors(BuildOptions(masked_softmax_fusion=False))
    assert "masked_softmax_fusion: false is for torch's attention" in error and "write transformer_impl: local" in error
    assert kernel_errors(BuildOptions(masked_softmax_fusion=False, transformer_impl="local")) == []
    (error,) = kernel_errors(BuildOptions(apply_rope_fusion=True))
    assert error.startswith("apply_rope_fusion: true") and "the package transformer-engine is missing here" in error
