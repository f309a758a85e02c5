"""The output folder: may it be used, and the small files that a run leaves in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmca.config import RunConfig, to_yaml
from rlmca.observe.jsonl import dumps, read_lines, write_atomically
from rlmca.observe.log import LOG_FILE

_RESULTS_OF_A_RUN = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "train_results.json",
)


class OutputDirError(ValueError):
    """An output folder that this run may not write to."""


def prepare_output_dir(cfg: RunConfig, is_main: bool = True, *, resuming: bool = False) -> Path:
    """Makes `output_dir` and returns it.

    A folder that holds the results of a finished run is refused, unless this run resumes from a checkpoint in it or
    `overwrite_output_dir` is set. Nothing is deleted.
    """
    if not cfg.train.output_dir:
        raise OutputDirError("output_dir is not set: name the folder for logs, checkpoints and the model")
    path = Path(cfg.train.output_dir)
    if path.exists() and not path.is_dir():
        raise OutputDirError(f"output_dir: {path} is a file; name a folder")
    if not (resuming or cfg.train.overwrite_output_dir):
        there = [name for name in _RESULTS_OF_A_RUN if (path / name).exists()]
        if (path / "hf").is_dir() and any((path / "hf").iterdir()):
            there.append("hf/")  # the folder at the end replaces it as a whole
        if there:
            raise OutputDirError(
                f"output_dir: {path} holds the results of another run ({', '.join(there)}); "
                "name another folder or set overwrite_output_dir: true"
            )
    if is_main:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputDirError(f"output_dir: {path} cannot be made: {error}") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise OutputDirError(f"output_dir: {path} cannot be written to")
    return path


def write_json(path: str | Path, value: Any) -> None:
    """Strict JSON, non-finite numbers as null; the file has its old or its new content, never a part."""
    write_atomically(Path(path), dumps(value, indent=2) + "\n")


def write_config(cfg: RunConfig, path: str | Path | None = None) -> None:
    """`config.yaml` as resolved (secrets left out), in `output_dir` unless a path is given."""
    write_atomically(Path(path) if path is not None else Path(cfg.train.output_dir) / "config.yaml", to_yaml(cfg))


def write_notes(folder: str | Path, notes: Sequence[str]) -> None:
    """What the user of an adapter must know, as `README.md` beside it; no file when there is nothing."""
    if notes:
        write_atomically(Path(folder) / "README.md", "# LoRA adapter\n\n" + "".join(f"- {text}\n" for text in notes))


def write_results(output_dir: str | Path, split: str, metrics: Mapping[str, Any]) -> None:
    """`{split}_results.json`, and the same metrics merged into `all_results.json` (names as in Transformers)."""
    folder = Path(output_dir)
    write_json(folder / f"{split}_results.json", metrics)
    merged = folder / "all_results.json"
    before = json.loads(merged.read_text(encoding="utf-8")) if merged.exists() else {}
    write_json(merged, {**before, **metrics})


def write_trainer_state(
    output_dir: str | Path, *, step: int, total_steps: int, epoch: float, extra: Mapping[str, Any] | None = None
) -> None:
    """`trainer_state.json` in Transformers' form: global_step, max_steps, epoch and the log's lines as `log_history`."""
    folder = Path(output_dir)
    history = []
    for line in read_lines(folder / LOG_FILE) if (folder / LOG_FILE).exists() else ():
        entry = {key: value for key, value in line.items() if key not in ("current_steps", "total_steps", "lr")}
        entry["step"] = line["current_steps"]
        if "lr" in line:
            entry["learning_rate"] = line["lr"]
        history.append(entry)
    state = {"global_step": step, "max_steps": total_steps, "epoch": epoch, "is_world_process_zero": True, "log_history": history}
    write_json(folder / "trainer_state.json", {**state, **(extra or {})})
