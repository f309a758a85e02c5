"""What a run would do, and what would stop it, found out without loading weights."""

from __future__ import annotations

from rlmca.planner.model import check_model
from rlmca.planner.parameters import RankParameters, rank_parameters, read_hf_config
from rlmca.planner.preflight import preflight_errors
from rlmca.planner.report import dry_run
from rlmca.planner.rows import count_rows

__all__ = ["RankParameters", "check_model", "count_rows", "dry_run", "preflight_errors", "rank_parameters", "read_hf_config"]
