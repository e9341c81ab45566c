"""Importance weights between the policy that is trained and the one that sampled, within bounds.

The two differ where the samples are of older weights, and where the sampler computes in other kernels or another
precision than the trainer. The weight ``pi(trainer) / pi(sampler)`` corrects for either, at the price of variance; the
bounds cut its tail.

========  =====================================  ===================================================================
mode      weight of a ratio ``w``                known as
========  =====================================  ===================================================================
clamp     ``min(max(w, lower), upper)``          truncated importance sampling, TIS (Ionides 2008; for language
                                                 models Yao et al. 2025, "Your Efficient RL Framework Secretly
                                                 Brings You Off-Policy RL Training")
mask      ``w`` if ``lower <= w <= upper``,      masked importance sampling, MIS (Liu et al. 2025, "When Speed Kills
          else 0                                 Stability"); on tokens, the cap of AReaL (arXiv:2505.24298)
========  =====================================  ===================================================================
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch

from areal_core.algorithms.kl import MAX_LOG_RATIO
from areal_core.algorithms.segments import expand_rows
from areal_core.algorithms.sequence_losses import sequence_log_ratio


@attrs.frozen(eq=False)
class ImportanceWeight:
    """A weight per token, and how it came about; none has a gradient.

    Attributes:
        weight: ``[T]``, to multiply the token's loss with.
        ratio: ``[T]``, before the bounds.
        outside: bool ``[T]``: the ratio is beyond a bound.
    """

    weight: torch.Tensor
    ratio: torch.Tensor
    outside: torch.Tensor


def importance_weight(
    logprobs: torch.Tensor,
    behave_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    mode: Literal["clamp", "mask"] = "clamp",
    lower: float | None = None,
    upper: float | None = None,
    sequence_ratio: Literal["geometric", "product"] = "geometric",
) -> ImportanceWeight:
    """The bounded weight of the trainer's policy over the sampler's, see the table of this module.

    A token or sequence that is masked keeps its place in the denominator of the loss.

    Args:
        logprobs: ``[T]``, of the trainer's policy; not read where not ``loss_mask``.
        behave_logprobs: ``[T]``, of the sampler; likewise.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        level: a ratio for each token, or one for each sequence, repeated at its tokens.
        mode: see the table.
        lower, upper: bounds of the ratio; None: none.
        sequence_ratio: the geometric mean of a sequence's token ratios, whose bounds do not depend on the length, or
            their product, which is the ratio of the sequence's probabilities.

    Returns:
        Log-ratios are clamped to +-20; where not ``loss_mask`` the weight is 1.
    """
    if level == "token":
        log_ratio = torch.where(loss_mask, logprobs, 0.0) - torch.where(loss_mask, behave_logprobs, 0.0)
    else:
        rows = sequence_log_ratio(logprobs, behave_logprobs, loss_mask, cu_seqlens, mean=sequence_ratio == "geometric")
        log_ratio = torch.where(loss_mask, expand_rows(rows, cu_seqlens, len(loss_mask)), 0.0)
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio if lower is None and upper is None else ratio.clamp(lower, upper)
    outside = loss_mask & (weight != ratio)
    if mode == "mask":
        weight = torch.where(outside, 0.0, ratio)
    return ImportanceWeight(torch.where(loss_mask, weight, 1.0), ratio, outside)
