"""Options of the `actor` section on the way to advantages, each where it changes the result."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from areal_core.algorithms.grpo import GRPO
from areal_core.algorithms.ppo import PPO
from areal_core.api.batch import PackedBatch
from areal_core.api.configs import NormConfig, PPOActorConfig

BatchOf = Callable[..., PackedBatch]


def grpo(**fields: Any) -> GRPO:
    return GRPO(PPOActorConfig(path="unused", **{"reward_norm": None, **fields}))


@pytest.mark.parametrize(("unbiased", "deviation"), [(True, statistics.stdev), (False, statistics.pstdev)])
def test_advantages_when_the_deviation_is_biased_or_not_expected_that_divisor(
    batch_of: BatchOf, unbiased: bool, deviation: Callable[[list[float]], float]
) -> None:
    # Arrange
    batch = batch_of(1)
    norm = NormConfig(mean_level="batch", std_level="batch", std_unbiased=unbiased, eps=0.0)

    # Act
    result, _ = grpo(reward_norm=norm).compute_advantages(batch)

    # Assert
    rewards = batch["rewards"].tolist()
    mean, std = statistics.mean(rewards), deviation(rewards)
    for reward, mask, advantages in zip(
        rewards, batch.sequences("loss_mask"), result.sequences("advantages"), strict=True
    ):
        assert advantages[mask].tolist() == pytest.approx([(reward - mean) / std] * int(mask.sum()), rel=1e-9)


def test_advantages_when_rewards_exceed_the_clip_expected_both_sides_bounded(batch_of: BatchOf) -> None:
    # Arrange: from -4 to 4 around a clip of 2.5.
    batch = batch_of(1)
    rewards = [float(i - 4) for i in range(batch.num_seqs)]
    batch = batch.with_rows(rewards=batch["rewards"].new_tensor(rewards))

    # Act
    result, _ = grpo(reward_clip=2.5).compute_advantages(batch)

    # Assert
    for reward, mask, advantages in zip(
        rewards, batch.sequences("loss_mask"), result.sequences("advantages"), strict=True
    ):
        assert set(advantages[mask].tolist()) <= {min(max(reward, -2.5), 2.5)}


def test_advantages_when_discounted_without_token_rewards_expected_less_far_from_the_end(batch_of: BatchOf) -> None:
    # Arrange
    batch = batch_of(3)

    # Act
    result, _ = grpo(discount=0.9).compute_advantages(batch)

    # Assert: the reward sits at the last trained token; tokens between turns take no time.
    for reward, mask, advantages in zip(
        batch["rewards"].tolist(), batch.sequences("loss_mask"), result.sequences("advantages"), strict=True
    ):
        n = int(mask.sum())
        assert advantages[mask].tolist() == pytest.approx([reward * 0.9 ** (n - 1 - i) for i in range(n)], abs=1e-9)


def test_advantages_when_the_kl_is_in_the_reward_and_prox_is_known_expected_kl_of_the_policy_before_the_step(
    batch_of: BatchOf,
) -> None:
    # Arrange: the sampler's log-probs (older weights, other kernels) are not those of the policy that is trained.
    batch = batch_of(4)

    # Act
    result, _ = grpo(kl_ctl=0.3, kl_in_reward=True).compute_advantages(batch)

    # Assert
    kl = (0.3 * (batch["prox_logprobs"] - batch["ref_logprobs"])).tolist()
    trained = batch["loss_mask"].tolist()
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        for t in range(start, end):
            if trained[t]:
                expected = float(batch["rewards"][row]) - sum(kl[s] for s in range(t, end) if trained[s])
                assert float(result["advantages"][t]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_zero_advantage_when_there_is_an_entropy_bonus_expected_a_gradient(algorithm: Any) -> None:
    # Sequences without advantage must stay in the batch: the bonus is theirs too.
    plain = PPOActorConfig(path="unused", reward_norm=None)
    bonus = PPOActorConfig(path="unused", reward_norm=None, entropy_coef=0.01)

    assert algorithm(plain).zero_advantage_is_zero_gradient
    assert not algorithm(bonus).zero_advantage_is_zero_gradient


def test_ppo_returns_when_advantages_are_normalised_expected_in_units_of_the_reward(batch_of: BatchOf) -> None:
    # The critic learns the scale of the rewards: what is normalised is for the policy alone.
    batch = batch_of(6)

    results = [
        PPO(PPOActorConfig(path="unused", reward_norm=None, adv_norm=norm)).compute_advantages(batch)[0]
        for norm in (None, NormConfig())
    ]

    assert results[0]["returns"].tolist() == results[1]["returns"].tolist()
    assert results[0]["advantages"].tolist() != results[1]["advantages"].tolist()
