"""What must hold between the keys of stage dpo."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig, keys

Finding = tuple[tuple[str, ...], str]
DPO_ONLY = tuple(name for name, key in keys().items() if key.section == "preference")
IDLE = ("train_on_prompt", "mask_history")


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Every contradiction of these keys in training."""
    own = cfg.preference
    if cfg.stage != "dpo":
        for name in DPO_ONLY:
            if name in cfg.given:
                yield ("stage", name), f"{name} belongs to stage dpo, and stage is {cfg.stage}: leave it out"
        return
    if own.dpo_label_smoothing and own.pref_loss != "sigmoid":
        yield (
            ("dpo_label_smoothing", "pref_loss"),
            f"dpo_label_smoothing: {own.dpo_label_smoothing} belongs to pref_loss sigmoid, and pref_loss is {own.pref_loss}: leave it out",
        )
    if cfg.model.train_from_scratch and own.needs_reference and cfg.model.ref_model is None:
        yield (
            ("train_from_scratch", "pref_loss", "ref_model"),
            f"train_from_scratch: pref_loss {own.pref_loss} would take fresh random weights for its reference: write ref_model, "
            "or pref_loss: orpo or simpo",
        )


def notes(cfg: RunConfig) -> Iterator[str]:
    """Keys that stage dpo does not use, given as they are."""
    own, given = cfg.preference, cfg.given
    for name in IDLE:
        if name in given and getattr(cfg.data, name):
            yield f"{name} has no effect: stage dpo compares the last reply of each side, and nothing else is a target"
    if "ref_model" in given and not own.needs_reference:
        yield f"ref_model has no effect: pref_loss {own.pref_loss} compares with no reference"
    if "simpo_gamma" in given and own.pref_loss != "simpo":
        yield f"simpo_gamma has no effect: pref_loss is {own.pref_loss}"
