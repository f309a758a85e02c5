"""Keys of generation: sampling in stage grpo and in the commands eval and generate."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option


@dataclass(frozen=True)
class GenerationConfig:
    """How replies are sampled."""

    do_sample: bool = option(True, "Sample; false: the most likely token each time.")
    temperature: float = option(1.0, "Logits are divided by this before sampling.", above=0)
    top_p: float = option(1.0, "Sample from the most likely tokens that hold this much probability.", above=0, at_most=1)
    top_k: int = option(-1, "Sample from this many most likely tokens; -1: all.", at_least=-1)
    max_prompt_len: int = option(1024, "Longest prompt in tokens; longer prompts are dropped and counted.", at_least=1)
    max_new_tokens: int = option(512, "Longest reply in tokens, the stop token included.", at_least=1)
    stop: list[str] = option([], "Further texts that end a reply; each must be one token.", split=False)
