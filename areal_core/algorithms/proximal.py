"""Log-probs of the proximal policy, the one before a step's first update, without a forward pass of their own."""

from __future__ import annotations

import torch


def loglinear_proximal(
    logprobs: torch.Tensor, behave_logprobs: torch.Tensor, versions: torch.Tensor, trainer_version: torch.Tensor
) -> torch.Tensor:
    """A point between the sampler's and the current log-probs, by the distance of their versions (AReaL's
    documentation, "Proximal Log-Probability Approximation", method loglinear).

    ``log prox = log behave + alpha (log current - log behave)`` with
    ``alpha = (v_prox - v_behave) / (v_current - v_behave)``. ``v_prox`` is the version that the step starts from,
    ``v_current = v_prox + 1`` the one that it makes: the current policy moves from the first to the second during the
    step. For a token of the newest weights ``alpha`` is 0 and the result is exact up to the sampler's numbers; for
    older ones it assumes that the log-prob moved evenly.

    Args:
        logprobs: ``[T]``, of the current policy; no gradient flows.
        behave_logprobs: ``[T]``, of the sampler.
        versions: int ``[T]``: version that sampled each token.
        trainer_version: int ``[T]``, or a scalar tensor: ``v_prox``.

    Returns:
        ``[T]``, detached.
    """
    lag = (trainer_version - versions).clamp(min=0).to(logprobs.dtype)
    return torch.lerp(behave_logprobs, logprobs.detach(), lag / (lag + 1))
