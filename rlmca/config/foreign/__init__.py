"""Names of LLaMA-Factory, mcore_adapter and Hugging Face that are not honoured here, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.config.foreign.aliases import ALIASES
from rlmca.config.foreign.entry import Foreign
from rlmca.config.foreign.huggingface import HUGGINGFACE
from rlmca.config.foreign.llamafactory import LLAMAFACTORY
from rlmca.config.foreign.megatron import MEGATRON
from rlmca.config.foreign.rl import RL

FOREIGN: Mapping[str, Foreign] = {**LLAMAFACTORY, **MEGATRON, **HUGGINGFACE, **RL}

__all__ = ["ALIASES", "FOREIGN", "Foreign"]
