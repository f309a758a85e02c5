"""The local engine: a Transformers model in this process that generates with its own loop.

A batch is made of whole prompts of similar length. Each prompt runs through the model once; its cache is then
repeated for its replies, every step adds one token to every reply, and finished replies leave the batch. What a
reply says depends on its prompt, its seed and the weights, not on its neighbours (rounding of the matrix products
aside).

Shape legend: P prompts of a chunk, B replies of a chunk, A replies still in the batch, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlmca.layouts import Form
from rlmca.rollout.attention import GROUPED_ATTENTION, register_grouped_attention
from rlmca.rollout.base import Reply, Request, RolloutError, SamplingParams
from rlmca.rollout.cache import RowCache, repeats, select_rows
from rlmca.rollout.chunks import Piece, plan_chunks
from rlmca.rollout.requests import check_requests
from rlmca.rollout.sampling import choose
from rlmca.transfer.module import copy_to_module

_DROP_SHARE = 0.25
"""Finished replies leave the batch when they are this share of it: dropping copies the cache of the others."""


class LocalEngine:
    """A causal language model of Transformers as a rollout engine (see `base.RolloutEngine`).

    `source` is a Hugging Face folder (weights are read, version 0) or a model config (nothing can be generated before
    the first `update_weights`). `rollout_batch` bounds the replies generated at once (None: no bound). `pad_id` only
    fills the places that no token attends to; it may equal a stop token or any other id. `load_options` go to
    Transformers (revision, cache_dir, token, trust_remote_code).
    """

    form: Form | None = "stacked"
    """Modules of Transformers hold the experts of a layer in one tensor."""

    def __init__(
        self,
        source: str | Path | PreTrainedConfig,
        *,
        pad_id: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rollout_batch: int | None = None,
        load_options: Mapping[str, Any] | None = None,
    ) -> None:
        if rollout_batch is not None and rollout_batch < 1:
            raise ValueError(f"rollout_batch is {rollout_batch}: write a positive number of replies, or leave it out for no bound")
        register_grouped_attention()
        self.device = torch.device(device)
        self.module: PreTrainedModel = _build(source, dtype, load_options or {}).to(self.device)
        self.module.eval().requires_grad_(False)
        self.pad_id = 0 if pad_id is None else pad_id
        self.rollout_batch = rollout_batch
        self._version = -1 if isinstance(source, PreTrainedConfig) else 0
        config = self.module.config
        layer_types = getattr(config, "layer_types", None) or []
        every_layer = not layer_types and getattr(config, "sliding_window", None) is not None  # Mistral's have one and no list
        self._windowed = every_layer or any(kind != "full_attention" for kind in layer_types)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first, and after an update that failed half way."""
        return self._version

    @torch.no_grad()
    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Writes every parameter from (Hugging Face name, tensor), each exactly once; tied tensors follow."""
        self._version = -1
        copy_to_module(stream, self.module)
        self._version = version

    def close(self) -> None:
        """Frees the model."""
        self._version = -1
        self.module.to("meta")

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Reply]]:
        """Replies to every request, `result[i][k]` for `requests[i].seeds[k]`."""
        self._check(requests, params)
        replies: list[list[Reply]] = [[] for _ in requests]
        pieces = plan_chunks([len(r.prompt_ids) for r in requests], [len(r.seeds) for r in requests], self.rollout_batch)
        for chunk in pieces:
            for piece, group in zip(chunk, self._generate_chunk(requests, chunk, params), strict=True):
                replies[piece.request].extend(group)
        return replies

    @torch.no_grad()
    def stream(self, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Iterator[int]:
        """The ids of one reply, one after the other: those that `generate` gives for this prompt and seed."""
        self._check([Request(prompt_ids, [seed])], params)
        state = _prefill(self.module, [prompt_ids], self.pad_id, self._windowed, torch.zeros(1, dtype=torch.int64, device=self.device))
        seed_A = torch.tensor([seed], dtype=torch.int64, device=self.device)
        for t in range(params.max_new_tokens):
            token_A, logp_A = choose(state.logits_AV, params, seed_A, t)
            if not bool(logp_A.isfinite().all()):
                raise self._not_finite(t)
            token = int(token_A)
            yield token
            if token in params.stop_ids or t + 1 == params.max_new_tokens:
                return
            state.step(self.module, token_A)

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        if self._version < 0:
            raise RolloutError("the local rollout engine has no weights: call update_weights before generate")
        config = self.module.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        limit = "the model's max_position_embeddings"
        check_requests(requests, params, vocab_size=config.vocab_size, longest=longest, limit=limit)

    def _not_finite(self, t: int) -> RolloutError:
        return RolloutError(f"log-probabilities at reply position {t} are not finite with the weights of version {self._version}")

    def _generate_chunk(self, requests: Sequence[Request], chunk: Sequence[Piece], params: SamplingParams) -> list[list[Reply]]:
        prompts = [requests[piece.request].prompt_ids for piece in chunk]
        counts = [piece.count for piece in chunk]
        seeds = [seed for piece in chunk for seed in requests[piece.request].seeds[piece.first : piece.first + piece.count]]
        owner_B = repeats(counts, self.device)
        state = _prefill(self.module, prompts, self.pad_id, self._windowed, owner_B)
        seed_A = torch.tensor(seeds, dtype=torch.int64, device=self.device)
        stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=self.device)
        B = len(seeds)
        row_A, done_A = torch.arange(B, device=self.device), torch.zeros(B, dtype=torch.bool, device=self.device)
        length_B = torch.full((B,), params.max_new_tokens, device=self.device)
        ids_tB: list[Tensor] = []
        logp_tB: list[Tensor] = []
        for t in range(params.max_new_tokens):
            token_A, logp_A = choose(state.logits_AV, params, seed_A, t)
            if not bool((logp_A.isfinite() | done_A).all()):
                raise self._not_finite(t)
            ids_tB.append(token_A.new_zeros(B).index_copy_(0, row_A, token_A))
            logp_tB.append(logp_A.new_zeros(B).index_copy_(0, row_A, logp_A))
            stopped_A = torch.isin(token_A, stops) & ~done_A
            length_B[row_A[stopped_A]] = t + 1
            done_A = done_A | stopped_A
            finished = int(done_A.sum())
            if finished == len(done_A) or t + 1 == params.max_new_tokens:
                break
            if finished >= _DROP_SHARE * len(done_A):
                keep_A = (~done_A).nonzero()[:, 0]
                state.keep(keep_A)
                row_A, token_A, seed_A, done_A = row_A[keep_A], token_A[keep_A], seed_A[keep_A], done_A[keep_A]
            state.step(self.module, token_A)
        return _replies(ids_tB, logp_tB, length_B, row_A[~done_A], counts, self._version)


@dataclass
class _State:
    """The batch between two steps: caches, next-token logits and which cached positions hold a token."""

    cache: RowCache
    logits_AV: Tensor
    position_A1: Tensor
    valid_AS: Tensor | None
    """None when no row has padding, so that no mask is needed."""
    windowed: bool

    def keep(self, keep_A: Tensor) -> None:
        """Only the chosen rows stay."""
        select_rows(self.cache, keep_A)
        self.position_A1 = self.position_A1[keep_A]
        if self.valid_AS is not None:
            self.valid_AS = self.valid_AS[keep_A]

    def step(self, module: PreTrainedModel, token_A: Tensor) -> None:
        """Feeds one token to every row."""
        self.position_A1 = self.position_A1 + 1
        mask = self.valid_AS
        if mask is not None:
            mask = self.valid_AS = torch.nn.functional.pad(mask, (0, 1), value=True)
            # a ready-made 4-D mask is used as it is; the model only has to build its own where layers have windows
            mask = mask if self.windowed else mask[:, None, None, :]
        out = module(
            input_ids=token_A[:, None],
            attention_mask=mask,
            position_ids=self.position_A1,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits_AV = out.logits[:, -1]


def _prefill(module: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int, windowed: bool, owner_B: Tensor) -> _State:
    """Runs each prompt once, padded on the left, and gives every reply a copy of its prompt's cache."""
    device = owner_B.device
    length_P = torch.tensor([len(p) for p in prompts], device=device)
    width = int(length_P.max())
    ids_PS = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    ragged = bool((length_P != width).any())
    place_S = torch.arange(width, device=device)
    valid_PS = place_S >= (width - length_P)[:, None]
    cache = RowCache(module.config)
    out = module(
        input_ids=ids_PS,
        attention_mask=valid_PS if ragged else None,
        position_ids=(place_S - (width - length_P)[:, None]).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    select_rows(cache, owner_B)
    return _State(cache, out.logits[:, -1][owner_B], (length_P - 1)[owner_B, None], valid_PS[owner_B] if ragged else None, windowed)


def _replies(
    ids_tB: list[Tensor], logp_tB: list[Tensor], length_B: Tensor, cut_A: Tensor, counts: Sequence[int], version: int
) -> list[list[Reply]]:
    """Columns of tokens to lists of replies, group by group. `cut_A` are the rows that ran into the length limit."""
    ids, logp, lengths = torch.stack(ids_tB, 1).tolist(), torch.stack(logp_tB, 1).tolist(), length_B.tolist()
    cut = set(cut_A.tolist())
    flat = (
        Reply(row[:n], lp[:n], [version] * n, "length" if b in cut else "stop")
        for b, (row, lp, n) in enumerate(zip(ids, logp, lengths, strict=True))
    )
    return [[next(flat) for _ in range(count)] for count in counts]


def _build(source: str | Path | PreTrainedConfig, dtype: torch.dtype, load_options: Mapping[str, Any]) -> PreTrainedModel:
    options = {"dtype": dtype, "attn_implementation": GROUPED_ATTENTION, **load_options}
    if not isinstance(source, PreTrainedConfig):
        return AutoModelForCausalLM.from_pretrained(str(source), **options)
    with torch.random.fork_rng(devices=[]):  # the random start values are overwritten: they must not move anybody's generator
        return AutoModelForCausalLM.from_config(source, **options)
