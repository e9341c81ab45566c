"""What the trainers on a fixed dataset share: data, set-up, steps, evaluation and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.api.batch import PackedBatch
from areal_core.api.dataset_api import DatasetKind
from areal_core.api.engine_api import LossFn, LossWeightFn, TrainEngine
from areal_core.api.io_struct import FinetuneSpec
from areal_core.data.loader import DataLoader
from areal_core.errors import BadInputError
from areal_core.stats import StatsTracker
from areal_core.trainer.loading import build_train_engine, load_dataset, load_tokenizer
from areal_core.trainer.residency import Residency
from areal_core.trainer.world import ShardRouter, World

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig, DatasetConfig, TrainEngineConfig
    from areal_core.plugins.manager import PluginManager
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal


class SupervisedTrainer:
    """One model on the rows of a dataset. Rank 0 reads and tokenises them and scatters token-balanced shards.

    A trainer says what a row becomes (``encode``, ``pack``, ``partition``), what else a shard needs (``prepare``), and
    the loss. ``config`` has the fields ``actor``, ``train_dataset`` and ``valid_dataset`` beside the common ones.
    """

    metric = "eval/loss"
    kind: DatasetKind
    #: Of the model: see ``TrainEngine.initialize``.
    role = "actor"
    loss_fn: LossFn
    weight_fn: LossWeightFn

    def __init__(
        self, config: Any, world: World, manager: PluginManager, session: RunSession | None, stop: StopSignal
    ) -> None:
        self.config = config
        self.world = world
        self.manager = manager
        self.stop = stop
        self.stats = StatsTracker()
        self.version = 0
        self.tokenizer = load_run_tokenizer(config, config.actor)
        self.train_set = self._rows(config.train_dataset, "train_dataset")
        self.valid_set: EncodedRows | None = None
        if config.valid_dataset is not None:
            self.valid_set = self._rows(config.valid_dataset, "valid_dataset")
        self.loader = DataLoader(
            self.train_set,
            config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            seed=config.seed,
            key="train_dataset",
        )
        self.spec = finetune_spec(config, len(self.train_set))
        self.total_steps, self.steps_per_epoch = self.spec.total_steps, self.spec.steps_per_epoch
        self.model = build_train_engine(config.actor, manager, key="actor")
        self.model.initialize(self.spec, role=self.role)
        self.engines: dict[str, TrainEngine] = {"actor": self.model}
        self.residency = Residency(self.stats)
        self.residency.add(self.model, config.actor)
        self.router = ShardRouter(world, self.model)

    # ------------------------------------------------------------------------------------------ what a trainer is

    def encode(self, row: Mapping[str, Any], max_length: int | None) -> Any | None:
        """What ``pack`` packs; None to leave the row out."""
        raise NotImplementedError

    def pack(self, examples: Sequence[Any]) -> PackedBatch:
        raise NotImplementedError

    def partition(self, batch: PackedBatch, parts: int) -> list[list[int]]:
        """The sequences of each data-parallel rank."""
        raise NotImplementedError

    def prepare(self, shard: PackedBatch) -> PackedBatch:
        """What else the loss needs, computed by every rank on its shard."""
        return shard

    # ------------------------------------------------------------------------------------------------- the loop

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.model.set_version(self.version)
        self.loader.load_state_dict(state["loader"])

    def start(self) -> None:
        self.residency.use(self.model)
        self.model.train()

    def train_step(self, step: int) -> bool:
        stats = self.stats
        with stats.time("step"):
            if not self.world.agree(not self.stop() if self.world.is_main else None):
                return False
            with stats.time("data"):
                # Every rank walks the loader, so that its state is the same everywhere; only rank 0 tokenises.
                batch, shard = self._shard(self.train_set, self.loader.next_batch())
            shard = self.prepare(shard)
            with stats.time("train"):
                self.model.train()
                stats.scalars(self.model.train_batch(shard, self.loss_fn, self.weight_fn), "train")
                self.model.lr_scheduler_step()
            self.version += 1
            self.model.set_version(self.version)
        if batch is not None:
            stats.scalar("train/tokens", batch.num_tokens)
            stats.scalar("train/epoch", step / self.steps_per_epoch)
        return True

    def evaluate(self, step: int) -> bool:
        """Loss and statistics over the held-out rows, in batches of ``valid_dataset.batch_size``."""
        valid, config = self.valid_set, self.config.valid_dataset
        if valid is None or config is None:
            return True
        self.residency.use(self.model)
        self.model.eval()
        count = min(len(valid), self.config.evaluation.limit or len(valid))
        totals: dict[str, float] = {}
        weight = 0.0
        for start in range(0, count, config.batch_size):
            if not self.world.agree(not self.stop() if self.world.is_main else None):
                return False
            indices = range(start, min(start + config.batch_size, count))
            batch, shard = self._shard(valid, [valid[i] for i in indices])
            result = self.model.eval_batch(self.prepare(shard), self.loss_fn, self.weight_fn)
            share = self.world.agree(float(self.weight_fn(batch)) if batch is not None else None)
            for name, value in result.items():
                totals[name] = totals.get(name, 0.0) + value * share
            weight += share
        # Only now: an interrupted evaluation must not rank the weights by some of the rows.
        for name, total in totals.items():
            self.stats.ratio(f"eval/{name}", total, weight)
        return True

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "loader": self.loader.state_dict()}

    def close(self) -> None:
        self.model.destroy()

    # -------------------------------------------------------------------------------------------------- private

    def _rows(self, config: DatasetConfig, key: str) -> EncodedRows:
        rows = load_dataset(config, self.kind, self.tokenizer, self.manager, key=key)
        return EncodedRows(rows, self.encode, config.max_length, key=key)

    def _shard(self, rows: EncodedRows, chosen: Sequence[Mapping[str, Any]]) -> tuple[PackedBatch | None, PackedBatch]:
        """The batch of some rows (on rank 0), and this rank's part of it. Collective."""
        batch = parts = None
        if self.world.is_main:
            batch = self.pack(rows.encode(chosen))
            parts = self.partition(batch, self.router.dp_size)
        return batch, self.router.scatter(batch, parts)


class EncodedRows(Sequence[dict[str, Any]]):
    """Rows that are tokenised when they are first used, and kept.

    Args:
        encode: ``encode(row, max_length)`` gives an example, or None for a row to leave out.
        key: the dataset's section in the configuration, for messages.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        encode: Callable[[Mapping[str, Any], int | None], Any | None],
        max_length: int | None,
        *,
        key: str,
    ) -> None:
        self.rows = rows
        self.key = key
        self.max_length = max_length
        self._encode = encode
        self._encoded: dict[int, Any | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return {**self.rows[index], "_index": index}

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The examples of some rows; those that are left out (too long, nothing to learn from) are missing.

        Raises:
            BadInputError: if none is left.
        """
        encoded = []
        for row in rows:
            index = int(row["_index"])
            if index not in self._encoded:
                self._encoded[index] = self._encode(row, self.max_length)
            example = self._encoded[index]
            if example is not None:
                encoded.append(example)
        if not encoded:
            if self.max_length is None:
                raise BadInputError(f"{self.key}: no row of this batch has anything to learn from.")
            raise BadInputError(
                f"{self.key}.max_length: every row of this batch is longer than {self.max_length} tokens."
            )
        return encoded


def load_run_tokenizer(config: BaseTrainerConfig, model: TrainEngineConfig) -> Any:
    """The tokenizer of a run: ``tokenizer_path``, else the model's."""
    return load_tokenizer(config.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)


def finetune_spec(config: Any, dataset_size: int) -> FinetuneSpec:
    """How long a run is, for learning-rate schedules."""
    return FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=dataset_size,
        train_batch_size=config.train_dataset.batch_size,
        total_train_steps=config.total_train_steps,
    )
