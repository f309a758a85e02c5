"""A configuration written back as YAML: every value as resolved, no secrets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from rlmca.config import checks
from rlmca.config.engine_checks import HUGGINGFACE_ONLY, MEGATRON_ONLY
from rlmca.config.preference_checks import DPO_ONLY
from rlmca.config.reading import scalar_resolvers
from rlmca.config.schema import RunConfig, keys

_SECRET_NAMES = {"api_key", "token", "hf_token", "hub_token", "access_token", "auth_token", "password", "secret", "authorization"}
_SECRET_ENDS = ("_api_key", "_access_token", "_auth_token", "_password", "_secret")


class _Dumper(yaml.SafeDumper):
    """Quotes text that either this program's YAML or YAML 1.1 would read as something else."""

    yaml_implicit_resolvers = scalar_resolvers(yaml.SafeDumper.yaml_implicit_resolvers)


def to_yaml(cfg: RunConfig) -> str:
    """YAML that loads back to an equal configuration (secrets apart); keys of the other stage and of other engines are left out."""
    skipped = set(checks.SFT_ONLY if cfg.stage == "grpo" else checks.GRPO_ONLY)
    skipped = skipped - {"ref_model"} if cfg.stage == "dpo" else skipped | set(DPO_ONLY)
    if cfg.engine != "megatron":
        skipped |= set(MEGATRON_ONLY)
    if cfg.engine != "huggingface":
        skipped |= set(HUGGINGFACE_ONLY)
    values: dict[str, Any] = {"stage": cfg.stage}
    for name, key in keys().items():
        if name == "stage" or name in skipped or key.rule.secret:
            continue
        value = getattr(getattr(cfg, key.section), name)
        if value is not None:
            values[name] = _plain(value)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if not (isinstance(v, str) and _secret(str(k)))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _secret(name: str) -> bool:
    """Whether an option of a user's function or of an engine has the name of a secret."""
    name = name.lower().replace("-", "_")
    return name in _SECRET_NAMES or name.endswith(_SECRET_ENDS)
