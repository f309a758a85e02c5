"""The model families, one table each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmca.layouts.families.deepseek_v3 import DEEPSEEK_V3
from rlmca.layouts.families.llama import LLAMA
from rlmca.layouts.families.mistral import MISTRAL
from rlmca.layouts.families.mixtral import MIXTRAL
from rlmca.layouts.families.qwen2 import QWEN2
from rlmca.layouts.families.qwen2_moe import QWEN2_MOE
from rlmca.layouts.families.qwen3 import QWEN3
from rlmca.layouts.families.qwen3_moe import QWEN3_MOE
from rlmca.layouts.family import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (QWEN3, QWEN3_MOE, QWEN2, QWEN2_MOE, LLAMA, MISTRAL, MIXTRAL, DEEPSEEK_V3)
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config by its `model_type`. Raises ValueError naming the type and the supported families."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"config.json has model_type {model_type!r}, which is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
