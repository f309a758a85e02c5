"""What `rl_algorithm` fills in: a table of defaults, each of which a file may override.

Order: a key's own default, then the preset's, then what a chosen loss, estimator or place of the KL brings in where it is
not the preset's own, then what is given. None in these tables: the key has no meaning there and stays unset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One algorithm: its paper and the keys it sets; `overlong_share` of max_new_tokens is its overlong_buffer."""

    paper: str
    keys: Mapping[str, Any]
    overlong_share: float | None = None


_GROUP = {"advantage": "grpo", "advantage_std": "sample", "advantage_eps": 1e-6}
_MEAN_ONLY = {"advantage_std": "none"}
_NO_KL = {"kl_coef": 0.0, "kl_in": "loss", "kl_estimator": "k3"}
_NO_RATIO = {"clip_ratio_low": None, "clip_ratio_high": None}
_SEQUENCE_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}


def _kl(coef: float, where: str, estimator: str) -> dict[str, Any]:
    return {"kl_coef": coef, "kl_in": where, "kl_estimator": estimator}


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300",
        {**_GROUP, "policy_loss": "grpo", "loss_agg": "seq_mean_token_mean", **_clip(0.2, 0.2), **_kl(0.001, "loss", "k3")},
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476",
        {**_GROUP, "policy_loss": "ppo", "loss_agg": "token_mean", **_clip(0.2, 0.28), **_NO_KL, "dynamic_sampling": True},
        overlong_share=0.2,  # 4096 of 20480 tokens in the paper
    ),
    "dr_grpo": Preset(
        "Understanding R1-Zero-Like Training, arXiv 2503.20783",
        {"advantage": "dr_grpo", **_MEAN_ONLY, "policy_loss": "ppo", "loss_agg": "seq_mean_token_sum_norm", **_clip(0.2, 0.2), **_NO_KL},
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv 2506.13585",
        {
            **_GROUP, "advantage_std": "population", "advantage_eps": 1e-4, "policy_loss": "cispo", "loss_agg": "seq_mean_token_mean",
            **_NO_RATIO, "cispo_cap": 5.0, **_kl(0.1, "loss", "k3"),
        },
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization, arXiv 2507.18071",
        {**_GROUP, "policy_loss": "gspo", "loss_agg": "seq_mean_token_mean", **_SEQUENCE_CLIP, **_NO_KL},
    ),
    "gspo_token": Preset(
        "Group Sequence Policy Optimization, arXiv 2507.18071, section 4.3",
        {**_GROUP, "policy_loss": "gspo_token", "loss_agg": "seq_mean_token_mean", **_SEQUENCE_CLIP, **_NO_KL},
    ),
    "rloo": Preset(
        "Back to Basics, arXiv 2402.14740",
        {"advantage": "rloo", **_MEAN_ONLY, "policy_loss": "reinforce", "loss_agg": "seq_mean_token_sum", **_NO_RATIO,
         **_kl(0.05, "reward", "k1")},
    ),
    "reinforce_plus_plus": Preset(
        "REINFORCE++, arXiv 2501.03262",
        {"advantage": "reinforce_plus_plus", **_MEAN_ONLY, "policy_loss": "ppo", "loss_agg": "token_mean", **_clip(0.2, 0.2),
         **_kl(0.01, "reward", "k1")},
    ),
    "reinforce_plus_plus_baseline": Preset(
        "REINFORCE++, arXiv 2501.03262",
        {"advantage": "reinforce_plus_plus_baseline", **_MEAN_ONLY, "policy_loss": "ppo", "loss_agg": "token_mean", **_clip(0.2, 0.2),
         **_kl(0.01, "loss", "k2")},
    ),
    "nemotron_grpo": Preset(
        "Nemotron-Cascade, arXiv 2512.13607",
        {**_GROUP, "policy_loss": "reinforce", "loss_agg": "token_mean", **_NO_RATIO, **_NO_KL},
    ),
}  # fmt: skip

_RATIO_LOSSES = ("ppo", "grpo")
_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"loss_agg": "seq_mean_token_mean", **_clip(0.2, 0.2), "cispo_cap": None},
    "ppo": {"loss_agg": "token_mean", **_clip(0.2, 0.2), "cispo_cap": None},
    "cispo": {"loss_agg": "seq_mean_token_mean", **_NO_RATIO, "cispo_cap": 5.0},
    "gspo": {"loss_agg": "seq_mean_token_mean", **_SEQUENCE_CLIP, "cispo_cap": None},
    "gspo_token": {"loss_agg": "seq_mean_token_mean", **_SEQUENCE_CLIP, "cispo_cap": None},
    "reinforce": {"loss_agg": "token_mean", **_NO_RATIO, "cispo_cap": None},
}
"""What a loss brings in that is not the preset's."""


def fill(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that a file left out, where its preset and what it chose instead of the preset's say something.

    `given`: the fitted values of the file; a value of None counts as left out.
    """
    given = {name: value for name, value in given.items() if value is not None}
    preset = PRESETS.get(given.get("rl_algorithm", "grpo"), PRESETS["grpo"])
    out = dict(preset.keys)
    loss = given.get("policy_loss", out["policy_loss"])
    if loss != out["policy_loss"] and loss in _LOSSES:
        same_clip = {loss, out["policy_loss"]} == set(_RATIO_LOSSES)
        out |= {"loss_agg": _LOSSES[loss]["loss_agg"]} if same_clip else _LOSSES[loss]
    advantage = given.get("advantage", out["advantage"])
    if advantage != out["advantage"]:
        out |= {"advantage_std": "sample"} if advantage == "grpo" else _MEAN_ONLY
    where = given.get("kl_in", out["kl_in"])
    if where != out["kl_in"]:
        out["kl_estimator"] = "k1" if where == "reward" else "k3"
    if "clip_ratio_high" in given:
        out["cispo_cap"] = None  # cispo: the cap is then 1 + clip_ratio_high
    if preset.overlong_share is not None:
        out["overlong_buffer"] = int(preset.overlong_share * given.get("max_new_tokens", 512))
    kind = given.get("rollout_correction", "none")
    if kind.startswith("tis"):
        out["rollout_correction_cap"] = 2.0
    if kind.startswith("icepop"):
        out["rollout_correction_range"] = [0.5, 2.0]
    return {name: value for name, value in out.items() if name not in given}
