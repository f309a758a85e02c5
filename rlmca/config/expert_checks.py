"""What must hold between the keys of a mixture of experts, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig

Finding = tuple[tuple[str, ...], str]
EXPERT_KEYS = (
    "expert_tensor_parallel_size",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_dtype",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)
"""Keys that mean nothing without experts."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Losses without a weight or a kind, and limits without a capacity."""
    m = cfg.megatron
    keys = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    kind, weight = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if weight and kind == "none":
        yield (
            keys,
            f"moe_aux_loss_coeff: {weight:g} weighs a loss that moe_router_load_balancing_type: none switches off; "
            "write moe_router_load_balancing_type: seq_aux_loss (balance within each row) or aux_loss (within a micro-batch)",
        )
    if kind != "none" and not weight:
        yield keys, f"moe_router_load_balancing_type: {kind} needs a weight: write moe_aux_loss_coeff, for example 0.001"
    capacity = m.moe_expert_capacity_factor
    if capacity is None:
        needs = {
            "moe_pad_expert_input_to_capacity": m.moe_pad_expert_input_to_capacity,
            "moe_token_drop_policy": m.moe_token_drop_policy != "probs",
        }
        if given := [name for name, written in needs.items() if written]:
            yield (
                ("moe_expert_capacity_factor", *given),
                f"{', '.join(given)}: without moe_expert_capacity_factor no expert has a capacity; write it, or leave this out",
            )
    elif m.moe_pad_expert_input_to_capacity and m.moe_token_dispatcher_type != "alltoall":
        yield (
            ("moe_pad_expert_input_to_capacity", "moe_token_dispatcher_type"),
            "moe_pad_expert_input_to_capacity: true is for exchanges of a fixed size: write moe_token_dispatcher_type: alltoall",
        )
