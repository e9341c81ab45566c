"""Reward models from preference pairs: the Bradley-Terry likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput

if TYPE_CHECKING:
    from areal_core.api.engine_api import LossFn


def bradley_terry_loss(*, center_coef: float = 0.0) -> LossFn:
    """``sum_p -log sigmoid(r_c - r_r - m) + center_coef * (r_c + r_r)^2`` over pairs ``p``.

    ``r_c`` and ``r_r`` are the scores of the chosen and the rejected answer, ``m`` the pair's margin: the negative
    log-likelihood of Bradley and Terry (1952) with the margin of Touvron et al. (2023, Llama 2, eq. 2). A likelihood of
    differences leaves the level of the scores free; the second term holds it near 0 (Eisenstein et al. 2023, section
    3.2).

    Args:
        center_coef: weight of that term; 0 leaves it out.

    Returns:
        A loss function of ``values`` ``[T]``, of which each sequence's last entry is its score, and a batch whose
        sequences ``2 p`` and ``2 p + 1`` are chosen and rejected, with the row ``margins`` ``[B]``. Statistics per
        pair: ``accuracy`` (chosen above rejected), ``margin`` (by how much), ``score_chosen``, ``score_rejected``.
    """

    def loss_fn(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        assert output.values is not None
        scores = output.values[batch.cu_seqlens[1:].long() - 1]
        chosen, rejected = split_pairs(scores)
        difference = chosen - rejected
        losses = -F.logsigmoid(difference - batch["margins"][::2])
        if center_coef:
            losses = losses + center_coef * (chosen + rejected) ** 2
        return LossOutput(
            losses.sum(),
            pair_stats(
                accuracy=(difference > 0).to(difference.dtype),
                margin=difference,
                score_chosen=chosen,
                score_rejected=rejected,
            ),
        )

    return loss_fn


def split_pairs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen and rejected, ``[B / 2]`` each, of one number per sequence ``[B]``.

    Raises:
        ValueError: if a side is missing.
    """
    if len(rows) % 2:
        raise ValueError(f"a batch of pairs has an even number of sequences, got {len(rows)}: a pair was split")
    return rows[0::2], rows[1::2]


def pair_stats(**values: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """``LossOutput.stats`` of numbers per pair."""
    return {name: (v.detach().sum(), v.new_full((), len(v))) for name, v in values.items()}


def pair_weight(batch: PackedBatch) -> torch.Tensor:
    """The number of pairs: the loss of a batch is its mean over them, whatever the split."""
    return torch.tensor(float(batch.num_seqs // 2), device=batch.cu_seqlens.device)
