"""What Transformers says about a reply: log-probs at a temperature, recomputed from the ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlmca.rollout.base import Reply


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [T, V] of every reply position."""
    logits_SV = model(torch.tensor([[*prompt, *reply]])).logits[0].float()
    return torch.log_softmax(logits_SV[len(prompt) - 1 : -1] / temperature, -1)


def logp_gap(model: PreTrainedModel, prompt: Sequence[int], reply: Reply, temperature: float = 1.0) -> float:
    """Largest difference between the reply's log-probs and the model's."""
    logp_TV = distributions(model, prompt, reply.ids, temperature)
    want_T = logp_TV.gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
    return float((torch.tensor(reply.logp) - want_T).abs().max())
