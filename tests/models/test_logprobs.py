"""The log-prob head against torch's own log_softmax in float64: values and gradients."""

from __future__ import annotations

import pytest
import torch

from rlmca.models.logprobs import token_log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("vocab_size", [11, 16])
def test_values_and_gradients_equal_log_softmax(temperature: float, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    target_N = torch.randint(0, vocab_size, (7,))
    weights_N, entropy_weights_N = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    logp_N, entropy_N = token_log_probs(logits_NV, target_N, vocab_size=vocab_size, temperature=temperature)
    (logp_N * weights_N + entropy_N * entropy_weights_N).sum().backward()
    ours = logits_NV.grad.clone()
    logits_NV.grad = None

    full_NV = torch.log_softmax(logits_NV[:, :vocab_size] / temperature, -1)
    expected_N = full_NV.gather(1, target_N[:, None])[:, 0]
    expected_entropy_N = -(full_NV.exp() * full_NV).sum(-1)
    (expected_N * weights_N + expected_entropy_N * entropy_weights_N).sum().backward()
    torch.testing.assert_close(logp_N, expected_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy_N, expected_entropy_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours, logits_NV.grad, rtol=0, atol=1e-12)
    assert not ours[:, vocab_size:].any()


def test_gradcheck() -> None:
    torch.manual_seed(1)
    logits_NV = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target_N = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda z: token_log_probs(z, target_N, vocab_size=5, temperature=0.8), (logits_NV,))


def test_known_fault_sampling_temperature_is_applied() -> None:
    """Logits [2, 0] at temperature 0.5: log-prob of token 0 is -0.018150, not -0.126928."""
    logp_N, _ = token_log_probs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), vocab_size=2, temperature=0.5)
    assert abs(logp_N.item() + 0.018150) < 1e-6


def test_no_targets_and_bad_temperature() -> None:
    logits_NV = torch.zeros(0, 4, requires_grad=True)
    logp_N, _ = token_log_probs(logits_NV, torch.zeros(0, dtype=torch.int64), vocab_size=4)
    logp_N.sum().backward()
    assert logits_NV.grad is not None and logits_NV.grad.shape == (0, 4)
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_log_probs(torch.zeros(1, 4), torch.tensor([0]), vocab_size=4, temperature=0.0)


def test_bf16_logits_are_computed_in_fp32() -> None:
    logits_NV = torch.randn(4, 8).bfloat16().requires_grad_()
    logp_N, _ = token_log_probs(logits_NV, torch.tensor([1, 2, 3, 4]), vocab_size=8)
    assert logp_N.dtype == torch.float32
    logp_N.sum().backward()
    assert logits_NV.grad is not None and logits_NV.grad.dtype == torch.bfloat16
