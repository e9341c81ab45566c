"""Clipped losses per token against their formulas in plain Python, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from areal_core.algorithms.losses import critic_loss, ppo_clip_loss, value_clip_loss
from areal_core.api.batch import PackedBatch, TokenOutput


def reference_loss(
    new: float, old: float, advantage: float, low: float, high: float, c: float | None
) -> tuple[float, float]:
    """Loss and its derivative with respect to ``new``."""
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, bounded * advantage)
    active = ratio * advantage <= bounded * advantage
    if c is not None and advantage < 0 and objective < c * advantage:
        objective, active = c * advantage, False
    return -objective, -ratio * advantage if active else 0.0


CASES = list(itertools.product([0.2, 0.1], [None, 0.28], [None, 1.5, 3.0]))


@pytest.mark.parametrize(("low", "high", "c"), CASES)
def test_ppo_clip_when_random_expected_formula_and_gradient(low: float, high: float | None, c: float | None) -> None:
    g = torch.Generator().manual_seed(1)
    new, old, advantage = (torch.randn(400, generator=g, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()

    result = ppo_clip_loss(new, old, advantage, low, high, c)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)

    expected = [
        reference_loss(*x, low, low if high is None else high, c)
        for x in zip(new.tolist(), old.tolist(), advantage.tolist(), strict=True)
    ]
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(result.loss.detach(), exact[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, exact[:, 1], rtol=1e-9, atol=1e-9)
    # The statistics name exactly the tokens without a gradient.
    torch.testing.assert_close(result.clipped | result.dual_clipped, gradient == 0)
    assert not bool((result.clipped & result.dual_clipped).any())
    assert bool(result.dual_clipped.any()) == (c is not None)
    assert bool(result.clipped.any())


def test_ppo_clip_when_random_expected_gradcheck() -> None:
    g = torch.Generator().manual_seed(5)
    new, old, advantage = (torch.randn(40, generator=g, dtype=torch.float64) for _ in range(3))

    assert torch.autograd.gradcheck(
        lambda x: ppo_clip_loss(x, old, advantage, 0.2, 0.3, 2.0).loss, (new.requires_grad_(),)
    )


def test_ppo_clip_when_on_policy_expected_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)

    result = ppo_clip_loss(logprobs, logprobs.detach(), advantages, 0.2)
    result.loss.sum().backward()

    torch.testing.assert_close(logprobs.grad, -advantages, rtol=0, atol=0)
    assert not bool(result.clipped.any())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("difference", [300.0, -300.0])
def test_ppo_clip_when_policies_are_far_apart_expected_finite(advantage: float, difference: float) -> None:
    new = torch.tensor([difference]).requires_grad_()

    result = ppo_clip_loss(new, torch.zeros(1), torch.tensor([advantage]), 0.2)
    result.loss.sum().backward()

    assert math.isfinite(float(result.loss.detach()))
    assert new.grad is not None and math.isfinite(float(new.grad))


def test_value_clip_when_random_expected_formula_and_gradient() -> None:
    g = torch.Generator().manual_seed(2)
    new, old, returns = (torch.randn(300, generator=g, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()

    loss, clipped = value_clip_loss(new, old, returns, 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), new)

    for i, (v, v_old, r) in enumerate(zip(new.tolist(), old.tolist(), returns.tolist(), strict=True)):
        near = min(max(v, v_old - 0.3), v_old + 0.3)
        free, bounded = (v - r) ** 2, (near - r) ** 2
        assert math.isclose(float(loss[i].detach()), 0.5 * max(free, bounded), rel_tol=1e-9)
        assert bool(clipped[i]) == (bounded > free)
        assert math.isclose(float(gradient[i]), 0.0 if bounded > free else v - r, rel_tol=1e-9)
    assert bool(clipped.any()) and not bool(clipped.all())
    assert torch.autograd.gradcheck(lambda x: value_clip_loss(x, old, returns, 0.3)[0], (new,))


def test_critic_loss_expected_sum_over_trained_tokens(batch_of: Callable[..., PackedBatch]) -> None:
    batch = batch_of(4)
    values = (batch["values"] + 0.3).requires_grad_()

    result = critic_loss(value_eps_clip=0.2, coef=0.5)(TokenOutput(torch.zeros(0), values=values), batch)
    result.loss.backward()

    expected = 0.0
    for trained, v, old, r in zip(
        *(batch[n].tolist() for n in ("loss_mask", "values", "values", "returns")), strict=True
    ):
        if trained:
            expected += 0.5 * 0.5 * max((v + 0.3 - r) ** 2, (old + 0.2 - r) ** 2)
    assert math.isclose(float(result.loss.detach()), expected, rel_tol=1e-9)
    assert values.grad is not None and bool((values.grad[~batch["loss_mask"]] == 0).all())
    count = result.stats["value_loss"][1]
    assert float(count) == int(batch["loss_mask"].sum())


def test_critic_loss_when_engine_has_no_values_expected_error(batch_of: Callable[..., PackedBatch]) -> None:
    with pytest.raises(ValueError, match=r"output\.values"):
        critic_loss(value_eps_clip=0.2, coef=0.5)(TokenOutput(torch.zeros(0)), batch_of())
