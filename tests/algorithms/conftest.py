"""Ragged random batches, in fp64, with prompts, several turns and groups of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from areal_core.api.batch import PackedBatch


def make_batch(seed: int = 0, num_seqs: int = 9, max_len: int = 14, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """Lengths from 1; masks with holes (turns); some sequences without a trained token; group ids with gaps."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_len + 1, (num_seqs,), generator=g)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) > 0.4
    if num_seqs:
        mask[: int(lengths[0])] = False

    def noise(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(total, generator=g, dtype=dtype)

    logprobs = torch.where(mask, -noise().abs(), 0.0)
    return PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.randint(0, 99, (total,), generator=g),
            "loss_mask": mask,
            "logprobs": logprobs,
            "prox_logprobs": torch.where(mask, logprobs + noise(0.3), 0.0),
            "ref_logprobs": torch.where(mask, logprobs + noise(0.5), 0.0),
            "values": noise(),
            "advantages": torch.where(mask, noise(), 0.0),
            "returns": noise(),
        },
        {
            "rewards": torch.randint(0, 3, (num_seqs,), generator=g).to(dtype),
            "group_ids": 5 * torch.randint(0, max(1, num_seqs // 3), (num_seqs,), generator=g) + 2,
        },
    )


@pytest.fixture
def batch_of() -> Callable[..., PackedBatch]:
    return make_batch
