"""What trackers are told of a configuration."""

from __future__ import annotations

import yaml

from rlmca.config import RunConfig, to_yaml
from rlmca.observe.trackers import TrackerOptions


def tracker_options(cfg: RunConfig) -> TrackerOptions:
    """`report_to` and what belongs to it; the configuration as `config.yaml` has it, secrets left out."""
    own = cfg.tracking
    swanlab = {
        "project": own.swanlab_project,
        "workspace": own.swanlab_workspace,
        "name": own.swanlab_run_name,
        "log_dir": own.swanlab_logdir,
        "mode": own.swanlab_mode if "swanlab_mode" in cfg.given else None,  # else SwanLab's environment variable decides
    }
    return TrackerOptions(
        report_to=cfg.train.report_to,
        project=own.project,
        run_name=cfg.train.run_name,
        config=yaml.safe_load(to_yaml(cfg)),
        swanlab={key: value for key, value in swanlab.items() if value is not None},
        swanlab_api_key=own.swanlab_api_key,
    )
