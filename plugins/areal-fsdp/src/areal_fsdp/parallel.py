"""FSDP2 over a model: one group per decoder layer, the rest in the root's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from areal_fsdp.config import FSDPConfig
from areal_fsdp.mesh import Mesh
from areal_fsdp.scorer import Scorer


def broadcast_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every rank's weights those of the group's first rank (random ones differ between ranks)."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def shard_model(scorer: Scorer, mesh: Mesh, compute_dtype: torch.dtype, options: FSDPConfig) -> None:
    """Apply ``fully_shard`` in place. Gradients are summed over the ranks, in fp32, never averaged."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    layer_names = set(scorer.model._no_split_modules or [])
    layers = [m for m in scorer.model.modules() if type(m).__name__ in layer_names]
    mixed = next(scorer.parameters()).dtype != compute_dtype
    for module in [*layers, scorer]:
        is_root = module is scorer
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype if mixed else None,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32 if is_root and mixed else None,
        )
        fully_shard(
            module,
            mesh=mesh.fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=None if is_root else options.reshard_after_forward,
        )
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The engine divides by the total weight itself. gloo has no scaled sum, hence the second line.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
