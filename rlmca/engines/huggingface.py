"""The Hugging Face engine: a Transformers model on every rank, data parallelism by torch; the oracle of the Megatron engine.

Shape legend: B rows, T tokens of the padded row, N targets of a micro-batch in row-major order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.engines.base import AdapterUse, Limits
from rlmca.engines.freeze import layer_count, trained
from rlmca.engines.huggingface_adapters import HuggingFaceAdapters
from rlmca.engines.huggingface_checkpoint import ModelState, Training, adapter_state, load_state, save_state, whole_state
from rlmca.engines.huggingface_forward import TokenLogProbs
from rlmca.engines.huggingface_model import build_module
from rlmca.engines.huggingface_optimizer import build_optimizer, guarded_step
from rlmca.engines.loss_scale import LossScaler
from rlmca.engines.microbatch import Cutting, MicroBatch, micro_batches, shares
from rlmca.engines.offload import Offload, optimizer_tensors
from rlmca.engines.options import HuggingFaceOptions
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
from rlmca.parallel.balance import row_cost
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.module import ModuleWeights
from rlmca.transfer.narrow import check_fits
from rlmca.transfer.source import read_hf_config
from rlmca.types import Batch, batch_of_examples


class HuggingFaceEngine:
    """See `rlmca.engines.base.Engine`. A frozen engine (`trainable=False`) has neither gradients nor an optimizer."""

    def __init__(
        self, folder: Path, parallel: Parallel, options: HuggingFaceOptions, *, fresh: bool = False, trainable: bool = True
    ) -> None:
        """The model of the HF folder `folder` on this rank; with `fresh` only its config counts and weights are newly drawn.

        HFFolderError says which tensors or features of the model stand in the way, ValueError which parts that are to be
        trained it does not have.
        """
        self.folder, self.parallel, self.options = folder, parallel, options
        self.module: PreTrainedModel = build_module(folder, options, fresh=fresh)
        self._hf_config = read_hf_config(folder)
        for name, parameter in self.module.named_parameters() if options.loss_scale else ():
            check_fits(name, parameter, torch.float16)
        half = torch.bfloat16 if options.bf16 else torch.float16 if options.loss_scale else None
        self._plain = TokenLogProbs(self.module, autocast=half)
        if options.packing and not self._plain.keeps_borders():
            raise HFFolderError(
                f"packing: {type(self.module).__name__} lets the rows of a packed micro-batch see each other "
                f"under attention {self.module.config._attn_implementation}; leave packing out, or write flash_attn: sdpa"
            )
        self.model: Any = self._plain
        self.optimizer: torch.optim.AdamW | None = None
        self.scaler: LossScaler | None = None
        self._offload = Offload()
        self._adapters: HuggingFaceAdapters | None = None
        self._trained: dict[str, nn.Parameter] = {}
        if not trainable:
            self.module.requires_grad_(False)
            return
        self._trained = self._choose_trained(fresh=fresh)
        if options.gradient_checkpointing:
            if not self.module.supports_gradient_checkpointing:
                raise HFFolderError(f"gradient_checkpointing: {type(self.module).__name__} has no support for it; leave it out")
            # it makes what the embedding gives need a gradient too: a reentrant layer with frozen inputs would get none, silently
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": options.use_reentrant})
        if parallel.dp_size > 1:
            self.model = self._data_parallel()
            self._settle_buckets()
        self.optimizer = build_optimizer(self._trained, options.optimizer)
        if options.loss_scale is not None:
            self.scaler = LossScaler(options.loss_scale, parallel.device)

    def _choose_trained(self, *, fresh: bool) -> dict[str, nn.Parameter]:
        """Leave a gradient to the adapters alone, or to some of the weights, as the options say; those, under their files' names."""
        lora, part = self.options.lora, self.options.freeze
        if lora is not None:
            if fresh:
                raise ValueError("adapters need weights to stand beside: give the engine a folder")
            self._adapters = HuggingFaceAdapters(self.module, lora)
            return self._adapters.parameters
        found = dict(self.module.named_parameters())
        if part is not None:
            wanted = trained(found, layer_count(found), part)
            for name, parameter in found.items():
                parameter.requires_grad_(name in wanted)
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def _data_parallel(self) -> DistributedDataParallel:
        """torch's DDP around what gives the log-probs; every rank then starts from rank 0's weights."""
        return DistributedDataParallel(
            self._plain,
            device_ids=[self.parallel.device.index] if self.parallel.device.type == "cuda" else None,
            process_group=self.parallel.dp_group,
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.options.bucket_cap_mb,
        )

    def _settle_buckets(self) -> None:
        """One backward pass of nothing.

        DDP sorts its buckets anew after the first backward pass it sees, and where a gradient lies decides the order in
        which three or more ranks add it up: without this, the first step after a resume would round otherwise than the
        same step of a run that was not stopped.
        """
        nothing = batch_of_examples([[0]], [[False]])
        devices = [self.parallel.device.index] if self.parallel.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self.model.train()
            nothing = nothing.to(self.parallel.device)
            self.model(nothing.ids_BT, nothing.mask_BT).sum().backward()
        self.module.zero_grad(set_to_none=True)

    # ---- the batch

    def shares(self, batch: Batch) -> list[list[int]]:
        """See `Engine.shares`."""
        return shares(batch, self.cutting(self.options.micro_batch_size), self.parallel)

    def cutting(self, rows: int) -> Cutting:
        """How a share is cut into micro-batches of at most `rows` rows, or of the tokens that the options allow."""
        own = self.options
        return Cutting(rows=rows, max_tokens=own.max_tokens_per_microbatch, packed=own.packing, cost=row_cost(self._hf_config))

    # ---- training

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """One optimizer step; see `Engine.train_batch`."""
        if self.optimizer is None:
            raise ValueError("a frozen engine cannot be trained")
        self._offload.check()
        counts = global_counts(batch, loss, self.parallel)
        if not any(float(count) for count in counts.values()):
            return NOTHING_LIVE | stop_metrics(False, limits)
        pieces = micro_batches(batch, self.cutting(self.options.micro_batch_size), self.parallel)
        metrics = reduce_metrics(self.compute_gradients(pieces, loss, counts), self.parallel)
        finite = all(math.isfinite(value) for value in metrics.values())
        stopped = finite and beyond(metrics, limits)
        scale = None if self.scaler is None else self.scaler.scale
        allowed = finite and not stopped
        grad_norm, stepped = guarded_step(self.optimizer, self.options.optimizer, learning_rate, allowed=allowed, scaler=self.scaler)
        said = step_metrics(grad_norm, stepped=stepped, finite_loss=allowed, loss_scale=scale)
        return {**metrics, **said, **stop_metrics(stopped, limits)}

    def compute_gradients(self, pieces: list[MicroBatch], loss: Loss, counts: dict[str, Tensor]) -> Collected:
        """Forward and backward of all micro-batches; `.grad` of every parameter is then that of the whole batch of all ranks (in
        float16 times the loss scale)."""
        self.model.train()
        self.module.zero_grad(set_to_none=True)
        collected: Collected = []
        for number, piece in enumerate(pieces, start=1):
            several = self.model is not self._plain
            # gradients add up on each rank; the last micro-batch sends their sum
            with self.model.no_sync() if several and number < len(pieces) else contextlib.nullcontext():
                raw_2N = self.model(piece.ids_BT, piece.mask_BT, loss.temperature, loss.needs_entropy, piece.borders)
                value, metrics = loss.terms(token_outputs(raw_2N, piece.rows, loss.needs_entropy), piece.rows, counts)
                if not raw_2N.shape[1]:
                    value = value + raw_2N.sum()  # no target: keep the graph, the other ranks wait for its gradient
                collected.append((value.detach().clone(), metrics))
                # DDP takes the mean over ranks; the loss is normalised by the counts of all of them already
                value = value * self.parallel.dp_size
                (value if self.scaler is None else self.scaler.scaled(value)).backward()
        return collected

    # ---- inference

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """See `Engine.log_probs`."""
        self._offload.check()
        self.model.eval()
        pieces = micro_batches(batch, self.cutting(self.options.eval_batch_size), self.parallel)
        with contextlib.nullcontext() if self._adapters is None else self._adapters.used(adapter):
            found = [self._plain(piece.ids_BT, piece.mask_BT, temperature, entropy, piece.borders) for piece in pieces]
        out_2BT = gathered_outputs(found, pieces, batch.ids_BT.shape, found[0].dtype)
        return TokenOutputs(logp_BT=out_2BT[0], entropy_BT=out_2BT[1] if entropy else None)

    # ---- weights and checkpoints

    def weights(self) -> ModuleWeights:
        """See `Engine.weights`."""
        self._offload.check()
        if self._adapters is not None:
            return self._adapters.merged(self._hf_config, self._group(), self._offload.check)
        return ModuleWeights(dict(self.module.named_parameters()), self._hf_config, self._group(), self._offload.check)

    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.parallel.world_size > 1 else None

    @property
    def adapters(self) -> HuggingFaceAdapters | None:
        """The adapters of a run that trains some."""
        return self._adapters

    def adapter_weights(self, params: Mapping[str, Tensor] | None = None) -> ModuleWeights:
        """The adapters under PEFT's names; `params`: their gradients, say, in place of their values."""
        self._offload.check()
        return self._own_adapters().weights(self._hf_config, self._group(), self._offload.check, params)

    def export_adapter(self, path: Path, base: str) -> None:
        """See `Engine.export_adapter`."""
        self._own_adapters().export(self.adapter_weights(), path, base)

    def _own_adapters(self) -> HuggingFaceAdapters:
        if self._adapters is None:
            raise ValueError("this engine trains no adapter")
        return self._adapters

    def offload(self) -> int:
        """See `Engine.offload`."""
        if self._offload.active:
            return 0
        keep = [*self.module.parameters(), *self.module.buffers()]
        keep += [] if self.optimizer is None else optimizer_tensors(self.optimizer)
        keep += [] if self._adapters is None else self._adapters.start.tensors
        return self._offload.out(keep, [p.grad for p in self.module.parameters() if p.grad is not None])

    def onload(self) -> None:
        """See `Engine.onload`."""
        self._offload.back()

    def save(self, path: Path) -> None:
        """See `Engine.save`."""
        self._offload.check()
        optimizer, scaler = (self.optimizer, self.scaler) if self.options.save_optimizer else (None, None)
        save_state(path, self._model_state(), Training(self._trained, optimizer, scaler), self.parallel)

    def load(self, path: Path) -> None:
        """See `Engine.load`."""
        self._offload.check()
        load_state(path, self._model_state(), Training(self._trained, self.optimizer, self.scaler), self.parallel)

    def _model_state(self) -> ModelState:
        """What a checkpoint keeps of the model: all of it, or the adapters. Rank 0 alone writes it."""
        if self._adapters is None:
            return whole_state(ModuleWeights(dict(self.module.named_parameters()), self._hf_config), self.module, self.folder)
        return adapter_state(self._adapters, ModuleWeights(self._adapters.parameters, self._hf_config), str(self.folder))
