"""The mesh of a backend string: which ranks share parameters, tokens, heads and batches."""

from __future__ import annotations

import logging

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_core.api.alloc import ParallelStrategy
from areal_core.errors import ConfigError

#: Outermost first: the ranks of one ``tp`` group are neighbours, so they sit on one machine.
DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")


def check_strategy(strategy: ParallelStrategy, replicate: int, *, key: str = "backend") -> None:
    """Raise unless the fsdp engine has such a mesh.

    Raises:
        BadInputError: naming the letter or the option.
    """
    same = attrs.evolve(strategy, data=strategy.data * strategy.pipeline, pipeline=1, expert=1, expert_tensor=1)
    for letter, size, kind in (
        ("p", strategy.pipeline, "pipeline"),
        ("e", strategy.expert, "expert"),
        ("et", strategy.expert_tensor, "expert"),
    ):
        if size > 1:
            raise ConfigError(
                f"fsdp:{strategy} asks for {letter}{size}, but the fsdp engine has no {kind} parallelism; its letters "
                f"are d (data), t (tensor) and c (context). Use fsdp:{same}, on as many processes, or an engine that "
                "has it, if `areal plugins list` shows one.",
                key=key,
            )
    if strategy.data % replicate:
        divisors = [n for n in range(1, strategy.data + 1) if strategy.data % n == 0]
        raise ConfigError(
            f"{replicate} does not divide the {strategy.data} data-parallel ranks of fsdp:{strategy}. "
            f"Use one of {', '.join(map(str, divisors))}.",
            key="fsdp.replicate",
        )


def _is_no_hint(record: logging.LogRecord) -> bool:
    """Not torch's advice on the mesh where a parameter that is split twice is gathered, in one step after the other."""
    return "While redistributing" not in str(record.msg)


@attrs.frozen(eq=False, kw_only=True)
class Mesh:
    """This rank's place in the mesh; ``device_mesh`` is None in a single process, and then every group is None.

    Attributes:
        rank: global rank.
        world: every rank of the mesh.
        dp_group: the ranks with other shards of a batch and the same part of the model.
        cp_group, tp_group: the ranks that share this rank's sequences, or its heads and vocabulary; None for one.
        model_group: ``cp`` and ``tp`` together: the ranks with the same shard of a batch; None for one.
    """

    device: torch.device
    device_mesh: DeviceMesh | None = None
    rank: int = 0
    world: dist.ProcessGroup | None = None
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: dist.ProcessGroup | None = None
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    fsdp_mesh: DeviceMesh | None = None
    tp_mesh: DeviceMesh | None = None


def build_mesh(strategy: ParallelStrategy, replicate: int, device: torch.device) -> Mesh:
    """Build the mesh over all ranks of the default process group. Collective.

    Args:
        replicate: HSDP: parameters are sharded over ``data / replicate`` (times context) ranks, and replicated.
    """
    if strategy.world_size == 1:
        return Mesh(device=device)
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_no_hint)
    sizes = (replicate, strategy.data // replicate, strategy.context, strategy.tensor)
    root = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    # Before any use of a submesh: the groups of flattened dimensions must be made in the same order everywhere.
    data = root["dp_replicate", "dp_shard"]._flatten("dp")
    shard = root["dp_shard", "cp"]._flatten("dp_shard_cp")
    model = root["cp", "tp"]._flatten("cp_tp")
    return Mesh(
        device=device,
        device_mesh=root,
        rank=dist.get_rank(),
        world=dist.group.WORLD,
        dp_rank=data.get_local_rank(),
        dp_size=data.size(),
        dp_group=data.get_group() if data.size() > 1 else None,
        cp_rank=root["cp"].get_local_rank(),
        cp_size=strategy.context,
        cp_group=root["cp"].get_group() if strategy.context > 1 else None,
        tp_rank=root["tp"].get_local_rank(),
        tp_size=strategy.tensor,
        tp_group=root["tp"].get_group() if strategy.tensor > 1 else None,
        model_group=model.get_group() if model.size() > 1 else None,
        fsdp_mesh=shard if replicate == 1 else DeviceMesh._concatenate([root["dp_replicate"], shard]),
        tp_mesh=root["tp"] if strategy.tensor > 1 else None,
    )
