"""The policy: a GPT model whose head gives the log-probability of chosen tokens instead of all logits.

Shape legend: B rows, T tokens of a row, S tokens of it on this rank (context parallelism), N chosen tokens, H hidden
size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rlmca.models.attention import packed_rows
from rlmca.models.context import Borders, held_places, own_targets, whole_outputs
from rlmca.models.logprobs import token_log_probs
from rlmca.models.logprobs_head import head_log_probs
from rlmca.models.router import ExpertBlock, ExpertLayer


class LogProbHead(ColumnParallelLinear):
    """Megatron's output layer, giving [2, N] log-prob and entropy (zeros when not asked for) instead of logits.

    A module and not a function that is handed the weight: with `overlap_param_gather` DDP waits for the weight when its
    module is called. The gradient of `chosen_NH` is this rank's share, see `head_log_probs`. Without
    `cross_entropy_loss_fusion` all logits of the chosen tokens are made, and the second row is always the entropy.
    """

    def forward(
        self, chosen_NH: Tensor, target_N: Tensor, weight: Tensor | None, *, vocab_size: int, temperature: float, entropy: bool
    ) -> Tensor:
        weight_VH = self.weight if weight is None else weight
        group = self.tp_group if self.tp_group.size() > 1 else None
        if not self.config.cross_entropy_loss_fusion:
            logits_NV = torch.nn.functional.linear(chosen_NH, weight_VH)
            return torch.stack(token_log_probs(logits_NV, target_N, vocab_size=vocab_size, temperature=temperature, group=group))
        logp_N, entropy_N = head_log_probs(
            chosen_NH, weight_VH, target_N, vocab_size=vocab_size, temperature=temperature, group=group, entropy=entropy
        )
        return torch.stack([logp_N, torch.zeros_like(logp_N) if entropy_N is None else entropy_N])


class PolicyModel(GPTModel):
    """`forward(ids_BT, mask_BT)` -> [2, N] log-prob and entropy of the tokens where `mask_BT` is True (row-major order).

    Earlier pipeline stages return hidden states. Only the hidden states that predict a chosen token go through the
    head: with short replies to long prompts most of the work would be thrown away. This is also the one place where
    positions shift: the state at t-1 predicts token t.
    """

    def __init__(self, *args: Any, real_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        if self.post_process:
            # GPTModel names the class of its output layer: give what it built, parameters and hooks alike, our forward.
            # The head sees rows that `_chosen` has gathered already, and `_chosen` reduces their gradient too.
            self.output_layer.__class__ = LogProbHead
        for module in self.modules():
            if type(module) is MoELayer:  # a layer spec with another class would not be handed its process groups
                module.__class__ = ExpertLayer
        if self.config.num_moe_experts:
            self.decoder.__class__ = ExpertBlock

    def forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperature: float = 1.0,
        entropy: bool = True,
        borders: Borders | None = None,
        sequence_BT: Tensor | None = None,
    ) -> Tensor:
        """See the class. `borders`: the one row of the batch holds several sequences, which begin there; last, the row's end.

        The first token of a sequence must not be chosen: nothing predicts it. Without `entropy` its row is zero. Routers of
        experts read `sequence_BT`: the number of the sequence that a token belongs to, -1 for padding.
        """
        cp = self.cp_group.size()
        held_S = held_places(borders or (0, ids_BT.shape[1]), cp, self.cp_group.rank(), ids_BT.device)
        ids_BS = ids_BT if cp == 1 else ids_BT[:, held_S]
        hidden = super().forward(
            ids_BS,
            held_S.expand_as(ids_BS),  # read by learned positions alone, which no family here has; rotary ones follow the borders
            attention_mask=None,
            packed_seq_params=None if borders is None else packed_rows(borders, ids_BT.device),
            padding_mask=None if sequence_BT is None else self._held_sequences(sequence_BT, held_S),
        )
        if not self.post_process:
            return hidden
        row_N, index_N, number_N = own_targets(mask_BT, held_S)
        raw_2N = self.output_layer(
            self._chosen(hidden, row_N, index_N),
            ids_BT[row_N, held_S[index_N] + 1],
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None,
            vocab_size=self.real_vocab_size,
            temperature=temperature,
            entropy=entropy,
        )
        return raw_2N if cp == 1 else whole_outputs(raw_2N, number_N, int(mask_BT.sum()), self.cp_group)

    def _held_sequences(self, sequence_BT: Tensor, held_S: Tensor) -> Tensor:
        """Those of the tokens that this stage's layers hold here; Megatron shares them out to tensor ranks on the first stage alone."""
        sequence_BS = sequence_BT[:, held_S]
        if self.pre_process or not self.config.sequence_parallel:
            return sequence_BS
        return sequence_BS.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()].contiguous()

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def _chosen(self, hidden_SBH: Tensor, row_N: Tensor, index_N: Tensor) -> Tensor:
        """The states that go through the head; backward: the sum of their gradients over the ranks' vocabulary shards."""
        if self.tp_group.size() > 1:
            if self.config.sequence_parallel:
                hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True, group=self.tp_group)
            else:
                hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=self.tp_group)
        flat_XH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        return flat_XH.index_select(0, index_N * hidden_SBH.shape[1] + row_N)
