"""`dataset_info.json`: what a data set's name stands for, in LLaMA-Factory's schema."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmca.data.errors import DataError

INFO_FILE = "dataset_info.json"
FORMATS = ("alpaca", "sharegpt", "openai")
FILE_TYPES = ("json", "jsonl", "csv", "parquet", "arrow", "txt")
TEXT_COLUMN = "text"
"""The one column of a .txt file, whose rows are its lines."""

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": None, "system": None, "tools": None}
TURN_COLUMNS = {"messages": "conversations", "system": None, "tools": None}
RL_COLUMNS = {"answer": "answer", "ability": "ability", "verifier": "verifier"}
SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}

KNOWN_KEYS = (
    "file_name",
    "hf_hub_url",
    "ms_hub_url",
    "om_hub_url",
    "script_url",
    "cloud_file_name",
    "formatting",
    "ranking",
    "subset",
    "split",
    "folder",
    "num_samples",
    "columns",
    "tags",
)
LATER_SOURCES = {
    "ms_hub_url": "ModelScope",
    "om_hub_url": "Modelers",
    "script_url": "a loading script",
    "cloud_file_name": "a file in cloud storage",
}
LATER_COLUMNS = ("images", "videos", "audios", "kto_tag")
PAIR_COLUMNS = ("chosen", "rejected")
# Without one of these no row can be read, so a `columns` that does not mention them keeps the default; the others
# are read only when `columns` names them, as in LLaMA-Factory.
ALWAYS_READ = ("prompt", "response", "messages", *RL_COLUMNS, *PAIR_COLUMNS)


@dataclass(frozen=True)
class DatasetEntry:
    """One data set: exactly one of `path`, `hub` and `procedural` says where its rows are."""

    name: str
    path: Path | None = None
    hub: str | None = None
    procedural: str | None = None
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    ranking: bool | None = False
    """Rows are preference pairs; None: no entry says so (a data set given as a path, or a name on the hub)."""
    formatting: str | None = "alpaca"
    """None: seen from the first row (a data set given as a path)."""
    columns: Mapping[str, str | None] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The source, for error messages."""
        if self.path is not None:
            return f"file {self.path}"
        return f"hub data set {self.hub}" if self.hub is not None else f"{self.procedural}"

    def described_columns(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.columns.items() if value is not None)


def nearest(name: str, known: Sequence[str]) -> str:
    """'; nearest: x' for an error message, or the whole list when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else (f"; known: {', '.join(sorted(known))}" if known else "")


def default_columns(formatting: str) -> dict[str, str | None]:
    base = ALPACA_COLUMNS if formatting == "alpaca" else TURN_COLUMNS
    columns: dict[str, str | None] = {**base, **RL_COLUMNS}
    if formatting == "openai":
        columns["messages"] = "messages"
    return columns


def default_tags(formatting: str) -> dict[str, str]:
    return dict(OPENAI_TAGS if formatting == "openai" else SHAREGPT_TAGS)


def with_formatting(entry: DatasetEntry, formatting: str, prompt: str | None = None) -> DatasetEntry:
    """An entry whose format was only seen from its rows; `prompt` is the column of the prompt, where it has another name."""
    columns = {**default_columns(formatting), **({"prompt": prompt} if prompt else {})}
    return dataclasses.replace(entry, formatting=formatting, columns=columns, tags=default_tags(formatting))


def read_info(dataset_dir: str | Path) -> dict[str, Any]:
    """The whole `dataset_info.json` of a folder. DataError when it is missing or no JSON object."""
    path = Path(dataset_dir) / INFO_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: set dataset_dir to the folder that holds {INFO_FILE}") from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(info, dict):
        raise DataError(f"{path} must hold one object, data set name → entry; it holds a {type(info).__name__}")
    return info


def resolve(names: Sequence[str], dataset_dir: str | Path) -> list[DatasetEntry]:
    """The entries of `names`; all problems at once in one DataError, nothing read but `dataset_info.json`."""
    entries, errors = [], []
    info: dict[str, Any] | None = None
    for name in names:
        try:
            if not isinstance(name, str) or not name.strip():
                raise DataError(f"data set name {name!r} is empty")
            if name.startswith("reasoning_gym:"):
                entries.append(DatasetEntry(name=name, procedural=name, formatting="procedural"))
                continue
            if str(dataset_dir) == "ONLINE":
                columns, tags = default_columns("alpaca"), default_tags("alpaca")
                entries.append(DatasetEntry(name=name, hub=name, ranking=None, columns=columns, tags=tags))
                continue
            if str(dataset_dir).startswith("REMOTE:"):
                raise DataError("dataset_dir REMOTE:… is not in this version: download dataset_info.json and name its folder")
            if _is_path(name):
                entries.append(DatasetEntry(name=name, path=Path(name), ranking=None, formatting=None))
                continue
            if info is None:
                info = read_info(dataset_dir)
            if name not in info:
                raise DataError(f"data set {name!r} is not in {Path(dataset_dir) / INFO_FILE}{nearest(name, list(info))}")
            entries.append(parse_entry(name, info[name], Path(dataset_dir)))
        except DataError as error:
            if str(error) not in errors:
                errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return entries


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.suffix.lstrip(".") in FILE_TYPES and path.is_file()


def parse_entry(name: str, raw: Any, dataset_dir: Path) -> DatasetEntry:
    """One checked entry; DataError names the data set, the key, and what works instead."""
    at = f"data set {name!r} in {dataset_dir / INFO_FILE}"
    if not isinstance(raw, dict):
        raise DataError(f"{at}: the entry must be an object, not {type(raw).__name__}")
    for key in raw:
        if key not in KNOWN_KEYS:
            raise DataError(f"{at}: unknown key {key!r}{nearest(key, KNOWN_KEYS)}")
    ranking = raw.get("ranking") or False
    if not isinstance(ranking, bool):
        raise DataError(f"{at}: ranking must be true or false, not {ranking!r}")
    for key in ("file_name", "hf_hub_url", "subset", "split", "folder"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            raise DataError(f"{at}: {key} must be text, not {raw[key]!r}")
    num_samples = raw.get("num_samples")
    if num_samples is not None and (isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1):
        raise DataError(f"{at}: num_samples must be a whole number ≥ 1, not {num_samples!r}")
    formatting = raw.get("formatting", "alpaca")
    if formatting not in FORMATS:
        raise DataError(f"{at}: formatting {formatting!r} is unknown; one of {', '.join(FORMATS)}")
    hub = raw.get("hf_hub_url")
    path = None
    if hub is None:
        path = _local_path(at, raw, dataset_dir)
        for key in ("subset", "folder", "split"):
            if raw.get(key) is not None and not (key == "split" and raw[key] == "train"):
                raise DataError(f"{at}: {key} belongs to hf_hub_url; a local file has none")
    columns = raw.get("columns")
    if columns is None and formatting == "alpaca" and path is not None and path.suffix.lower() == ".txt":
        columns = {"prompt": TEXT_COLUMN}
    return DatasetEntry(
        name=name,
        path=path,
        hub=hub,
        subset=raw.get("subset"),
        split=raw.get("split") or "train",
        folder=raw.get("folder"),
        num_samples=num_samples,
        ranking=ranking,
        formatting=formatting,
        columns=_columns(at, columns, formatting, ranking),
        tags=_tags(at, raw.get("tags"), formatting),
    )


def _local_path(at: str, raw: Mapping[str, Any], dataset_dir: Path) -> Path:
    # The other hubs come first in LLaMA-Factory, but only as mirrors of hf_hub_url or when its switches ask for them.
    for key, what in LATER_SOURCES.items():
        if raw.get(key) is not None:
            raise DataError(f"{at}: {key} ({what}) is not in this version; use file_name or hf_hub_url")
    if raw.get("file_name") is None:
        raise DataError(f"{at}: no source; write file_name or hf_hub_url")
    path = dataset_dir / raw["file_name"]
    if not path.exists():
        raise DataError(f"{at}: {path} does not exist")
    return path


def _columns(at: str, given: Any, formatting: str, ranking: bool) -> dict[str, str | None]:
    columns = default_columns(formatting) | ({name: name for name in PAIR_COLUMNS} if ranking else {})
    if given is None:
        return columns
    _check_names(at, "columns", given)
    for key in given:
        if key in LATER_COLUMNS:
            raise DataError(f"{at}: columns.{key} is not in this version")
        if key in PAIR_COLUMNS and not ranking:
            raise DataError(f"{at}: columns.{key} belongs to preference pairs: write ranking: true in the entry")
        if key not in columns:
            raise DataError(f"{at}: columns.{key} is unknown for formatting {formatting}{nearest(key, list(columns))}")
    return {key: given.get(key, default if key in ALWAYS_READ else None) for key, default in columns.items()}


def _tags(at: str, given: Any, formatting: str) -> dict[str, str]:
    tags = default_tags(formatting)
    if given is None:
        return tags
    _check_names(at, "tags", given)
    for key in given:
        if key not in tags:
            raise DataError(f"{at}: tags.{key} is unknown{nearest(key, list(tags))}")
    tags = {**tags, **{key: value for key, value in given.items() if value is not None}}
    roles = [value for key, value in tags.items() if key not in ("role_tag", "content_tag")]
    if formatting != "alpaca" and len(set(roles)) != len(roles):
        raise DataError(f"{at}: two roles have the same tag: {', '.join(roles)}")
    return tags


def _check_names(at: str, what: str, given: Any) -> None:
    if not isinstance(given, dict) or not all(value is None or isinstance(value, str) for value in given.values()):
        raise DataError(f"{at}: {what} must map names to column names (text)")
