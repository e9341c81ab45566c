"""The `dpo` trainer: a policy from preference pairs and a reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.algorithms.bradley_terry import pair_weight
from areal_core.algorithms.dpo import dpo_loss
from areal_core.api.batch import PackedBatch
from areal_core.api.engine_api import TrainEngine
from areal_core.data.pairs import encode_pair, pack_pairs, partition_pairs
from areal_core.trainer.loading import build_train_engine
from areal_core.trainer.supervised import SupervisedTrainer
from areal_core.trainer.world import check_same_shards


class DPOTrainer(SupervisedTrainer):
    """DPO and IPO. The reference's log-probs are computed once for each batch.

    Without a `ref` section the reference is the actor with its LoRA adapters off: no second copy of the model.
    """

    kind = "dpo"
    weight_fn = staticmethod(pair_weight)

    def __init__(self, config: Any, *args: Any) -> None:
        self.loss_fn = dpo_loss(beta=config.beta, loss=config.loss, label_smoothing=config.label_smoothing)
        super().__init__(config, *args)
        self.ref: TrainEngine | None = None
        if config.ref is not None:
            self.ref = build_train_engine(config.ref, self.manager, key="ref")
            self.ref.initialize(self.spec, role="ref")
            self.residency.add(self.ref, config.ref)
            check_same_shards(self.world, self.model, self.ref, key="ref.backend")

    def encode(self, row: Mapping[str, Any], max_length: int | None) -> Any | None:
        return encode_pair(row, self.tokenizer, max_length, target="answer")

    def pack(self, examples: Sequence[Any]) -> PackedBatch:
        return pack_pairs(examples)

    def partition(self, batch: PackedBatch, parts: int) -> list[list[int]]:
        return partition_pairs(batch, parts, attention_cost=self.config.actor.mb_spec.attention_cost)

    def prepare(self, shard: PackedBatch) -> PackedBatch:
        with self.stats.time("forward"):
            if self.ref is not None:
                self.residency.use(self.ref)
                output = self.ref.forward(shard)
            else:
                with self.model.disable_adapter():
                    output = self.model.forward(shard)
        self.residency.use(self.model)
        return shard.with_tokens(ref_logprobs=output.logprobs)

    def close(self) -> None:
        super().close()
        if self.ref is not None:
            self.ref.destroy()
