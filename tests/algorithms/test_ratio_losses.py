"""Losses other than PPO's clip against their formulas in plain Python, gradients written out, and their limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from areal_core.algorithms.cispo import CISPO
from areal_core.algorithms.length_penalty import overlong_penalty
from areal_core.algorithms.losses import ppo_clip_loss
from areal_core.algorithms.sequence_losses import sequence_clip_loss, sequence_log_ratio
from areal_core.algorithms.weighted_losses import cispo_loss, reinforce_loss, sapo_loss
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import PPOActorConfig

BatchOf = Callable[..., PackedBatch]


def random_tokens(seed: int, count: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    new, old, advantages = (torch.randn(count, generator=g, dtype=torch.float64) for _ in range(3))
    advantages[::7] = 0.0
    return new.requires_grad_(), old, advantages


def test_reinforce_loss_when_random_expected_formula_and_gradient() -> None:
    new, old, advantages = random_tokens(1)

    result = reinforce_loss(new, old, advantages)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)

    expected = [-a * n for a, n in zip(advantages.tolist(), new.tolist(), strict=True)]
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, -advantages, rtol=0, atol=0)
    ratios = [math.exp(n - o) for n, o in zip(new.tolist(), old.tolist(), strict=True)]
    assert result.ratio.tolist() == pytest.approx(ratios)
    assert not bool((result.clipped | result.dual_clipped).any())


@pytest.mark.parametrize(("low", "high"), [(0.0, 5.0), (0.8, 1.2), (0.0, 1.0)])
def test_cispo_loss_when_random_expected_formula_and_gradient(low: float, high: float) -> None:
    new, old, advantages = random_tokens(2)

    result = cispo_loss(new, old, advantages, low, high)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)

    for i, (n, o, a) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        ratio = math.exp(n - o)
        weight = min(max(ratio, low), high)
        assert float(result.loss[i].detach()) == pytest.approx(-weight * a * n, rel=1e-9, abs=1e-12)
        assert float(gradient[i]) == pytest.approx(-weight * a, rel=1e-9, abs=1e-12)
        assert bool(result.clipped[i]) == (ratio < low or ratio > high)
    assert bool(result.clipped.any()) and not bool(result.clipped.all())
    # What PPO's clip takes away, and this loss is for: a clipped token still learns.
    assert bool((gradient[result.clipped & (advantages != 0)] != 0).all())


def test_cispo_when_its_weight_has_two_bounds_expected_both_in_the_loss(batch_of: Callable[..., PackedBatch]) -> None:
    batch = batch_of(2)
    new = (batch["logprobs"] + 0.5 * batch["advantages"].sin()).requires_grad_()

    loss = CISPO(PPOActorConfig(path="unused"), max_weight=1.2, min_weight=0.7).loss(TokenOutput(new), batch).loss
    (gradient,) = torch.autograd.grad(loss, new)

    ratio = (new.detach() - batch["logprobs"]).exp()
    assert bool((ratio < 0.7).any()) and bool((ratio > 1.2).any())
    expected = torch.where(batch["loss_mask"], -ratio.clamp(0.7, 1.2) * batch["advantages"], 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (3.0, 0.5)])
def test_sapo_loss_when_random_expected_formula_and_gradient(tau_pos: float, tau_neg: float) -> None:
    new, old, advantages = random_tokens(3)

    result = sapo_loss(new, old, advantages, tau_pos, tau_neg)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)

    for i, (n, o, a) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        ratio = math.exp(n - o)
        tau = tau_pos if a > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert float(result.loss[i].detach()) == pytest.approx(-a * 4 / tau * gate, rel=1e-9, abs=1e-12)
        assert float(gradient[i]) == pytest.approx(-a * 4 * gate * (1 - gate) * ratio, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        reinforce_loss,
        lambda new, old, a: cispo_loss(new, old, a, 0.0, 5.0),
        lambda new, old, a: sapo_loss(new, old, a, 1.0, 1.05),
    ],
)
def test_token_loss_when_on_policy_expected_policy_gradient(loss: Callable[..., object]) -> None:
    new, _, advantages = random_tokens(4)

    result = loss(new, new.detach(), advantages)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)  # type: ignore[attr-defined]

    torch.testing.assert_close(gradient, -advantages, rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("difference", [300.0, -300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_loss_when_policies_are_far_apart_expected_finite(
    advantage: float, difference: float, dtype: torch.dtype
) -> None:
    old, advantages = torch.zeros(1, dtype=dtype), torch.tensor([advantage], dtype=dtype)
    mask, cu_seqlens = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1], dtype=torch.int32)
    for loss in (
        lambda new: cispo_loss(new, old, advantages, 0.0, 5.0),
        lambda new: sapo_loss(new, old, advantages, 1.0, 1.05),
        lambda new: sequence_clip_loss(new, old, advantages, mask, cu_seqlens, 3e-4, 4e-4),
    ):
        new = torch.tensor([difference], dtype=dtype, requires_grad=True)

        result = loss(new)
        result.loss.sum().backward()

        assert math.isfinite(float(result.loss.detach()))
        assert new.grad is not None and math.isfinite(float(new.grad))


@pytest.mark.parametrize("seed", range(3))
def test_sequence_log_ratio_when_ragged_expected_mean_over_trained_tokens(batch_of: BatchOf, seed: int) -> None:
    batch = batch_of(seed)
    new, old, mask = batch["prox_logprobs"], batch["logprobs"], batch["loss_mask"]

    result = sequence_log_ratio(new, old, mask, batch.cu_seqlens)

    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        trained = [float(new[t] - old[t]) for t in range(start, end) if mask[t]]
        assert float(result[row]) == pytest.approx(sum(trained) / len(trained) if trained else 0.0, abs=1e-12)


@pytest.mark.parametrize(("low", "high", "c"), [(3e-4, 4e-4, None), (0.04, 0.06, None), (0.04, None, 1.02)])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_clip_when_ragged_expected_formula_and_gradient(
    batch_of: BatchOf, low: float, high: float | None, c: float | None, seed: int
) -> None:
    batch = batch_of(seed, num_seqs=20)
    mask, bounds = batch["loss_mask"], batch.cu_seqlens.tolist()
    rows = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = rows.repeat_interleave(batch.seqlens.long())
    new = batch["prox_logprobs"].clone().requires_grad_()

    result = sequence_clip_loss(new, batch["logprobs"], advantages, mask, batch.cu_seqlens, low, high, c)
    (gradient,) = torch.autograd.grad(result.loss[mask].sum(), new)

    kinds = set()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        actions = [t for t in range(start, end) if mask[t]]
        if not actions:
            continue
        a = float(rows[row])
        s = math.exp(sum(float(batch["prox_logprobs"][t] - batch["logprobs"][t]) for t in actions) / len(actions))
        near = min(max(s, 1 - low), 1 + (low if high is None else high))
        objective, free = min(s * a, near * a), s * a <= near * a
        if c is not None and a < 0 and objective < c * a:
            objective, free = c * a, False
        kinds.add(free)
        for t in actions:
            assert float(result.loss[t].detach()) == pytest.approx(-objective, rel=1e-9)
            assert float(result.ratio[t]) == pytest.approx(s, rel=1e-9)
            # n tokens carry the same loss, and each has 1 / n of the mean in s: n * (-a s) / n.
            assert float(gradient[t]) == pytest.approx(-a * s if free else 0.0, rel=1e-9, abs=1e-12)
    assert kinds == {True, False}
    assert bool((gradient[~mask] == 0).all())


def test_sequence_clip_when_sequences_have_one_token_expected_ppo_clip() -> None:
    new, old, advantages = random_tokens(6, 40)
    mask, cu_seqlens = torch.ones(40, dtype=torch.bool), torch.arange(41, dtype=torch.int32)

    result = sequence_clip_loss(new, old, advantages, mask, cu_seqlens, 0.2, 0.28)

    expected = ppo_clip_loss(new, old, advantages, 0.2, 0.28)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.clipped, expected.clipped)


def test_overlong_penalty_expected_equation() -> None:
    lengths = list(range(0, 140))

    result = overlong_penalty(torch.tensor(lengths), 120, 30)

    expected = [0.0 if n <= 90 else -1.0 if n > 120 else (90 - n) / 30 for n in lengths]
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, abs=1e-6)
    assert overlong_penalty(torch.tensor([], dtype=torch.int64), 120, 30).tolist() == []
