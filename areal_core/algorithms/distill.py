"""On-policy distillation: divergences between the student's and the teacher's distribution of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput

if TYPE_CHECKING:
    Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, kind: Divergence = "reverse_kl", jsd_beta: float = 0.5
) -> torch.Tensor:
    """A divergence of two distributions over the vocabulary, exactly: summed over all of its entries.

    With ``p`` the student's probabilities and ``q`` the teacher's (Agarwal et al. 2024, GKD, section 2 and eq. 1):

    * ``reverse_kl``: ``KL(p || q) = sum_v p_v (log p_v - log q_v)``: the student keeps to what the teacher would write.
    * ``forward_kl``: ``KL(q || p)``: the student covers all that the teacher would write.
    * ``jsd``: ``beta KL(q || m) + (1 - beta) KL(p || m)`` with ``m = beta q + (1 - beta) p``; bounded.

    Args:
        student, teacher: logits ``[N, V]``.
        jsd_beta: ``beta``, above 0 and below 1.

    Returns:
        nats, ``[N]``; with a gradient to both.
    """
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    weights = torch.tensor([jsd_beta, 1 - jsd_beta], dtype=log_p.dtype, device=log_p.device).log()
    log_m = torch.logaddexp(log_q + weights[0], log_p + weights[1])
    return jsd_beta * _kl(log_q, log_m) + (1 - jsd_beta) * _kl(log_p, log_m)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """``KL(a || b)`` ``[N]``."""
    return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)


def distill_loss(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    """The divergence summed over trained tokens, of sequences that the student has sampled (on-policy).

    The samples count as given: there is no gradient through sampling (Agarwal et al. 2024, algorithm 1).

    Args:
        output: ``of_logits`` ``[T]``, the divergence of each token.
        batch: ``loss_mask`` bool ``[T]``.

    Returns:
        The sum, and the statistic ``divergence`` per trained token, in nats.
    """
    assert output.of_logits is not None
    mask = batch["loss_mask"]
    loss = (output.of_logits * mask).sum()
    return LossOutput(loss, {"divergence": (loss.detach(), mask.sum().to(loss.dtype))})


def distill_loss_weight(batch: PackedBatch) -> torch.Tensor:
    """The number of trained tokens: the loss of a batch is its mean over them, whatever the split."""
    return batch["loss_mask"].sum().float()
