"""An engine on the ranks of a pool, and what Transformers computes on the same batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlmca.types import Batch, batch_of_examples


@dataclass(frozen=True)
class Layout:
    """One row of the layout table."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    micro_batch: int = 2
    packing: bool = False
    max_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    data_parallel: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    freeze: dict[str, Any] | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


def random_batch(vocab: int = 67, rows: int = 8, *, seed: int = 0) -> Batch:
    """Rows of unequal length with random target masks; token id 0 occurs and the first tokens are never targets."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 14, (rows,), generator=draw).tolist()
    ids = [torch.randint(0, vocab, (n,), generator=draw).tolist() for n in lengths]
    masks = [[False] + (torch.rand(n - 1, generator=draw) < 0.6).tolist() for n in lengths]
    masks[0][-1] = True
    return batch_of_examples(ids, masks)


def make_engine(folder: Path, layout: Layout, *, trainable: bool = True, fresh: bool = False) -> Any:
    """A `MegatronEngine` of this rank under `layout`, with the weights of `folder` or (`fresh`) newly drawn ones."""
    import os

    from rlmca.engines.megatron import MegatronEngine
    from rlmca.engines.options import EngineOptions, LossScaleOptions, PipelineOptions
    from rlmca.models.build import BuildOptions, DataParallelOptions
    from rlmca.models.options import FreezeOptions, LoraOptions
    from rlmca.parallel import megatron
    from rlmca.transfer.hf_folder import layout_of_folder

    _forget_last_engine()
    world = layout.world
    rank = int(os.environ.get("RANK", 0)) if world > 1 else 0
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "vpp": layout.vpp, "ep": layout.ep, "etp": layout.etp}
    parallel = megatron.start(**sizes, rank=rank, world_size=world, seed=7)
    options = EngineOptions(
        build=BuildOptions(sequence_parallel=layout.sp, context_parallel=layout.cp, **layout.options),
        data_parallel=DataParallelOptions(**layout.data_parallel),
        pipeline=PipelineOptions(**layout.pipeline),
        loss_scale=LossScaleOptions(**layout.loss_scale),
        micro_batch_size=layout.micro_batch,
        eval_batch_size=3,
        lora=None if layout.lora is None else LoraOptions(**layout.lora),
        freeze=None if layout.freeze is None else FreezeOptions(**layout.freeze),
        packing=layout.packing,
        max_tokens_per_microbatch=layout.max_tokens,
    )
    return MegatronEngine(layout_of_folder(folder), parallel, options, folder=None if fresh else folder, trainable=trainable)


def _forget_last_engine() -> None:
    """Let go of an engine that is no longer used, and of the process groups it keeps.

    Megatron caches rotary angles by module, and a model is full of cycles: groups of earlier layouts would live on, each with
    threads that poll. After ten layouts the threads of a few pools leave a machine of two cores no time for anything else.
    """
    import gc

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()
    gc.collect()


def gradients_on_rank(folder: Path, layout: Layout, batch: Batch) -> dict[str, Any] | None:
    """Loss, gradients under HF names and log-probs of the whole batch; rank 0 answers."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    logp_BT = SpmdGroup(engine, engine.parallel).log_probs(batch).logp_BT
    value, gradients = loss_and_gradients(engine, batch, SftLoss())
    return {"loss": value, "gradients": gradients, "logp_BT": logp_BT} if engine.parallel.rank == 0 else None


def loss_and_gradients(engine: Any, batch: Batch, loss: Any) -> tuple[float, dict[str, Tensor]]:
    """(loss of the whole batch, its gradients under HF names; those on rank 0 alone). Collective."""
    from rlmca.engines.microbatch import micro_batches
    from rlmca.engines.step import global_counts, reduce_metrics
    from rlmca.transfer.stream import hf_tensors

    parallel = engine.parallel
    own = batch.rows(engine.shares(batch)[parallel.dp_rank])
    counts = global_counts(own, loss, parallel)
    pieces = micro_batches(own, engine.cutting(engine.options.micro_batch_size), parallel)
    value = reduce_metrics(engine.compute_gradients(pieces, loss, counts), parallel)["loss"]
    _gather_sharded_gradients(engine)
    if engine.adapters is not None:
        weights = engine.adapter_weights({name: p.main_grad for name, p in engine.adapters.parameters.items()})
    else:
        frozen = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in engine.named_parameters() if not p.requires_grad}
        weights = engine.weights().with_params(frozen | {n: p.main_grad for n, p in engine.named_parameters() if p.requires_grad})
    return value, {name: tensor.clone() for name, tensor in hf_tensors(weights)}


def _gather_sharded_gradients(engine: Any) -> None:
    """The distributed optimizer leaves each data-parallel rank its own part of the summed gradient: collect the parts."""
    if not engine.options.data_parallel.use_distributed_optimizer:
        return
    for buffer in (buffer for model in engine.models for buffer in (*model.buffers, *model.expert_parallel_buffers)):
        group = buffer.data_parallel_group  # of dense weights with context ranks, of experts their own
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for bucket in buffer.buckets:
            parts = bucket.grad_data.chunk(size)
            gathered = [torch.empty_like(part) for part in parts]
            dist.all_gather(gathered, parts[rank].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(gathered))


def assert_same_numbers(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Loss, log-probs and every gradient, of the same names; a gradient by its name and size where it differs."""
    assert abs(ours["loss"] - theirs["loss"]) < tolerance
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=tolerance)
    assert set(ours["gradients"]) == set(theirs["gradients"])
    for name, expected in theirs["gradients"].items():
        torch.testing.assert_close(ours["gradients"][name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def hf_reference(model: Any, batch: Batch) -> dict[str, Any]:
    """The same numbers by Transformers alone, row by row without padding."""
    model.zero_grad()
    logp_BT = torch.zeros(batch.ids_BT.shape)
    total: Tensor = torch.zeros(())
    for b in range(len(batch)):
        length = int(batch.length_B[b])
        ids = batch.ids_BT[b : b + 1, :length]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
        logp_T = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        logp_BT[b, 1:length] = logp_T.detach() * batch.mask_BT[b, 1:length]
        total = total - (logp_T * batch.mask_BT[b, 1:length]).sum()
    loss = total / batch.mask_BT.sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    # under the names of its files: Transformers holds the experts of a layer in one tensor
    return {"loss": loss.item(), "gradients": dict(revert_weight_conversion(model, gradients)), "logp_BT": logp_BT}
