"""What must hold between the keys of processes."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig

_OF_RAY = ("ray_address", "ray_num_workers", "ray_init_kwargs")


def process_findings(cfg: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys read, sentence) for every contradiction."""
    processes = cfg.processes
    given = [name for name in _OF_RAY if name in cfg.given and getattr(processes, name)]  # empty arguments ask for nothing
    if given and processes.use_ray is False:
        yield (("use_ray", *given), f"{', '.join(given)}: belongs to Ray, and use_ray is false: leave one out")
    elif given and processes.use_ray is None and cfg.stage != "grpo":
        yield (("use_ray", *given), f"{', '.join(given)}: stage {cfg.stage} takes Ray only with use_ray: true")
    for name, instead in (("address", "ray_address"), ("num_cpus", "ray_num_workers")):
        if name in processes.ray_init_kwargs:
            yield ("ray_init_kwargs",), f"ray_init_kwargs.{name}: write {instead}"
