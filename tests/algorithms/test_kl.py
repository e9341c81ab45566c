"""KL estimators against their formulas, their gradients, and the divergences they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from areal_core.algorithms.kl import kl_estimate

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
}


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_when_random_expected_formula_and_gradient(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    ref = torch.randn(50, generator=g, dtype=torch.float64)
    policy = torch.randn(50, generator=g, dtype=torch.float64).requires_grad_()

    value = kl_estimate(policy, ref, name)
    (slope,) = torch.autograd.grad(value.sum(), policy)

    differences = (policy - ref).tolist()
    expected = torch.tensor([FORMULAS[name](d) for d in differences], dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    expected = torch.tensor([SLOPES[name](d) for d in differences], dtype=torch.float64)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, name), (policy,))


def expectations(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact expectation over a categorical policy p of an estimate and of its gradient; also p's logits and log q."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.exp().detach()
    estimate = (p * kl_estimate(log_p, log_q, name)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    return estimate.detach(), gradient, logits, log_q


def gradient_of_kl(logits: torch.Tensor, log_q: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    log_p = logits.log_softmax(0)
    kl = (log_p.exp() * (log_p - log_q)).sum() if reverse else (log_q.exp() * (log_q - log_p)).sum()
    return torch.autograd.grad(kl, logits)[0]


def test_k1_expected_unbiased_with_zero_expected_gradient() -> None:
    value, gradient, logits, log_q = expectations("k1")

    log_p = logits.log_softmax(0).detach()
    torch.testing.assert_close(value, (log_p.exp() * (log_p - log_q)).sum(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_k2_expected_gradient_of_reverse_kl() -> None:
    _, gradient, logits, log_q = expectations("k2")

    torch.testing.assert_close(gradient, gradient_of_kl(logits, log_q, reverse=True), rtol=1e-9, atol=1e-12)


def test_k3_expected_unbiased_with_gradient_of_forward_kl() -> None:
    value, gradient, logits, log_q = expectations("k3")

    log_p = logits.log_softmax(0).detach()
    torch.testing.assert_close(value, (log_p.exp() * (log_p - log_q)).sum(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, gradient_of_kl(logits, log_q, reverse=False), rtol=1e-9, atol=1e-12)


def test_k3_when_policies_are_close_in_fp32_expected_never_negative() -> None:
    policy = torch.full((100,), -3.0)
    ref = policy + torch.linspace(-1e-4, 1e-4, 100)

    value = kl_estimate(policy, ref, "k3")

    assert bool((value >= -1e-12).all())
    torch.testing.assert_close(value, (policy - ref).square() / 2, rtol=1e-2, atol=1e-11)


def test_k3_when_far_apart_expected_finite_value_and_gradient() -> None:
    policy = torch.tensor([-500.0, 0.0]).requires_grad_()

    value = kl_estimate(policy, torch.tensor([0.0, -500.0]), "k3")
    (gradient,) = torch.autograd.grad(value.sum(), policy)

    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())


def test_kl_when_estimator_is_unknown_expected_error() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
