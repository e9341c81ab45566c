"""Trust region on the second moment of the log-ratio (M2PO)."""

from __future__ import annotations

import torch


def second_moment_mask(
    logprobs: torch.Tensor,
    behave_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    threshold: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens that M2PO drops (arXiv:2510.01161, section 4).

    ``M2 = mean((log r)^2)`` with ``r = exp(logprobs - behave_logprobs)``, over the tokens on which an update widens the
    gap: ``A > 0`` and ``r > 1``, or ``A < 0`` and ``r < 1``. Those with the largest ``(log r)^2`` are dropped, as few
    as possible, until the mean over the others is at most ``threshold``. Every other trained token is kept. Of equal
    values all or none are dropped, so the result does not depend on the order of the tokens.

    Args:
        logprobs, behave_logprobs: ``[T]``, of the trained policy and of the sampler.
        advantages: ``[T]``.
        loss_mask: bool ``[T]``; nothing is read elsewhere.
        threshold: bound on ``M2``; 0.04 in the paper.

    Returns:
        bool ``[T]``: dropped; and ``M2`` before and after, scalars (0 where no token counts).
    """
    log_ratio = torch.where(loss_mask, logprobs, 0.0).double() - torch.where(loss_mask, behave_logprobs, 0.0).double()
    widening = loss_mask & (torch.where(loss_mask, advantages, 0.0) * log_ratio > 0)
    squares = torch.where(widening, log_ratio.square(), torch.inf)
    ordered = squares.sort().values
    counts = torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = (ordered.cumsum(0) / counts <= threshold).sum()
    # The first one beyond the prefix that fits; with ties in it, those in the prefix go too.
    limit = torch.cat([ordered, ordered.new_full((1,), torch.inf)])[kept]
    dropped = widening & (squares >= limit)
    return dropped, _mean(squares, widening), _mean(squares, widening & ~dropped)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
