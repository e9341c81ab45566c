"""M2PO, LitePPO, GDPO and DAPO's dynamic sampling against their formulas, written out in plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.dapo import DAPO
from areal_core.algorithms.gdpo import GDPO
from areal_core.algorithms.liteppo import LitePPO
from areal_core.algorithms.m2po import M2PO
from areal_core.algorithms.multi_reward import decoupled_rewards
from areal_core.algorithms.second_moment import second_moment_mask
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import NormConfig, PPOActorConfig
from areal_core.errors import ConfigError

BatchOf = Callable[..., PackedBatch]
GROUP = NormConfig(mean_level="group", std_level="group")


def actor(**fields: Any) -> PPOActorConfig:
    return PPOActorConfig(path="unused", **{"reward_norm": GROUP, **fields})


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


# ------------------------------------------------------------------------------------------------------------ M2PO


def greedy(logs: list[float], advantages: list[float], mask: list[bool], threshold: float) -> list[bool]:
    """Take the largest away, one by one, while the mean of what is left is above the threshold."""
    left = [t for t in range(len(logs)) if mask[t] and logs[t] * advantages[t] > 0]
    dropped = [False] * len(logs)
    while left and mean([logs[t] ** 2 for t in left]) > threshold:
        worst = max(left, key=lambda t: logs[t] ** 2)
        left.remove(worst)
        dropped[worst] = True
    return dropped


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 0.2, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_second_moment_mask_when_random_expected_greedy_removal(batch_of: BatchOf, seed: int, threshold: float) -> None:
    batch = batch_of(seed, num_seqs=12)
    arguments = (batch["prox_logprobs"], batch["logprobs"], batch["advantages"], batch["loss_mask"])

    dropped, before, after = second_moment_mask(*arguments, threshold)

    logs = (batch["prox_logprobs"] - batch["logprobs"]).tolist()
    advantages, mask = batch["advantages"].tolist(), batch["loss_mask"].tolist()
    expected = greedy(logs, advantages, mask, threshold)
    assert dropped.tolist() == expected
    counted = [t for t in range(len(logs)) if mask[t] and logs[t] * advantages[t] > 0]
    assert float(before) == pytest.approx(mean([logs[t] ** 2 for t in counted]))
    kept = [logs[t] ** 2 for t in counted if not expected[t]]
    assert float(after) == pytest.approx(mean(kept) if kept else 0.0)
    assert float(after) <= threshold


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-0.4, -0.1, 0.0, 0.1, 0.4]), st.sampled_from([-1.0, 0.0, 1.0])), min_size=1))
def test_second_moment_mask_when_values_are_equal_expected_all_or_none(tokens: list[tuple[float, float]]) -> None:
    logs, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    mask = torch.ones(len(tokens), dtype=torch.bool)

    dropped, _, after = second_moment_mask(logs, torch.zeros_like(logs), advantages, mask, 0.04)

    fates: dict[float, set[bool]] = {}
    for log, advantage, gone in zip(logs.tolist(), advantages.tolist(), dropped.tolist(), strict=True):
        if log * advantage > 0:
            fates.setdefault(log**2, set()).add(gone)
        else:
            assert not gone
    assert all(len(fate) == 1 for fate in fates.values())
    assert float(after) <= 0.04


def test_m2po_loss_when_stale_expected_unclipped_ratio_of_what_is_kept(batch_of: BatchOf) -> None:
    algorithm = M2PO(actor(), threshold=0.02)
    batch, stats = algorithm.compute_advantages(batch_of(4, num_seqs=12))
    g = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)
    new = (batch["prox_logprobs"] + noise).requires_grad_()

    loss = algorithm.loss(TokenOutput(new), batch).loss
    (gradient,) = torch.autograd.grad(loss, new)

    plain, _ = LitePPO(actor()).compute_advantages(batch_of(4, num_seqs=12))
    logs = (batch["prox_logprobs"] - batch["logprobs"]).tolist()
    dropped = greedy(logs, plain["advantages"].tolist(), batch["loss_mask"].tolist(), 0.02)
    assert 0 < sum(dropped) < len(dropped)
    total, slopes = 0.0, [0.0] * len(logs)
    for t in range(len(logs)):
        if batch["loss_mask"][t] and not dropped[t]:
            slopes[t] = -float(plain["advantages"][t]) * math.exp(float(new[t].detach() - batch["logprobs"][t]))
            total += slopes[t]
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)
    assert stats["m2/after"] <= 0.02 < stats["m2/before"]
    assert stats["m2/dropped_fraction"] == pytest.approx(sum(dropped) / int(batch["loss_mask"].sum()))


def test_m2po_loss_when_decoupled_expected_clip_around_the_proximal_policy(batch_of: BatchOf) -> None:
    algorithm = M2PO(actor(use_decoupled_loss=True))
    batch, _ = algorithm.compute_advantages(batch_of(4))
    new = (batch["prox_logprobs"] + 1.0).requires_grad_()

    algorithm.loss(TokenOutput(new), batch).loss.backward()

    assert new.grad is not None and bool((new.grad[batch["advantages"] > 0] == 0).all())
    assert bool((new.grad[(batch["advantages"] < 0) & batch["loss_mask"]] != 0).all())


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"use_decoupled_loss": True, "prox_logp": "loglinear"}, "actor.prox_logp"),
        ({"c_clip": 3.0}, "actor.c_clip"),
        ({"eps_clip_higher": 0.3}, "actor.eps_clip_higher"),
    ],
)
def test_m2po_check_when_configuration_cannot_work_expected_key(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="m2po") as caught:
        M2PO(actor(**fields)).check(group_size=4, has_ref=False, has_critic=False)

    assert caught.value.key == key


# --------------------------------------------------------------------------------------------------------- LitePPO


@pytest.mark.parametrize("seed", range(3))
def test_liteppo_advantages_expected_group_mean_and_batch_deviation(batch_of: BatchOf, seed: int) -> None:
    norm = NormConfig(mean_level="group", std_level="batch")
    batch, _ = LitePPO(actor(reward_norm=norm)).compute_advantages(batch_of(seed, num_seqs=12))

    rewards, groups = batch["rewards"].tolist(), batch["group_ids"].tolist()
    spread = std(rewards)
    assert LitePPO.presets["actor.reward_norm.std_level"] == "batch"
    for row, advantages in enumerate(batch.sequences("advantages")):
        centre = mean([r for r, g in zip(rewards, groups, strict=True) if g == groups[row]])
        expected = (rewards[row] - centre) / (spread + 1e-5)
        trained = advantages[advantages != 0].tolist()
        assert trained == pytest.approx([expected] * len(trained), rel=1e-9)


# ------------------------------------------------------------------------------------------------------------ GDPO


def gdpo_written_out(
    terms: list[list[float]],
    weights: list[float],
    groups: list[int],
    std: Callable[[list[float]], float] = statistics.stdev,
) -> list[float]:
    totals = [0.0] * len(terms)
    for k, weight in enumerate(weights):
        for row, line in enumerate(terms):
            peers = [terms[i][k] for i, g in enumerate(groups) if g == groups[row] and not math.isnan(terms[i][k])]
            if not math.isnan(line[k]) and len(set(peers)) > 1:
                totals[row] += weight * (line[k] - mean(peers)) / (std(peers) + 1e-5)
    return [(s - mean(totals)) / (std(totals) + 1e-5) for s in totals]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_decoupled_rewards_when_random_expected_formula(seed: int, missing: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([4, 0, 0, 4, 4, 9, 9, 0, 9, 0, 4])
    terms = torch.randn(11, 3, generator=g, dtype=torch.float64)
    terms[groups == 0, 1] = 0.5
    if missing:
        terms[[1, 4, 5], [0, 2, 2]] = torch.nan
    weights = [1.0, 0.3, -2.0]

    result = decoupled_rewards(terms, torch.tensor(weights).expand(11, 3), groups, GROUP)

    expected = gdpo_written_out(terms.tolist(), [float(torch.tensor(w)) for w in weights], groups.tolist())
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_decoupled_rewards_when_a_group_has_no_variance_expected_exact_zeros() -> None:
    terms = torch.tensor([[0.1, 0.7], [0.1, 0.7], [0.3, 0.2], [0.6, 0.2]])

    result = decoupled_rewards(terms, None, torch.tensor([0, 0, 1, 1]), GROUP)

    assert result[:2].tolist() == [0.0, 0.0]
    assert result[2] < 0 < result[3]


def test_decoupled_rewards_when_sums_round_expected_exact_zeros_for_a_group_without_variance() -> None:
    # Arrange: the mean over the batch is 0 but for rounding; a trainer leaves out what is exactly 0.
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    terms = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms[:3] = 0.7

    # Act
    result = decoupled_rewards(terms, None, groups, GROUP)

    # Assert
    assert result[:3].tolist() == [0.0, 0.0, 0.0]
    assert bool((result[3:] != 0).all())


def test_gdpo_advantages_when_sums_are_equal_expected_to_tell_the_rewards_apart(batch_of: BatchOf) -> None:
    batch = batch_of(2, num_seqs=4)
    terms = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    batch = batch.with_rows(reward_terms=terms, rewards=terms.sum(1), group_ids=torch.zeros(4, dtype=torch.int64))

    result, stats = GDPO(actor()).compute_advantages(batch)

    rows = [float(a[a != 0][0]) if bool((a != 0).any()) else 0.0 for a in result.sequences("advantages")]
    expected = gdpo_written_out(terms.tolist(), [1.0, 1.0], [0, 0, 0, 0])
    assert [row for row in rows if row] == pytest.approx([e for e, row in zip(expected, rows, strict=True) if row])
    assert abs(expected[0] - expected[1]) > 0.1
    assert stats["reward/mean"] == pytest.approx(0.75)


def test_gdpo_advantages_when_there_is_one_reward_expected_it_normalised_twice(batch_of: BatchOf) -> None:
    batch = batch_of(3, num_seqs=12)

    result, _ = GDPO(actor()).compute_advantages(batch)

    expected = gdpo_written_out([[r] for r in batch["rewards"].tolist()], [1.0], batch["group_ids"].tolist())
    for value, advantages in zip(expected, result.sequences("advantages"), strict=True):
        trained = advantages[advantages != 0].tolist()
        assert trained == pytest.approx([value] * len(trained), rel=1e-6)


def test_gdpo_advantages_when_weighted_clipped_and_biased_expected_formula(batch_of: BatchOf) -> None:
    # Arrange: the first reward is clipped on either side, the second lowers the sum, and deviations divide by n.
    batch = batch_of(2, num_seqs=12)
    terms = 2 * torch.randn(12, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weights = [1.0, -0.5]
    groups = torch.arange(12) % 3
    batch = batch.with_rows(
        reward_terms=terms, reward_weights=terms.new_tensor(weights).expand(12, 2), group_ids=groups
    )
    norm = NormConfig(mean_level="group", std_level="group", std_unbiased=False)

    # Act
    result, _ = GDPO(actor(reward_norm=norm, reward_clip=1.5)).compute_advantages(batch)

    # Assert
    bounded = [[min(max(r, -1.5), 1.5) for r in row] for row in terms.tolist()]
    assert bounded != terms.tolist()
    expected = gdpo_written_out(bounded, weights, groups.tolist(), statistics.pstdev)
    for value, mask, advantages in zip(
        expected, batch.sequences("loss_mask"), result.sequences("advantages"), strict=True
    ):
        assert advantages[mask].tolist() == pytest.approx([value] * int(mask.sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "key"),
    [({"reward_norm": None}, "actor.reward_norm"), ({"reward_scaling": 2.0}, "actor.reward_scaling")],
)
def test_gdpo_check_when_configuration_cannot_work_expected_key(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="gdpo") as caught:
        GDPO(actor(**fields)).check(group_size=4, has_ref=False, has_critic=False)

    assert caught.value.key == key


# ------------------------------------------------------------------------------------------------------------ DAPO


def test_dapo_accepts_group_expected_only_with_variance() -> None:
    algorithm = DAPO(actor())

    assert algorithm.filters_groups and algorithm.max_sampled_batches == 10
    assert algorithm.accepts_group([0.0, 1.0, 0.0])
    assert not algorithm.accepts_group([1.0, 1.0])


def test_dapo_accepts_group_when_dynamic_sampling_is_off_expected_all() -> None:
    algorithm = DAPO(actor(), dynamic_sampling=False)

    assert not algorithm.filters_groups
    assert algorithm.accepts_group([1.0, 1.0])
