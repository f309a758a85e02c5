"""An optimizer step as the routers of a model see it: denominators before its first forward, metrics after its last backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlmca.engines.microbatch import MicroBatch
from rlmca.models.options import BuildOptions
from rlmca.models.policy import PolicyModel
from rlmca.models.router import Router, RouterStep
from rlmca.parallel.groups import Parallel


class RouterLosses:
    """The auxiliary losses of an engine's routers: means over the whole step, whatever it is cut into."""

    def __init__(self, chunks: Sequence[PolicyModel], options: BuildOptions, parallel: Parallel) -> None:
        self.parallel, self.options = parallel, options
        balance = options.moe_router_load_balancing_type
        self.active = balance != "none" or bool(options.moe_z_loss_coeff)
        """The same on every rank, also on a pipeline stage that has no experts."""
        self.routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        self._groups, self._tokens = 1.0, 1.0

    def begin(self, pieces: Sequence[MicroBatch]) -> None:
        """Count what the losses of the step are means over: rows (of seq_aux_loss) or micro-batches, and tokens. Collective."""
        if not self.active:
            return
        by_row = self.options.moe_router_load_balancing_type == "seq_aux_loss"
        lengths = [piece.rows.length_B[: len(piece.numbers)] for piece in pieces]
        rows = [int((length_B > 0).sum()) for length_B in lengths]  # without those that only fill up ranks
        groups = sum(rows) if by_row else sum(n > 0 for n in rows)
        tokens = sum(int(length_B.sum()) for length_B in lengths)
        counts = self.parallel.dp_sum(torch.tensor([groups, tokens], dtype=torch.float64, device=self.parallel.device))
        self._groups, self._tokens = counts.tolist()
        # Megatron's DDP divides gradients by the data-parallel and context-parallel sizes
        factor = self.parallel.dp_size * self.parallel.cp_size
        step = RouterStep(
            groups=max(map(len, lengths)) if by_row else 1, group_weight=factor / self._groups, token_weight=factor / self._tokens
        )
        for router in self.routers:
            router.begin(step, self.parallel.device)

    def metrics(self) -> dict[str, float]:
        """The last step's losses, without their coefficients, as means over layers with experts; on every rank. Collective."""
        if not self.active:
            return {}
        seen = torch.zeros(3, dtype=torch.float64, device=self.parallel.device)
        for router in self.routers:
            seen[:2] += router.seen
            seen[2] += 1
        if self.parallel.world_size > 1:
            dist.all_reduce(seen)
        balance, z, routers = seen.tolist()
        layers = routers * self.parallel.pp_size / self.parallel.world_size
        result: dict[str, float] = {}
        if (kind := self.options.moe_router_load_balancing_type) != "none":
            result[kind] = balance / self._groups / layers
        if self.options.moe_z_loss_coeff:
            result["z_loss"] = z / self._tokens / layers
        return result
