"""Supervised fine-tuning: the negative log-likelihood of demonstrated tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput

if TYPE_CHECKING:
    import torch


def sft_loss(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    """``-sum_t log p(x_t | x_<t)`` over trained tokens, in nats.

    Args:
        output: ``logprobs`` ``[T]`` (at temperature 1, for the likelihood).
        batch: ``loss_mask`` bool ``[T]``.

    Returns:
        The sum, and the statistic ``nll`` per trained token.
    """
    mask = batch["loss_mask"]
    loss = -(output.logprobs * mask).sum()
    return LossOutput(loss, {"nll": (loss.detach(), mask.sum().to(loss.dtype))})


def sft_loss_weight(batch: PackedBatch) -> torch.Tensor:
    """The number of trained tokens: the loss of a batch is its mean over them, whatever the split."""
    return batch["loss_mask"].sum().float()
