"""The environment variables of a run, read once at the command line and passed down as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlmca.config.errors import ConfigError

_TRUE = {"1", "true", "t", "yes", "y", "on"}
_FALSE = {"", "0", "false", "f", "no", "n", "off"}


@dataclass(frozen=True)
class Environment:
    """What the environment says about the engine and about the processes of a run (LLaMA-Factory's variable names).

    `rank`, `local_rank` and `world_size` are those of a process that torchrun started; None outside of torchrun.
    """

    use_mca: bool = False
    force_torchrun: bool = False
    nnodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_id: str | None = None
    min_nnodes: int | None = None
    max_nnodes: int | None = None
    max_restarts: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Environment:
        """Read the variables from a mapping such as `os.environ`; ConfigError names every variable that makes no sense."""
        errors: list[str] = []

        def text(name: str) -> str | None:
            return environ.get(name, "").strip() or None

        def flag(name: str) -> bool:
            value = environ.get(name, "").strip().lower()
            if value not in _TRUE | _FALSE:
                errors.append(f"environment variable {name}={environ[name]}: write {name}=1 or {name}=0")
            return value in _TRUE

        def number(name: str, least: int) -> int | None:
            value = text(name)
            if value is None:
                return None
            if not value.isdecimal() or int(value) < least:
                errors.append(f"environment variable {name}={value}: write a whole number, at least {least}")
                return None
            return int(value)

        found = cls(
            use_mca=flag("USE_MCA"),
            force_torchrun=flag("FORCE_TORCHRUN"),
            nnodes=number("NNODES", 1),
            node_rank=number("NODE_RANK", 0),
            nproc_per_node=number("NPROC_PER_NODE", 1),
            master_addr=text("MASTER_ADDR"),
            master_port=number("MASTER_PORT", 1),
            rdzv_id=text("RDZV_ID"),
            min_nnodes=number("MIN_NNODES", 1),
            max_nnodes=number("MAX_NNODES", 1),
            max_restarts=number("MAX_RESTARTS", 0),
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=number("WORLD_SIZE", 1),
        )
        if errors:
            raise ConfigError(errors)
        return found

    @property
    def under_torchrun(self) -> bool:
        """True in a process that torchrun started."""
        return None not in (self.rank, self.local_rank, self.world_size)

    @property
    def is_main(self) -> bool:
        """True in the process that prints and writes: rank 0, or the only process."""
        return not self.under_torchrun or self.rank == 0

    def launch_errors(self) -> list[str]:
        """Contradictions among the variables that start processes; empty under torchrun, which sets them itself."""
        if self.under_torchrun:
            return []
        errors = []
        nodes = self.max_nnodes or self.nnodes or 1
        if nodes > 1 and self.rank is not None and self.node_rank is None:
            errors.append(
                f"RANK={self.rank} is set and NODE_RANK is not: RANK numbers processes, and torchrun sets it by itself; "
                f"number this machine with NODE_RANK=0 ... {nodes - 1}"
            )
        if nodes > 1 and (self.master_addr is None or self.master_port is None):
            errors.append(f"{nodes} nodes need MASTER_ADDR and MASTER_PORT of the first one, the same on every node")
        if self.node_rank is not None and self.node_rank >= nodes:
            errors.append(f"NODE_RANK={self.node_rank}: with {nodes} node(s) it is at most {nodes - 1} (NNODES counts the nodes)")
        if (self.min_nnodes is None) != (self.max_nnodes is None):
            errors.append("MIN_NNODES and MAX_NNODES are set together or not at all")
        if self.min_nnodes is not None and self.max_nnodes is not None:
            if self.min_nnodes > self.max_nnodes:
                errors.append(f"MIN_NNODES={self.min_nnodes} is above MAX_NNODES={self.max_nnodes}")
            if self.rdzv_id is None:
                errors.append("an elastic run (MIN_NNODES, MAX_NNODES) needs RDZV_ID, the same on every node")
        return errors
