"""Keys of experiment trackers, under the names of Hugging Face and LLaMA-Factory."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option

SWANLAB_KEYS = ("swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode", "swanlab_api_key", "swanlab_logdir")


@dataclass(frozen=True)
class TrackingConfig:
    """Where `report_to` sends a run."""

    project: str = option("rlmca", "Project of the run in trackers (in MLflow the experiment).")
    use_swanlab: bool = option(False, "LLaMA-Factory's way to write report_to: swanlab.")
    swanlab_project: str | None = option(None, "Project in SwanLab; project when not set.")
    swanlab_workspace: str | None = option(None, "Workspace in SwanLab.")
    swanlab_run_name: str | None = option(None, "Name of the run in SwanLab; run_name when not set.")
    swanlab_mode: str = option("cloud", "Where SwanLab's run goes: local and offline write to swanlab_logdir alone.",
                               choices=("cloud", "local", "offline", "disabled"))  # fmt: skip
    swanlab_logdir: str | None = option(None, "Folder of SwanLab's files; output_dir/swanlab when not set.")
    swanlab_api_key: str | None = option(None, "Key that SwanLab logs in with; else its own environment variable or login.", secret=True)
