"""The `rl` trainer: generate, score, compute advantages, update, hand the new weights to the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput, as_maximum, as_stat
from areal_core.api.engine_api import TrainEngine
from areal_core.logging import getLogger
from areal_core.stats import StatsTracker
from areal_core.trainer.loading import build_algorithm, build_train_engine, load_dataset
from areal_core.trainer.on_policy import OnPolicy
from areal_core.trainer.residency import Residency
from areal_core.trainer.supervised import finetune_spec, load_run_tokenizer
from areal_core.trainer.world import ShardRouter, World

if TYPE_CHECKING:
    from areal_core.api.configs import RLConfig
    from areal_core.plugins.manager import PluginManager
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal

logger = getLogger("RLTrainer")


class RLTrainer:
    """Policy-gradient training on verifiable rewards.

    Global rank 0 holds the whole batch of a step: it runs the rollouts, computes advantages over all of it, so that
    group and batch statistics are exact whatever the mesh, and scatters token-balanced shards for every pass over a
    model.
    """

    metric = "eval/reward"

    def __init__(
        self, config: RLConfig, world: World, manager: PluginManager, session: RunSession | None, stop: StopSignal
    ) -> None:
        self.config = config
        self.world = world
        self.stats = StatsTracker()
        self.algorithm = build_algorithm(config, manager)
        self.tokenizer = load_run_tokenizer(config, config.actor)
        train_rows = load_dataset(config.train_dataset, "rl", self.tokenizer, manager, key="train_dataset")
        spec = finetune_spec(config, len(train_rows))
        self.total_steps, self.steps_per_epoch = spec.total_steps, spec.steps_per_epoch

        self.actor = build_train_engine(config.actor, manager, key="actor")
        self.actor.initialize(spec, role="actor")
        self.residency = Residency(self.stats)
        self.residency.add(self.actor, config.actor)
        self.engines: dict[str, TrainEngine] = {"actor": self.actor}
        self.ref: TrainEngine | None = None
        if config.ref is not None and self.algorithm.needs_ref_logprobs:
            self.ref = build_train_engine(config.ref, manager, key="ref")
            self.ref.initialize(spec, role="ref")
            self.ref.eval()
            self.residency.add(self.ref, config.ref)
        self.critic: TrainEngine | None = None
        if config.critic is not None:
            self.critic = build_train_engine(config.critic, manager, key="critic")
            self.critic.initialize(spec, role="critic")
            self.engines["critic"] = self.critic
            self.residency.add(self.critic, config.critic)
        # The engines may lie on meshes of their own, with another number of shards each.
        models = [self.actor, *(engine for engine in (self.ref, self.critic) if engine is not None)]
        self.routers = {id(engine): ShardRouter(world, engine) for engine in models}

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
            algorithm=self.algorithm,
        )

    # ------------------------------------------------------------------------------------------------- the loop

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state(state, self.engines.values())

    def start(self) -> None:
        self.policy.start()

    def train_step(self, step: int) -> bool:
        stats = self.stats
        with stats.time("step"):
            batch, going = self.policy.next_batch(step)
            if not going:
                return False
            with stats.time("forward"):
                batch = self._add_model_outputs(batch)
            if batch is not None:
                with stats.time("advantages"):
                    batch, advantage_stats = self.algorithm.compute_advantages(batch)
                    batch = batch.with_rows(loss_weights=self.algorithm.row_weights(batch))
                    stats.scalars(advantage_stats, "train")
            with stats.time("train"):
                # The actor last: where models give way to each other it stays, for its weights to be sent.
                if self.critic is not None:
                    self._update_critic(self.critic, batch)
                self._update_actor(batch)
            self.policy.hand_over()
            self.policy.record(step, batch)
        self.policy.step_finished(step)
        return True

    def evaluate(self, step: int) -> bool:
        self.residency.release()
        rollouts = self.policy.rollouts
        done = rollouts.evaluate(step, self.stats) if rollouts is not None else None
        return bool(self.world.agree(done))

    def state(self) -> dict[str, Any]:
        return self.policy.state()

    def close(self) -> None:
        self.policy.close()
        for engine in (*self.engines.values(), self.ref):
            if engine is not None:
                engine.destroy()

    # --------------------------------------------------------------------------------------------- model passes

    def _add_model_outputs(self, batch: PackedBatch | None) -> PackedBatch | None:
        """The log-probs and values that the algorithm needs, of models as they are before this step's update."""
        if batch is not None:
            versions = batch["versions"].new_full((batch.num_seqs,), self.policy.version)
            batch = batch.with_rows(trainer_version=versions)
        wanted: list[tuple[str, TrainEngine, str]] = []
        if self.algorithm.needs_ref_logprobs:
            # With LoRA and no `ref` the reference is the actor without its adapters.
            wanted.append(("ref_logprobs", self.ref or self.actor, "logprobs"))
        if self.algorithm.needs_prox_logprobs:
            wanted.append(("prox_logprobs", self.actor, "logprobs"))
        if self.critic is not None:
            wanted.append(("values", self.critic, "values"))
        for name, engine, output in wanted:
            self.residency.use(engine)
            engine.eval()
            router = self.routers[id(engine)]
            parts = router.partition(batch, self.config.actor.mb_spec.attention_cost)
            is_base = name == "ref_logprobs" and engine is self.actor
            given = batch if output == "logprobs" else _without_supports(batch)
            with self.actor.disable_adapter() if is_base else nullcontext():
                result = engine.forward(router.scatter(given, parts))
            gathered = router.gather(getattr(result, output), batch, parts)
            if batch is not None and gathered is not None:
                batch = batch.with_tokens(**{name: gathered})
        return batch

    def _update_actor(self, batch: PackedBatch | None) -> None:
        algorithm, actor = self.algorithm, self.actor
        prune = self.config.actor.skip_zero_advantage and algorithm.zero_advantage_is_zero_gradient
        self.residency.use(actor)
        actor.train()
        for minibatch in self._minibatches(batch, self.config.actor.ppo_n_minibatches):
            if minibatch is not None and prune:
                minibatch, skipped = _without_zero_advantage(minibatch)
                self.stats.mean("train/skipped_seqs", skipped)
            results = actor.train_batch(
                self._shard(minibatch, actor),
                self._actor_loss,
                algorithm.loss_weight,
                with_entropy=algorithm.needs_entropy,
            )
            self._record("train", results)
        actor.lr_scheduler_step()

    def _actor_loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        """The algorithm's loss; also how far the trainer's log-probs are from the sampler's.

        In synchronous mode and before the first optimizer step the two are the same model: a gap there is a bug.
        """
        result, mask = self.algorithm.loss(output, batch), batch["loss_mask"]
        gap = (output.logprobs.detach() - batch["logprobs"]).abs()
        return attrs.evolve(
            result,
            stats={**result.stats, "logprob_gap": as_stat(gap, mask)},
            maxima={**result.maxima, "logprob_gap": as_maximum(gap, mask)},
        )

    def _update_critic(self, critic: TrainEngine, batch: PackedBatch | None) -> None:
        from areal_core.algorithms.losses import critic_loss

        config = self.config.critic
        assert config is not None
        self.residency.use(critic)
        critic.train()
        loss_fn = critic_loss(value_eps_clip=config.value_eps_clip, coef=config.value_loss_coef)
        for minibatch in self._minibatches(_without_supports(batch), config.ppo_n_minibatches):
            shard = self._shard(minibatch, critic)
            self._record("critic", critic.train_batch(shard, loss_fn, lambda mb: mb["loss_mask"].sum()))
        critic.lr_scheduler_step()

    def _record(self, prefix: str, results: Mapping[str, float]) -> None:
        """Mean over the mini-batches of a step; of maxima the greatest."""
        for name, value in results.items():
            record = self.stats.maximum if name.endswith("_max") else self.stats.mean
            record(f"{prefix}/{name}", value)

    def _minibatches(self, batch: PackedBatch | None, count: int) -> Sequence[PackedBatch | None]:
        """``count`` parts of rank 0's batch with the samples of a prompt together; Nones on the other ranks."""
        if count == 1 or batch is None:
            return [batch] * count
        from areal_core.data.partition import minibatches

        parts = minibatches(batch.seqlens.tolist(), count, groups=batch["group_ids"].tolist())
        return [batch.select(part) for part in parts]

    def _shard(self, batch: PackedBatch | None, engine: TrainEngine) -> PackedBatch:
        """This rank's part of rank 0's batch, for one engine. Collective."""
        router = self.routers[id(engine)]
        return router.scatter(batch, router.partition(batch, self.config.actor.mb_spec.attention_cost))


def _without_supports(batch: PackedBatch | None) -> PackedBatch | None:
    """What a critic gets: values do not depend on what the sampler kept, and that is most of a batch."""
    return None if batch is None else batch.without("supports")


def _without_zero_advantage(batch: PackedBatch) -> tuple[PackedBatch, int]:
    """Leave out sequences whose advantages are all 0. Their weight in the denominator goes to the others."""
    import torch

    used = torch.zeros(batch.num_tokens + 1, dtype=torch.int64)
    used[1:] = ((batch["advantages"] != 0) & batch["loss_mask"]).cumsum(0)
    keep = used[batch.cu_seqlens.long()].diff() > 0
    n_keep = int(keep.sum())
    skipped = batch.num_seqs - n_keep
    if skipped == 0 or n_keep == 0:
        # Nothing to learn from at all: an empty batch makes the engine skip the step.
        return (batch if skipped == 0 else batch.select([])), skipped
    weights = batch["loss_weights"]
    lost = weights[~keep].sum() / n_keep
    kept = batch.select(torch.nonzero(keep).flatten().tolist())
    return kept.with_rows(loss_weights=kept["loss_weights"] + lost), skipped
