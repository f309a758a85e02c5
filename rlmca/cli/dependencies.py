"""`rlmca-cli env`: versions of every dependency and what is missing for which feature."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata

import rlmca


@dataclass(frozen=True)
class Dependency:
    """A distribution by its registry name, and what needs it."""

    name: str
    feature: str
    optional: bool = False


DEPENDENCIES = (
    Dependency("torch", "everything"),
    Dependency("numpy", "everything"),
    Dependency("pyyaml", "configuration"),
    Dependency("rich", "output"),
    Dependency("transformers", "tokenizers, rollouts, schedulers, training without USE_MCA=1"),
    Dependency("safetensors", "weights"),
    Dependency("peft", "finetuning_type: lora"),
    Dependency("datasets", "data sets on the hub"),
    Dependency("jinja2", "chat templates"),
    Dependency("megatron-core", "training with USE_MCA=1", optional=True),
    Dependency("flash-attn", "flash_attn: fa2 without USE_MCA=1", optional=True),
    Dependency("math-verify", "reward math"),
    Dependency("reasoning-gym", "reasoning_gym data sets and reward"),
    Dependency("zstandard", "rollouts/step-N.jsonl.zst"),
    Dependency("matplotlib", "plot_loss"),
    Dependency("tensorboard", "report_to: tensorboard"),
    Dependency("wandb", "report_to: wandb", optional=True),
    Dependency("swanlab", "report_to: swanlab", optional=True),
    Dependency("trackio", "report_to: trackio", optional=True),
    Dependency("mlflow", "report_to: mlflow", optional=True),
    Dependency("transformer-engine", "transformer_impl: transformer_engine", optional=True),
    Dependency("apex", "fused kernels of Megatron", optional=True),
)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def print_environment() -> None:
    """A table of dependencies, then one line per missing one."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"rlmca {rlmca.__version__}", title_justify="left")
    for heading in ("package", "version", "for"):
        table.add_column(heading)
    table.add_row("python", platform.python_version(), sys.executable)
    missing = []
    for dependency in DEPENDENCIES:
        version = installed_version(dependency.name)
        table.add_row(dependency.name, version or "missing", dependency.feature)
        if version is None:
            missing.append(dependency)
    table.add_row("devices", *_devices())
    console = Console()
    console.print(table)
    for dependency in missing:
        kind = "optional" if dependency.optional else "needed"
        console.print(f"missing {dependency.name} ({kind}): without it there is no {dependency.feature}", soft_wrap=True, markup=False)


def _devices() -> tuple[str, str]:
    if installed_version("torch") is None:
        return "unknown", "torch is missing"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "cpu", "no CUDA device, training runs on the CPU"
    return f"{count} cuda", ", ".join(torch.cuda.get_device_name(i) for i in range(count))
