"""Reading a Hugging Face folder: safetensors in one file or in shards with an index, slice by slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlmca.layouts import ModelLayout
from rlmca.layouts.boxes import Box, Shape
from rlmca.layouts.rows import Spec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ROTARY_TABLE = ".rotary_emb.inv_freq"


class HFFolderError(ValueError):
    """A folder that cannot be read as a Hugging Face model; the message names the file or the tensors."""


class HFFolder:
    """An open folder. `shapes` and `dtypes` map every tensor's name; `config` is config.json. Files stay open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        try:
            self._read_headers()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> dict[str, Any]:
        """The mapping in config.json."""
        return read_config(self.path)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The tensor, or the part of it inside `box`, in its stored type on the CPU. Only that part is read from disk."""
        part = self._files[self._file_of[name]].get_slice(name)
        value: Tensor = part[tuple(slice(a, b) for a, b in box)] if box is not None else part[:]
        return value

    def same_bits(self, one: str, two: str) -> bool:
        """Whether two tensors are equal bit for bit."""
        if (self.shapes[one], self.dtypes[one]) != (self.shapes[two], self.dtypes[two]):
            return False
        return torch.equal(self.read(one).view(torch.uint8), self.read(two).view(torch.uint8))

    def files_of(self, names: Iterable[str]) -> list[Path]:
        """The files that hold these tensors, each once."""
        return [self.path / file for file in sorted({self._file_of[name] for name in names})]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _locate(self) -> dict[str, str]:
        """{tensor name: file name}."""
        return locate(self.path)

    def _read_headers(self) -> None:
        for name in sorted(set(self._file_of.values())):
            self._files[name] = open_file(self.path / name)
        held = {name: set(file.keys()) for name, file in self._files.items()}
        for name, file_name in self._file_of.items():
            if name not in held[file_name]:
                raise HFFolderError(f"{self.path / file_name} lacks the tensor {name}, which the index places there")
            part = self._files[file_name].get_slice(name)
            if part.get_dtype() not in DTYPES:
                hint = "; convert the folder to bf16 first, FP8 is not read in this version" if part.get_dtype().startswith("F8") else ""
                raise HFFolderError(f"{name} in {self.path / file_name} has type {part.get_dtype()}; {', '.join(DTYPES)} are read{hint}")
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = DTYPES[part.get_dtype()]


def locate(path: Path) -> dict[str, str]:
    """{tensor name: file name} as the index says; for a single file the names come from its header."""
    if not path.is_dir():
        raise HFFolderError(f"{path} is not a folder")
    index = path / INDEX
    if index.exists() and (path / SINGLE).exists():
        raise HFFolderError(f"{path} has both {SINGLE} and {INDEX}: remove the one that is not the model")
    if index.exists():
        try:
            file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            if not all(isinstance(name, str) for name in file_of.values()):
                raise TypeError("a file name that is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise HFFolderError(f"{index} is not a safetensors index: it needs a JSON object with a weight_map") from error
        if missing := sorted({f for f in file_of.values() if not (path / f).is_file()}):
            raise HFFolderError(f"{path} lacks {', '.join(missing)}, which its index names; download the folder again")
        return file_of
    if (path / SINGLE).is_file():
        with open_file(path / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if (path / "adapter_model.safetensors").exists():
        hint = "this is a LoRA adapter: write its model in model_name_or_path and this folder in adapter_name_or_path"
    elif list(path.glob("*.bin")):
        hint = "pickled .bin weights are not read: load the model with Transformers and call save_pretrained, which writes safetensors"
    else:
        hint = "is it a Hugging Face model folder?"
    raise HFFolderError(f"{path} has neither {SINGLE} nor {INDEX}; {hint}")


def open_file(path: Path) -> Any:
    """An open safetensors file. Raises HFFolderError when it is none."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise HFFolderError(f"{path} is not a whole safetensors file: {error}") from error


def open_hf_folder(path: str | Path) -> HFFolder:
    """Open a folder for reading. Raises HFFolderError: no weights, a missing or cut file, an unknown type."""
    return HFFolder(Path(path))


def layout_of_folder(path: str | Path, spec: Spec = "local") -> ModelLayout:
    """The layout of the model in a folder, experts in the form in which its files hold them; without weights, one by one."""
    return ModelLayout(read_config(path), spec).as_stored(tensor_names(path))


def tensor_names(path: str | Path) -> list[str]:
    """Names of a folder's tensors; none where there are no weights to read: whoever reads them says so."""
    try:
        return list(locate(Path(path)))
    except HFFolderError:
        return []


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a folder. Raises HFFolderError when it is absent or no JSON object."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise HFFolderError(f"{file} does not exist; a Hugging Face model folder has one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HFFolderError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise HFFolderError(f"{file} does not hold a JSON object")
    return config


class NamedTensors(Protocol):
    """Tensors of a folder by name."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        ...

    def same_bits(self, one: str, two: str) -> bool:
        """Whether two tensors are equal bit for bit."""
        ...


def check_tensors(folder: NamedTensors, want: Mapping[str, Shape], tied: bool, kept: tuple[str, ...] = ()) -> None:
    """Raises HFFolderError when the folder's tensors are not those of the layout, all differences in one message.

    A tied model may carry a copy of its embedding as lm_head.weight if it is the same bit for bit. Rotary tables that old
    Llama folders store are computed, as Transformers does, and not read. Names that begin with one of `kept` may be there.
    """
    have = {name: shape for name, shape in folder.shapes.items() if not name.endswith(ROTARY_TABLE) and not name.startswith(kept)}
    problems = []
    if tied and "lm_head.weight" in have:
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        del have[head]
        if embedding in have and not folder.same_bits(embedding, head):
            problems.append(f"tie_word_embeddings is true, but {head} differs from {embedding}; write tie_word_embeddings: false")
    if missing := [n for n in want if n not in have]:
        problems.append(f"missing: {_some(missing)}")
    if surplus := [n for n in have if n not in want]:
        problems.append(f"unexpected: {_some(surplus)}")
    problems += [f"{n} has shape {have[n]}, config.json says {want[n]}" for n in want if n in have and have[n] != want[n]]
    if problems:
        raise HFFolderError(f"the tensors in {folder.path} do not fit its config.json:\n" + "\n".join(problems))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
