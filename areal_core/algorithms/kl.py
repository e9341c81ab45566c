"""Estimators of the KL divergence between two policies from sampled tokens (Schulman 2020, "Approximating KL
Divergence").

With ``x ~ p`` (the policy) and ``d = log p(x) - log q(x)`` (``q``: the reference), per token:

======  ==========================  ==========================================================================
name    value                       gradient with respect to the policy, when the estimate is itself the loss
======  ==========================  ==========================================================================
``k1``  ``d``                       ``grad log p``: its expectation is 0, so as a loss it does nothing but noise
``k2``  ``d^2 / 2``                 ``d * grad log p``: in expectation the gradient of ``KL(p || q)``
``k3``  ``exp(-d) - 1 + d``         ``(1 - exp(-d)) * grad log p``: in expectation the gradient of ``KL(q || p)``
======  ==========================  ==========================================================================

The value of ``k1`` and ``k3`` is an unbiased estimate of ``KL(p || q)``; ``k2`` is biased by terms of third order.
``k2`` and ``k3`` are never negative. The expectations hold for samples of the current policy: no importance weight is
applied here.
"""

from __future__ import annotations

from typing import Literal

import torch

#: Log-ratios are clamped to this before ``exp``: far outside, ``exp`` overflows and the gradient becomes NaN.
MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """KL of the policy from a reference, per sampled token, in nats.

    Args:
        logprobs: ``[T]``, of the policy; gradients flow through it.
        ref_logprobs: ``[T]``, of the reference.
        estimator: see the table of this module.

    Returns:
        ``[T]``. In ``k3`` the log-ratio is clamped to +-20.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1 keeps the digits that exp(-d) - 1 loses where the policies are close.
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; known: 'k1', 'k2', 'k3'")
