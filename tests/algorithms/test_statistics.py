"""What algorithms report of a step, each number against its definition written out over the trained tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from areal_core.algorithms.grpo import GRPO
from areal_core.algorithms.losses import critic_loss
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import ImportanceConfig, PPOActorConfig

BatchOf = Callable[..., PackedBatch]


def quotients(stats: Any) -> dict[str, float]:
    return {name: float(total / count) for name, (total, count) in stats.items()}


def test_critic_stats_when_values_err_on_both_sides_expected_means_over_trained_tokens(batch_of: BatchOf) -> None:
    # Arrange: values now, before the step, and returns all differ, at untrained tokens too.
    batch = batch_of(4)
    mask, old, returns = batch["loss_mask"], batch["values"], batch["returns"]
    new = old + 0.4 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    # Act
    result = critic_loss(value_eps_clip=0.2, coef=0.5)(TokenOutput(torch.zeros(0), values=new), batch)

    # Assert: the value loss stands without its coefficient.
    free, bounded = (new - returns) ** 2, (torch.clamp(new, old - 0.2, old + 0.2) - returns) ** 2
    expected = {
        "value_loss": 0.5 * torch.maximum(free, bounded),
        "value_clip_fraction": (bounded > free).double(),
        "value": new,
        "return": returns,
        "value_error": (new - returns).abs(),
    }
    assert quotients(result.stats) == pytest.approx({k: float(v[mask].mean()) for k, v in expected.items()}, rel=1e-6)


def test_loss_stats_when_decoupled_expected_each_against_the_policy_it_names(batch_of: BatchOf) -> None:
    # Arrange: three different policies, and a clip that is hit on either side.
    batch = batch_of(2, num_seqs=20)
    mask = batch["loss_mask"]
    noise = 0.4 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    new = batch["prox_logprobs"] + noise
    config = PPOActorConfig(
        path="unused", importance=ImportanceConfig(mode="clamp", upper=1.2), eps_clip=0.1, eps_clip_higher=0.3
    )

    # Act
    stats = quotients(GRPO(config).loss(TokenOutput(new), batch).stats)

    # Assert
    now, prox, behave, a = (x[mask] for x in (new, batch["prox_logprobs"], batch["logprobs"], batch["advantages"]))
    ratio = (now - prox).exp()
    low, high = (ratio < 0.9) & (a < 0), (ratio > 1.3) & (a > 0)
    objective = torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a)
    weight = (prox - behave).exp().clamp(max=1.2)
    assert 0 < int(low.sum()) != int(high.sum()) > 0
    assert stats["clip_fraction_low"] == pytest.approx(float(low.double().mean()))
    assert stats["clip_fraction_high"] == pytest.approx(float(high.double().mean()))
    assert stats["clip_fraction"] == pytest.approx(float((low | high).double().mean()))
    assert stats["prox_kl"] == pytest.approx(float((ratio - 1 - (now - prox)).mean()))
    assert stats["approx_kl"] == pytest.approx(float(((now - behave).exp() - 1 - (now - behave)).mean()))
    assert stats["policy_loss"] == pytest.approx(float(-(weight * objective).mean()))


def test_advantage_stats_when_all_advantages_are_positive_expected_only_trained_tokens_counted(
    batch_of: BatchOf,
) -> None:
    # Arrange: raw rewards as advantages, all above 0; untrained tokens hold 0.
    batch = batch_of(1)
    rewards = torch.arange(1, batch.num_seqs + 1).double()
    batch = batch.with_rows(rewards=rewards)

    # Act
    _, stats = GRPO(PPOActorConfig(path="unused", reward_norm=None)).compute_advantages(batch)

    # Assert
    counts = [int(m.sum()) for m in batch.sequences("loss_mask")]
    smallest = min(r for r, n in zip(rewards.tolist(), counts, strict=True) if n)
    assert stats["advantage/min"] == smallest > 0
    assert stats["completion_length/mean"] == pytest.approx(sum(counts) / len(counts))
    assert stats["completion_length/max"] == max(counts)
