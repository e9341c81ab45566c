"""A model on a mesh: tensor parallelism first, then FSDP2 over what is left; one group per decoder layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from areal_core.api.configs import TrainEngineConfig
from areal_core.api.vision import is_vision_language
from areal_core.errors import BadInputError, ConfigError, did_you_mean
from areal_fsdp.attention import ATTENTION_NAME
from areal_fsdp.config import FSDPConfig
from areal_fsdp.loading import DTYPES
from areal_fsdp.mesh import Mesh
from areal_fsdp.scorer import Scorer
from areal_fsdp.tensor_parallel import parallelize
from areal_fsdp.ulysses import Ulysses


def check_parallel(
    model: Any, mesh: Mesh, config: TrainEngineConfig, options: FSDPConfig, *, key: str = "actor"
) -> None:
    """Raise if a model cannot do what the mesh and the options ask for.

    Args:
        key: where the engine's configuration stands, for messages.

    Raises:
        BadInputError: naming the key.
    """
    packed = getattr(model.config, "_attn_implementation", None) == ATTENTION_NAME
    present = {type(module).__name__ for module in model.modules()}
    for name in options.wrap_layers:
        if name not in present:
            known = ", ".join(sorted(model._no_split_modules or present))
            raise BadInputError(
                f"{key}.fsdp.wrap_layers: {type(model).__name__} has no module {name!r}; its layers are {known}."
                f"{did_you_mean(name, present)}"
            )
    if is_vision_language(model.config) and mesh.tp_size * mesh.cp_size > 1:
        raise BadInputError(
            f"{key}.backend: model type {model.config.model_type!r} reads images, whose tokens t and c do not split "
            "over ranks yet. Use fsdp:dN."
        )
    padded = f"which model type {model.config.model_type!r} does not have with attn_impl={config.attn_impl}"
    if mesh.cp_size > 1 and not packed:
        raise BadInputError(
            f"{key}.backend: c{mesh.cp_size} needs packed attention, {padded}. Set attn_impl to auto, or use fsdp:dXtY."
        )
    if mesh.tp_size == 1:
        return
    if options.sequence_parallel and not packed:
        raise BadInputError(
            f"{key}.fsdp.sequence_parallel: needs packed attention, {padded}. Set it to false, or attn_impl to auto."
        )
    if not options.disable_dropout:
        raise BadInputError(
            f"{key}.fsdp.disable_dropout: must be true with tensor parallelism, whose ranks draw other masks."
        )
    if config.lora is not None and config.lora.dropout > 0:
        raise BadInputError(f"{key}.lora.dropout: must be 0 with tensor parallelism, whose ranks draw other masks.")


def broadcast_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every rank's weights those of the group's first rank (random ones differ between ranks)."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def build_scorer(
    model: nn.Module, mesh: Mesh, config: TrainEngineConfig, options: FSDPConfig, *, is_critic: bool
) -> Scorer:
    """The module to train, split over the ``tp`` ranks and aware of the ``cp`` ones. No communication.

    Raises:
        BadInputError: if the model cannot be split.
    """
    tensor_parallel = None
    if mesh.tp_mesh is not None:
        tensor_parallel = parallelize(model, mesh.tp_mesh, sequence_parallel=options.sequence_parallel)
    return Scorer(
        model,
        is_critic=is_critic,
        temperature=config.temperature,
        logits_chunk=options.logits_chunk_tokens,
        tensor_parallel=tensor_parallel,
        ulysses=Ulysses(mesh.cp_group, mesh.cp_rank, mesh.cp_size) if mesh.cp_group is not None else None,
    )


def shard_model(scorer: Scorer, mesh: Mesh, compute_dtype: torch.dtype, options: FSDPConfig) -> None:
    """Apply ``fully_shard`` in place. Gradients are summed over the ranks, never averaged."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    layers = decoder_layers(scorer.model, options.wrap_layers)
    mixed = next(scorer.parameters()).dtype != compute_dtype
    assert mesh.fsdp_mesh is not None
    shards = mesh.fsdp_mesh.size(-1)
    for module in [*layers, scorer]:
        is_root = module is scorer
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype if mixed else None,
            reduce_dtype=DTYPES[options.reduce_dtype],
            output_dtype=torch.float32 if is_root and mixed else None,
        )
        fully_shard(
            module,
            mesh=mesh.fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=None if is_root else options.reshard_after_forward,
            shard_placement_fn=lambda p: _shard_dim(p, shards),
        )
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The engine divides by the total weight itself. gloo has no scaled sum, hence the second line.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: Any, names: list[str]) -> list[nn.Module]:
    """The modules of the named classes, or the decoder layers."""
    chosen = set(names or model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in chosen]


def _shard_dim(parameter: nn.Parameter, shards: int) -> Shard | None:
    """The second dimension where the first is already split unevenly by tensor parallelism (a vocabulary)."""
    if not isinstance(parameter, DTensor) or shards == 1:
        return None
    placement, size = parameter.placements[0], parameter.shape[0]
    if not (isinstance(placement, Shard) and placement.dim == 0 and size % parameter.device_mesh.size()):
        return None
    if parameter.ndim < 2 or parameter.shape[1] % shards:
        raise ConfigError(
            f"t{parameter.device_mesh.size()} does not divide the vocabulary of {size} tokens, nor do the "
            f"{shards} ranks that shard parameters divide the model's width. Use sizes of which one does.",
            key="backend",
        )
    return Shard(1)
