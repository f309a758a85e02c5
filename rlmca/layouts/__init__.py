"""Model families as tables and the copy plan between Hugging Face tensors and Megatron ranks: index arithmetic, no torch."""

from rlmca.layouts.families import FAMILIES, family_of
from rlmca.layouts.family import Family
from rlmca.layouts.fields import UnsupportedField
from rlmca.layouts.plan import Copy, HFPlan, ModelLayout, ParamPlan, Piece
from rlmca.layouts.rows import Form, MegatronModel
from rlmca.layouts.topology import Coord, LayoutError, Topology

__all__ = [
    "FAMILIES", "Coord", "Copy", "Family", "Form", "HFPlan", "LayoutError", "MegatronModel", "ModelLayout", "ParamPlan", "Piece",
    "Topology", "UnsupportedField", "family_of",
]  # fmt: skip
