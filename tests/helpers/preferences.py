"""Preference pairs for tests: a project with a ranking set, and what plain formulas on a Transformers model say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmca.types import Batch
from tests.helpers.models import make_model
from tests.helpers.tokenizers import tiny_tokenizer

KINDS = ("sigmoid", "hinge", "ipo", "orpo", "simpo")


def make_pairs_project(folder: Path, *, pairs: int = 16) -> Path:
    """A tiny model (`model/`) and pairs (`data/`): the sum chosen, another number of more or fewer digits rejected."""
    tokenizer = tiny_tokenizer()
    model = make_model("qwen3_tied", vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True)
    numbers = [((5 * i) % 12, (7 * i) % 9) for i in range(pairs + 4)]
    rows = [
        {
            "conversations": [{"from": "human", "value": f"What is {a} + {b} = ?" + " please" * (a % 3)}],
            "chosen": {"from": "gpt", "value": str(a + b)},
            "rejected": {"from": "gpt", "value": "no" + " idea" * (b % 3)},
        }
        for a, b in numbers
    ]
    entry = {
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    }
    (folder / "data" / "pairs.json").write_text(json.dumps(rows[:pairs]))
    (folder / "data" / "held.json").write_text(json.dumps(rows[pairs:]))
    info = {"pairs": {"file_name": "pairs.json", **entry}, "held": {"file_name": "held.json", **entry}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return folder


def dpo_options(project: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "stage": "dpo",
        "model_name_or_path": str(project / "model"),
        "dataset_dir": str(project / "data"),
        "dataset": "pairs",
        "cutoff_len": 64,
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "save_strategy": "no",
        "save_hf_model": False,
        "seed": 3,
        **changes,
    }


def reply_logps(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(summed log-prob of each row's targets [B], their number [B]), row by row, without padding, by Transformers alone."""
    sums = []
    for b in range(len(batch)):
        length = int(batch.length_B[b])
        ids = batch.ids_BT[b : b + 1, :length]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
        logp_T = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        sums.append(logp_T[batch.mask_BT[b, 1:length]].sum())
    return torch.stack(sums), batch.mask_BT.sum(1)


def plain_preference(
    model: Any, reference: Any, batch: Batch, kind: str, *, beta: float, ftx: float = 0.0, smoothing: float = 0.0, gamma: float = 0.5
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics), LLaMA-Factory's formulas written out: rows 2 n are chosen, 2 n + 1 rejected."""
    total_B, count_B = reply_logps(model, batch)
    with torch.no_grad():
        ref_B, _ = reply_logps(reference, batch)
    if kind in ("ipo", "orpo", "simpo"):
        value_B, ref_B = total_B / count_B, ref_B / count_B
    else:
        value_B = total_B
    chosen, rejected = value_B[0::2], value_B[1::2]
    ratio = (chosen - rejected) - (ref_B[0::2] - ref_B[1::2])
    sigmoid = torch.sigmoid
    if kind == "sigmoid":
        loss = -(1 - smoothing) * torch.log(sigmoid(beta * ratio)) - smoothing * torch.log(sigmoid(-beta * ratio))
    elif kind == "hinge":
        loss = torch.clamp(1 - beta * ratio, min=0)
    elif kind == "ipo":
        loss = (ratio - 1 / (2 * beta)) ** 2
    elif kind == "simpo":
        loss = -torch.log(sigmoid(beta * ((chosen - rejected) - gamma / beta)))
    else:
        odds = torch.log(chosen.exp() / (1 - chosen.exp())) - torch.log(rejected.exp() / (1 - rejected.exp()))
        loss = -chosen - beta * torch.log(sigmoid(odds))
    loss = loss + ftx * -(total_B / count_B)[0::2]
    zero = kind in ("orpo", "simpo")
    rewards = beta * (value_B - (0 if zero else ref_B)).detach()
    metrics = {
        "rewards/chosen": rewards[0::2].mean(),
        "rewards/rejected": rewards[1::2].mean(),
        "rewards/margins": (rewards[0::2] - rewards[1::2]).mean(),
        "rewards/accuracies": (rewards[0::2] > rewards[1::2]).double().mean(),
        "logps/chosen": chosen.detach().mean(),
        "logps/rejected": rejected.detach().mean(),
    }
    return loss.mean(), {name: float(value) for name, value in metrics.items()}


def random_pairs(pairs: int = 5, vocab: int = 67, *, seed: int = 0) -> Batch:
    """Pairs of a common prompt and two replies of unequal length, all tokens random."""
    from rlmca.data import Encoded, Pair, batch_of_pairs

    draw = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        return torch.randint(0, vocab, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw).tolist()

    def side(prompt: list[int], reply: list[int]) -> Encoded:
        return Encoded(prompt + reply, [False] * len(prompt) + [True] * len(reply))

    found = []
    for _ in range(pairs):
        prompt = ids(2, 6)
        found.append(Pair(side(prompt, ids(1, 7)), side(prompt, ids(1, 7))))
    return batch_of_pairs(found)


def with_reference(batch: Batch, reference: Any) -> Batch:
    """The reference's log-probs of every target, by Transformers alone."""
    ref_BT = torch.zeros(batch.ids_BT.shape)
    with torch.no_grad():
        for b in range(len(batch)):
            length = int(batch.length_B[b])
            ids = batch.ids_BT[b : b + 1, :length]
            logp = torch.log_softmax(reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1], -1)
            ref_BT[b, 1:length] = logp.gather(1, ids[0, 1:, None])[:, 0].float()
    return batch.replace(ref_logp_BT=ref_BT)


def loss_gradients_metrics(engine: Any, batch: Batch, loss: Any) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """(loss of the whole batch, gradients under HF names on rank 0, metrics) of either engine. Collective."""
    from rlmca.engines.microbatch import micro_batches
    from rlmca.engines.step import global_counts, reduce_metrics
    from rlmca.transfer.stream import hf_tensors
    from tests.helpers.engine import _gather_sharded_gradients

    parallel = engine.parallel
    own = batch.rows(engine.shares(batch)[parallel.dp_rank])
    pieces = micro_batches(own, engine.cutting(engine.options.micro_batch_size), parallel)
    metrics = reduce_metrics(engine.compute_gradients(pieces, loss, global_counts(own, loss, parallel)), parallel)
    if hasattr(engine, "module"):
        return metrics.pop("loss"), {name: p.grad.clone() for name, p in engine.module.named_parameters()}, metrics
    _gather_sharded_gradients(engine)
    weights = engine.weights().with_params({name: p.main_grad for name, p in engine.named_parameters()})
    return metrics.pop("loss"), {name: tensor.clone() for name, tensor in hf_tensors(weights)}, metrics


def preferences_on_rank(
    folder: Path, layout: Any, batch: Batch, options: list[dict[str, Any]]
) -> list[tuple[float, dict[str, Tensor], dict[str, float]]]:
    """`loss_gradients_metrics` on Megatron for each of several losses."""
    from rlmca.algorithms.losses import PreferenceLoss, PreferenceOptions
    from tests.helpers.engine import make_engine

    engine = make_engine(folder, layout)
    return [loss_gradients_metrics(engine, batch, PreferenceLoss(PreferenceOptions(**own))) for own in options]
