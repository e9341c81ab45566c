"""Direct preference optimisation: a policy from preference pairs, without a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from areal_core.algorithms.bradley_terry import pair_stats, split_pairs
from areal_core.algorithms.segments import segment_sum, sequence_index
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput

if TYPE_CHECKING:
    from areal_core.api.engine_api import LossFn


def dpo_loss(*, beta: float = 0.1, loss: Literal["sigmoid", "ipo"] = "sigmoid", label_smoothing: float = 0.0) -> LossFn:
    """A loss of ``h_p = log pi(y_c) / ref(y_c) - log pi(y_r) / ref(y_r)``, summed over pairs ``p``.

    ``y_c`` is the chosen answer, ``y_r`` the rejected one; log-probs of an answer are summed over its trained tokens.

    * ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` with ``e = label_smoothing`` (Rafailov et
      al. 2023, eq. 7; smoothing as in Mitchell 2023, "conservative DPO").
    * ``ipo``: ``(h - 1 / (2 beta))^2`` (Azar et al. 2023, eq. 17, with ``beta`` for its tau).

    Returns:
        A loss function of ``logprobs`` ``[T]`` and a batch whose sequences ``2 p`` and ``2 p + 1`` are chosen and
        rejected, with ``loss_mask`` and ``ref_logprobs`` ``[T]``. Statistics per pair: ``accuracy`` (the implicit
        reward of the chosen answer is greater), ``margin`` (by how much), ``reward_chosen`` and ``reward_rejected``
        (``beta log pi / ref``), ``logprob_chosen`` and ``logprob_rejected`` (of the whole answer, nats).
    """

    def loss_fn(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        mask = batch["loss_mask"]
        index = sequence_index(batch.cu_seqlens, batch.num_tokens)

        def answers(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return split_pairs(segment_sum(torch.where(mask, values, 0.0), index, batch.num_seqs))

        chosen, rejected = answers(output.logprobs)
        ref_chosen, ref_rejected = answers(batch["ref_logprobs"])
        ratio_chosen, ratio_rejected = chosen - ref_chosen, rejected - ref_rejected
        h = ratio_chosen - ratio_rejected
        if loss == "ipo":
            losses = (h - 1 / (2 * beta)) ** 2
        else:
            losses = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
        return LossOutput(
            losses.sum(),
            pair_stats(
                accuracy=(h > 0).to(h.dtype),
                margin=beta * h,
                reward_chosen=beta * ratio_chosen,
                reward_rejected=beta * ratio_rejected,
                logprob_chosen=chosen,
                logprob_rejected=rejected,
            ),
        )

    return loss_fn
