"""Reward `code`: programs of strangers, the tests they must pass, and what they must not do."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from rlmca.rewards import Failure
from rlmca.rewards.base import Verdict
from rlmca.rewards.code import CodeOptions, UnitTests, code_reward, open_sandbox, passed_share, program_in, same_output
from rlmca.rewards.code import tests_of as read_tests
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.sandbox import Limits, Ran, Sandbox
from rlmca.rewards.sandbox.run import SandboxError
from rlmca.types import Sample

LONG = 60.0  # seconds for what ends by itself
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox(CodeOptions(timeout=LONG, memory_mb=512, output_kb=256, disk_mb=4))
    except ValueError as error:
        pytest.skip(str(error))


def run(sandbox: Sandbox, code: str, stdin: str = "", seconds: float = LONG) -> Ran:
    return sandbox.run({"main.py": code}, stdin, seconds)


# --- reading replies and rows


def test_the_program_is_the_last_whole_python_block_or_all() -> None:
    assert program_in("a\n```python\nx = 1\n```\n```py\ny = 2\n```\n```\nout\n```") == "y = 2"
    assert program_in("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"tests": [{"input": "1\n", "output": 2}, {"output": ["a", "b"]}]}, UnitTests(pairs=(("1\n", "2"), ("", "a\nb")))),
        ({"tests": '{"inputs": ["1"], "outputs": ["2"]}'}, UnitTests(pairs=(("1", "2"),))),
        ({"tests": {"input": ["1"], "output": ["2"]}}, UnitTests(pairs=(("1", "2"),))),
        ({"tests": ["assert f(1)", "assert f(2)"]}, UnitTests(asserts=("assert f(1)", "assert f(2)"))),
        ({"test_code": "def check(f): assert f()", "entry_point": "g"}, UnitTests(asserts=("def check(f): assert f()\n\ncheck(g)\n",))),
    ],
)
def test_columns_of_tests(row: dict[str, Any], want: UnitTests) -> None:
    assert read_tests(row) == want


@pytest.mark.parametrize("tests", [None, [], "assert", [1], ["a", {"output": 1}], {"inputs": ["1"], "outputs": []}, {}])
def test_a_row_without_tests_is_invalid(tests: Any) -> None:
    with pytest.raises(ValueError, match="reward code: the"):
        read_tests({"tests": tests})


def test_outputs_are_equal_but_for_white_space_at_ends() -> None:
    assert same_output(b"1 \n2\n\n", "1\n2") and same_output("é\n".encode(), "é") and same_output(b"", "\n")
    assert not same_output(b"1\n 2", "1\n2") and not same_output(b"1", "1.0") and not same_output(b"\xff", "")


@pytest.mark.parametrize("options", [{"timeout": 0.0}, {"memory_mb": -1}, {"processes": 0}, {"output_kb": 0}, {"disk_mb": 0}])
def test_limits_are_above_zero(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be above 0"):
        CodeOptions(**options)


# --- verdicts

READS_AHEAD = """
import os
text = b''
for fd in range(3, 64):
    try:
        text += os.pread(fd, 1 << 20, 0)
    except OSError:
        pass
for fd in range(3, 64):
    for word in text.replace(b'"', b' ').split():
        try:
            os.write(fd, b'\\n' + word + b'\\n')
        except OSError:
            pass
"""
DOUBLE = "def f(x):\n    return 2 * x\n"
ASSERTS = ("assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 7", "assert f('a') == 'aa'")


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (DOUBLE, 0.75),
        ("import sys\nsys.exit(0)\n" + DOUBLE, 0.0),
        ("import os\nos._exit(0)\n", 0.0),
        ("import os\ndef f(x): os._exit(0)\n", 0.0),
        ("import sys\ndef f(x): sys.exit(0)\n", 0.0),
        ("def f(x):\n    raise SystemExit\n", 0.0),
        (DOUBLE + "print('ok\\n' * 100); input()\n", 0.0),
        ("import sys, atexit\natexit.register(print, 'passed')\n" + DOUBLE, 0.75),
        ("import builtins, os\nbuiltins.AssertionError = Warning\nos.write = os._exit = print\ndef f(x): return 0\n", 0.0),
        ("import builtins\nbuiltins.exec = lambda *a: None\n", 0.0),
        ("import builtins\nreal = compile\nbuiltins.compile = lambda s, *a: real('0', *a)\n", 0.0),
        ("import builtins\nclass bytes:\n    fromhex = staticmethod(lambda s: b'0')\nbuiltins.bytes = bytes\n", 0.0),
        (READS_AHEAD, 0.0),
        ("seen = []\ndef f(x):\n    seen.append(x)\n    return 2 * x if len(seen) == 1 else None\n", 0.75),
        ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)\n", 0.0),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n" + DOUBLE, 0.75),
        ("def f(x:", 0.0),
        ("\x00", 0.0),
        ("", 0.0),
    ],
)
def test_asserts(sandbox: Sandbox, program: str, want: float) -> None:
    assert passed_share(sandbox, program, UnitTests(asserts=ASSERTS), LONG) == want


def test_human_eval_form(sandbox: Sandbox) -> None:
    row = {"test_code": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "f"}
    assert passed_share(sandbox, DOUBLE, read_tests(row), LONG) == 1.0
    assert passed_share(sandbox, "def f(x): return x", read_tests(row), LONG) == 0.0


def test_pairs(sandbox: Sandbox) -> None:
    pairs = UnitTests(pairs=(("3\n4\n", "7"), ("é\nb", "éb"), ("1\n2", "4")))
    program = "a, b = input(), input()\nprint(int(a) + int(b) if a.isdigit() else a + b)"
    assert passed_share(sandbox, program, pairs, LONG) == pytest.approx(2 / 3)
    assert passed_share(sandbox, "print(7)\nraise SystemExit(1)", UnitTests(pairs=(("", "7"),)), LONG) == 0.0


def test_a_program_out_of_time_is_a_timeout_and_what_passed_before_counts(sandbox: Sandbox) -> None:
    hung = passed_share(sandbox, "while True: pass", UnitTests(pairs=(("", "1"),)), 1.0)
    assert isinstance(hung, Failure) and hung.kind == "timeout"
    short = Sandbox(Limits(seconds=1.0))
    program = "import time\ndef f(x):\n    if x == 2: time.sleep(99)\n    return 2 * x\n"
    assert passed_share(short, program, UnitTests(asserts=ASSERTS), LONG) == 0.5


def test_scores_come_in_order_and_a_bad_row_is_invalid_alone(sandbox: Sandbox) -> None:
    reward = code_reward(CodeOptions(timeout=LONG), CheckPool(2, LONG))
    rows: list[tuple[str, dict[str, Any]]] = [
        ("```python\n" + DOUBLE + "```", {"tests": ["assert f(1) == 2"]}),
        ("x", {}),
        ("print(1)", {"tests": [{"output": 1}]}),
        ("print(2)" + "\n" * 1_000_000, {"tests": [{"output": 1}]}),
    ]
    verdicts = reward([Sample([1], [5], [-1.0], [0], "stop", reply=reply, row=row) for reply, row in rows])

    def value(verdict: Verdict) -> float | str | None:
        return verdict.cause if isinstance(verdict, Failure) else verdict

    assert list(map(value, verdicts)) == [1.0, "ValueError", 1.0, 0.0]


# --- what programs must not do


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 5)",
        "open('/usr/x', 'w')",
        "import os\nos.mkdir('/x')",
        "open('/etc/passwd')",
        "import os\nos.kill(1, 9)",
        "bytearray(2 << 30)",
        "open('big', 'wb').write(bytes(1 << 20))",
        "for i in range(100): open(f'f{i}', 'wb').write(bytes(200_000))",
        "print('x' * (1 << 20))",
        "import os, time\nfor i in range(40): os.fork() or time.sleep(60)",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0  # a user namespace with rights of its own",
        "files = [open('/dev/null') for i in range(100)]",
    ],
)
def test_what_is_not_allowed_fails(sandbox: Sandbox, code: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        ran = run(sandbox, code.replace("PORT", str(listening.getsockname()[1])) + "\nprint('done')")
    assert ran.status != 0 and not ran.stdout.endswith(b"done\n") and len(ran.stdout) <= 256 * 1024


def test_the_environment_and_the_rest_of_the_machine_are_not_seen(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    shown = run(sandbox, "import os, sys\nprint(dict(os.environ), os.listdir('.'), os.listdir('/'), os.getuid(), 'site' in sys.modules)")
    text = shown.stdout.decode()
    assert "secret" not in text and "['main.py']" in text and "'proc'" not in text and "'home'" not in text
    assert text.split()[-2:] != ["0", "False"] and text.endswith("False\n")
    here = str(Path(__file__).resolve())
    assert run(sandbox, f"open({here!r})").status == 1


def test_threads_and_processes_of_its_own_work(sandbox: Sandbox) -> None:
    code = "import multiprocessing\nif __name__ == '__main__':\n    print(multiprocessing.Pool(2).map(abs, [-1, 2]))"
    assert run(sandbox, code).stdout == b"[1, 2]\n"


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', 'MARK'])
    os._exit(0)
time.sleep(0.3)
print('left')
"""


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


@functools.cache
def limits_only() -> Sandbox:
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"needs {SYSTEM_PYTHON}, an interpreter that every user may start: install python3")
    return Sandbox(Limits(seconds=LONG, memory_mb=512, output_kb=256), SYSTEM_PYTHON, apart=False)


@pytest.mark.parametrize("apart", [True, False])
def test_nothing_is_left(sandbox: Sandbox, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for parent in tmp_path.parents:
        if not apart and os.geteuid() == 0 and not parent.stat().st_mode & 1:
            monkeypatch.setattr(tempfile, "tempdir", None)
    used, mark = sandbox if apart else limits_only(), f"rlmca-test-{os.getpid()}-{apart}"
    ran = run(used, DAEMON.replace("MARK", mark))
    assert ran.stdout == b"left\n" and not marked(mark)
    assert run(used, DAEMON.replace("MARK", mark) + "time.sleep(600)", seconds=2.0).timed_out and gone(mark)
    assert not list(tmp_path.iterdir())


def test_limits_without_namespaces(sandbox: Sandbox) -> None:
    used = limits_only()
    assert run(used, "print(input())", "hi").stdout == b"hi\n"
    assert run(used, "while True: pass", seconds=1.0).timed_out
    for code in (
        "bytearray(2 << 30)",
        "print('x' * (1 << 20))",
        "import os\nfor i in range(400): os.fork() or __import__('time').sleep(60)",
    ):
        assert run(used, code).status != 0
    if os.geteuid() == 0:
        assert run(used, f"import os\nos.kill({os.getpid()}, 0)").status == 1
        assert run(used, "import os\nprint(os.getuid() >= 50000)").stdout == b"True\n"


def test_an_interpreter_is_checked_when_built() -> None:
    with pytest.raises(ValueError, match="'/nosuch/python' is no Python interpreter"):
        Sandbox(Limits(), "/nosuch/python")


def test_a_machine_without_namespaces_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Sandbox, *_: Any) -> Ran:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(Sandbox, "run", fails)
    with pytest.raises(ValueError, match="unshare: Operation not permitted.*allow_network: true"):
        open_sandbox(CodeOptions())


def test_the_program_ends_with_the_process_that_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    mark = f"rlmca-test-{os.getpid()}-killed"
    code = (
        "from rlmca.rewards.sandbox import Limits, Sandbox\n"
        f"Sandbox(Limits(seconds=600)).run({{'main.py': {DAEMON.replace('MARK', mark) + 'time.sleep(600)'!r}}}, '')\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed leaves a folder there
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=environment) as asker:
        try:
            deadline = time.monotonic() + 120
            while not marked(mark) and time.monotonic() < deadline and asker.poll() is None:
                time.sleep(0.1)
            assert marked(mark)
        finally:
            asker.send_signal(signal.SIGKILL)
    assert gone(mark)
