"""The model a command starts from: its folder, tokenizer and template, how replies are drawn, who draws them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rlmca.config import RunConfig
from rlmca.data import ChatTemplate, DataError, load_tokenizer, stop_ids
from rlmca.layouts import Form
from rlmca.rollout.base import RolloutEngine, RolloutError, SamplingParams
from rlmca.rollout.local import LocalEngine
from rlmca.rollout.samples import PromptRow, stop_text_ids
from rlmca.rollout.sglang.environment import resolve_engine
from rlmca.transfer.source import read_hf_config, resolve_model


@dataclass(frozen=True)
class Source:
    """Where a model's files are, its tokenizer and its chat template."""

    folder: Path
    tokenizer: Any
    template: ChatTemplate

    def stop_ids(self, stop: list[str]) -> tuple[int, ...]:
        """Every id that ends a reply: of the generation config, the tokenizer, the template, and the texts in `stop`."""
        generation = GenerationConfig.from_pretrained(self.folder) if (self.folder / "generation_config.json").is_file() else None
        try:
            texts = stop_text_ids(self.tokenizer, stop)
        except ValueError as error:
            raise DataError(str(error)) from None
        return stop_ids(self.tokenizer, generation, (self.template.end_id, *texts))


def open_source(cfg: RunConfig) -> Source:
    """Find the files of `model_name_or_path` and read its tokenizer."""
    folder = resolve_model(cfg.model.model_name_or_path, cfg.model)
    tokenizer = load_tokenizer(dataclasses.replace(cfg.model, model_name_or_path=str(folder)))
    # Texts are not rendered, so stage pt takes tokenizers without a template too.
    name = cfg.model.template or ("default" if cfg.stage == "pt" else None)
    return Source(folder, tokenizer, ChatTemplate(tokenizer, name, cfg.data.enable_thinking, cfg.data.default_system))


def sampling_params(cfg: RunConfig, source: Source, *, greedy: bool) -> SamplingParams:
    """How the YAML wants replies drawn, or the most likely token each time."""
    generation = cfg.generation
    return SamplingParams(
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=-1 if greedy else generation.top_k,
        max_new_tokens=generation.max_new_tokens,
        stop_ids=source.stop_ids(generation.stop),
    )


def run_dtype(cfg: RunConfig) -> torch.dtype:
    """The type of weights outside of the trainer: rollouts and exported folders."""
    return torch.bfloat16 if cfg.train.bf16 else torch.float16 if cfg.train.fp16 else torch.float32


def rollout_engine(cfg: RunConfig, source: Source, device: torch.device | str, log_dir: Path) -> RolloutEngine:
    """The engine that writes replies, with the source's weights: SGLang servers, or a Transformers model in this process.

    Servers write their logs to `log_dir`.
    """
    if resolve_engine(cfg) == "sglang":
        from rlmca.rollout.sglang.setup import sglang_engine  # an HTTP client and a server's process are needed only here

        return sglang_engine(cfg, source.folder, dtype=run_dtype(cfg), log_dir=log_dir)
    return LocalEngine(
        source.folder,
        pad_id=source.tokenizer.pad_token_id,
        dtype=run_dtype(cfg),
        device=device,
        rollout_batch=cfg.rollout.rollout_batch,
        load_options={"trust_remote_code": cfg.model.trust_remote_code},
    )


def rollout_form(cfg: RunConfig) -> Form | None:
    """The `form` of the engine above, for ranks that have none but send it their part of the weights."""
    return None if resolve_engine(cfg) == "sglang" else LocalEngine.form


def context_limit(cfg: RunConfig, source: Source) -> tuple[int | None, str]:
    """Most tokens of prompt and reply together (None: no bound), and what sets it."""
    config = read_hf_config(source.folder)
    own = (config.get("text_config") or config).get("max_position_embeddings")
    served = cfg.rollout.sglang.context_length if resolve_engine(cfg) == "sglang" else None
    limit = min((n for n in (own, served) if n is not None), default=None)
    return limit, "sglang: context_length" if limit is not None and limit == served else "the model's max_position_embeddings"


def check_lengths(cfg: RunConfig, source: Source, prompts: Sequence[PromptRow]) -> None:
    """Raises RolloutError, before anything is written, when the longest prompt and its reply would not fit the model.

    An engine would find out in the middle of a run, at the first step that has that prompt.
    """
    limit, name = context_limit(cfg, source)
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if limit is not None and longest + cfg.generation.max_new_tokens > limit:
        raise RolloutError(
            f"the longest prompt has {longest} tokens and max_new_tokens is {cfg.generation.max_new_tokens}, together more than {name} "
            f"{limit}: lower max_new_tokens or max_prompt_len"
        )
