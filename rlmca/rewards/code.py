"""Reward `code`: the share of the row's unit tests that the program in the reply passes, run apart from the machine."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Failure, Reward, Verdict
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.sandbox import Limits, Sandbox
from rlmca.rewards.sandbox.run import SandboxError
from rlmca.rewards.text import last_block

if TYPE_CHECKING:
    from rlmca.types import Sample

log = logging.getLogger(__name__)
LANGUAGES = ("python", "python3", "py")


@dataclass(frozen=True)
class CodeOptions:
    """`timeout`: seconds of one test; `reward_timeout` bounds all tests of a reply.

    `memory_mb`: of each process; `processes`: processes and threads; `output_kb`: standard output and each file; `disk_mb`: all
    files. `python`: an interpreter whose packages the programs may import; without it they have the standard library.
    `allow_network`: run the programs where the machine lets us give them no namespaces of their own.
    """

    timeout: float = 5.0
    memory_mb: int = 1024
    processes: int = 16
    output_kb: int = 1024
    disk_mb: int = 64
    python: str | None = None
    allow_network: bool = False

    def __post_init__(self) -> None:
        self.limits()  # refuses what is not above 0

    def limits(self) -> Limits:
        """The limits of one run. Raises ValueError for one that is not above 0."""
        return Limits(self.timeout, self.memory_mb, self.processes, self.output_kb, self.disk_mb)


@dataclass(frozen=True)
class UnitTests:
    """Of one row: pairs of standard input and output, or statements that must run through."""

    pairs: tuple[tuple[str, str], ...] = ()
    asserts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs) + len(self.asserts)


def code_reward(options: CodeOptions, pool: CheckPool) -> Reward:
    """Tests passed / tests, of the last complete ```python block of the reply, or the whole reply.

    See `tests_of` for the row's columns. A pair runs the program anew with that input; its output must equal the expected one,
    white space at the ends of lines and the text ignored, and it must end with status 0. Asserts run after the program,
    each in a fork of its own. A reply none of whose tests passed and one of which ran out of time counts as a timeout. At most
    `reward_workers` programs run at a time. Raises ValueError when the machine cannot keep the programs apart.
    """
    sandbox = open_sandbox(options)

    def check(sample: Sample) -> Verdict:
        try:
            tests = tests_of(sample.row)
            return passed_share(sandbox, program_in(sample.reply), tests, pool.timeout)
        except (SandboxError, ValueError, OSError) as error:
            return Failure.of(error)

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        with ThreadPoolExecutor(pool.workers) as threads:
            return list(threads.map(check, samples))

    return score


def open_sandbox(options: CodeOptions) -> Sandbox:
    """The sandbox, tried once. Raises ValueError saying what the machine does not allow."""
    sandbox = Sandbox(options.limits(), options.python)
    problem = _trial(sandbox)
    if problem is None:
        log.info("reward code: programs run without network, in a file system, and among processes, of their own")
        return sandbox
    if not options.allow_network:
        raise ValueError(
            f"programs cannot be kept apart from this machine and its network: {problem}. It takes user namespaces, or root with "
            "CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined); "
            "option allow_network: true runs them with limits of time, memory and processes only"
        )
    sandbox = Sandbox(options.limits(), options.python, apart=False)
    problem = _trial(sandbox)
    if problem is not None:
        raise ValueError(f"programs cannot be run: {problem}; option 'python' names another interpreter, one that every user may start")
    log.warning("reward code: allow_network: programs reach the network and may read what their user may read; only limits are in force")
    return sandbox


def _trial(sandbox: Sandbox) -> str | None:
    try:
        ran = sandbox.run({"main.py": "print(6 * 7)"}, "", sandbox.limits.seconds)
    except SandboxError as error:
        return str(error)
    if ran.stdout == b"42\n":
        return None
    return "a trial program ran out of time" if ran.timed_out else f"a trial program ended with status {ran.status}"


def program_in(reply: str) -> str:
    """The last complete ```python block, or the whole reply."""
    block = last_block(reply, LANGUAGES)
    return reply if block is None else block


def tests_of(row: Mapping[str, Any]) -> UnitTests:
    """The tests of a row; any column may be JSON text.

    `tests`: a list of {input, output}, {inputs: [...], outputs: [...]}, or a list of statements (`assert f(1) == 2`).
    `test_code`: a text of statements; with `entry_point` that calls `check(entry_point)` at its end (HumanEval). Raises
    ValueError for a row without tests.
    """
    if isinstance(row.get("test_code"), str):
        entry = row.get("entry_point")
        return UnitTests(asserts=(row["test_code"] + (f"\n\ncheck({entry})\n" if entry else ""),))
    tests = row.get("tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            raise ValueError("reward code: the row's `tests` is text but no JSON; statements belong in `test_code`") from None
    if isinstance(tests, Mapping):
        given, wanted = (tests.get(f"{name}s", tests.get(name)) for name in ("input", "output"))
        if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
            raise ValueError("reward code: the row's `tests` is a mapping, so it needs lists `inputs` and `outputs` of one length")
        tests = [{"input": i, "output": o} for i, o in zip(given, wanted, strict=True)]
    if not isinstance(tests, (list, tuple)) or not tests:
        raise ValueError(
            "reward code: the data row has no `tests` (a list of {input, output} or of assert statements) and no `test_code`; "
            f"its columns are {', '.join(map(str, row)) or 'none'}"
        )
    if all(isinstance(test, str) for test in tests):
        return UnitTests(asserts=tuple(tests))
    if all(isinstance(test, Mapping) and "output" in test for test in tests):
        return UnitTests(pairs=tuple((_lines(test.get("input", "")), _lines(test["output"])) for test in tests))
    raise ValueError("reward code: the row's `tests` must be all {input, output} or all statements")


def passed_share(sandbox: Sandbox, program: str, tests: UnitTests, seconds: float) -> Verdict:
    """Tests passed / tests. What has not begun after `seconds` has failed."""
    end = time.monotonic() + seconds
    passed, late = 0, False
    for given, wanted in tests.pairs:
        left = end - time.monotonic()
        if left <= 0:
            late = True
            break
        ran = sandbox.run({"main.py": program}, given, min(left, sandbox.limits.seconds))
        late |= ran.timed_out
        passed += ran.status == 0 and not ran.timed_out and same_output(ran.stdout, wanted)
    if tests.asserts:
        tokens = [secrets.token_hex(16) for _ in tests.asserts]
        files = {"main.py": Path(__file__).with_name("sandbox").joinpath("asserts.py").read_text(), "solution.py": program}
        cases = [f"{token} {test.encode('utf-8', 'replace').hex()}" for token, test in zip(tokens, tests.asserts, strict=True)]
        ran = sandbox.run(files, "\n".join([str(sandbox.limits.seconds), *cases]), seconds)
        said = set(ran.stdout.decode(errors="replace").split("\n"))
        late |= ran.timed_out or "timeout" in said
        passed += sum(token in said for token in tokens)
    if late and not passed:
        return Failure("timeout", "a program ran out of time")
    return passed / len(tests)


def same_output(stdout: bytes, wanted: str) -> bool:
    """Equal, white space at the ends of lines and of the whole text left out."""
    text = stdout.decode("utf-8", "replace")
    return [line.rstrip() for line in text.rstrip().split("\n")] == [line.rstrip() for line in wanted.rstrip().split("\n")]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
