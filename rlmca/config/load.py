"""From a file and overrides to a checked `RunConfig`, or to all of its errors at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmca.config import checks, presets
from rlmca.config.convert import Unfit, convert, nearest
from rlmca.config.environment import Environment
from rlmca.config.errors import ConfigError
from rlmca.config.foreign import ALIASES, FOREIGN
from rlmca.config.reading import apply_overrides, read_file
from rlmca.config.schema import SECTIONS, RunConfig, keys

COMMANDS = ("train", "eval", "generate", "chat", "export")


def load_config(path: str | Path, overrides: Sequence[str] = (), *, env: Environment, command: str = "train") -> RunConfig:
    """Read a YAML or JSON file, apply `key=value` overrides and check everything for `command`.

    ConfigError holds every problem: unreadable values, unknown and refused keys, contradictions. Nothing is loaded or started.
    """
    values, errors = read_file(path)
    errors = errors + apply_overrides(values, overrides)
    return make_config(values, errors, env=env, command=command)


def make_config(values: Mapping[str, Any], errors: Sequence[str] = (), *, env: Environment, command: str = "train") -> RunConfig:
    """A checked configuration from plain values; `errors` found while reading are reported with the rest."""
    if command not in COMMANDS:
        raise ValueError(f"command {command!r} is not one of {', '.join(COMMANDS)}")
    problems, notes, broken = list(errors), [], set[str]()
    fitted: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for written, value in values.items():
        name = ALIASES.get(written, written)
        if name in sources:
            problems.append(f"{sources[name]} and {written} are the same key: leave one out")
            continue
        sources[name] = written
        if name in keys():
            try:
                fitted[name] = convert(keys()[name], _share(name, value, fitted))
            except Unfit as error:
                text = "does not fit: write text" if keys()[name].rule.secret else str(error)
                problems.append(text if text.startswith(f"{written} {value}:") else f"{written}: {text}")
                broken.add(name)
        elif written in FOREIGN:
            foreign = FOREIGN[written]
            if foreign.kind == "no_effect":
                notes.append(f"{foreign.name} has no effect: {foreign.reason}")
            elif not foreign.accepts(value):
                problems.append(foreign.sentence(value))
        else:
            problems.append(_unknown(written))
    cfg = _resolve(_build(fitted, env, command))
    problems += [text for read, text in checks.findings(cfg, command) if not broken & set(read)]
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(cfg, notes=(*notes, *checks.notes(cfg, command)))


def _share(name: str, value: Any, fitted: dict[str, Any]) -> Any:
    """Transformers 5 writes the share of warm-up as warmup_steps below 1: moved to warmup_ratio, where it belongs."""
    if name == "warmup_steps":
        try:
            share = float(value)
        except (TypeError, ValueError):
            return value
        if 0 < share < 1:
            if fitted.get("warmup_ratio"):
                raise Unfit(f"{value} is a share of the run, and warmup_ratio is given too: leave one out")
            fitted["warmup_ratio"] = share
            return 0
    elif name == "warmup_ratio" and fitted.get("warmup_ratio"):
        raise Unfit(f"{value} and warmup_steps: {fitted['warmup_ratio']} (a share of the run) are both given: leave one out")
    return value


def _unknown(name: str) -> str:
    close = nearest(name, [*keys(), *ALIASES]) or nearest(name, FOREIGN)
    return f"{name}: unknown key" + (f", did you mean {close}?" if close else "; rlmca-cli help lists all keys")


def _build(fitted: Mapping[str, Any], env: Environment, command: str) -> RunConfig:
    given = frozenset(name for name, value in fitted.items() if value is not None)
    fitted = {**fitted, **presets.fill(fitted)}
    sections = {
        section: cls(**{f.name: fitted[f.name] for f in dataclasses.fields(cls) if f.name in fitted}) for section, cls in SECTIONS.items()
    }
    engine = "megatron" if env.use_mca else "huggingface" if command == "train" else "none"
    return RunConfig(stage=fitted.get("stage", "sft"), engine=engine, env=env, given=given, **sections)


def _resolve(cfg: RunConfig) -> RunConfig:
    """Defaults that follow from other keys."""
    rl, train, data, megatron = cfg.rl, cfg.train, cfg.data, cfg.megatron
    if rl.mini_batch_size is None:
        rl = dataclasses.replace(rl, mini_batch_size=rl.rollout_batch_size)
    if rl.loss_agg == "seq_mean_token_sum_norm" and rl.loss_agg_constant is None:
        rl = dataclasses.replace(rl, loss_agg_constant=float(cfg.generation.max_new_tokens))
    if train.eval_strategy == "steps" and train.eval_steps is None:
        train = dataclasses.replace(train, eval_steps=train.logging_steps)
    if train.stop_value is not None and not train.stop_metric:
        train = dataclasses.replace(train, stop_metric="eval_accuracy" if cfg.stage == "grpo" else "eval_loss")
    if cfg.stage == "pt" and data.packing is None and data.neat_packing is None:
        data = dataclasses.replace(data, packing=True)  # as in LLaMA-Factory
    if cfg.tracking.use_swanlab and "swanlab" not in train.report_to:
        train = dataclasses.replace(train, report_to=[*train.report_to, "swanlab"])
    if data.data_seed is None:
        data = dataclasses.replace(data, data_seed=train.seed)
    if megatron.recompute_granularity == "full" and megatron.recompute_method is None and megatron.recompute_num_layers is None:
        megatron = dataclasses.replace(megatron, recompute_method="uniform", recompute_num_layers=1)  # as in mcore_adapter: every layer
    return dataclasses.replace(cfg, rl=rl, train=train, data=data, megatron=megatron)
