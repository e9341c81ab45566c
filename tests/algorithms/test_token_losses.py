"""The losses that belong to no algorithm (SFT, distillation, PPO's critic): order and split change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from areal_core.algorithms.conformance import random_batch
from areal_core.algorithms.distill import distill_loss, distill_loss_weight
from areal_core.algorithms.losses import critic_loss
from areal_core.algorithms.sft import sft_loss, sft_loss_weight
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.engine_api import LossFn, LossWeightFn

LOSSES: dict[str, tuple[LossFn, LossWeightFn]] = {
    "sft": (sft_loss, sft_loss_weight),
    "distill": (distill_loss, distill_loss_weight),
    "critic": (critic_loss(value_eps_clip=0.2, coef=0.5), sft_loss_weight),
}


def reduced(
    name: str, batch: PackedBatch, parts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss over weight, its gradient for each token of ``batch``, and the statistics, part by part."""
    loss_fn, weight_fn = LOSSES[name]
    gradient = torch.zeros(batch.num_tokens, dtype=torch.float64)
    loss, weight = torch.zeros((), dtype=torch.float64), 0.0
    sums: dict[str, list[float]] = {}
    for micro_batch in (batch.select(part) for part in parts):
        new = micro_batch["new"].clone().requires_grad_()
        result = loss_fn(TokenOutput(new, values=new, of_logits=new), micro_batch)
        (gradient[micro_batch["at"]],) = torch.autograd.grad(result.loss, new)
        loss, weight = loss + result.loss.detach(), weight + float(weight_fn(micro_batch))
        for stat, (total, count) in result.stats.items():
            entry = sums.setdefault(stat, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + float(total), entry[1] + float(count)
    return loss / weight, gradient / weight, {stat: total / count for stat, (total, count) in sums.items()}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    order=st.permutations(range(9)),
    owners=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_loss_when_split_and_reordered_expected_the_same(
    name: str, seed: int, order: list[int], owners: list[int]
) -> None:
    batch = random_batch(seed)
    batch = batch.with_tokens(returns=batch["values"] + batch["new"])

    whole = reduced(name, batch, [list(range(9))])
    parts = reduced(name, batch, [[i for i in order if owners[i] == part] for part in range(4)])

    assert float(whole[0]) != 0
    assert_close(parts[:2], whole[:2], rtol=1e-9, atol=1e-12)
    assert parts[2] == pytest.approx(whole[2], rel=1e-6)
