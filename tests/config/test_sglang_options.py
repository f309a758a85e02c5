"""`sglang`, `sglang_base_urls` and `sync`: types, bounds, contradictions, secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, RunConfig, describe, load_config, make_config, to_yaml
from rlmca.config.sglang import SglangOptions, SyncOptions, server_flags

MCA = Environment(use_mca=True)
GRPO: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "stage": "grpo", "rewards": "exact"}
FAR = "http://node7:30000"


def config(**values: Any) -> RunConfig:
    return make_config({**GRPO, **values}, env=MCA)


def errors(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    return caught.value.errors


def test_options_are_read_with_their_types() -> None:
    cfg = config(
        rollout_engine="sglang",
        sglang={"tp": "2", "num_engines": 3.0, "mem_fraction_static": "0.6", "deterministic": "no", "extra_args": {"x-y": 1}},
        sync={"method": "tensor", "bucket_mb": 64},
    )
    assert cfg.rollout.sglang == SglangOptions(tp=2, num_engines=3, mem_fraction_static=0.6, deterministic=False, extra_args={"x-y": 1})
    assert cfg.rollout.sync == SyncOptions(method="tensor", bucket_mb=64.0) and cfg.notes == ()
    assert config(sglang=None, sync="").rollout.sglang == SglangOptions()
    assert config(sglang_base_urls="http://127.0.0.1:1/, https://[::1]:2").rollout.sglang_base_urls == [
        "http://127.0.0.1:1",
        "https://[::1]:2",
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sglang": {"tpp": 2}}, "sglang: tpp: unknown, did you mean tp?"),
        ({"sglang": {"gpu_memory": 2}}, "sglang: gpu_memory: unknown"),
        ({"sglang": {"tp": 0}}, "sglang: tp: 0 is too small: at least 1"),
        ({"sglang": {"num_engines": "two"}}, "sglang: num_engines: 'two' is not a number"),
        ({"sglang": {"mem_fraction_static": 1}}, "mem_fraction_static: 1.0 is too large: it must be below 1"),
        ({"sglang": {"start_timeout": 0}}, "start_timeout: 0.0 is too small"),
        ({"sglang": {"extra_args": "--x"}}, "extra_args: expected `name: value` pairs"),
        ({"sglang": {"tp": 3, "ep": 2}}, "sglang: tp 3 is not a multiple of ep 2"),
        ({"sglang": {"extra_args": {"tp_size": 2}}}, "extra_args.tp_size is set by the program: write sglang: {tp: ...}"),
        ({"sglang": {"extra_args": {"--host": "0.0.0.0"}}}, "servers listen on 127.0.0.1"),
        ({"sglang": {"extra_args": {"x": {"a": 1}}}}, "extra_args.x: write text"),
        ({"sglang": [1]}, "sglang: expected `name: value` pairs"),
        ({"sglang": {"mem_fraction_static": 0.5}, "use_cpu": True}, "a share of a GPU's memory, and use_cpu is true"),
        ({"sync": {"method": "nccl"}}, "sync: method: nccl: not in this version; write disk or tensor"),
        ({"sync": {"method": "disc"}}, "sync: method: 'disc' is not one of disk, tensor"),
        ({"sync": {"delta": True}}, "sync: delta: sending only what changed is not in this version"),
        ({"sync": {"bucket_mb": 0}}, "sync: bucket_mb: 0.0 is too small"),
        ({"sync": {"bucket": 1}}, "sync: bucket: unknown, did you mean bucket_mb?"),
        ({"sync": {"method": "tensor", "dir": "x"}}, "dir belongs to method disk"),
        ({"sglang_base_urls": "node7:30000"}, "'node7:30000' is not an address: write http://host:port"),
        ({"sglang_base_urls": "http://h:99999"}, "is not an address"),
        ({"sglang_base_urls": "http://h:1/v1"}, "is not an address"),
        ({"sglang_base_urls": ["http://h:1", "http://h:1/"]}, "http://h:1 is named twice"),
        ({"sglang_base_urls": FAR}, "method disk and http://node7:30000 on another machine: write dir"),
        (
            {"sglang_base_urls": FAR, "sync": {"method": "tensor"}, "sglang": {"tp": 2, "python": "p"}},
            "sglang: {python, tp} belongs to servers",
        ),
        ({"sglang_base_urls": FAR, "sync": {"method": "tensor"}, "rollout_engine": "local"}, "contradict each other"),
        ({"rollout_engine": "vllm"}, "'vllm' is not one of auto, local, sglang"),
    ],
)
def test_what_is_wrong_is_one_error_that_says_what_to_write(values: dict[str, Any], words: str) -> None:
    found = errors(**{"rollout_engine": "sglang", **values})
    assert len(found) == 1 and words in found[0], found


def test_several_mistakes_are_all_named() -> None:
    (found,) = errors(sglang={"tp": 0, "nope": 1, "timeout": "x"})
    assert all(part in found for part in ("tp: 0", "nope: unknown", "timeout: 'x'"))


def test_servers_that_run_already_may_be_given_with_a_key_and_a_timeout() -> None:
    cfg = config(sglang_base_urls=[FAR], sync={"dir": "/shared"}, sglang={"api_key": "SECRET", "timeout": 60})
    assert cfg.rollout.sglang.api_key == "SECRET" and cfg.notes == ()


def test_options_of_the_other_engine_or_method_are_noted() -> None:
    assert config(rollout_engine="torch", sglang={"tp": 2}, sync={"method": "tensor"}).notes == (
        "sglang has no effect: rollout_engine is local",
        "sync has no effect: rollout_engine is local",
    )
    assert config(rollout_engine="sglang", sync={"bucket_mb": 5}).notes == ("sync.bucket_mb has no effect: sync.method is disk",)


def test_no_secret_is_shown_dumped_or_repeated(tmp_path: Path) -> None:
    cfg = config(rollout_engine="sglang", sglang={"api_key": "SECRET", "tp": 2})
    assert "SECRET" not in to_yaml(cfg) and "SECRET" not in repr(cfg)
    (tmp_path / "c.yaml").write_text(to_yaml(cfg))
    again = load_config(tmp_path / "c.yaml", env=MCA)
    assert again == cfg and again.rollout.sglang.tp == 2 and again.rollout.sglang.api_key is None
    for values in ({"sglang": {"api_key": ["SECRET"]}}, {"sglang": "SECRET"}, {"sglang_base_urls": "http://u:SECRET@h:1"}):
        assert "SECRET" not in str(errors(**values))


@pytest.mark.parametrize("engine", ["local", "sglang", "auto"])
def test_a_resolved_file_loads_back_without_new_notes(tmp_path: Path, engine: str) -> None:
    cfg = config(rollout_engine=engine, sync={"dir": "/x"} if engine == "sglang" else {})
    (tmp_path / "c.yaml").write_text(to_yaml(cfg))
    again = load_config(tmp_path / "c.yaml", env=MCA)
    assert again == cfg
    assert not [note for note in (*cfg.notes, *again.notes) if note.startswith(("sglang", "sync"))]


def test_flags_of_a_server() -> None:
    assert server_flags({"a_b": 1, "--c": True, "d": False, "e": None, "f": ["x", 2]}) == ["--a-b", "1", "--c", "--f", "x", "2"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sglang_tp_size", "sglang: {tp: ...}"),
        ("sglang_maxlen", "{context_length: ...}"),
        ("sglang_mem_fraction", "{mem_fraction_static: ...}"),
    ],
)
def test_names_of_llamafactory_are_refused_with_what_to_write(name: str, words: str) -> None:
    (found,) = errors(**{name: 2})
    assert found.startswith(name) and words in found


def test_help_lists_the_options() -> None:
    lines = describe("sglang")
    assert any(line.strip().startswith("mem_fraction_static: ") for line in lines)
    assert any("disk" in line for line in describe("sync"))
