"""The `sft` trainer: next-token loss on demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.algorithms.sft import sft_loss, sft_loss_weight
from areal_core.api.batch import PackedBatch
from areal_core.data.packing import pack_examples
from areal_core.data.partition import balanced_partition
from areal_core.data.sft import encode_example
from areal_core.trainer.supervised import SupervisedTrainer


class SFTTrainer(SupervisedTrainer):
    """Supervised fine-tuning; the loss is the mean over trained tokens."""

    kind = "sft"
    loss_fn = staticmethod(sft_loss)
    weight_fn = staticmethod(sft_loss_weight)

    def encode(self, row: Mapping[str, Any], max_length: int | None) -> Any | None:
        return encode_example(row, self.tokenizer, max_length, self.config.train_on_prompt)

    def pack(self, examples: Sequence[Any]) -> PackedBatch:
        return pack_examples(examples)

    def partition(self, batch: PackedBatch, parts: int) -> list[list[int]]:
        cost = self.config.actor.mb_spec.attention_cost
        return balanced_partition(batch.seqlens.tolist(), parts, attention_cost=cost)
