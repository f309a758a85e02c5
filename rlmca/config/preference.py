"""Keys of learning from pairs of replies (LLaMA-Factory's names and defaults)."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option

REFERENCE_FREE = ("orpo", "simpo")
"""Losses that compare with no reference model."""


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss of stage dpo."""

    pref_loss: str = option(
        "sigmoid",
        "Loss of a pair. sigmoid: DPO; hinge: SLiC; ipo, orpo, simpo: of mean log-probs a token, the last two without a reference.",
        choices=("sigmoid", "hinge", "ipo", "orpo", "simpo"),
        refused={"kto_pair": "kto_pair: not in this version; write sigmoid, hinge, ipo, orpo or simpo"},
    )
    pref_beta: float = option(0.1, "Strength of the comparison: how far a reply may move from the reference for its preference.", above=0)
    pref_ftx: float = option(0.0, "Weight of the chosen reply's mean negative log-prob, added to the loss of its pair.", at_least=0)
    dpo_label_smoothing: float = option(
        0.0, "sigmoid: share of pairs that are taken to be named the wrong way round (conservative DPO).", at_least=0, below=0.5
    )
    simpo_gamma: float = option(0.5, "simpo: the margin that the chosen reply is to win by.", at_least=0)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probs of a reference model."""
        return self.pref_loss not in REFERENCE_FREE
