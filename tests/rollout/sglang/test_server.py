"""Servers of ours as processes: how they start, fail to start, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlmca.rollout.base import Request, RolloutError, SamplingParams
from rlmca.rollout.sglang.process import OwnProcess, group_members
from rlmca.rollout.sglang.server import ServerOptions, SglangServer, free_port, server_environment, serving_folder, without_end_tokens
from rlmca.rollout.sglang.setup import sglang_engine
from tests.rollout.sglang.conftest import run_config

pytestmark = pytest.mark.serial
Launch = Callable[..., SglangServer]


@pytest.fixture
def launch(tmp_path: Path, model_folder: Path) -> Iterator[Launch]:
    """Starts the stub in a server's place."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "stub_server.py"} "$@"\n')
    python.chmod(0o755)
    started: list[SglangServer] = []

    def start(mode: str, find_port: Callable[[], int] = free_port, timeout: float = 60.0, **env: str) -> SglangServer:
        options = ServerOptions(python, model_folder, tmp_path / "logs" / "s.log", False, env={"STUB": mode, **env}, start_timeout=timeout)
        started.append(SglangServer.launch(options, find_port))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_close_ends_the_whole_group_and_may_be_repeated(launch: Launch) -> None:
    server = launch("serve")
    server.wait_until_ready()
    assert server.alive and server.url.startswith("http://127.0.0.1:")
    group = server.process.pid
    assert len(group_members(group)) == 2, "the stub has a helper that ignores SIGTERM"
    served = Path(json.loads(server.get("/model_info"))["model_path"])
    assert served.is_dir()
    server.close()
    server.close()
    assert not server.alive and group_members(group) == [] and not served.parent.exists()


def test_what_a_killed_server_started_is_cleared_away(launch: Launch) -> None:
    server = launch("serve")
    server.wait_until_ready()
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.process.wait(30) and group_members(server.process.pid) == []
    assert "it was killed by SIGKILL" in server.how_it_ended()


def test_a_server_that_ends_while_starting_is_an_error_at_once(launch: Launch) -> None:
    server = launch("die", timeout=3600)
    with pytest.raises(
        RolloutError, match=r"(?s)did not start: it ended with exit status 3; the end of .*CUDA error: no kernel image"
    ) as caught:
        server.wait_until_ready()
    assert "key ***" in str(caught.value) and server.api_key not in str(caught.value)


def test_a_server_that_never_answers_is_an_error_after_the_timeout(launch: Launch) -> None:
    server = launch("hang", timeout=0.5)
    with pytest.raises(RolloutError, match=r"(?s)was not ready within 0.5 s; the end of .*stub hang"):
        server.wait_until_ready()
    assert server.alive, "closing it is the caller's"


def test_a_port_that_turns_out_busy_is_changed_for_another(launch: Launch) -> None:
    busy, good = free_port(), free_port()
    ports = iter([busy, busy, good])
    server = launch("busy", lambda: next(ports), STUB_BUSY=str(busy))
    server.wait_until_ready()
    assert server.url.endswith(f":{good}")


def test_ports_that_are_all_busy_are_an_error(launch: Launch) -> None:
    busy = free_port()
    server = launch("busy", lambda: busy, STUB_BUSY=str(busy))
    with pytest.raises(RolloutError, match="address already in use"):
        server.wait_until_ready()


def test_a_stranger_that_answers_on_our_port_is_not_taken_for_our_server(launch: Launch) -> None:
    server = launch("serve", timeout=1.5, STUB_PATH="/other/model")
    with pytest.raises(RolloutError, match="was not ready"):
        server.wait_until_ready()


def test_a_python_that_is_none_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="could not be started with /no/python"):
        SglangServer.launch(ServerOptions(Path("/no/python"), model_folder, tmp_path / "s.log", False))


def test_a_process_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG speaks of threads: a short-lived one must not be the server's parent."""
    made: list[OwnProcess] = []
    code = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 9); open(os.environ['READY'], 'w').close(); time.sleep(600)"
    ready = tmp_path / "ready"
    thread = threading.Thread(
        target=lambda: made.append(OwnProcess([sys.executable, "-c", code], {**os.environ, "READY": str(ready)}, tmp_path / "log"))
    )
    thread.start()
    thread.join()
    try:
        while not ready.exists():
            assert not made[0].wait(0.05)
        assert not made[0].wait(0.5)
    finally:
        made[0].kill()
    assert not made[0].alive and made[0].how_it_ended() == "was killed by SIGKILL"


def test_servers_know_no_end_tokens(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    config = {"eos_token_id": [1, 2], "vision_config": {"x": 1}, "text_config": {"eos_token_id": 3, "vocab_size": 9}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    (source / "model.safetensors").write_text("weights")
    serving_folder(source, tmp_path / "served")
    assert sorted(p.name for p in (tmp_path / "served").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "served" / "model.safetensors").read_text() == "weights"
    served = json.loads((tmp_path / "served" / "config.json").read_text())
    assert served["eos_token_id"] is served["text_config"]["eos_token_id"] is None and served["text_config"]["vocab_size"] == 9
    assert config["eos_token_id"] == [1, 2] and without_end_tokens({}) == {"eos_token_id": None}


def test_a_server_is_told_nothing_of_the_trainers_ranks_and_no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("no_proxy", "intern")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    env = server_environment(ServerOptions(Path("p"), Path("m"), Path("l"), False, tp=2), tmp_path)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH", "TORCHELASTIC_RUN_ID"} & set(env)
    assert env["no_proxy"] == "intern,127.0.0.1,localhost" and env["CUDA_VISIBLE_DEVICES"] == "3" and env["TMPDIR"] == str(tmp_path)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


def test_a_server_killed_in_the_middle_of_a_rollout_is_one_clear_error(
    model_folder: Path, tmp_path: Path, start_model: PreTrainedModel
) -> None:
    """The real server. Nothing waits for the half hour that a reply may take; afterwards no process is left."""
    engine = sglang_engine(run_config(sglang={"max_running_requests": 4}), model_folder, dtype=torch.float32, log_dir=tmp_path)
    with engine:
        process = engine.servers[0].process
        asked = [Request([3, 4], list(range(200)))]
        threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(
            RolloutError, match=r"SGLang server http://127.0.0.1:\d+ is gone.*it was killed by SIGKILL; the end of .*sglang-0.log"
        ):
            engine.generate(asked, SamplingParams(max_new_tokens=120))
        assert group_members(process.pid) == []
        with pytest.raises(RolloutError, match="is gone"):
            engine.generate(asked, SamplingParams(max_new_tokens=2))
        with pytest.raises(RolloutError, match="is gone"):
            engine.update_weights([(n, p.detach()) for n, p in start_model.named_parameters()], 1)
        assert engine.version == -1
