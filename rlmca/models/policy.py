"""The policy: a GPT model whose head gives the log-probability of chosen tokens instead of all logits.

Shape legend: B rows, T tokens of a row, S tokens of it on this rank (context parallelism), N chosen tokens, H hidden
size, V vocabulary columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from rlmca.models.context import own_targets, whole_outputs, zigzag_positions
from rlmca.models.logprobs import token_log_probs


class PolicyModel(GPTModel):
    """`forward(ids_BT, mask_BT)` -> [2, N] log-prob and entropy of the tokens where `mask_BT` is True (row-major order).

    Earlier pipeline stages return hidden states. Only the hidden states that predict a chosen token go through the
    head: with short replies to long prompts most of the logits would be computed to be thrown away. This is also the
    one place where positions shift: the state at t-1 predicts token t.
    """

    def __init__(self, *args: Any, real_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        if self.post_process:
            # the head sees rows that are already gathered and chosen, so it must neither gather again nor
            # all-reduce the input's gradient by itself: `_chosen` does both for its part
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = False
            self.output_layer.disable_grad_reduce = True

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, temperature: float = 1.0) -> Tensor:
        """See the class. `mask_BT[:, 0]` must be False: nothing predicts a first token."""
        cp = self.cp_group.size()
        position_S = zigzag_positions(ids_BT.shape[1], cp, self.cp_group.rank(), ids_BT.device)
        ids_BS = ids_BT if cp == 1 else ids_BT[:, position_S]
        hidden = super().forward(ids_BS, position_S.expand_as(ids_BS), attention_mask=None)
        if not self.post_process:
            return hidden
        row_N, place_N, number_N = own_targets(mask_BT, position_S)
        chosen_NH = self._chosen(hidden, row_N, place_N)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_NV, _ = self.output_layer(chosen_NH, weight=weight)
        logp_N, entropy_N = token_log_probs(
            logits_NV,
            ids_BT[row_N, position_S[place_N] + 1],
            vocab_size=self.real_vocab_size,
            temperature=temperature,
            group=self.tp_group if self.tp_group.size() > 1 else None,
        )
        raw_2N = torch.stack([logp_N, entropy_N])
        return raw_2N if cp == 1 else whole_outputs(raw_2N, number_N, int(mask_BT.sum()), self.cp_group)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def _chosen(self, hidden_SBH: Tensor, row_N: Tensor, position_N: Tensor) -> Tensor:
        if self.tp_group.size() > 1:
            if self.config.sequence_parallel:  # backward: every rank's vocabulary shard contributes, so reduce-scatter
                hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True, group=self.tp_group)
            else:
                hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=self.tp_group)
        flat_XH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        return flat_XH.index_select(0, position_N * hidden_SBH.shape[1] + row_N)
