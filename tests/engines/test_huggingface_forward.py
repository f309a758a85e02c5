"""Which models of Transformers go without logits: those whose head is a plain matrix that comes last, found by trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlmca.algorithms.losses import SftLoss
from rlmca.engines.huggingface_forward import TokenLogProbs
from rlmca.engines.microbatch import micro_batches
from tests.engines.test_huggingface_model import OTHERS, SIZES
from tests.helpers.engine import random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import FAMILIES, make_model, save_model
from tests.models.test_logprobs_head import Largest

NARROW = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
KINDS: list[tuple[str, dict[str, Any], bool]] = [
    ("gpt2", {}, False),
    ("opt", {}, False),
    ("bloom", {}, False),
    ("mamba", {}, False),
    ("phi3", {}, False),
    ("gemma2", {"final_logit_softcapping": None}, False),
    ("gemma2", {}, True),  # logits are capped
    ("gemma2", {"final_logit_softcapping": 1e6}, True),  # a cap that logits of a small model hardly feel
    ("cohere", NARROW, True),  # scaled
    ("granite", {**NARROW, "logits_scaling": 3.0}, True),
    ("phi", NARROW, True),  # a bias
]


def build(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**OTHERS.get(kind, {}), **changes})).eval()


@pytest.mark.parametrize(("kind", "changes", "makes_logits"), KINDS)
def test_heads_are_known_by_what_the_model_does_with_them(kind: str, changes: dict[str, Any], makes_logits: bool) -> None:
    model = build(kind, changes)
    head, before = model.get_output_embeddings(), torch.get_rng_state()
    ours = TokenLogProbs(model)
    assert ours.makes_logits == makes_logits
    assert "forward" not in vars(head) and not model.training and torch.equal(before, torch.get_rng_state())
    ids, mask = torch.tensor([[1, 5, 9, 3], [2, 2, 7, 7]]), torch.tensor([[False, True, False, True], [False, False, True, True]])
    with torch.no_grad():
        logp_BTV = torch.log_softmax(model(input_ids=ids).logits / 0.8, -1)
        out_2N = ours(ids, mask, 0.8)
    chosen_NV = logp_BTV[:, :-1][mask[:, 1:]]
    torch.testing.assert_close(out_2N[0], chosen_NV.gather(1, ids[mask][:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(out_2N[1], -(chosen_NV.exp() * chosen_NV).sum(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_families_of_both_engines_go_without_logits(family: str) -> None:
    assert not TokenLogProbs(make_model(family), autocast=torch.bfloat16).makes_logits


class Twice(nn.Linear):
    """A head of some other kind, which may do anything."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_a_head_of_another_class_is_called() -> None:
    model = make_model("llama")
    model.lm_head.__class__ = Twice
    assert TokenLogProbs(model).makes_logits


def test_a_training_step_makes_no_logits(tmp_path: Path) -> None:
    """With more targets than a token's state is wide, logits would be the largest tensor by far."""
    folder = save_model("qwen3_untied", tmp_path / "model", vocab_size=6000, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    engine, batch = make_hf_engine(folder, micro_batch=64), random_batch(vocab=6000, rows=64)
    with Largest() as seen:
        engine.compute_gradients(micro_batches(batch, engine.cutting(64), engine.parallel), SftLoss(), SftLoss().counts(batch))
    assert batch.mask_BT.sum() > 200 and seen.shape[0] * seen.shape[-1] <= batch.mask_BT.sum() * 2048, seen.shape
