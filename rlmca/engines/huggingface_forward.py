"""A Transformers model as a module that gives log-probs: what data parallelism wraps, since all of its weights work inside it.

Shape legend: B rows, T tokens of the padded row, K columns with a target in some row, N targets of a micro-batch in
row-major order, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmca.models.logprobs import token_log_probs
from rlmca.models.logprobs_head import head_log_probs


class TokenLogProbs(nn.Module):
    """`forward(ids_BT, mask_BT)` -> [2, N] log-prob and entropy of the tokens where `mask_BT` is True (row-major order).

    Rows are right-padded: the causal mask alone keeps padding out of real tokens, and what padding computes is never
    read. Only positions that predict a target of some row go through the head. Where the head is a plain matrix and the
    model returns what it gives, logits are never made, see `head_log_probs`; other models make those of the positions.
    """

    def __init__(self, module: PreTrainedModel, *, autocast: torch.dtype | None = None) -> None:
        """`autocast`: the type of matrix products; None: that of the weights."""
        super().__init__()
        self.module = module
        self._half = autocast
        self._accepted = _accepted(module)
        self.makes_logits = not self._head_comes_last()

    def forward(
        self, ids_BT: Tensor, mask_BT: Tensor, temperature: float = 1.0, entropy: bool = True, borders: tuple[int, ...] | None = None
    ) -> Tensor:
        """See the class. `borders`: the one row of the batch holds several sequences, which begin there; last, the row's end.

        The first token of a sequence must not be chosen: nothing predicts it. Without `entropy` its row may be zero.
        """
        column_K, target_N = mask_BT.any(0).nonzero()[:, 0], ids_BT[mask_BT]
        chosen_BK = mask_BT[:, column_K]
        if self.makes_logits:
            logits_NV = self._output(ids_BT, column_K - 1, borders)[chosen_BK]
            return torch.stack(token_log_probs(logits_NV, target_N, vocab_size=logits_NV.shape[1], temperature=temperature))
        head: Any = self.module.get_output_embeddings()
        with _replaced(head, lambda hidden: hidden):
            hidden_NH = self._output(ids_BT, column_K - 1, borders)[chosen_BK]
        with self._autocast(ids_BT):
            logp_N, entropy_N = head_log_probs(
                hidden_NH, head.weight, target_N, vocab_size=head.weight.shape[0], temperature=temperature, entropy=entropy
            )
        return torch.stack([logp_N, torch.zeros_like(logp_N) if entropy_N is None else entropy_N])

    def _output(self, ids_BT: Tensor, position_K: Tensor, borders: tuple[int, ...] | None = None) -> Tensor:
        """What the model calls logits, [B, K, V] (or [B, K, H] under a head that does nothing), of these positions.

        Positions that begin anew are how Transformers is told of packed sequences: its attention keeps them apart.
        """
        B, T = ids_BT.shape
        sequences = [torch.arange(end - begin, device=ids_BT.device) for begin, end in itertools.pairwise(borders or (0, T))]
        inputs = {
            "position_ids": torch.cat(sequences).expand(B, T),
            "use_cache": False,
            "logits_to_keep": position_K,
        }
        with self._autocast(ids_BT):
            output = self.module(input_ids=ids_BT, **{name: value for name, value in inputs.items() if name in self._accepted}).logits
        return output if "logits_to_keep" in self._accepted else output[:, position_K]

    def _autocast(self, ids_BT: Tensor) -> torch.autocast:
        return torch.autocast(ids_BT.device.type, dtype=self._half or torch.bfloat16, enabled=self._half is not None)

    @torch.no_grad()
    def keeps_borders(self) -> bool:
        """Whether packed sequences do not see each other and count positions from their own beginning.

        Seen by other tokens in front: what a sequence gives must not change.
        """
        device, training, half = next(self.module.parameters()).device, self.module.training, self._half
        place_K = torch.arange(4, device=device)
        if "flash" not in str(self.module.config._attn_implementation):  # whose kernels know nothing wider
            self._half = None
        self.module.eval()
        try:
            alone = self._output(torch.tensor([[1, 2, 3, 1]], device=device), place_K)
            behind = [
                self._output(torch.tensor([[*front, 1, 2, 3, 1]], device=device), place_K + 4, (0, 4, 8))
                for front in ([3, 2, 1, 1], [1, 0, 2, 2])
            ]
            allowed = (2e-2 if self._half else 1e-4) * float(alone.abs().max())
        finally:
            self._half = half
            self.module.train(training)
        return all(float((other - alone).abs().max()) <= allowed for other in behind)

    @torch.no_grad()
    def _head_comes_last(self) -> bool:
        """Whether the model's logits are hidden states times one matrix and nothing else: no bias, capping, scaling, masking.

        Seen by putting other heads in its place, on a row of two tokens: whatever a head gives, the model must return.
        """
        head = self.module.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            return False
        device, training = head.weight.device, self.module.training
        ids_BT, position_K = torch.zeros(1, 2, dtype=torch.int64, device=device), torch.arange(2, device=device)
        noise_V = 100 * torch.linspace(-1, 1, head.out_features, device=device)  # far from where a cap is nearly the identity
        self.module.eval()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            try:
                return all(
                    _returns_what_the_head_gives(lambda: self._output(ids_BT, position_K), head, stand_in)
                    for stand_in in (lambda hidden: noise_V.expand(*hidden.shape[:-1], -1).clone(), lambda hidden: hidden)
                )
            finally:
                self.module.train(training)


def _returns_what_the_head_gives(run: Callable[[], Tensor], head: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> bool:
    given: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        given.append(stand_in(hidden))
        return given[-1].clone()

    with _replaced(head, forward):
        output = run()
    return len(given) == 1 and output.shape == given[0].shape and torch.equal(output, given[0].to(output.dtype))


@contextlib.contextmanager
def _replaced(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The head with another forward; its hooks stay."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _accepted(module: PreTrainedModel) -> set[str]:
    """Which optional arguments the model's forward has. Positions for the head are trusted to Transformers' own code alone."""
    names = set(inspect.signature(module.forward).parameters)
    return names if type(module).__module__.startswith("transformers.") else names - {"logits_to_keep"}
