"""The Hugging Face engine in one process: against plain Transformers and against the Megatron engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.contract import TokenOutputs
from rlmca.algorithms.losses import SftLoss
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, gradients_on_rank, hf_reference, make_engine, random_batch
from tests.helpers.huggingface import hf_gradients_on_rank, make_hf_engine
from tests.helpers.models import FAMILIES, make_model, save_model
from tests.helpers.training import batches, learning_rate, train_plainly

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def folder(models: dict[str, Path]) -> Path:
    return models["qwen3_tied"]


def check_gradients(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert set(mine) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value.to(mine[name].dtype), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert value.abs().max() > 1e-4, f"{name}: a gradient of zero would prove nothing"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_gradients_and_log_probs_equal_transformers_and_megatron(family: str, models: dict[str, Path]) -> None:
    """Transformers in float64, row by row without padding; Megatron in the same micro-batches."""
    batch = random_batch()
    ours = hf_gradients_on_rank(models[family], {"micro_batch": 3}, batch)
    plain = hf_reference(make_model(family).double(), batch)
    megatron = gradients_on_rank(models[family], Layout("tp1", micro_batch=3), batch)
    assert megatron is not None
    for theirs in (plain, megatron):
        assert abs(ours["loss"] - theirs["loss"]) < TOLERANCE
        torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"].float(), rtol=0, atol=TOLERANCE)
        check_gradients(ours["gradients"], theirs["gradients"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_gradients_do_not_depend_on_micro_batches_or_kernels(micro_batch: int, attention: str, folder: Path) -> None:
    batch = random_batch()
    ours = hf_gradients_on_rank(folder, {"micro_batch": micro_batch, "attention": attention}, batch)
    theirs = hf_reference(make_model("qwen3_tied"), batch)
    assert abs(ours["loss"] - theirs["loss"]) < TOLERANCE
    check_gradients(ours["gradients"], theirs["gradients"])


@pytest.mark.parametrize("settings", [{"micro_batch": 3}, {"max_tokens_per_microbatch": 20}, {"micro_batch": 8, "attention": "eager"}])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_packed_rows_give_the_gradients_of_single_ones(family: str, settings: dict[str, Any], models: dict[str, Path]) -> None:
    ours = hf_gradients_on_rank(models[family], {"packing": True, **settings}, random_batch())
    theirs = hf_reference(make_model(family), random_batch())
    assert abs(ours["loss"] - theirs["loss"]) < TOLERANCE
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=TOLERANCE)
    check_gradients(ours["gradients"], theirs["gradients"])


def test_a_model_that_would_mix_packed_rows_is_refused(tmp_path: Path) -> None:
    """Bloom has no position ids to tell it where a row begins."""
    from transformers import BloomConfig, BloomForCausalLM

    from rlmca.transfer.hf_folder import HFFolderError

    BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)).save_pretrained(tmp_path)
    assert make_hf_engine(tmp_path) is not None
    with pytest.raises(HFFolderError, match="packing: BloomForCausalLM lets the rows of a packed micro-batch see each other"):
        make_hf_engine(tmp_path, packing=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_number(use_reentrant: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    runs, forward = [0], Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: (runs.__setitem__(0, runs[0] + torch.is_grad_enabled()), forward(self, x))[1])
    plain = hf_gradients_on_rank(folder, {"micro_batch": 3}, random_batch())
    once, runs[0] = runs[0], 0
    again = hf_gradients_on_rank(folder, {"micro_batch": 3, "gradient_checkpointing": True, "use_reentrant": use_reentrant}, random_batch())
    assert once == 6 and runs[0] == (6 if use_reentrant else 12), "the reentrant forward runs without gradient first"
    assert plain["loss"] == again["loss"]
    assert all(torch.equal(value, again["gradients"][name]) for name, value in plain["gradients"].items())


def test_gradient_checkpointing_drops_the_same_activations(tmp_path: Path) -> None:
    wet = save_model("qwen3_tied", tmp_path / "wet", attention_dropout=0.3)
    plain, again = (
        hf_gradients_on_rank(wet, {"gradient_checkpointing": on, "attention": "eager"}, random_batch())["gradients"] for on in (False, True)
    )
    assert all(torch.equal(value, again[name]) for name, value in plain.items())


def test_a_trained_token_with_the_padding_id_keeps_its_gradient(tmp_path: Path) -> None:
    """Transformers alone drops the gradient of the embedding row of pad_token_id."""
    model, padded = make_model("qwen3_untied", pad_token_id=5, eos_token_id=5), tmp_path / "padded"
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.randn(32) * 0.1  # Transformers draws that row as zeros
    model.save_pretrained(padded)
    batch = batch_of_examples([[3, 5, 9, 5, 5], [5, 7, 5]], [[True] * 5, [True] * 3])
    name = "model.embed_tokens.weight"
    ours = hf_gradients_on_rank(padded, {}, batch)["gradients"]
    megatron = gradients_on_rank(padded, Layout("tp1"), batch)
    assert megatron is not None
    check_gradients(ours, megatron["gradients"])
    assert ours[name][5].abs().max() > 1e-4
    assert not hf_reference(model, batch)["gradients"][name][5].any()


@pytest.mark.parametrize(("weight_decay", "max_grad_norm"), [(0.0, 1.0), (0.1, 0.5), (0.1, 0.0)])
def test_twenty_steps_equal_a_plain_loop(weight_decay: float, max_grad_norm: float, folder: Path) -> None:
    from rlmca.engines.options import OptimizerOptions

    engine = make_hf_engine(folder, optimizer=OptimizerOptions(weight_decay=weight_decay, max_grad_norm=max_grad_norm))
    ours = [engine.train_batch(batch, SftLoss(), learning_rate(step)) for step, batch in enumerate(batches(8))]
    model = make_model("qwen3_tied").train()
    theirs = train_plainly(model, 8, weight_decay=weight_decay, max_grad_norm=max_grad_norm or float("inf"))
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < TOLERANCE, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-4 * max(1.0, expected["grad_norm"]), f"step {step}"
        assert mine["skipped"] == 0.0
    for (name, mine), (_, expected) in zip(engine.module.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_twenty_steps_equal_megatron_with_every_option_of_the_optimizer(folder: Path) -> None:
    """The same metrics and, at the end, the same weights under the same names."""
    from rlmca.engines.options import OptimizerOptions

    options = OptimizerOptions(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=0.7)
    engines = [make_hf_engine(folder, optimizer=options), make_engine(folder, Layout("tp1"))]
    engines[1].options = _replaced(engines[1].options, optimizer=options)
    for step, batch in enumerate(batches(8)):
        mine, theirs = (engine.train_batch(batch, SftLoss(), learning_rate(step)) for engine in engines)
        assert mine.keys() == theirs.keys()
        assert all(abs(mine[name] - theirs[name]) < 5e-5 for name in mine), f"step {step}: {mine} {theirs}"
    found = [{name: tensor.clone() for name, tensor in engine.weights().tensors()} for engine in engines]
    assert found[0].keys() == found[1].keys() and engines[0].weights().shapes() == engines[1].weights().shapes()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")


def _replaced(options: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(options, **changes)


def test_log_probs_do_not_depend_on_their_batch_and_leave_training_alone(folder: Path) -> None:
    engine, batch = make_hf_engine(folder), random_batch(seed=5)
    whole = engine.log_probs(batch, temperature=0.7, entropy=True)
    rows = [engine.log_probs(batch.rows([i]), temperature=0.7, entropy=True) for i in range(len(batch))]
    torch.testing.assert_close(whole.logp_BT, torch.cat([r.logp_BT for r in rows]), rtol=0, atol=TOLERANCE)
    megatron = make_engine(folder, Layout("tp1"), trainable=False).log_probs(batch, temperature=0.7, entropy=True)
    torch.testing.assert_close(whole.logp_BT, megatron.logp_BT, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(whole.entropy_BT, megatron.entropy_BT, rtol=0, atol=TOLERANCE)
    assert not whole.logp_BT[~batch.mask_BT].any() and not whole.entropy_BT[~batch.mask_BT].any()
    assert engine.log_probs(batch).entropy_BT is None
    assert not any(p.grad is not None for p in engine.module.parameters()) and whole.logp_BT.dtype == torch.float32


def test_only_positions_that_predict_a_target_go_through_the_head(folder: Path) -> None:
    engine, seen = make_hf_engine(folder, micro_batch=3), []
    engine.module.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape[:2])))
    rows = [[5, 6, 7, 8, 9, 1], [4, 3, 2], [1, 2, 3, 4]]
    engine.train_batch(batch_of_examples(rows, [[False] * 5 + [True], [False, False, True], [False] * 4]), SftLoss(), 0.0)
    assert seen == [(3, 2)], "the columns before tokens 2 and 5, of three rows"


def test_batches_with_nothing_to_learn_in_part_of_them(folder: Path) -> None:
    """Micro-batches and rows without a target, rows of one token, targets at the first token that can have one."""
    rows = [[4], [5, 6], [7, 8, 9, 1], [2, 3, 4], [9, 9]]
    batch = batch_of_examples(rows, [[True], [False] * 2, [False] * 4, [False, True, True], [False, True]])
    ours, theirs = hf_gradients_on_rank(folder, {"micro_batch": 1}, batch), hf_reference(make_model("qwen3_tied"), batch)
    assert abs(ours["loss"] - theirs["loss"]) < TOLERANCE
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=TOLERANCE)
    check_gradients(ours["gradients"], theirs["gradients"])
    engine = make_hf_engine(folder)
    nothing = engine.log_probs(batch.replace(mask_BT=torch.zeros_like(batch.mask_BT)), entropy=True)
    assert not nothing.logp_BT.any() and not nothing.entropy_BT.any()


# ---- steps that must not be taken


class Poisoned(SftLoss):
    """A loss, or only its gradient, that is not finite."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def terms(self, out: TokenOutputs, batch: Batch, counts: Any) -> Any:
        loss, metrics = super().terms(out, batch, counts)
        if self.kind == "loss":
            return loss * float("inf"), metrics
        return loss + (out.logp_BT.sum() * 0).sqrt() * 0, metrics


@pytest.mark.parametrize("kind", ["loss", "gradient", "no_target"])
def test_a_step_without_a_usable_gradient_changes_nothing(kind: str, folder: Path) -> None:
    engine = make_hf_engine(folder)
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)

    def state() -> list[torch.Tensor]:
        return [*(p.detach().clone() for p in engine.module.parameters())] + [
            value.clone() for entry in engine.optimizer.state.values() for value in entry.values()
        ]

    before, batch = state(), random_batch(seed=2)
    if kind == "no_target":
        metrics = engine.train_batch(batch.replace(mask_BT=torch.zeros_like(batch.mask_BT)), SftLoss(), 1e-2)
        assert metrics == {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0}
    else:
        metrics = engine.train_batch(batch, Poisoned(kind), 1e-2)
    assert metrics["skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert engine.train_batch(random_batch(seed=2), SftLoss(), 1e-2)["skipped"] == 0.0
    assert not all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


# ---- precision and dropout


def test_bf16_computes_in_bf16_and_keeps_small_updates(folder: Path) -> None:
    engine, exact = make_hf_engine(folder, bf16=True), make_hf_engine(folder)
    batch = random_batch(seed=3)
    rough, fine = (e.train_batch(batch, SftLoss(), 1e-6)["loss"] for e in (engine, exact))
    assert 0 < abs(rough - fine) < 0.05
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    start = [p.detach().clone() for p in engine.module.parameters()]
    engine.train_batch(batch, SftLoss(), 1e-6)
    moved = [(a - b).abs().max() for a, b in zip(start, engine.module.parameters(), strict=True)]
    assert min(moved) > 0 and max(moved) < 1e-5, "too small a step for bfloat16 weights of this size"
    out = engine.log_probs(batch)
    assert out.logp_BT.dtype == torch.float32 and 0 < (out.logp_BT - exact.log_probs(batch).logp_BT).abs().max() < 0.1


def test_dropout_of_the_config_means_the_same_in_both_engines(tmp_path: Path) -> None:
    """The mean loss over many draws agrees, off in log_probs; a dropout of other places or another rate would not agree."""
    rate = 0.4
    wet, dry = (save_model("qwen3_untied", tmp_path / f"{p}", attention_dropout=p, initializer_range=0.4) for p in (rate, 0.0))
    batch, draws = random_batch(seed=4), 300
    means, errors = [], []
    for engine in (make_hf_engine(wet, micro_batch=8), make_engine(wet, Layout("tp1", micro_batch=8))):
        losses = torch.tensor([engine.train_batch(batch, SftLoss(), 0.0)["loss"] for _ in range(draws)])
        assert losses.std() > 1e-3, "no dropout"
        means.append(losses.mean()), errors.append(losses.std() / draws**0.5)
    calm = make_hf_engine(dry, micro_batch=8)
    without = calm.train_batch(batch, SftLoss(), 0.0)["loss"]
    error = (errors[0] ** 2 + errors[1] ** 2).sqrt()
    assert abs(means[0] - means[1]) < 4 * error
    assert abs(means[0] - without) > 8 * error, "this many draws must tell dropout from none"
    torch.testing.assert_close(make_hf_engine(wet).log_probs(batch).logp_BT, calm.log_probs(batch).logp_BT)


def test_random_states_do_not_move_when_weights_are_read(folder: Path) -> None:
    engine = make_hf_engine(folder)
    before = torch.get_rng_state()
    type(engine)(folder, engine.parallel, engine.options, fresh=False, trainable=False)
    assert torch.equal(before, torch.get_rng_state())
