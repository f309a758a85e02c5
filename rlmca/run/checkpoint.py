"""`checkpoint-N` folders: written aside, renamed when whole, rotated; a crash at any moment leaves the last whole one.

Life of a checkpoint: `checkpoint-N.tmp` is filled by all ranks, every file is flushed to disk, a manifest with the size
of every file is written last, and one rename makes it `checkpoint-N`. Only a folder whose manifest and files agree
counts as a checkpoint. Its age is the manifest's serial number, not N: a folder that an earlier run left at a higher
step is older. Older ones are removed only after the new one is in place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"checkpoint-\d+\.(tmp|old)")
_TOKEN = ".being-written"
"""A file that a rank removes when its part fails: removing works on a full disk, where writing a note would not."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or is not there to be read."""


class Checkpoints:
    """The checkpoints in `output_dir`. All ranks call the same methods in the same order; `is_main` does the renaming.

    `barrier` waits for all ranks. `save_total_limit` None keeps all, otherwise that many (at least 1) of the newest;
    the checkpoint of step `keep` (the best one, say) is among them whatever its age, beside the newest if need be.
    """

    def __init__(
        self,
        output_dir: str | Path,
        save_total_limit: int | None = None,
        is_main: bool = True,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise ValueError(f"save_total_limit is {save_total_limit}: write 1 or more, or leave it out to keep all")
        self.output_dir, self._limit, self._is_main, self._barrier = Path(output_dir), save_total_limit, is_main, barrier
        self.keep: int | None = None
        if is_main:
            self._tidy()
        barrier()

    def newest(self) -> Path | None:
        """The whole checkpoint written last, or None. Partial ones are never picked."""
        found = self._whole()
        return found[-1] if found else None

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """The folder to write checkpoint `step` into; at the end of the block it becomes `checkpoint-{step}`.

        When the block raises on any rank, no rank keeps the checkpoint: that rank raises its own error, the others
        `CheckpointError`, and what was there before is untouched.
        """
        final = self.output_dir / f"checkpoint-{step}"
        temporary = final.with_name(final.name + ".tmp")
        if self._is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / _TOKEN).touch()
        self._barrier()
        try:
            yield temporary
        except BaseException:
            (temporary / _TOKEN).unlink(missing_ok=True)
            self._barrier()
            raise
        self._barrier()
        if not (temporary / _TOKEN).exists():
            raise CheckpointError(f"{final} was not written: another rank failed")
        self._barrier()  # nobody looks for the token any more
        failure: BaseException | None = None
        if self._is_main:
            try:
                self._finish(temporary, final)
            except BaseException as error:
                failure = error
        self._barrier()
        if failure is not None:
            raise failure
        if not self._is_main and not is_whole(final):
            raise CheckpointError(f"{final} was not written: the main rank failed")

    def _finish(self, temporary: Path, final: Path) -> None:
        (temporary / _TOKEN).unlink()
        files = {str(path.relative_to(temporary)): path.stat().st_size for path in sorted(temporary.rglob("*")) if path.is_file()}
        for name in files:
            _flush(temporary / name)
        serial = max((_serial(path) for path in self._whole()), default=0) + 1
        text = json.dumps({"serial": serial, "time": time.time(), "files": files}, indent=1)
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for folder in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
            _flush(folder)
        aside = final.with_name(final.name + ".old")
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        _flush(self.output_dir)
        shutil.rmtree(aside, ignore_errors=True)
        self._rotate()

    def _rotate(self) -> None:
        if self._limit is None:
            return
        found = self._whole()
        removable = [path for path in found[:-1] if step_of(path) != self.keep]
        for path in removable[: max(0, len(found) - self._limit)]:
            _remove(path)

    def _whole(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.output_dir.is_dir():
            return []
        found = [path for path in self.output_dir.iterdir() if _NAME.fullmatch(path.name) and is_whole(path)]
        return sorted(found, key=_serial)

    def _tidy(self) -> None:
        """Puts back what a crash between two renames left aside, then removes what dead runs left half written."""
        if not self.output_dir.is_dir():
            return
        for path in [path for path in self.output_dir.iterdir() if _LEFTOVER.fullmatch(path.name)]:
            original = path.with_suffix("")
            if path.suffix == ".old" and is_whole(path) and not original.exists():
                os.rename(path, original)
            else:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.output_dir.iterdir():
            if _NAME.fullmatch(path.name) and not is_whole(path):
                _logger.warning("%s is not a whole checkpoint of this program: it is not used and not removed", path)


def is_whole(folder: Path) -> bool:
    """True when the manifest is there and every file it names has the size it names."""
    try:
        manifest = _manifest(folder)
        files, _ = manifest["files"], int(manifest["serial"])
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def step_of(folder: Path) -> int:
    """N of `checkpoint-N`."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder} is not named checkpoint-N")
    return int(match[1])


def resume_folder(checkpoints: Checkpoints, resume_from_checkpoint: bool | str | Path | None, overwrite: bool) -> Path | None:
    """The checkpoint that a run starts from, or None for a fresh start.

    A path must be a whole checkpoint. "auto" or True wants one to be there. None takes the newest one unless
    `overwrite`, as LLaMA-Factory does. False never resumes.
    """
    if resume_from_checkpoint == "auto":
        resume_from_checkpoint = True
    if isinstance(resume_from_checkpoint, (str, Path)):
        folder = Path(resume_from_checkpoint)
        if not is_whole(folder):
            raise CheckpointError(
                f"resume_from_checkpoint: {folder} is not a whole checkpoint (no {MANIFEST}, or files are missing or cut short)"
            )
        return folder
    if resume_from_checkpoint is False or (resume_from_checkpoint is None and overwrite):
        return None
    newest = checkpoints.newest()
    if newest is None and resume_from_checkpoint:
        raise CheckpointError(f"resume_from_checkpoint: true, but {checkpoints.output_dir} holds no whole checkpoint-N")
    return newest


def _manifest(folder: Path) -> dict[str, Any]:
    with open(folder / MANIFEST, encoding="utf-8") as file:
        return json.load(file)


def _serial(folder: Path) -> int:
    return int(_manifest(folder)["serial"])


def _flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a checkpoint; the manifest goes first, so that a crash half way leaves nothing that looks whole."""
    aside = folder.with_name(folder.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    (folder / MANIFEST).unlink()
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
