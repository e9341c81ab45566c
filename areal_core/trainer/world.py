"""The processes of a run, and how a batch on global rank 0 reaches the data-parallel ranks and comes back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs

from areal_core.api.batch import PackedBatch
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from areal_core.api.engine_api import TrainEngine


_PATIENCE = timedelta(days=30)


@attrs.define
class World:
    """This process among those of the run.

    Attributes:
        rank, size: global rank and number of processes.
        group: a gloo group over all of them, for control messages and batches in host memory; None if alone.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def from_environment(cls) -> World:
        """Join the processes that torchrun started, or be alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, None)
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        # A group of its own: batches and decisions must not queue behind an engine's collectives. The other ranks wait
        # in it for as long as rank 0 plays a batch; a rank that dies closes its connections, which ends the wait.
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree(self, decision: Any) -> Any:
        """Rank 0's ``decision`` (JSON-compatible) on every rank. Collective."""
        from areal_core.data.comm import broadcast_json

        return broadcast_json(decision, group=self.group, src=0)

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank. Collective."""
        if self.group is None:
            return flag
        import torch
        import torch.distributed as dist

        falses = torch.tensor(int(not flag))
        dist.all_reduce(falses, group=self.group)
        return int(falses) == 0

    def barrier(self) -> None:
        if self.group is not None:
            import torch.distributed as dist

            dist.barrier(self.group)


def check_same_shards(world: World, one: TrainEngine, other: TrainEngine, *, key: str) -> None:
    """Raise unless two engines put the same shard of a batch on each rank. Collective.

    Raises:
        ConfigError: naming ``key``, where the other's mesh is configured.
    """
    same = (one.data_parallel_rank, one.data_parallel_world_size) == (
        other.data_parallel_rank,
        other.data_parallel_world_size,
    )
    if not world.all(same):
        raise ConfigError(
            f"spreads a batch over {other.data_parallel_world_size} data-parallel ranks, but actor.backend over "
            f"{one.data_parallel_world_size}, or in another order. Use the actor's mesh.",
            key=key,
        )


class ShardRouter:
    """Moves packed batches from rank 0 to the data-parallel ranks of one engine, and per-token results back."""

    def __init__(self, world: World, engine: TrainEngine) -> None:
        self.world = world
        self.engine = engine
        # One entry per global rank. Ranks with equal entries hold the same shard (tensor or context parallel).
        self.dp_ranks = self._all_ranks(engine.data_parallel_rank)
        self.dp_size = engine.data_parallel_world_size

    def _all_ranks(self, value: int) -> list[int]:
        if self.world.group is None:
            return [value]
        import torch
        import torch.distributed as dist

        mine = torch.tensor([value])
        everyone = [torch.zeros_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine, group=self.world.group)
        return [int(v) for v in everyone]

    def partition(self, batch: PackedBatch | None, attention_cost: float) -> list[list[int]] | None:
        """Rank 0's parts of a batch of rollouts, balanced, with the samples of a prompt together where that fits."""
        if batch is None:
            return None
        from areal_core.data.partition import balanced_partition

        return balanced_partition(
            batch.seqlens.tolist(), self.dp_size, groups=batch["group_ids"].tolist(), attention_cost=attention_cost
        )

    def scatter(self, batch: PackedBatch | None, parts: Sequence[Sequence[int]] | None) -> PackedBatch:
        """This rank's shard of rank 0's ``batch``: ``parts[data_parallel_rank]`` are its sequences. Collective.

        It stays in host memory, where an engine sorts it into micro-batches.
        """
        from areal_core.data.comm import scatter_batches

        shards: list[PackedBatch] | None = None
        if self.world.is_main:
            if batch is None or parts is None:
                raise ValueError("rank 0 must bring the batch and its parts")
            by_dp = [batch.select(list(part)) for part in parts]
            shards = [by_dp[dp_rank] for dp_rank in self.dp_ranks]
        return scatter_batches(shards, group=self.world.group, src=0)

    def gather(
        self, local: torch.Tensor, batch: PackedBatch | None, parts: Sequence[Sequence[int]] | None
    ) -> torch.Tensor | None:
        """Undo ``scatter`` for one per-token tensor: on rank 0 the tensor aligned with ``batch``. Collective."""
        from areal_core.data.comm import gather_tokens

        cu_seqlens = None if batch is None else batch.cu_seqlens
        # Ranks of one shard bring the same values; writing them twice is harmless.
        by_rank = None if parts is None else [parts[dp_rank] for dp_rank in self.dp_ranks]
        return gather_tokens(local.cpu(), cu_seqlens, by_rank, group=self.world.group)
