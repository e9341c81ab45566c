"""The rollout controller: the trainer's blocking face of an event loop that plays episodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import Trajectory
from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_core.rollout.build import check_workflow
from areal_core.rollout.entrance import Entrance
from areal_core.rollout.episode import Group, Job, RolloutResult, read_first_versions
from areal_core.rollout.ledger import Ledger, OutcomeCallback
from areal_core.rollout.refill import Reserve, RowSource, filtered, mean_reward, settle_for
from areal_core.rollout.runner import EpisodeRunner, behind_error
from areal_core.rollout.staleness import StalenessManager
from areal_core.rollout.stats import nothing_accepted

_BARRIER_SECONDS = 30.0

logger = getLogger("RolloutController")


class RolloutController:
    """Plays episodes of a workflow against an inference engine, in an event loop of its own thread.

    Every method blocks and is called from one thread, the trainer's; none of the callbacks runs in another. Waiting
    methods ask ``should_stop`` at least every 0.2 s and raise ``RolloutInterrupted`` when it says so.

    A group is the ``group_size`` episodes of one row. A complete group keeps its accepted episodes if they are at least
    two (or all, when ``group_size`` is 1); else it is dropped, and what was accepted of it counts as rejected with the
    reason ``incomplete_group`` (``stale_group`` for one that is too old). Every episode ends in exactly one of
    ``accepted``, ``rejected``, ``failed`` and ``cancelled``.

    Args:
        engine: an initialised inference engine.
        workflow: a ``RolloutWorkflow``, or a function that makes one.
        config: ``rollout`` of the run's configuration.
        batch_size: rows (groups) of one training step.
        group_size: episodes per row.
        seed: the run's seed.
        on_outcome: told of every episode that ended, before the method that collected it returns.
        should_accept: filter of single trajectories (reason ``filter``).
        should_accept_group: filter of complete training groups (reason ``filtered_group``); ``prepare_batch`` plays
            other rows in place of those it refuses.
        max_tried_groups: most groups played for one batch of ``prepare_batch``, refused ones among them. When they are
            used up the batch is what passed, with a warning; None: no bound.
        should_stop: whether the run is to end; each waiting method also takes its own.
        with_supports: ask the engine, if it returns them, for the supports of training samples (see
            ``areal_core.api.supports``) where ``gconfig`` truncates.
        reward_fn: the reward whose counts become metrics (``reward/calls``, ``reward/errors/KIND``); None: the
            attribute ``reward_fn`` of the workflow, if it has one.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: Any,
        config: InferenceEngineConfig,
        *,
        batch_size: int,
        group_size: int = 1,
        seed: int = 0,
        on_outcome: OutcomeCallback | None = None,
        should_accept: Callable[[Trajectory], bool] | None = None,
        should_accept_group: Callable[[list[Trajectory]], bool] | None = None,
        max_tried_groups: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        with_supports: bool = False,
        reward_fn: Any = None,
    ) -> None:
        self.engine, self.config = engine, config
        self.batch_size, self.group_size, self.seed = batch_size, group_size, seed
        self.workflow = check_workflow(workflow)
        self._reward_fn = reward_fn if reward_fn is not None else getattr(self.workflow, "reward_fn", None)
        self._should_accept, self._should_accept_group = should_accept, should_accept_group
        self._max_tried = max_tried_groups or 1 << 62
        self._reserve = Reserve()
        self._should_stop = should_stop or (lambda: False)
        self._with_supports = with_supports and engine.returns_supports
        self._staleness = StalenessManager(batch_size, config.max_head_offpolicyness)
        self._entrance: Entrance | None = None
        self._restored: list[dict[str, Any]] = []
        self._serial = 0
        self._ledger = Ledger(on_outcome)

    # ------------------------------------------------------------------------------------------------- life cycle

    @property
    def synchronous(self) -> bool:
        return self.config.max_head_offpolicyness == 0

    @property
    def version(self) -> int:
        return self._staleness.version

    def start(self) -> None:
        """Start the event loop. A controller may be started again after ``stop``."""
        if self._entrance is not None:
            return
        self._staleness.running = self._staleness.waiting = 0
        make_runner = partial(
            EpisodeRunner,
            engine=self.engine,
            config=self.config,
            seed=self.seed,
            staleness=self._staleness,
            min_members=min(2, self.group_size),
            episodes_per_batch=self.batch_size * self.group_size,
            should_accept=self._should_accept,
            should_accept_group=self._should_accept_group,
            with_supports=self._with_supports,
        )
        self._entrance = Entrance(lambda loop, notify: make_runner(loop, notify=notify), self._should_stop)
        self._play_restored()

    def stop(self) -> None:
        """Cancel everything that runs, and end the thread. May be called twice, and after an error."""
        entrance, self._entrance = self._entrance, None
        if entrance is None:
            return
        if not entrance.end():
            logger.warning("the rollout thread does not end: something in an episode blocks the event loop")
            return
        try:
            self._ledger.report([*entrance.runner.dropped, *entrance.runner.unused], self.version)
        except Exception:
            logger.exception("on_outcome failed while the rollout was stopped")

    def __enter__(self) -> RolloutController:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _inside(self) -> Entrance:
        if self._entrance is None:
            raise RuntimeError("the rollout controller is not started; call start()")
        return self._entrance

    @property
    def _live(self) -> EpisodeRunner:
        return self._inside.runner

    # ------------------------------------------------------------------------------------------------ synchronous

    def rollout_batch(
        self, rows: Sequence[Mapping[str, Any]], *, should_stop: Callable[[], bool] | None = None
    ) -> RolloutResult:
        """Play every row's group now and wait for all of them.

        In synchronous mode the requests of all episodes reach the engine before it generates the first token, so that
        the same batch is computed in the same way again.

        Raises:
            ArealError: if no trajectory was accepted, or too many episodes failed.
            BadInputError: what an episode raised; nothing is tried again.
            RolloutInterrupted: see the class.
        """
        start = time.monotonic()
        groups = self._play_rows(rows, should_stop)
        self._staleness.consumed += len(groups)
        return self._finish_sync(groups, start)

    def _play_rows(self, rows: Sequence[Mapping[str, Any]], should_stop: Callable[[], bool] | None) -> list[Group]:
        job = self._job(rows, self.workflow, self.group_size, "sync")
        self._play(job, should_stop, barrier=self.synchronous)
        read_first_versions(job.groups)
        for group in job.groups:
            group.version = self.version
            if group.n_accepted and self._staleness.is_stale(group.first_version):
                raise behind_error(group)
            elif not group.dropped and group.n_accepted < self._live.min_members:
                group.drop("incomplete")
        return job.groups

    def _finish_sync(self, groups: list[Group], start: float) -> RolloutResult:
        result = self._collect(groups, "rollout", start)
        if not result.trajectories:
            raise nothing_accepted(groups, "the batch")
        return result

    def _play_until_full(self, source: RowSource, should_stop: Callable[[], bool] | None) -> RolloutResult:
        """A batch of rows, and others in place of the groups that the filter refused, as many as are missing."""
        start = time.monotonic()
        groups: list[Group] = []
        missing = self.batch_size
        try:
            while missing:
                played = self._play_rows(self._reserve.draw(source, missing), should_stop)
                groups += played
                refused = len(filtered(played))
                if refused and len(groups) + refused > self._max_tried:
                    settle_for(len(groups) - len(filtered(groups)), self.batch_size, filtered(groups))
                    break
                missing = refused
                if missing:
                    self._inside.raise_if_told(should_stop)
        except BaseException:
            self._ledger.report(groups, self.version)
            raise
        self._staleness.consumed += self.batch_size
        return self._finish_sync(groups, start)

    def evaluate(
        self,
        rows: Sequence[Mapping[str, Any]],
        workflow: Any = None,
        *,
        group_size: int = 1,
        should_stop: Callable[[], bool] | None = None,
    ) -> RolloutResult:
        """Play rows outside of training; training episodes that run go on beside them. Metrics are ``eval/...``.

        Args:
            rows: held-out rows.
            workflow: another workflow, e.g. with other sampling; None: the training one.
            group_size: episodes per row.

        Raises:
            ArealError: if no trajectory was accepted, or more failed than ``max_failure_rate``.
        """
        start = time.monotonic()
        job = self._job(rows, check_workflow(workflow) if workflow is not None else self.workflow, group_size, "eval")
        self._play(job, should_stop, barrier=self.synchronous)
        result = self._collect(job.groups, "eval", start)
        episodes = [episode for group in job.groups for episode in group.episodes]
        failed = sum(episode.outcome == "failed" for episode in episodes)
        if failed > self.config.max_failure_rate * len(episodes):
            raise self._live.watch.error(failed, len(episodes))
        if rows and not result.trajectories:
            raise nothing_accepted(job.groups, "the evaluation")
        return result

    def _job(self, rows: Iterable[Mapping[str, Any]], workflow: Any, group_size: int, lane: Any) -> Job:
        job = Job(lane)
        split = "eval" if lane == "eval" else "train"
        job.groups = [
            Group(row, self._uid(row, split, i), group_size, workflow, split, job) for i, row in enumerate(rows)
        ]
        return job

    def _uid(self, row: Mapping[str, Any], split: str, index: int) -> str:
        uid = row.get("_uid")
        if uid is not None:
            return str(uid)
        if split == "eval":
            return f"row-{index}"
        self._serial += 1
        return f"row-{self._serial - 1}"

    def _play(self, job: Job, should_stop: Callable[[], bool] | None, *, barrier: bool) -> None:
        inside, run_job = self._inside, self._live.run_job
        try:
            if barrier and job.groups:
                self.engine.pause_generation()
                try:
                    inside.call_unless(should_stop, run_job, job)
                    limit = min(_BARRIER_SECONDS, self.config.episode_timeout / 2)
                    inside.wait(lambda: job.barrier <= 0, should_stop, limit)
                finally:
                    self.engine.continue_generation()
            else:
                inside.call_unless(should_stop, run_job, job)
            inside.wait(lambda: job.remaining == 0, should_stop)
        except BaseException:
            inside.cancel(job)
            self._ledger.report(job.groups, self.version)
            raise

    # ----------------------------------------------------------------------------------------------- asynchronous

    def prepare_batch(self, dataloader: RowSource, *, should_stop: Callable[[], bool] | None = None) -> RolloutResult:
        """The next ``batch_size`` groups whose age is within the staleness bound.

        Keeps as many groups under way as the bound allows; rows come from ``dataloader`` as room appears. With
        ``max_head_offpolicyness`` 0 this is ``rollout_batch(dataloader.next_batch())``, and again with other rows in
        place of groups that ``should_accept_group`` refused.

        Raises:
            NoGroupPassed: if it refused ``max_tried_groups``, all that were tried.
            ArealError: if as many groups as may be under way at a time came to nothing, one after the other.
            RuntimeError: if it waits for groups that ``pause`` keeps from starting.
            TypeError: if ``dataloader`` has no ``next_batch``.
        """
        if not callable(getattr(dataloader, "next_batch", None)):
            raise TypeError(
                f"prepare_batch was given a {type(dataloader).__name__}, which has no next_batch(). Use "
                "areal_core.data.loader.DataLoader(rows, batch_size), or rollout_batch(rows) for a list of rows."
            )
        if self.synchronous:
            return self._play_until_full(dataloader, should_stop)
        try:
            return self._next_groups(dataloader, should_stop)
        except ArealError:
            if self._live.fatal is None:
                self._ledger.report(self._inside.call(self._live.take_dropped), self.version)
            raise

    def _next_groups(self, dataloader: RowSource, should_stop: Callable[[], bool] | None) -> RolloutResult:
        start = time.monotonic()
        runner = self._live
        runner.wanted = self.batch_size
        while True:
            # Asked in the loop's thread, where its counters agree with each other.
            room = self._inside.call_unless(should_stop, runner.room)
            rows: list[dict[str, Any]] = []
            # One batch more than there is room for: what ends while the trainer is busy is replaced at once.
            while room and len(rows) < room + self.batch_size:
                rows += dataloader.next_batch()
            if rows:
                self._submit(rows)
            self._wait_for_groups(self.batch_size, lambda: runner.room() > 0, should_stop)
            self._raise_if_hopeless()
            count = min(self.batch_size, len(runner.ready))
            enough = count == self.batch_size
            if not enough and self._tried_enough():
                settle_for(count, self.batch_size, filtered(runner.dropped))
                enough = True
            groups = self._inside.call(runner.take, count) if enough else None
            if groups is not None:
                # A short batch is a version's batch too: nothing more may start in its place.
                self._staleness.consumed += self.batch_size - count
                return self._finish_async(groups, start)
            self._inside.raise_if_told(should_stop)

    def _wait_for_groups(self, count: int, other: Callable[[], bool], should_stop: Callable[[], bool] | None) -> None:
        """Wait for ``count`` complete groups, or ``other``."""
        runner = self._live

        def check() -> None:
            if runner.stuck and len(runner.ready) < count and not other():
                raise RuntimeError("waiting for episodes while the controller is paused; call resume() first")

        self._inside.wait(lambda: len(runner.ready) >= count or other() or runner.stuck, should_stop)
        self._inside.call_unless(should_stop, check)

    def _raise_if_hopeless(self) -> None:
        """Refilling must not go on for ever where, say, the reward always raises."""
        runner = self._live
        dropped = [group for group in list(runner.dropped) if group.dropped == "incomplete"]
        if len(dropped) >= (self._staleness.max_staleness + 1) * self.batch_size and not runner.ready:
            raise nothing_accepted(dropped, f"the last {len(dropped)} groups")

    def _tried_enough(self) -> bool:
        """Whether no batch can be filled within the bound, since too many groups were refused."""
        return len(filtered(list(self._live.dropped))) + self.batch_size > self._max_tried

    def submit(self, row: Mapping[str, Any]) -> None:
        """Queue one row's group; it starts when the staleness bound and the concurrency limit allow."""
        self._submit([row])

    def wait(self, count: int, *, should_stop: Callable[[], bool] | None = None) -> RolloutResult:
        """The next ``count`` complete groups of submitted rows, whose age is within the bound.

        Raises:
            ArealError: if fewer than that are under way.
            RuntimeError: if it waits for groups that ``pause`` keeps from starting.
        """
        start, runner = time.monotonic(), self._live
        runner.wanted = count
        while True:
            self._wait_for_groups(count, lambda: self._under_way() < count, should_stop)
            groups = self._inside.call(runner.take, count) if len(runner.ready) >= count else None
            if groups is not None:
                return self._finish_async(groups, start)
            under_way = self._inside.call(self._under_way)
            if under_way < count:
                raise ArealError(
                    f"cannot wait for {count} groups: {under_way} are under way (the others were consumed, "
                    "dropped as incomplete or stale, or never submitted)"
                )

    def drain(self, *, should_stop: Callable[[], bool] | None = None) -> None:
        """Wait until no submitted episode runs. Rows that have not started stay queued; results stay for ``wait``."""
        runner = self._live
        was_paused = self._inside.call(runner.hold)
        try:
            self._inside.wait(lambda: not runner.inside, should_stop)
        finally:
            self._inside.call(runner.release, was_paused)

    def pause(self) -> None:
        """Start no submitted episode until ``resume``; those that run go on, and so do batches and evaluations."""
        self._inside.call(self._live.pause)

    def resume(self) -> None:
        self._inside.call(self._live.resume)

    def set_version(self, version: int) -> None:
        """The trainer works on the step for ``version`` from now on. Tell the engine first."""
        if self._entrance is None:
            self._staleness.set_version(version)
        else:
            self._entrance.call(self._entrance.runner.set_version, version)

    def _under_way(self) -> int:
        runner = self._live
        return len(runner.ready) + len(runner.inside) + len(runner.pending)

    def _submit(self, rows: Iterable[Mapping[str, Any]]) -> None:
        groups = [Group(r, self._uid(r, "train", 0), self.group_size, self.workflow, "train") for r in rows]
        self._inside.call(self._live.submit, groups)

    def _finish_async(self, groups: list[Group], start: float) -> RolloutResult:
        return self._collect(groups, "rollout", start, self._inside.call(self._live.take_dropped))

    # --------------------------------------------------------------------------------------------------- results

    def _collect(self, groups: list[Group], prefix: str, start: float, dropped: Sequence[Group] = ()) -> RolloutResult:
        result = self._ledger.collect(groups, dropped, prefix, self.version, start)
        ended, stats = [*dropped, *groups], result.stats
        if prefix == "rollout":
            if self._should_accept_group is not None:
                stats["rollout/reward_unfiltered"] = mean_reward(ended)
            stats.update(self._queue_stats())
        # An evaluation reads them too, so that its calls do not show in the next batch.
        shown = "" if prefix == "rollout" else f"{prefix}/"
        stats.update({f"{shown}{name}": value for name, value in self._reward_stats().items()})
        counts = getattr(groups[0].workflow if groups else self.workflow, "export_stats", None)
        stats.update({f"{prefix}/{name}": value for name, value in ({} if counts is None else counts()).items()})
        self._ledger.report(ended, self.version)
        return result

    def _reward_stats(self) -> dict[str, float]:
        """Of the reward since they were last read: ``reward/calls``, ``reward/errors/KIND``."""
        export = getattr(self._reward_fn, "export_stats", None)
        return {} if export is None else export()

    def _queue_stats(self) -> dict[str, float]:
        runner = self._live
        return {
            "rollout/queue/pending": float(len(runner.pending)),
            "rollout/queue/running": float(len(runner.inside)),
            "rollout/queue/ready": float(len(runner.ready)),
        }

    def export_stats(self) -> dict[str, float]:
        """Totals since the start of the controller, and queue sizes."""
        stats = self._ledger.export_totals()
        if self._entrance is not None:
            stats.update(self._queue_stats())
        return stats

    # ----------------------------------------------------------------------------------------------------- state

    def state_dict(self, save_row: Callable[[Mapping[str, Any]], Any] = dict) -> dict[str, Any]:
        """JSON-compatible state: version, counters, and the rows to play again (under way, or complete and unused).

        Args:
            save_row: what is kept of such a row, e.g. ``DataLoader.save_row``; all of it by default.

        Raises:
            ArealError: if what is kept holds values that JSON cannot.
        """
        rows = self._restored if self._entrance is None else self._entrance.call(self._live.unfinished_rows)
        rows = [*rows, *self._reserve.rows]
        try:
            saved = json.loads(json.dumps([save_row(row) for row in rows]))
        except (TypeError, ValueError) as error:
            raise ArealError(f"a row under way cannot be saved, it holds more than JSON can: {error}") from error
        return {
            "version": self.version,
            "consumed": self._staleness.consumed,
            "serial": self._serial,
            "totals": self._ledger.state_dict(),
            "rows": saved,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], load_row: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    ) -> None:
        """Go on where ``state_dict`` was taken. Before ``start``, or while nothing is under way.

        Args:
            load_row: makes a row of what was kept of it, e.g. ``DataLoader.load_row``.
        """
        if self._entrance is not None and self._under_way():
            raise RuntimeError("load_state_dict while episodes are under way")
        self._staleness.version, self._staleness.consumed = int(state["version"]), int(state["consumed"])
        self._serial = int(state.get("serial", 0))
        self._ledger.load_state_dict(state.get("totals", {}))
        self._restored = [dict(load_row(row)) for row in state["rows"]]
        self._reserve.rows.clear()
        if self._entrance is not None:
            self._play_restored()

    def _play_restored(self) -> None:
        """Rows of a saved state come first: at once, or in synchronous mode with the next batch."""
        rows, self._restored = self._restored, []
        if self.synchronous:
            self._reserve.rows.extend(rows)
        elif rows:
            self._submit(rows)
