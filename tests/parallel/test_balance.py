"""Load balance: everything dealt out once, within capacity, evenly, and the cost that is balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.parallel.balance import RowCost, fitting_partition, partition, row_cost

sizes = st.lists(st.integers(1, 50), max_size=40)


@given(sizes, st.integers(1, 9))
def test_every_item_is_in_one_bin_and_bins_are_even(costs: list[int], bins: int) -> None:
    parts = partition(costs, bins)
    assert len(parts) == bins and sorted(sum(parts, [])) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    if len(costs) >= bins:
        assert all(parts)
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0), "moving one item could not make it more even than that"


@given(sizes, st.integers(1, 60))
def test_capacity_holds_for_all_but_single_large_items(items: list[int], capacity: int) -> None:
    parts = fitting_partition([float(s) for s in items], items, capacity)
    assert sorted(sum(parts, [])) == list(range(len(items)))
    for part in parts:
        assert sum(items[i] for i in part) <= capacity or len(part) == 1
    filled = sum(1 for part in parts if part)
    assert filled <= 2 * -(-sum(items) // capacity) + 1, "no more bins than half filled ones would need"


def test_long_rows_count_more_than_their_tokens() -> None:
    """Two ranks, one row of 4,096 tokens and eight of 512: tokens alone would call 4,096 against 4,096 even."""
    lengths = [4096] + [512] * 8
    by_tokens = partition([RowCost()(n) for n in lengths], 2)
    assert sorted(map(len, by_tokens)) == [1, 8]
    cost = RowCost(quadratic=1e-3)
    parts = partition([cost(n) for n in lengths], 2)
    assert [len(part) for part in parts] == [1, 8]
    lengths = [4096, 2048, 2048]
    assert cost(4096) > cost(2048) * 2


def test_the_square_is_attention_and_the_rest_is_weights() -> None:
    """FLOPs of one layer counted by torch: a forward over n tokens, weights and attention apart."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 32}
    model = LlamaForCausalLM(LlamaConfig(**own, num_hidden_layers=1, vocab_size=8, attn_implementation="eager"))
    cost, measured = row_cost(own), {}
    for tokens in (32, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model(input_ids=torch.zeros(1, tokens, dtype=torch.int64))
        weights = 2 * tokens * sum(p.numel() for n, p in model.model.layers[0].named_parameters() if p.dim() == 2)
        attention = counter.get_total_flops() - weights
        measured[tokens] = weights, attention / 2  # eager attention computes the masked half too
    for tokens, (weights, attention) in measured.items():
        assert cost.quadratic * tokens == pytest.approx(attention / weights, rel=0.02)


def test_a_token_costs_the_experts_that_it_goes_through() -> None:
    own = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
    assert row_cost({**own, "num_experts_per_tok": 3}) == row_cost({**own, "intermediate_size": 384})
    chosen = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    assert row_cost({**own, **chosen}) == row_cost({**own, "intermediate_size": 160})


@pytest.mark.parametrize("kind", ["minicpm3", "youtu", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash"])
def test_latent_attention_has_a_cost_in_every_family_that_transformers_has(kind: str) -> None:
    from transformers import AutoConfig

    full = AutoConfig.for_model(kind).to_dict()
    assert full["kv_lora_rank"], "or the family is not one of these"
    assert 0 < row_cost(full).quadratic < 1
    bare = {"model_type": kind, "kv_lora_rank": full["kv_lora_rank"]}
    assert 0 < row_cost(bare).quadratic < 1


def test_a_dense_layer_with_latent_attention_costs_its_feed_forward_network() -> None:
    latent = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
    }
    dense = row_cost({**latent, "v_head_dim": 10, "intermediate_size": 96})
    attention = 24 * (64 + 4 * 20) + 64 * (16 + 8) + 16 * 4 * (12 + 10) + 4 * 10 * 64
    assert dense.quadratic == pytest.approx(4 * (20 + 10) / 2 / (attention + 3 * 64 * 96))
    mixture = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_shared_experts": 1, "intermediate_size": 1000}
    assert row_cost({**latent, "v_head_dim": 10, **mixture}) == dense
