"""Context parallelism by DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Each of ``c`` ranks holds ``1 / c`` of the packed rows. Around attention one all-to-all swaps rows for heads: a rank
then has all rows, and ``1 / c`` of the heads.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from areal_fsdp.exchange import all_to_all


@attrs.frozen(eq=False)
class Ulysses:
    """The exchange over one group of context-parallel ranks."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def rows_to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[N / c, H, D] -> [N, H / c, D]`` for each; key and value heads are repeated as often as needed."""
        heads, kv_heads = query.shape[1], key.shape[1]
        repeats = next(
            n for n in range(1, heads // kv_heads + 1) if heads // kv_heads % n == 0 and kv_heads * n % self.ranks == 0
        )
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        parts = [x.unflatten(1, (self.ranks, -1)).flatten(2) for x in (query, key, value)]  # [N / c, c, H / c * D]
        widths = [part.shape[2] for part in parts]
        received = all_to_all(torch.cat(parts, 2).transpose(0, 1), self.group).flatten(0, 1)  # [N, ...]
        q, k, v = received.split(widths, 1)
        return (
            q.unflatten(1, (-1, query.shape[2])),
            k.unflatten(1, (-1, key.shape[2])),
            v.unflatten(1, (-1, value.shape[2])),
        )

    def heads_to_rows(self, output: torch.Tensor) -> torch.Tensor:
        """``[N, H / c, D] -> [N / c, H, D]``."""
        parts = output.unflatten(0, (self.ranks, -1))  # [c, N / c, H / c, D]
        return all_to_all(parts, self.group).transpose(0, 1).flatten(1, 2)

    def own_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter ``[H]`` of all heads."""
        return per_head.unflatten(0, (self.ranks, -1))[self.rank]
