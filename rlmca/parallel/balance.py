"""Load balance: what a sequence costs, and how sequences are dealt out so that bins cost alike."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RowCost:
    """Work of a sequence of n tokens, in the work that the weights of a layer do on one token: n + quadratic n^2.

    The square is causal attention. Of one layer and token, weights cost 2 P multiply-adds' operations (P: parameters of
    the layer that a token goes through), attention over n/2 earlier tokens on average 2 Q n (scores and values; Q:
    query heads x head size): quadratic = Q / P (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
    on GPU Clusters", appendix: the same counts).
    """

    quadratic: float = 0.0

    def __call__(self, tokens: int) -> float:
        return tokens + self.quadratic * tokens**2


def row_cost(hf_config: Mapping[str, Any]) -> RowCost:
    """Costs for a model with this config.json; a field that it lacks is taken as most models have it."""
    if hf_config.get("kv_lora_rank"):
        return _latent_cost(hf_config)
    hidden = int(hf_config.get("hidden_size") or 1024)
    heads = int(hf_config.get("num_attention_heads") or max(1, hidden // 128))
    head_size = int(hf_config.get("head_dim") or hidden // heads)
    groups = int(hf_config.get("num_key_value_heads") or heads)
    ffn = int(hf_config.get("intermediate_size") or 4 * hidden)
    if hf_config.get("moe_intermediate_size") or hf_config.get("num_experts_per_tok"):
        # a token goes through the experts that it chose, and the shared one
        ffn = int(hf_config.get("moe_intermediate_size") or ffn) * int(hf_config.get("num_experts_per_tok") or 1)
        ffn += int(hf_config.get("shared_expert_intermediate_size") or 0)
    query = heads * head_size
    return RowCost(query / (2 * hidden * query + 2 * hidden * groups * head_size + 3 * hidden * ffn))


def _latent_cost(c: Mapping[str, Any]) -> RowCost:
    """The same for multi-latent attention: keys and values of a head differ in size, and weights lie on the ways down and up."""

    def size(name: str, otherwise: int) -> int:
        return int(c.get(name) or otherwise)

    hidden, kv = size("hidden_size", 1024), int(c["kv_lora_rank"])
    heads = size("num_attention_heads", max(1, hidden // 128))
    plain, rotated = size("qk_nope_head_dim", 128), size("qk_rope_head_dim", 64)
    key, value = plain + rotated, size("v_head_dim", 128)
    queries = c["q_lora_rank"] * (hidden + heads * key) if c.get("q_lora_rank") else hidden * heads * key
    attention = queries + hidden * (kv + rotated) + kv * heads * (plain + value) + heads * value * hidden
    ffn = size("intermediate_size", 4 * hidden)
    if c.get("moe_intermediate_size"):
        ffn = c["moe_intermediate_size"] * (size("num_experts_per_tok", 1) + size("n_shared_experts", 0))
    return RowCost(heads * (key + value) / 2 / (attention + 3 * hidden * ffn))


def partition(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Numbers of the items in each of `bins` bins of about equal cost, ascending in every bin.

    Graham 1969, "Bounds on Multiprocessing Timing Anomalies": the dearest item first, each into the cheapest bin; at
    most 4/3 of the best possible. No bin stays empty while there are as many items (of positive cost) as bins.
    """
    result: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, number) for number in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, number = heapq.heappop(heap)
        result[number].append(item)
        heapq.heappush(heap, (load + costs[item], number))
    return [sorted(items) for items in result]


def fitting_partition(costs: Sequence[float], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The same with as few bins as keep every bin's summed size within `capacity`. A larger item gets a bin for itself."""
    large = [i for i, size in enumerate(sizes) if size > capacity]
    small = [i for i, size in enumerate(sizes) if size <= capacity]
    for bins in range(-(-sum(sizes[i] for i in small) // capacity), len(small) + 1):
        parts = [[small[i] for i in part] for part in partition([costs[i] for i in small], bins)]
        if all(sum(sizes[i] for i in part) <= capacity for part in parts):
            break
    return parts + [[i] for i in large]
