"""Checkpoints of several ranks, and the choice of where to resume."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlmca.run.checkpoint import CheckpointError, Checkpoints, resume_folder


def on_ranks(output: Path, failing: int | None, step: int = 1, world: int = 3) -> dict[int, BaseException | None]:
    """Every rank writes its own file; rank `failing` raises in the middle of it. Returns what each rank raised."""
    barrier = threading.Barrier(world, timeout=20)
    result: dict[int, BaseException | None] = {}

    def body(rank: int) -> None:
        try:
            with Checkpoints(output, 1, rank == 0, barrier.wait).writing(step) as folder:
                (folder / f"rank{rank}").write_text("part")
                if rank == failing:
                    raise OSError(28, "No space left on device")
            result[rank] = None
        except BaseException as error:
            result[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def test_all_ranks_write_into_one_checkpoint(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, None) == {0: None, 1: None, 2: None}
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and sorted(p.name for p in newest.iterdir()) == ["manifest.json", "rank0", "rank1", "rank2"]


@pytest.mark.parametrize("failing", (0, 1, 2))
def test_when_one_rank_fails_all_know_and_nothing_changes(tmp_path: Path, failing: int) -> None:
    on_ranks(tmp_path, None, step=1)
    result = on_ranks(tmp_path, failing, step=2)
    assert isinstance(result.pop(failing), OSError)
    assert all(isinstance(error, CheckpointError) for error in result.values())
    assert [p.name for p in [Checkpoints(tmp_path).newest()] if p] == ["checkpoint-1"]
    assert on_ranks(tmp_path, None, step=3) == {0: None, 1: None, 2: None}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_resume(tmp_path: Path) -> None:
    empty, full = Checkpoints(tmp_path / "empty"), Checkpoints(tmp_path / "full")
    with full.writing(7) as folder:
        (folder / "a").write_text("a")
    saved = tmp_path / "full" / "checkpoint-7"
    assert resume_folder(full, None, overwrite=False) == saved
    assert resume_folder(full, None, overwrite=True) is None
    assert resume_folder(full, "auto", overwrite=True) == saved == resume_folder(empty, saved, overwrite=False)
    assert resume_folder(full, False, overwrite=False) is None
    assert resume_folder(empty, None, overwrite=False) is None
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        resume_folder(empty, "auto", overwrite=False)
    (saved / "a").write_text("longer")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        resume_folder(empty, str(saved), overwrite=False)


def test_a_limit_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_total_limit is 0"):
        Checkpoints(tmp_path, 0)
