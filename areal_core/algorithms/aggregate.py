"""From a loss per token to one number: which token counts how much.

A batch's loss is ``sum_t weight_t * loss_t / sum_i row_weight_i``, with token weights from ``token_weights`` and
sequence weights from ``sequence_weights``. Both depend on the sequence alone, so the numerator and the denominator
may be summed over any split of the batch into micro-batches and ranks.

=================  ==================  ====================  ====================================================
mode               token weight        sequence weight       loss of the batch
=================  ==================  ====================  ====================================================
``token_mean``     1                   ``n_i``               mean over all trained tokens (DAPO, arXiv:2503.14476)
``seq_mean``       ``1 / n_i``         1                     mean of the sequences' means (GRPO, arXiv:2402.03300)
``seq_sum_const``  ``1 / constant``    1                     mean of sequence sums / constant (Dr.GRPO, 2503.20783)
=================  ==================  ====================  ====================================================

``n_i`` is the number of trained tokens of sequence ``i``. A sequence that trains no token has weight 0.
"""

from __future__ import annotations

from typing import Literal

import torch

from areal_core.algorithms.segments import expand_rows, segment_sum, sequence_index

LossAggregation = Literal["token_mean", "seq_mean", "seq_sum_const"]


def trained_lengths(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Trained tokens of each sequence, int64 ``[B]``; ``loss_mask`` bool ``[T]``, ``cu_seqlens`` int ``[B + 1]``."""
    index = sequence_index(cu_seqlens, len(loss_mask))
    return segment_sum(loss_mask.long(), index, len(cu_seqlens) - 1)


def token_weights(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, mode: LossAggregation, constant: float | None = None
) -> torch.Tensor:
    """What each token counts in the sum-loss.

    Args:
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        mode: see this module.
        constant: for ``seq_sum_const``: the divisor, usually the most tokens a completion may have.

    Returns:
        fp32 ``[T]``, 0 where not ``loss_mask``.
    """
    mask = loss_mask.float()
    if mode == "token_mean":
        return mask
    if mode == "seq_mean":
        lengths = trained_lengths(loss_mask, cu_seqlens).clamp(min=1).float()
        return mask / expand_rows(lengths, cu_seqlens, len(loss_mask))
    if mode == "seq_sum_const":
        return mask / _positive(constant)
    raise ValueError(f"unknown aggregation {mode!r}; known: 'token_mean', 'seq_mean', 'seq_sum_const'")


def sequence_weights(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, mode: LossAggregation) -> torch.Tensor:
    """What each sequence counts in the denominator; arguments as in ``token_weights``. fp32 ``[B]``."""
    lengths = trained_lengths(loss_mask, cu_seqlens)
    return lengths.float() if mode == "token_mean" else (lengths > 0).float()


def _positive(constant: float | None) -> float:
    if constant is None or constant <= 0:
        raise ValueError(f"seq_sum_const needs a positive constant, got {constant}")
    return constant
