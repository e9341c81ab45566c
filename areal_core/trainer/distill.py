"""The `distill` trainer: the student samples, and learns the teacher's distribution of every token it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal_core.algorithms.distill import distill_loss, distill_loss_weight, divergence
from areal_core.api.batch import PackedBatch
from areal_core.api.engine_api import TrainEngine
from areal_core.data.packing import pack_trajectories
from areal_core.errors import BadInputError
from areal_core.stats import StatsTracker
from areal_core.trainer.loading import build_train_engine, load_dataset
from areal_core.trainer.on_policy import OnPolicy
from areal_core.trainer.residency import Residency
from areal_core.trainer.supervised import finetune_spec, load_run_tokenizer
from areal_core.trainer.world import ShardRouter, World, check_same_shards

if TYPE_CHECKING:
    import torch

    from areal_core.api.distill_config import DistillConfig
    from areal_core.plugins.manager import PluginManager
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal


class DistillTrainer:
    """On-policy distillation over the whole vocabulary.

    The teacher runs once over each batch and keeps the hidden state of every sampled token; logits of both models exist
    for one chunk of tokens at a time, where the divergence is computed.
    """

    metric = "eval/loss"

    def __init__(
        self, config: DistillConfig, world: World, manager: PluginManager, session: RunSession | None, stop: StopSignal
    ) -> None:
        self.config = config
        self.world = world
        self.stats = StatsTracker()
        self.tokenizer = load_run_tokenizer(config, config.actor)
        train_rows = load_dataset(config.train_dataset, "rl", self.tokenizer, manager, key="train_dataset")
        spec = finetune_spec(config, len(train_rows))
        self.total_steps, self.steps_per_epoch = spec.total_steps, spec.steps_per_epoch
        self.actor = build_train_engine(config.actor, manager, key="actor")
        self.actor.initialize(spec, role="actor")
        self.residency = Residency(self.stats)
        self.residency.add(self.actor, config.actor)
        self.engines: dict[str, TrainEngine] = {"actor": self.actor}
        self.router = ShardRouter(world, self.actor)
        self.teacher = build_train_engine(config.teacher, manager, key="teacher")
        self.teacher.initialize(spec, role="ref")
        self.residency.add(self.teacher, config.teacher)
        check_same_shards(world, self.actor, self.teacher, key="teacher.backend")
        self.policy = OnPolicy(
            config,
            world,
            manager,
            session,
            stop,
            actor=self.actor,
            tokenizer=self.tokenizer,
            rows=train_rows,
            residency=self.residency,
            stats=self.stats,
            steps_per_epoch=self.steps_per_epoch,
        )

    # ------------------------------------------------------------------------------------------------- the loop

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state(state, [self.actor])

    def start(self) -> None:
        self.policy.start()

    def train_step(self, step: int) -> bool:
        stats = self.stats
        with stats.time("step"):
            batch, going = self.policy.next_batch(step)
            if not going:
                return False
            with stats.time("forward"):
                shard = self._with_teacher(batch)
            with stats.time("train"):
                self.actor.train()
                results = self.actor.train_batch(shard, distill_loss, distill_loss_weight, logits_fn=self._divergence)
                stats.scalars(results, "train")
                self.actor.lr_scheduler_step()
            self.policy.hand_over()
            self.policy.record(step, batch)
        self.policy.step_finished(step)
        return True

    def evaluate(self, step: int) -> bool:
        """The divergence on what the student writes to the held-out prompts, and the rewards of that."""
        if self.config.valid_dataset is None:
            return True
        self.residency.release()
        rollouts = self.policy.rollouts
        played = rollouts.play_eval(step, self.stats) if rollouts is not None else None
        if not self.world.agree(played is not None if self.world.is_main else None):
            return False
        shard = self._with_teacher(None if played is None else pack_trajectories(played))
        results = self.actor.eval_batch(shard, distill_loss, distill_loss_weight, logits_fn=self._divergence)
        self.stats.scalars(results, "eval")
        return True

    def state(self) -> dict[str, Any]:
        return self.policy.state()

    def close(self) -> None:
        self.policy.close()
        self.actor.destroy()
        self.teacher.destroy()

    # -------------------------------------------------------------------------------------------------- private

    def _with_teacher(self, batch: PackedBatch | None) -> PackedBatch:
        """This rank's part of rank 0's batch, with the teacher's ``teacher_hidden`` ``[T, H]``. Collective.

        The actor works next.
        """
        parts = self.router.partition(batch, self.config.actor.mb_spec.attention_cost)
        shard = self.router.scatter(batch, parts)
        self.residency.use(self.teacher)
        shard = shard.with_tokens(teacher_hidden=self.teacher.hidden_states(shard))
        self.residency.use(self.actor, logits_of=self.teacher)
        return shard

    def _divergence(self, batch: PackedBatch, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        teacher = self.teacher.logits(batch["teacher_hidden"][index])
        if teacher.shape != logits.shape:
            raise BadInputError(
                f"teacher.path: its vocabulary has {teacher.shape[-1]} entries, the actor's {logits.shape[-1]}. A "
                "teacher must share the student's tokenizer and vocabulary."
            )
        return divergence(logits, teacher, self.config.divergence, self.config.jsd_beta)
