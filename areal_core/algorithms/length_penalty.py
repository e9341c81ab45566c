"""Rewards that depend on the length of a completion."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, max_length: int, cache_length: int) -> torch.Tensor:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), to be added to the reward.

    0 up to ``max_length - cache_length`` tokens, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Args:
        lengths: ``[B]``: sampled tokens of each completion.
        max_length: from here on the penalty is full.
        cache_length: width of the slope, in tokens; from 1 to ``max_length``.

    Returns:
        fp32 ``[B]``, in [-1, 0].
    """
    return ((max_length - cache_length - lengths.double()) / cache_length).clamp(-1, 0).float()
