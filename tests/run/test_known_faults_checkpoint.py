"""Known faults of checkpoints: a crash or a full disk in mid-save leaves nothing usable; rotation takes the wrong one (row H2)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlmca.run.checkpoint import Checkpoints, is_whole, step_of
from tests.run.checkpoint_writer import content, fill

ROOT = Path(__file__).parents[2]


def write(output: Path, step: int, limit: int | None = None) -> None:
    with Checkpoints(output, limit).writing(step) as folder:
        fill(folder, step)


def loads(folder: Path | None, step: int) -> bool:
    """The checkpoint holds `step`'s content bit for bit and is named after it."""
    return (
        folder is not None and step_of(folder) == step and all((folder / name).read_bytes() == data for name, data in content(step).items())
    )


def in_a_process(output: Path, step: int, kind: str, cut: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.run.checkpoint_writer", str(output), str(step), "1", kind, str(cut)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def old_run(output: Path) -> None:
    """A whole checkpoint of a higher step, left by an earlier run, then checkpoint 1 of this run (which rotates it away),
    then once more the leftovers of a foreign program under our name."""
    write(output, 1000)
    write(output, 1, limit=1)
    (output / "checkpoint-2000").mkdir()
    (output / "checkpoint-2000" / "optimizer.pt").write_bytes(b"half")


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> int:
    output = tmp_path_factory.mktemp("count")
    old_run(output)
    done = in_a_process(output, 2, "count", 0)
    assert done.returncode == 0, done.stderr
    assert loads(Checkpoints(output, 1).newest(), 2)
    return int(done.stdout)


@pytest.mark.parametrize("kind", ("kill", "full"))
def test_at_every_cut_the_newest_is_whole(tmp_path: Path, operations: int, kind: str) -> None:
    assert operations > 20
    kept_old = kept_new = 0
    for cut in range(1, operations + 1):
        output = tmp_path / str(cut)
        output.mkdir()
        old_run(output)
        done = in_a_process(output, 2, kind, cut)
        checkpoints = Checkpoints(output, 1)  # the restart
        newest = checkpoints.newest()
        assert loads(newest, 1) or loads(newest, 2), (cut, done.stderr)
        kept_old, kept_new = kept_old + loads(newest, 1), kept_new + loads(newest, 2)
        if kind == "full":
            # a failure is never reported as a success
            assert done.returncode != 0 or loads(newest, 2), (cut, done.stderr)
        assert not [path for path in output.iterdir() if path.suffix in (".tmp", ".old")]
        with checkpoints.writing(3) as folder:
            fill(folder, 3)
        assert loads(Checkpoints(output, 1).newest(), 3)
        assert [path.name for path in output.iterdir() if is_whole(path)] == ["checkpoint-3"]
        assert (output / "checkpoint-2000" / "optimizer.pt").exists()  # not ours to remove
    assert kept_old and kept_new


def test_a_partial_folder_is_never_picked(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 8)
    for name, damage in (("trainer.json", None), ("state/__0_0.distcp", b"short"), ("manifest.json", b'{"files": ')):
        write(tmp_path, 8)
        target = tmp_path / "checkpoint-8" / name
        target.unlink() if damage is None else target.write_bytes(damage)
        assert loads(Checkpoints(tmp_path).newest(), 4)


def test_rotation_keeps_the_newest_and_remembers_nothing_in_memory(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        write(tmp_path, step, limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-15"]
    write(tmp_path, 3, limit=2)  # started over with fewer steps: still the newest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-15", "checkpoint-3"]
    assert loads(Checkpoints(tmp_path).newest(), 3)


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with Checkpoints(tmp_path).writing(5) as folder:
        (folder / "other").write_text("new")
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and sorted(path.name for path in newest.iterdir()) == ["manifest.json", "other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5"]


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoints = Checkpoints(tmp_path, 2)
        checkpoints.keep = 2
        with checkpoints.writing(step) as folder:
            fill(folder, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.keep = 2
    with checkpoints.writing(5) as folder:
        fill(folder, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-5"]
    assert loads(checkpoints.newest(), 5)
