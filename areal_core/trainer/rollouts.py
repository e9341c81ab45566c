"""Global rank 0's side of rollouts: the sampler, the controller, the data, and the log of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.api.distill_config import DistillConfig
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.data.loader import DataLoader
from areal_core.data.packing import pack_trajectories, reward_labels
from areal_core.errors import ArealError
from areal_core.rollout.build import build_workflow
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episode import RolloutInterrupted
from areal_core.rollout.refill import NoGroupPassed
from areal_core.trainer.loading import load_dataset

if TYPE_CHECKING:
    from areal_core.api.algorithm_api import Algorithm
    from areal_core.api.batch import PackedBatch
    from areal_core.api.configs import RLConfig
    from areal_core.api.engine_api import InferenceEngine
    from areal_core.api.io_struct import Trajectory
    from areal_core.plugins.manager import PluginManager
    from areal_core.stats import StatsTracker
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.signals import StopSignal


def default_eval_gconfig(gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    """Greedy, one sample, the training's lengths and stops."""
    return gconfig.new(n_samples=1, greedy=True, seed=None)


class Rollouts:
    """Makes training batches and evaluations."""

    def __init__(
        self,
        config: RLConfig | DistillConfig,
        engine: InferenceEngine,
        tokenizer: Any,
        train_rows: Sequence[dict[str, Any]] | None,
        manager: PluginManager,
        session: RunSession | None,
        stop: StopSignal,
        algorithm: Algorithm | None = None,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.engine = engine
        self.session = session
        self.loader: DataLoader | None = None
        if train_rows is not None:
            self.loader = DataLoader(
                train_rows,
                config.train_dataset.batch_size,
                shuffle=config.train_dataset.shuffle,
                seed=config.seed,
                key="train_dataset",
            )
        self.eval_gconfig = config.eval_gconfig or default_eval_gconfig(config.gconfig)
        self.eval_rows: list[dict[str, Any]] = []
        if config.valid_dataset is not None:
            rows = load_dataset(config.valid_dataset, "rl", tokenizer, manager, key="valid_dataset")
            limit = min(len(rows), config.evaluation.limit or len(rows))
            self.eval_rows = [{**rows[i], "_uid": f"eval-{i}", "_index": i} for i in range(limit)]
        workflow, self.rewards = build_workflow(config, tokenizer, manager, config.gconfig)
        self.eval_workflow, _ = build_workflow(
            config, tokenizer, manager, self.eval_gconfig, reward=self.rewards, training=False
        )
        engine.initialize(config.actor.path, tokenizer)
        self.controller = RolloutController(
            engine,
            workflow,
            config.rollout,
            batch_size=config.train_dataset.batch_size,
            group_size=config.gconfig.n_samples,
            seed=config.seed,
            on_outcome=self._record,
            should_stop=stop,
            reward_fn=self.rewards,
            # Only an algorithm has a ratio that truncation would bias; distillation has none.
            with_supports=algorithm is not None,
            **self._group_filter(),
        )
        if session is not None:
            session.directory.trajectories.tokenizer = tokenizer
        self._step = 0
        self._state: dict[str, Any] = {}

    def start(self, *, paused: bool = False) -> None:
        """Start the event loop; ``paused``: no token is computed before ``resume`` tells of the engine's weights."""
        if paused:
            self.engine.pause_generation()
        self.controller.start()
        self._state = self._snapshot()

    def next_batch(self, step: int, stats: StatsTracker) -> PackedBatch | None:
        """The batch of ``step``, or None if the run was asked to stop."""
        assert self.loader is not None, "made for evaluation only"
        self._step = step
        try:
            result = self.controller.prepare_batch(self.loader)
        except RolloutInterrupted:
            return None
        except NoGroupPassed as error:
            raise self._nothing_varies(error) from error
        stats.scalars(result.stats)
        stats.scalars(self.engine.export_stats(), "engine")
        return self._pack(result.trajectories)

    def _pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        batch = pack_trajectories(trajectories)
        if "reward_terms" not in batch:
            return batch
        sections = self.config.rewards
        weights = [sections[label].weight if label in sections else 1.0 for label in reward_labels(trajectories)]
        terms = batch["reward_terms"]
        return batch.with_rows(reward_weights=terms.new_tensor(weights).expand_as(terms).contiguous())

    def _group_filter(self) -> dict[str, Any]:
        """Dynamic sampling of the algorithm, as options of the controller."""
        algorithm = self.algorithm
        if algorithm is None or not algorithm.filters_groups:
            return {}
        return {
            "should_accept_group": lambda group: algorithm.accepts_group([t.reward for t in group]),
            "max_tried_groups": algorithm.max_sampled_batches * self.config.train_dataset.batch_size,
        }

    def _nothing_varies(self, error: NoGroupPassed) -> ArealError:
        assert not isinstance(self.config, DistillConfig), "only an algorithm filters groups"
        name = self.config.algorithm.name
        return ArealError(
            f"{name} accepted none of the {error.tried} groups of {self.config.gconfig.n_samples} samples that were "
            f"tried for step {self._step}: there is nothing to learn from. Their mean reward is "
            f"{error.mean_reward:.3g}; where all samples of a prompt have the same reward the task is too hard or too "
            "easy for the model. Use other prompts, a reward in finer steps or more samples per prompt "
            f"(gconfig.n_samples), or raise the bound (algorithm.{name}.max_sampled_batches for a built-in algorithm)."
        )

    def step_finished(self, step: int) -> None:
        self._state = self._snapshot()
        # What comes to nothing from now on, at the end of the run: a run that goes on from here drops it, and plays it.
        self._step = step + 1

    def evaluate(self, step: int, stats: StatsTracker) -> bool:
        """Score the held-out rows with the current weights. False if the run was asked to stop."""
        return self.play_eval(step, stats) is not None

    def play_eval(self, step: int, stats: StatsTracker) -> Sequence[Trajectory] | None:
        """As ``evaluate``: what was played, or None if the run was asked to stop."""
        if not self.eval_rows:
            return []
        before, self._step = self._step, step
        try:
            result = self.controller.evaluate(
                self.eval_rows, workflow=self.eval_workflow, group_size=self.eval_gconfig.n_samples
            )
        except RolloutInterrupted:
            return None
        finally:
            self._step = before
        stats.scalars(result.stats)
        # Read here, they do not count into the next step, which a resumed run could not repeat.
        stats.scalars(self.engine.export_stats(), "eval/engine")
        return result.trajectories

    def pause(self) -> None:
        """No token is computed until ``resume``."""
        self.controller.pause()
        self.engine.pause_generation()

    def resume(self, version: int) -> None:
        """Go on with weights of ``version``."""
        self.engine.set_version(version)
        self.controller.set_version(version)
        self.engine.continue_generation()
        self.controller.resume()

    def state(self) -> dict[str, Any]:
        """As of the last finished step: a run that is interrupted in the middle of a rollout repeats that step."""
        return self._state

    def load_state(self, state: Mapping[str, Any]) -> None:
        assert self.loader is not None, "made for evaluation only"
        self.loader.load_state_dict(state["loader"])
        self.controller.load_state_dict(state["controller"], self.loader.load_row)

    def close(self) -> None:
        self.controller.stop()
        self.rewards.destroy()
        self.engine.destroy()

    def _snapshot(self) -> dict[str, Any]:
        if self.loader is None:
            return {"loader": None, "controller": self.controller.state_dict()}
        return {"loader": self.loader.state_dict(), "controller": self.controller.state_dict(self.loader.save_row)}

    def _record(self, trajectory: Trajectory | None, outcome: str, info: Mapping[str, Any]) -> None:
        if self.session is None:
            return
        texts = {} if trajectory is None else trajectory.metadata
        # What was cancelled before it gave anything ended with the run: its row is played again on resume.
        if trajectory is not None or outcome != "cancelled":
            self.session.directory.trajectories.write(
                self._step,
                trajectory,
                prompt=texts.get("prompt"),
                completion=texts.get("completion"),
                outcome=outcome,
                split="eval" if info["split"] == "eval" else "train",
                uid=info["uid"],
                sample=info["sample"],
                reason=info["reason"] or None,
                error=info["error"],
                attempts=info["attempts"],
                seconds=round(info["seconds"], 4),
                version=info["version"],
            )
        self.session.trajectory_finished(trajectory, outcome)
