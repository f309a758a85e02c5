"""One SGLang server: started by us on loopback, or running already under an address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmca.rollout.base import RolloutError
from rlmca.rollout.sglang.process import OwnProcess, group_members

LAUNCHERS = Path(__file__).parents[2] / "sglang_side"
API_KEY_VARIABLE = "RLMCA_SGLANG_API_KEY"
BUSY_PORT = ("address already in use", "port is already in use", "errno 98")
_TYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
WORK_PREFIX = "rlmca-sglang-"
_PORT_TRIES = 4
_LONGEST_FOLDER = 40
_ATTACH_S = 20.0
_POLL_S = 0.2
_TRAINER_ONLY = ("PYTHONPATH", "PYTHONHOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell the trainer's processes who they are, or where the trainer's packages lie."""


@dataclass(frozen=True)
class ServerOptions:
    """What a server of ours is started with. `flags` are further flags of sglang.launch_server."""

    python: Path
    model: Path
    log: Path
    cuda: bool
    dtype: str = "float32"
    seed: int = 0
    tp: int = 1
    deterministic: bool = True
    flags: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    start_timeout: float = 180.0
    api_key: str | None = None


class SglangServer:
    """A server and, when it is ours, its process. Use `launch` or `attach`, then `wait_until_ready`."""

    def __init__(self, url: str, api_key: str | None, tp: int, options: ServerOptions | None, find_port: Callable[[], int]) -> None:
        self.url, self.api_key, self.tp = url, api_key, tp
        self.options = options
        self.process: OwnProcess | None = None
        self._find_port = find_port
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._work: Path | None = None
        self._dtype: str | None = None

    @classmethod
    def launch(cls, options: ServerOptions, find_port: Callable[[], int] | None = None) -> SglangServer:
        """Starts a process and returns at once. It ends with this process at the latest, however that ends."""
        server = cls("", options.api_key or secrets.token_urlsafe(24), options.tp, options, find_port or free_port)
        options.log.parent.mkdir(parents=True, exist_ok=True)
        server._folder = tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=short_folder(), ignore_cleanup_errors=True)
        server._work = Path(server._folder.name)
        try:
            serving_folder(options.model, server._work / "model")
            server._start()
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, url: str, api_key: str | None = None, dtype: str | None = None) -> SglangServer:
        """A server that somebody else started; `wait_until_ready` refuses one that computes in another type than `dtype`."""
        server = cls(url, api_key, 1, None, free_port)
        server._dtype = dtype
        return server

    @property
    def own(self) -> bool:
        """True when the process is ours."""
        return self.options is not None

    @property
    def alive(self) -> bool:
        """False when the process is ours and has ended; of others nothing is known."""
        return not self.own or (self.process is not None and self.process.alive)

    def wait_until_ready(self) -> None:
        """Returns when the server answers a generation; its `tp` is then known.

        Raises RolloutError with the log's last lines at once when our process ends, and after `start_timeout`.
        """
        limit = self.options.start_timeout if self.options is not None else _ATTACH_S
        until, tries = time.monotonic() + limit, 1
        while not self._healthy():
            if not self.alive:
                if tries == _PORT_TRIES or not any(words in self.log_tail(60).lower() for words in BUSY_PORT):
                    raise RolloutError(f"{self.name} did not start: {self.how_it_ended()}")
                tries += 1
                self._start()
            elif time.monotonic() > until:
                raise RolloutError(f"{self.name} was not ready within {limit:g} s{self._said()}")
            time.sleep(_POLL_S)
        self._learn()

    def close(self) -> None:
        """Ends our process and its whole group; of others nothing is changed. Calling it again changes nothing."""
        if self.process is not None:
            left = load_files(self.process.pid)
            self.process.kill()
            for file in left:
                file.unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"SGLang server {self.url}"

    def how_it_ended(self) -> str:
        """Exit status and the last lines of the log."""
        assert self.process is not None
        return f"it {self.process.how_it_ended()}{self._said()}"

    def log_tail(self, lines: int = 12) -> str:
        """Last lines of our server's log, long ones cut, without the key."""
        if self.options is None:
            return ""
        try:
            text = self.options.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        kept = [line if len(line) <= 300 else line[:300] + " ..." for line in text.splitlines()[-lines:]]
        return "\n".join(kept).replace(self.api_key or "\0", "***")

    def _said(self) -> str:
        return f"; the end of {self.options.log}:\n{self.log_tail()}" if self.options is not None else ""

    def _start(self) -> None:
        assert self.options is not None and self._work is not None
        self.options.log.unlink(missing_ok=True)
        port = self._find_port()
        self.url = f"http://127.0.0.1:{port}"
        env = server_environment(self.options, self._work)
        env[API_KEY_VARIABLE] = str(self.api_key)
        try:
            self.process = OwnProcess(server_command(self.options, self._work / "model", port), env, self.options.log)
        except OSError as error:
            raise RolloutError(f"{self.name} could not be started with {self.options.python}: {error}") from error

    def _healthy(self) -> bool:
        """The server answers, and it is ours: a stranger on our port serves another folder."""
        try:
            self.get("/health")
            return self._work is None or Path(self._info()["model_path"]) == self._work / "model"
        except (OSError, ValueError, KeyError):
            return False

    def _info(self) -> dict[str, Any]:
        return self._get_either("/model_info", "/get_model_info")

    def _learn(self) -> None:
        if self.own:
            return
        try:
            info = self._get_either("/server_info", "/get_server_info")
            self.tp = int(info["tp_size"])
        except (OSError, ValueError, KeyError) as error:
            raise RolloutError(f"{self.name} does not say its tp_size: is it an SGLang server of version 0.5? ({error!r})") from error
        theirs = _TYPES.get(str(info.get("dtype")))  # auto says nothing
        if self._dtype is not None and theirs is not None and theirs != self._dtype:
            raise RolloutError(
                f"{self.name} computes in {theirs} and this run in {self._dtype}: start it with --dtype {self._dtype}, "
                f"or write bf16: {str(theirs == 'bfloat16').lower()}"
            )

    def _get_either(self, path: str, older: str) -> dict[str, Any]:
        try:
            text = self.get(path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            text = self.get(older)
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        return answer

    def get(self, path: str) -> bytes:
        """The body of an answer; raises OSError (urllib's) for anything but success."""
        request = urllib.request.Request(self.url + path, headers=authorization(self.api_key))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the cluster's proxy does not know our servers
        with opener.open(request, timeout=30) as answer:
            body: bytes = answer.read()
        return body


def short_folder() -> str:
    """The temporary folder, if the addresses of sockets in it stay below the system's 107 characters; else /tmp."""
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"


def load_files(group: int) -> set[Path]:
    """The files in shared memory in which the processes of a server publish their load: SGLang leaves them when it is killed."""
    found = set()
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(path) for path in re.findall(r"/dev/shm/sglang_loads_\S+", maps)}
    return found


def authorization(api_key: str | None) -> dict[str, str]:
    """Headers that a server with a key asks for."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def free_port() -> int:
    """A port on loopback that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serving_folder(model: Path, target: Path) -> None:
    """A folder that is `model` to a server, without end tokens: links to its files and a config.json of its own.

    A server also stops at the end tokens of config.json and generation_config.json, and no request can forbid it. Replies
    must end at the stop ids of their request and nowhere else, so our servers know no end tokens.
    """
    target.mkdir(parents=True)
    for file in model.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (target / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(without_end_tokens(config), indent=1), encoding="utf-8")


def without_end_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a model's config that names no end token; some config classes have one by default, so null is written."""
    inner = {name: without_end_tokens(value) for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)}
    return {**config, **inner, "eos_token_id": None}


def server_command(options: ServerOptions, model: Path, port: int) -> list[str]:
    """The command line of a server of ours."""
    launcher = LAUNCHERS / ("launch.py" if options.cuda else "launch_cpu.py")
    flags = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype]
    flags += ["--random-seed", str(options.seed), "--skip-tokenizer-init", "--tp-size", str(options.tp)]
    if options.deterministic:
        flags.append("--enable-deterministic-inference")
    return [str(options.python), str(launcher), str(os.getpid()), *flags, *options.flags]


def server_environment(options: ServerOptions, work: Path) -> dict[str, str]:
    """Variables of a server: ours, without what concerns the trainer alone, and without a proxy for loopback."""
    env = {name: value for name, value in os.environ.items() if name not in _TRAINER_ONLY and not name.startswith("TORCHELASTIC_")}
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1,localhost"]))
    env["TMPDIR"] = str(work)
    env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # log-probs are those at the sampling temperature, whatever the shell says
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # a little room is added to the model's own, see setup
    if not options.cuda and options.tp > 1:
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(options.tp)))
    return {**env, **options.env}
