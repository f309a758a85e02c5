"""Every field of every family's config, changed one by one: our logits change as Transformers' do, or the field is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlmca.engines.megatron import MegatronEngine
from rlmca.engines.options import EngineOptions
from rlmca.layouts import FAMILIES, ModelLayout, UnsupportedField
from rlmca.models.build import BuildOptions
from rlmca.parallel import megatron
from rlmca.types import batch_of_examples
from tests.helpers.config_mutations import Maps, Mutation, base_config, mutations

IDS = [list(range(1, 12)), [5, 0, 3, 9, 2]]


def transformers_logp(config: dict[str, Any], folder: Path) -> torch.Tensor:
    """Log-probs by a Transformers model with seeded weights of this config, which is left in `folder`."""
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(config))), attn_implementation="eager").float().eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():  # drawn here: no field of the config decides how large they are
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    out = torch.zeros(len(IDS), max(map(len, IDS)))
    for row, ids in enumerate(IDS):
        logits = model(torch.tensor([ids])).logits[0, :-1]
        out[row, 1 : len(ids)] = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return out.detach()


def our_logp(config: dict[str, Any], folder: Path) -> torch.Tensor:
    parallel = megatron.start()
    options = EngineOptions(build=BuildOptions(transformer_impl="local"), micro_batch_size=2, eval_batch_size=2)
    engine = MegatronEngine(ModelLayout(config), parallel, options, folder=folder, trainable=False)
    batch = batch_of_examples(IDS, [[True] * len(ids) for ids in IDS])
    return engine.log_probs(batch).logp_BT


@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_field_is_computed_or_refused(family: str, tmp_path: Path) -> None:
    base = base_config(family)
    before = transformers_logp(base, tmp_path / "base")
    torch.testing.assert_close(our_logp(base, tmp_path / "base"), before, rtol=0, atol=1e-5)
    computed = refused = 0
    for number, mutation in enumerate(mutations(family)):
        assert isinstance(mutation, Mutation)
        if mutation.field == "return_dict":
            continue  # Transformers' own forward fails without it
        config, where = mutation.apply(base), f"{family}.{mutation.field} = {mutation.value!r}"
        try:
            ModelLayout(config)
        except (UnsupportedField, ValueError):
            refused += 1
            continue
        folder = tmp_path / str(number)
        theirs = transformers_logp(config, folder)
        torch.testing.assert_close(our_logp(config, folder), theirs, rtol=0, atol=2e-5, msg=lambda m, w=where: f"{w}: {m}")
        if isinstance(mutation.expect, Maps) and mutation.expect.logits and theirs.shape == before.shape:
            assert (theirs - before).abs().max() > 1e-6, f"{where}: the mutation shows nothing"
        computed += 1
    assert computed > 20 and refused > 10, f"{family}: {computed} computed, {refused} refused"
