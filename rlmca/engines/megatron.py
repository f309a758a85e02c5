"""The Megatron-Core engine: one policy (or frozen reference) under tensor, pipeline and data parallelism.

Shape legend: B rows, T tokens of the padded row, N targets of a micro-batch in row-major order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.engines.adapters import EngineAdapters, freeze
from rlmca.engines.base import AdapterUse, Limits
from rlmca.engines.checkpoint import ModelState, adapters_state, chunks_state, load_state, save_state
from rlmca.engines.microbatch import Cutting, MicroBatch, micro_batches, shares
from rlmca.engines.offload import Offload, optimizer_tensors
from rlmca.engines.optimizer import build_optimizer, guarded_step
from rlmca.engines.options import EngineOptions
from rlmca.engines.router_losses import RouterLosses
from rlmca.engines.step import (
    NOTHING_LIVE,
    Collected,
    beyond,
    gathered_outputs,
    global_counts,
    reduce_metrics,
    step_metrics,
    stop_metrics,
    token_outputs,
)
from rlmca.layouts import Coord, ModelLayout
from rlmca.layouts.adapters import BRANCHES
from rlmca.layouts.pipeline import pipeline_topology
from rlmca.layouts.plan import in_chunk
from rlmca.models.build import build_policy, wrap_data_parallel
from rlmca.models.lora import require_input_gradients
from rlmca.parallel.balance import row_cost
from rlmca.parallel.groups import Parallel
from rlmca.transfer.kept import KeptTensors
from rlmca.transfer.load import load_ranks
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.stream import LiveWeights
from rlmca.types import Batch


class MegatronEngine:
    """See `rlmca.engines.base.Engine`. A frozen engine (`trainable=False`) has neither gradients nor an optimizer."""

    def __init__(
        self, layout: ModelLayout, parallel: Parallel, options: EngineOptions, *, folder: Path | None, trainable: bool = True
    ) -> None:
        """Build this rank's part of the model and fill it from the HF folder `folder` (None: draw initial weights as Megatron does)."""
        self.layout, self.parallel, self.options = layout, parallel, options
        self.topology = pipeline_topology(
            layout.num_layers,
            tp=parallel.tp_size,
            pp=parallel.pp_size,
            vpp=parallel.vpp_size,
            ep=parallel.ep_size,
            etp=parallel.etp_size,
            **dataclasses.asdict(options.pipeline),
        )
        block = parallel.rank_in_stage // parallel.tp_size % self.topology.blocks
        self.coord = Coord(tp=parallel.tp_rank, pp=parallel.pp_rank, block=block)
        self.chunks = build_policy(layout, dataclasses.replace(options.build, init_weights=folder is None), self.topology, self.coord)
        self._adapters: EngineAdapters | None = None
        if folder is not None:
            self._load_weights(folder)
        self._kept = KeptTensors(folder, layout.megatron.kept) if folder is not None and layout.megatron.kept else None
        if trainable:
            self._choose_trained(fresh=folder is None)
        self.models: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        self._weights: LiveWeights | None = None
        self._gather_pending = False
        self._offload = Offload()
        self.router_losses = RouterLosses(self.chunks, options.build, parallel)
        if trainable:
            self.models = [wrap_data_parallel(chunk, options.data_parallel, first=k == 0) for k, chunk in enumerate(self.chunks)]
            if folder is None:
                for model in self.models:
                    model.broadcast_params()  # data-parallel replicas must start from the same draw
            self.optimizer = build_optimizer(self.models, options.optimizer, options.data_parallel, options.build.dtype, options.loss_scale)
            config = self.chunks[0].config
            config.finalize_model_grads_func = finalize_model_grads
            config.grad_scale_func = self.optimizer.scale_loss if options.build.dtype == torch.float16 else None
            if options.data_parallel.overlap_grad_reduce:
                no_sync = [model.no_sync for model in self.models]
                config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        else:
            for chunk in self.chunks:
                chunk.requires_grad_(False)

    def _load_weights(self, folder: Path) -> None:
        lora = self.options.lora
        if lora is None or not lora.merged:
            load_ranks(folder, self.layout, self.topology, self.coord, self._parameters())
            return
        with MergedFolder(folder, lora.merged) as merged:
            load_ranks(merged, self.layout, self.topology, self.coord, self._parameters())

    def _choose_trained(self, *, fresh: bool) -> None:
        """Leave a gradient to the adapters alone, or to some of the weights, as the options say."""
        lora, part = self.options.lora, self.options.freeze
        if lora is not None:
            if fresh:
                raise ValueError("adapters need weights to stand beside: give the engine a folder")
            self._adapters = EngineAdapters(self.layout, self.topology, self.coord, self.chunks, lora, self.parallel)
        elif part is not None:
            freeze(self.named_parameters(), self.layout, (self.topology, self.coord), part)
        recomputes = self.options.build.recompute_granularity is not None
        for chunk in self.chunks:
            trained = [parameter.requires_grad for parameter in chunk.parameters()]
            if not all(trained) and (recomputes or not any(trained)):
                require_input_gradients(chunk)

    # ---- the batch

    def shares(self, batch: Batch) -> list[list[int]]:
        """See `Engine.shares`."""
        return shares(batch, self.cutting(self.options.micro_batch_size), self.parallel)

    def cutting(self, rows: int) -> Cutting:
        """How a share is cut into micro-batches of at most `rows` rows, or of the tokens that the options allow."""
        return Cutting(
            rows=rows,
            max_tokens=self.options.max_tokens_per_microbatch,
            packed=self.options.packing,
            cost=row_cost(self.layout.hf_config),
            sequence_parallel=self.options.build.sequence_parallel,
            uniform=self.parallel.ep_size > 1 and self.options.build.exchanges_fixed_sizes,
        )

    # ---- training

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """One optimizer step; see `Engine.train_batch`."""
        self._offload.check()
        counts = global_counts(batch, loss, self.parallel)
        if not any(float(count) for count in counts.values()):
            return NOTHING_LIVE | stop_metrics(False, limits)
        pieces = micro_batches(batch, self.cutting(self.options.micro_batch_size), self.parallel)
        metrics = reduce_metrics(self.compute_gradients(pieces, loss, counts), self.parallel) | self.router_losses.metrics()
        finite = all(math.isfinite(value) for value in metrics.values())
        stopped = finite and beyond(metrics, limits)
        scale = float(self.optimizer.get_loss_scale()) if self.options.build.dtype == torch.float16 else None
        grad_norm, stepped = guarded_step(self.optimizer, self.options.optimizer, learning_rate, allowed=finite and not stopped)
        self._gather_pending = stepped and self.options.data_parallel.overlap_param_gather
        said = step_metrics(grad_norm, stepped=stepped, finite_loss=finite and not stopped, loss_scale=scale)
        return {**metrics, **said, **stop_metrics(stopped, limits)}

    def compute_gradients(self, pieces: list[MicroBatch], loss: Loss, counts: dict[str, Tensor]) -> Collected:
        """Forward and backward of all micro-batches, gradients reduced over ranks and left in Megatron's buffers."""
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron divides by the number of micro-batches and DDP by the data-parallel size; the loss is normalised already
        scale = len(pieces) * self.parallel.dp_size
        collected: Collected = []
        self.router_losses.begin(pieces)

        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            piece = next(iterator)

            def finish(raw_2N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                value, metrics = loss.terms(token_outputs(raw_2N, piece.rows, loss.needs_entropy), piece.rows, counts)
                if not raw_2N.shape[1]:
                    value = value + raw_2N.sum()  # no target: keep the graph, pipeline stages wait for its gradient
                collected.append((value.detach().clone(), metrics))
                return value * scale, {}

            return model(piece.ids_BT, piece.mask_BT, loss.temperature, loss.needs_entropy, piece.borders, self._sequences(piece)), finish

        self._run(forward, pieces, forward_only=False)
        self._gather_pending = False
        return collected

    # ---- inference

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """See `Engine.log_probs`."""
        self._gather_weights()
        for model in self.models:
            model.eval()
        pieces = micro_batches(batch, self.cutting(self.options.eval_batch_size), self.parallel)
        found: list[Tensor] = []

        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            piece = next(iterator)

            def finish(raw_2N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                found.append(raw_2N)
                return torch.zeros((), device=raw_2N.device), {}

            return model(piece.ids_BT, piece.mask_BT, temperature, entropy, piece.borders, self._sequences(piece)), finish

        with contextlib.nullcontext() if self._adapters is None else self._adapters.used(adapter):
            self._run(forward, pieces, forward_only=True)
        out_2BT = gathered_outputs(found, pieces, batch.ids_BT.shape, torch.promote_types(self.options.build.dtype, torch.float32))
        self.parallel.from_last_stage(out_2BT)
        return TokenOutputs(logp_BT=out_2BT[0], entropy_BT=out_2BT[1] if entropy else None)

    def _sequences(self, piece: MicroBatch) -> Tensor | None:
        """Which tokens belong together: what routers of experts balance and what they leave out."""
        return piece.sequence_BT() if self.layout.megatron.num_experts else None

    def _run(self, forward: Any, pieces: list[MicroBatch], *, forward_only: bool) -> None:
        B, T = pieces[0].ids_BT.shape
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(pieces) if len(self.models) == 1 else [iter(pieces) for _ in self.models],
            model=self.models,
            num_microbatches=len(pieces),
            seq_length=T,
            micro_batch_size=B,
            forward_only=forward_only,
        )

    # ---- weights and checkpoints

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name in the layout's rank plan, parameter) of everything that this rank holds, without adapters."""
        return [
            (in_chunk(name, self.coord.pp + self.topology.pp * number, self.topology), parameter)
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
            if BRANCHES not in name
        ]

    def _parameters(self) -> dict[str, Tensor]:
        plan = self.layout.rank_plan(self.topology, self.coord)
        buffers = {
            in_chunk(name, self.coord.pp + self.topology.pp * number, self.topology): buffer
            for number, chunk in enumerate(self.chunks)
            for name, buffer in chunk.named_buffers()
        }
        return {name: parameter.data for name, parameter in self.named_parameters()} | {
            name: buffer.data for name, buffer in buffers.items() if name in plan
        }

    def _gather_weights(self) -> None:
        """With overlapped parameter gathering the last step's weights arrive during the next forward: fetch them now."""
        self._offload.check()
        if self._gather_pending:
            for model in self.models:
                model.start_param_sync(force_sync=True)
            self._gather_pending = False

    def weights(self) -> LiveWeights:
        """See `Engine.weights`."""
        self._gather_weights()
        if self._weights is None:  # the plan is made once; parameters keep their storage over steps
            self._weights = LiveWeights(
                layout=self.layout,
                topology=self.topology,
                coord=self.coord,
                params=self._parameters(),
                rank_of=self._rank_of,
                group=dist.group.WORLD if self.parallel.world_size > 1 else None,
                readable=self._offload.check,
                added=(lambda param, at: None) if self._adapters is None else self._adapters.delta,
                kept=self._kept,
            )
        return self._weights

    def _rank_of(self, coord: Coord) -> int:
        return self.parallel.rank_of(coord.tp, coord.pp, coord.block)

    @property
    def adapters(self) -> EngineAdapters | None:
        """The adapters of a run that trains some."""
        return self._adapters

    def adapter_weights(self, params: Mapping[str, Tensor] | None = None) -> LiveWeights:
        """The adapters under PEFT's names; `params`: their gradients, say, in place of their values."""
        if self._adapters is None:
            raise ValueError("this engine trains no adapter")
        self._gather_weights()
        return self._adapters.weights(self._rank_of, params)

    def export_adapter(self, path: Path, base: str) -> None:
        """See `Engine.export_adapter`."""
        if self._adapters is None:
            raise ValueError("this engine trains no adapter")
        self._gather_weights()
        self._adapters.export(path, self._rank_of, base)

    def offload(self) -> int:
        """See `Engine.offload`."""
        if self._offload.active:
            return 0
        self._gather_weights()
        parts = getattr(self.optimizer, "chained_optimizers", [] if self.optimizer is None else [self.optimizer])
        keep = [tensor for chunk in self.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        keep += [tensor for part in parts if part.optimizer is not None for tensor in optimizer_tensors(part.optimizer)]
        keep += [] if self._adapters is None else self._adapters.start.tensors
        wrapped = self.models if self.optimizer is not None else []
        gradients = [buffer.grad_data for model in wrapped for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        return self._offload.out(keep, gradients)

    def onload(self) -> None:
        """See `Engine.onload`."""
        self._offload.back()

    def save(self, path: Path) -> None:
        """See `Engine.save`."""
        self._gather_weights()
        save_state(path, self._model_state(), self.optimizer if self.options.save_optimizer else None, self.parallel)

    def load(self, path: Path) -> None:
        """See `Engine.load`."""
        self._offload.check()
        load_state(path, self._model_state(), self.optimizer, self.parallel)
        self._gather_pending = False  # what the last step left to be gathered is overwritten

    def _model_state(self) -> ModelState:
        """What a checkpoint keeps of the model: all of it, or the adapters."""
        if self._adapters is None:
            return chunks_state(self.chunks)
        return adapters_state(self._adapters, self._rank_of)
