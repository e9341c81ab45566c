"""The `sft` trainer: next-token loss on demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.algorithms.sft import sft_loss, sft_loss_weight
from areal_core.api.batch import PackedBatch
from areal_core.api.engine_api import TrainEngine
from areal_core.api.io_struct import FinetuneSpec
from areal_core.data.loader import DataLoader
from areal_core.data.packing import pack_examples
from areal_core.data.partition import balanced_partition
from areal_core.data.sft import encode_example
from areal_core.errors import BadInputError
from areal_core.stats import StatsTracker
from areal_core.trainer.checks import check_run
from areal_core.trainer.loading import build_train_engine, load_dataset, load_tokenizer
from areal_core.trainer.world import ShardRouter, World

if TYPE_CHECKING:
    from areal_core.api.configs import DatasetConfig, SFTConfig
    from areal_core.plugins.manager import PluginManager
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal


class SFTTrainer:
    """Supervised fine-tuning. Rank 0 reads and tokenises the data and scatters token-balanced shards."""

    metric = "eval/loss"

    def __init__(
        self, config: SFTConfig, world: World, manager: PluginManager, session: RunSession | None, stop: StopSignal
    ) -> None:
        check_run(config, world.size)
        self.config = config
        self.world = world
        self.stop = stop
        self.stats = StatsTracker()
        self.tokenizer = load_tokenizer(
            config.tokenizer_path or config.actor.path, trust_remote_code=config.actor.trust_remote_code
        )
        rows = load_dataset(config.train_dataset, "sft", self.tokenizer, manager, key="train_dataset")
        self.train_set = EncodedRows(
            rows, self.tokenizer, config.train_dataset, config.train_on_prompt, key="train_dataset"
        )
        self.loader = DataLoader(
            self.train_set,
            config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            seed=config.seed,
            key="train_dataset",
        )
        self.valid_set: EncodedRows | None = None
        if config.valid_dataset is not None:
            valid = load_dataset(config.valid_dataset, "sft", self.tokenizer, manager, key="valid_dataset")
            self.valid_set = EncodedRows(
                valid, self.tokenizer, config.valid_dataset, config.train_on_prompt, key="valid_dataset"
            )
        spec = FinetuneSpec(
            total_train_epochs=config.total_train_epochs,
            dataset_size=len(rows),
            train_batch_size=config.train_dataset.batch_size,
            total_train_steps=config.total_train_steps,
        )
        self.total_steps, self.steps_per_epoch = spec.total_steps, spec.steps_per_epoch
        self.model = build_train_engine(config.actor, manager, key="actor")
        self.model.initialize(spec, role="actor")
        self.engines: dict[str, TrainEngine] = {"actor": self.model}
        self.router = ShardRouter(world, self.model)
        self.version = 0

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.model.set_version(self.version)
        self.loader.load_state_dict(state["loader"])

    def start(self) -> None:
        self.model.train()

    def train_step(self, step: int) -> bool:
        stats = self.stats
        with stats.time("step"):
            if not self.world.agree(not self.stop() if self.world.is_main else None):
                return False
            with stats.time("data"):
                # Every rank walks the loader, so that its state is the same everywhere; only rank 0 tokenises.
                rows = self.loader.next_batch()
                batch = pack_examples(self.train_set.encode(rows)) if self.world.is_main else None
                shard = self.router.scatter(batch, self._partition(batch))
            with stats.time("train"):
                self.model.train()
                stats.scalars(self.model.train_batch(shard, sft_loss, sft_loss_weight), "train")
                self.model.lr_scheduler_step()
            self.version += 1
            self.model.set_version(self.version)
        if batch is not None:
            stats.scalar("train/tokens", batch.num_tokens)
            stats.scalar("train/epoch", step / self.steps_per_epoch)
        return True

    def evaluate(self, step: int) -> bool:
        """Mean loss per trained token over the held-out rows, in batches of ``valid_dataset.batch_size``."""
        valid, config = self.valid_set, self.config.valid_dataset
        if valid is None or config is None:
            return True
        self.model.eval()
        count = min(len(valid), self.config.evaluation.limit or len(valid))
        total, tokens = 0.0, 0
        for start in range(0, count, config.batch_size):
            if not self.world.agree(not self.stop() if self.world.is_main else None):
                return False
            indices = range(start, min(start + config.batch_size, count))
            batch = pack_examples(valid.encode([valid[i] for i in indices])) if self.world.is_main else None
            shard = self.router.scatter(batch, self._partition(batch))
            result = self.model.eval_batch(shard, sft_loss, sft_loss_weight)
            weight = self.world.agree(int(batch["loss_mask"].sum()) if batch is not None else None)
            total, tokens = total + result["loss"] * weight, tokens + weight
        # Only now: an interrupted evaluation must not rank the weights by some of the rows.
        self.stats.ratio("eval/loss", total, tokens)
        return True

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "loader": self.loader.state_dict()}

    def close(self) -> None:
        self.model.destroy()

    def _partition(self, batch: PackedBatch | None) -> list[list[int]] | None:
        if batch is None:
            return None
        cost = self.config.actor.mb_spec.attention_cost
        return balanced_partition(batch.seqlens.tolist(), self.router.dp_size, attention_cost=cost)


class EncodedRows(Sequence[dict[str, Any]]):
    """Rows that are tokenised when they are first used, and kept."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        tokenizer: Any,
        config: DatasetConfig,
        train_on_prompt: bool,
        *,
        key: str,
    ) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.key = key
        self.max_length = config.max_length
        self.train_on_prompt = train_on_prompt
        self._encoded: dict[int, dict[str, Any] | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return {**self.rows[index], "_index": index}

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Token ids and loss masks; rows longer than ``max_length`` are left out.

        Raises:
            BadInputError: if none is left.
        """
        encoded = []
        for row in rows:
            index = int(row["_index"])
            if index not in self._encoded:
                self._encoded[index] = encode_example(row, self.tokenizer, self.max_length, self.train_on_prompt)
            example = self._encoded[index]
            if example is not None:
                encoded.append(example)
        if not encoded:
            raise BadInputError(
                f"{self.key}.max_length: every row of this batch is longer than {self.max_length} tokens."
            )
        return encoded
