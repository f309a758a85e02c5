"""Environment variables: types, contradictions, torchrun's own."""

from __future__ import annotations

import pytest

from rlmca.config import ConfigError, Environment


def test_everything_is_read_with_its_type() -> None:
    env = Environment.from_environ(
        {"USE_MCA": "1", "FORCE_TORCHRUN": "true", "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "10.0.0.1"}
        | {"MASTER_PORT": "29500", "RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "4", "MAX_RESTARTS": "3", "PATH": "/bin"}
    )
    assert env == Environment(True, True, 2, 1, 8, "10.0.0.1", 29500, "job", 1, 4, 3)
    assert env.launch_errors() == []
    assert Environment.from_environ({"USE_MCA": "0", "NNODES": ""}) == Environment()


def test_all_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Environment.from_environ({"USE_MCA": "ture", "NNODES": "two", "NPROC_PER_NODE": "0"})
    assert [text.split(":")[0] for text in caught.value.errors] == [
        "environment variable USE_MCA=ture",
        "environment variable NNODES=two",
        "environment variable NPROC_PER_NODE=0",
    ]


MULTI = {"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**MULTI, "RANK": "1"}, "NODE_RANK"),
        ({"NNODES": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({**MULTI, "NODE_RANK": "2"}, "NODE_RANK=2"),
        ({**MULTI, "MIN_NNODES": "1"}, "together"),
        ({**MULTI, "MIN_NNODES": "3", "MAX_NNODES": "2", "RDZV_ID": "x"}, "above MAX_NNODES"),
        ({**MULTI, "MIN_NNODES": "1", "MAX_NNODES": "2"}, "needs RDZV_ID"),
    ],
)
def test_contradictions_of_a_launch(variables: dict[str, str], words: str) -> None:
    found = Environment.from_environ(variables).launch_errors()
    assert len(found) == 1 and words in found[0], found


def test_a_process_of_torchrun_may_have_a_rank() -> None:
    env = Environment.from_environ({**MULTI, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
    assert env.under_torchrun and env.launch_errors() == [] and not env.is_main
    assert Environment().is_main
