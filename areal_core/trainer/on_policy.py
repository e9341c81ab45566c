"""The frame of a trainer whose batches its own policy samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.api.engine_api import InferenceEngine, TrainEngine
from areal_core.trainer.loading import build_inference_engine
from areal_core.trainer.rollouts import Rollouts
from areal_core.trainer.weight_sync import WeightSync

if TYPE_CHECKING:
    from areal_core.api.algorithm_api import Algorithm
    from areal_core.api.batch import PackedBatch
    from areal_core.api.configs import RLConfig
    from areal_core.api.distill_config import DistillConfig
    from areal_core.plugins.manager import PluginManager
    from areal_core.stats import StatsTracker
    from areal_core.trainer.residency import Residency
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal
    from areal_core.trainer.world import World


class OnPolicy:
    """Rollouts on global rank 0, the version of the policy, and its weights on their way to the sampler.

    All methods are collective but ``state``.

    Args:
        actor: the policy.
        rows: of the training dataset.
        steps_per_epoch: for the statistic ``train/epoch``.
        algorithm: filters groups, for one; None: every group is trained on.

    Attributes:
        rollouts: rank 0's; None on the others.
        version: of the actor's weights.
    """

    def __init__(
        self,
        config: RLConfig | DistillConfig,
        world: World,
        manager: PluginManager,
        session: RunSession | None,
        stop: StopSignal,
        *,
        actor: TrainEngine,
        tokenizer: Any,
        rows: Sequence[dict[str, Any]],
        residency: Residency,
        stats: StatsTracker,
        steps_per_epoch: int,
        algorithm: Algorithm | None = None,
    ) -> None:
        self.world, self.actor, self.residency, self.stats = world, actor, residency, stats
        self.steps_per_epoch = steps_per_epoch
        self.version = 0
        self.rollouts: Rollouts | None = None
        engine: InferenceEngine | None = None
        if world.is_main:
            engine = build_inference_engine(
                config.rollout, config.actor.dtype, manager, log_dir=config.run.path / "logs"
            )
            self.rollouts = Rollouts(config, engine, tokenizer, rows, manager, session, stop, algorithm)
        self.weights = WeightSync(
            world, actor, self.rollouts, engine, session, config=config.actor, run_path=config.run.path
        )

    def load_state(self, state: Mapping[str, Any], engines: Iterable[TrainEngine]) -> None:
        """Go on where ``state`` was taken; ``engines`` are told the version."""
        self.version = int(state["version"])
        for engine in engines:
            engine.set_version(self.version)
        if self.rollouts is not None:
            self.rollouts.load_state(state["rollouts"])

    def state(self) -> dict[str, Any]:
        """Rank 0's."""
        assert self.rollouts is not None
        return {"version": self.version, "rollouts": self.rollouts.state()}

    def start(self) -> None:
        if self.rollouts is not None:
            # A resumed run plays its unfinished rows again: not with the weights that the engine was loaded with.
            self.rollouts.start(paused=True)
        self._send()

    def next_batch(self, step: int) -> tuple[PackedBatch | None, bool]:
        """Rank 0's batch, None on the others; and whether there is one (not when the run is told to stop)."""
        with self.stats.time("rollout"):
            self.residency.release()
            batch = self.rollouts.next_batch(step, self.stats) if self.rollouts is not None else None
            return batch, bool(self.world.agree(batch is not None if self.world.is_main else None))

    def hand_over(self) -> None:
        """The actor was updated: its weights are those of the next version."""
        with self.stats.time("update_weights"):
            self.version += 1
            self._send()

    def record(self, step: int, batch: PackedBatch | None) -> None:
        if batch is not None:
            self.stats.scalar("train/tokens", batch.num_tokens)
            self.stats.scalar("train/version", self.version)
            self.stats.scalar("train/epoch", step / self.steps_per_epoch)

    def step_finished(self, step: int) -> None:
        if self.rollouts is not None:
            self.rollouts.step_finished(step)

    def close(self) -> None:
        if self.rollouts is not None:
            self.rollouts.close()

    def _send(self) -> None:
        self.residency.use(self.actor)
        self.weights.send(self.version)
