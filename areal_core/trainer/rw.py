"""The `rw` trainer: a reward model from preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.algorithms.bradley_terry import bradley_terry_loss, pair_weight
from areal_core.api.batch import PackedBatch
from areal_core.data.pairs import encode_pair, pack_pairs, partition_pairs
from areal_core.trainer.supervised import SupervisedTrainer


class RWTrainer(SupervisedTrainer):
    """Bradley-Terry on pairs: a scalar head over the model, whose value after the last token is the score."""

    kind = "rw"
    role = "reward"
    weight_fn = staticmethod(pair_weight)

    def __init__(self, config: Any, *args: Any) -> None:
        self.loss_fn = bradley_terry_loss(center_coef=config.center_coef)
        super().__init__(config, *args)

    def encode(self, row: Mapping[str, Any], max_length: int | None) -> Any | None:
        return encode_pair(row, self.tokenizer, max_length, target="score")

    def pack(self, examples: Sequence[Any]) -> PackedBatch:
        return pack_pairs(examples)

    def partition(self, batch: PackedBatch, parts: int) -> list[list[int]]:
        return partition_pairs(batch, parts, attention_cost=self.config.actor.mb_spec.attention_cost)
