"""The commands that need a model but no training: eval, generate, export. What each needs, `load_config` has checked."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlmca.config import RunConfig
from rlmca.data import Hub, Prompt, load_prompts
from rlmca.engines.finetuning_setup import adapter_folders
from rlmca.layouts.families import family_of
from rlmca.observe.console import console as run_console
from rlmca.observe.console import note
from rlmca.observe.jsonl import dumps, write_atomically
from rlmca.rewards import rewards_of
from rlmca.rollout.base import RolloutEngine, SamplingParams
from rlmca.run.evaluate import sample_all, summarise, summarise_sets
from rlmca.run.output import write_results
from rlmca.run.source import Source, check_lengths, open_source, rollout_engine, rollout_form, run_dtype, sampling_params
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.rewrite import rewrite_hf
from rlmca.transfer.hf_folder import read_config
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.source import resolve_model
from rlmca.types import Sample

PREDICTIONS = "generated_predictions.jsonl"
"""File of `generate`, with LLaMA-Factory's keys prompt, predict and label among others."""


class CommandError(ValueError):
    """A key that turns out not to fit the model, the folder or the functions it names."""


@dataclass
class _Loaded:
    """What both eval and generate work with."""

    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    sets: dict[str, int]
    """How many of the prompts each data set has; they stand one set after the other."""
    engine: RolloutEngine
    params: SamplingParams
    n: int


def run_eval(cfg: RunConfig, *, console: Console | None = None) -> dict[str, float]:
    """Scores `model_name_or_path` on `eval_dataset` (else `dataset`) with the reward functions.

    One greedy reply a prompt, or `num_generations` sampled ones when the file says `do_sample: true`. Prints a table;
    with an `output_dir` it writes eval_results.json, all_results.json and every reply to eval_predictions.jsonl.
    """
    sampled = cfg.generation.do_sample and "do_sample" in cfg.given
    try:
        built = rewards_of(cfg.rewards, cfg.generation.max_new_tokens)
    except ValueError as error:
        raise CommandError(f"rewards: {error}") from None
    with built as rewards:
        loaded = _load(cfg, sampled=sampled, n=cfg.rl.num_generations if sampled else 1)
        start = time.perf_counter()
        with contextlib.closing(loaded.engine):
            samples = _generate(loaded, cfg, "eval")
        seconds = time.perf_counter() - start
        rewards.score(samples)
    metrics = summarise(samples)
    if cfg.data.eval_on_each_dataset:
        metrics |= summarise_sets(samples, loaded.sets)
    metrics["tokens_per_second"] = sum(len(s.reply_ids) for s in samples) / seconds
    _print(console, f"eval of {cfg.model.model_name_or_path} on {', '.join(_datasets(cfg))}", metrics)
    if cfg.train.output_dir:
        folder = Path(cfg.train.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_predictions(folder / "eval_predictions.jsonl", samples, loaded.tokenizer)
        write_results(folder, "eval", {f"eval_{name}": value for name, value in metrics.items()})
    return metrics


def run_generate(cfg: RunConfig, *, console: Console | None = None) -> Path:
    """Writes the replies of `model_name_or_path` to the prompts of `eval_dataset` (else `dataset`); returns the file.

    `do_sample: false` takes the greedy reply; otherwise one sampled reply a prompt, or `num_generations` when the file
    sets it. The file appears whole or not at all.
    """
    several = cfg.generation.do_sample and "num_generations" in cfg.given
    loaded = _load(cfg, sampled=cfg.generation.do_sample, n=cfg.rl.num_generations if several else 1)
    with contextlib.closing(loaded.engine):
        samples = _generate(loaded, cfg, "generate")
    folder = Path(cfg.train.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PREDICTIONS
    write_predictions(path, samples, loaded.tokenizer)
    (console or run_console()).print(f"{len(samples)} replies in {path}", highlight=False, soft_wrap=True)
    return path


def run_export(cfg: RunConfig, *, console: Console | None = None) -> Path:
    """Writes the Hugging Face folder `model_name_or_path` again to `export_dir`, in shards of `export_size` GB; returns it.

    Adapters in `adapter_name_or_path` are merged into it.

    `bf16: true` in the file casts to bfloat16, `fp16: true` to float16, false to float32; without the keys the stored type stays.
    """
    dtype = run_dtype(cfg) if {"bf16", "fp16"} & cfg.given else None
    out = Path(cfg.export.export_dir)
    try:
        source = resolve_model(cfg.model.model_name_or_path, cfg.model)
        _check_exportable(source)
        tensors = rewrite_hf(source, out, dtype, float(cfg.export.export_size), adapter_folders(cfg))
    except FileExistsError as error:
        raise CommandError(f"export_dir: {error}") from None
    except ConvertError as error:
        raise CommandError(str(error)) from None
    (console or run_console()).print(f"{tensors} tensors in {out}", highlight=False, soft_wrap=True)
    return out


def _check_exportable(source: Path) -> None:
    """Families that only Transformers knows can be trained by its engine; what their tensors are is not known here."""
    config = read_config(source)
    try:
        family_of(config)
    except ValueError as error:
        raise CommandError(
            f"model_name_or_path: {error}; merge an adapter with peft's merge_and_unload and save_pretrained (a run that trains the "
            "adapter writes the merged model to output_dir/hf)"
        ) from None


def write_predictions(path: Path, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
    """One JSON object a reply: prompt, predict, label, finish, ids, logp and, where scored, reward, its parts and messages."""
    write_atomically(path, "".join(dumps(row) + "\n" for row in _prediction_rows(samples, tokenizer)))


def _prediction_rows(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> Iterable[dict[str, Any]]:
    texts: dict[int, str] = {}
    for sample in samples:
        if sample.group not in texts:
            texts[sample.group] = tokenizer.decode(sample.prompt_ids)
        row: dict[str, Any] = {
            "prompt": texts[sample.group],
            "predict": sample.reply,
            "label": sample.row.get("answer"),
            "finish": sample.finish,
            "ids": sample.reply_ids,
            "logp": sample.reply_logp,
        }
        if sample.reward_parts:
            row |= {"reward": sample.reward, "reward_parts": dict(sample.reward_parts), "messages": sample.row.get("messages")}
            if sample.row.get("shown_tools"):
                row["tools"] = sample.row["shown_tools"]
        yield row


def _datasets(cfg: RunConfig) -> list[str]:
    return list(cfg.data.eval_dataset or cfg.data.dataset)


def _load(cfg: RunConfig, *, sampled: bool, n: int) -> _Loaded:
    source = open_source(cfg)
    hub = Hub(cache_dir=cfg.model.cache_dir, token=cfg.model.hf_hub_token)
    longest = cfg.generation.max_prompt_len
    prompts: list[Prompt] = []
    sets: dict[str, int] = {}
    for name in _datasets(cfg):
        found = load_prompts(cfg.data, source.template, longest, [name], note, seed=cfg.train.seed, hub=hub)
        prompts += found
        sets[name] = len(found)
    params = sampling_params(cfg, source, greedy=not sampled)
    check_lengths(cfg, source, prompts)
    return _Loaded(source.tokenizer, prompts, sets, open_engine(cfg, source), params, n)


def open_engine(cfg: RunConfig, source: Source) -> RolloutEngine:
    """The rollout engine with the weights of the source's folder, the adapters of the configuration merged into them."""
    with contextlib.ExitStack() as stack:
        # whatever is wrong with the adapters shows before a model is loaded or a server started
        adapters = adapter_folders(cfg)
        merged = stack.enter_context(MergedFolder(source.folder, adapters)) if adapters else None
        return _start_engine(cfg, source, None if merged is None else merged.tensors(rollout_form(cfg)))


def _start_engine(cfg: RunConfig, source: Source, tensors: Iterator[tuple[str, Tensor]] | None) -> RolloutEngine:
    device = "cuda" if torch.cuda.is_available() and not cfg.train.use_cpu else "cpu"
    log_dir = Path(cfg.train.output_dir) / "sglang" if cfg.train.output_dir else Path(tempfile.gettempdir()) / f"rlmca-{os.getpid()}"
    engine = rollout_engine(cfg, source, device, log_dir)
    if tensors is not None:
        try:
            engine.update_weights(tensors, 0)
        except ValueError as error:  # Transformers holds weights under other names than the files
            engine.close()
            raise CommandError(f"adapter_name_or_path: the merged weights of {source.folder} do not fit its model: {error}") from None
        except BaseException:
            engine.close()
            raise
    return engine


def _generate(loaded: _Loaded, cfg: RunConfig, description: str) -> list[Sample]:
    return sample_all(
        loaded.engine, loaded.prompts, loaded.params, loaded.n, tokenizer=loaded.tokenizer, seed=cfg.train.seed, description=description
    )


def _print(console: Console | None, title: str, metrics: dict[str, float]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:,.0f}" if abs(value) > 1 and float(value).is_integer() else f"{value:.4f}")
    (console or run_console()).print(table)
