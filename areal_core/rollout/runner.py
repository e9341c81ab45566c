"""Plays episodes in an event loop. Everything here runs in that loop's thread and needs no lock."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import Trajectory
from areal_core.api.reward_api import RewardError
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.episode import Episode, EpisodeRejected, EpisodeTimeout, Group, Job, Outcome
from areal_core.rollout.results import as_trajectories
from areal_core.rollout.staleness import StalenessManager

_WINDOW = 100
_HUNG_REWARDS = 8

logger = getLogger("RolloutController")


class _Lane:
    """Episodes that wait for their turn, and how many run."""

    __slots__ = ("paused", "queue", "running")

    def __init__(self) -> None:
        self.queue: deque[Episode] = deque()
        self.running: dict[Episode, None] = {}
        self.paused = False


class EpisodeRunner:
    """Starts episodes, ends each in exactly one outcome, and completes groups.

    Two ways in: ``run_job`` plays groups at once for a caller that waits for all of them (synchronous rollout,
    evaluation); ``submit`` queues groups that start as the staleness bound allows, and collects them in ``ready``.

    Args:
        engine: answers the requests.
        config: concurrency, retries, timeout, failure rate.
        seed: the run's seed.
        staleness: the bound on submitted groups.
        min_members: accepted episodes that a group needs, or it is dropped.
        notify: called when a waiting thread should look again.
        should_accept, should_accept_group: filters of trajectories and of complete groups.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: InferenceEngine,
        config: InferenceEngineConfig,
        *,
        seed: int,
        staleness: StalenessManager,
        min_members: int,
        episodes_per_batch: int,
        notify: Callable[[], None],
        should_accept: Callable[[Trajectory], bool] | None = None,
        should_accept_group: Callable[[list[Trajectory]], bool] | None = None,
    ) -> None:
        self.loop, self.engine, self.config, self.seed = loop, engine, config, seed
        self.staleness, self.min_members, self.notify = staleness, min_members, notify
        self.should_accept, self.should_accept_group = should_accept, should_accept_group
        self.fatal: BaseException | None = None
        self.lanes = {"train": _Lane(), "sync": _Lane(), "eval": _Lane()}
        self.pending: deque[Group] = deque()  # submitted, not yet let in
        self.inside: dict[Group, None] = {}  # let in, not complete
        self.ready: list[Group] = []  # complete, not yet taken
        self.dropped: list[Group] = []  # complete, not to be used; to be reported
        self.unused: list[Group] = []  # after cancel_all: let in, and neither taken nor dropped
        self.wanted = 1  # complete groups that a thread waits for
        self.progress = 0  # changes with every episode that ends
        self._limit = config.max_concurrent_rollouts or (1 << 62)
        self._retries = config.max_retries
        self._running: dict[Episode, None] = {}  # in the order of their deadlines
        self._sweeper: asyncio.TimerHandle | None = None
        self._order = 0
        self._window: deque[bool] = deque(maxlen=max(1, min(_WINDOW, episodes_per_batch)))
        self._failed_in_window = 0
        self._exceptions: Counter[str] = Counter()
        self._ever_scored = False
        self._hung_rewards = 0
        self._stopping = self._holding = False

    # ------------------------------------------------------------------------------------------------- submission

    def run_job(self, job: Job) -> None:
        """Play all groups of ``job``, at once as far as the concurrency limit allows."""
        job.remaining = len(job.groups)
        lane = self.lanes[job.lane]
        for group in job.groups:
            self._number(group)
            lane.queue.extend(group.episodes)
        job.barrier = min(len(lane.queue), max(0, self._limit - len(lane.running)))
        self._pump(job.lane)

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups; each starts when the staleness bound has room for it."""
        for group in groups:
            self._number(group)
            self.pending.append(group)
        self._admit()

    def _number(self, group: Group) -> None:
        group.order = self._order
        self._order += 1

    def _admit(self) -> None:
        lane = self.lanes["train"]
        if lane.paused or self._holding or self._stopping or self.fatal is not None:
            return
        while self.pending and self.staleness.capacity > 0:
            group = self.pending.popleft()
            self.staleness.running += 1
            group.version = self.staleness.version
            self.inside[group] = None
            lane.queue.extend(group.episodes)
        self._pump("train")

    def _pump(self, lane_name: str) -> None:
        lane = self.lanes[lane_name]
        if lane.paused or self._stopping or self.fatal is not None:
            return
        while lane.queue and len(lane.running) < self._limit:
            episode = lane.queue.popleft()
            if episode.ended:
                continue
            lane.running[episode] = None
            episode.task = self.loop.create_task(self._run(episode))

    def pause(self) -> None:
        """Start no submitted episode until ``resume``; jobs go on."""
        self.lanes["train"].paused = True

    def resume(self) -> None:
        self.lanes["train"].paused = False
        self._admit()

    def hold(self) -> bool:
        """Let no further group in, but play what is inside, paused or not; returns whether it was paused."""
        lane = self.lanes["train"]
        was_paused, lane.paused, self._holding = lane.paused, False, True
        self._pump("train")
        return was_paused

    def release(self, paused: bool) -> None:
        """Undo ``hold``."""
        self._holding, self.lanes["train"].paused = False, paused
        self._admit()

    def set_version(self, version: int) -> None:
        self.staleness.set_version(version)
        self._admit()

    def room(self) -> int:
        """Groups that could be submitted and would start now."""
        return max(0, self.staleness.capacity - len(self.pending))

    # ------------------------------------------------------------------------------------------------ one episode

    async def _run(self, episode: Episode) -> None:
        group = episode.group
        loop, workflow = self.loop, group.workflow
        episode.started = True
        start = loop.time()
        episode.deadline = start + self.config.episode_timeout
        self._running[episode] = None
        if self._sweeper is None:
            self._sweeper = loop.call_at(episode.deadline, self._sweep)
        while True:
            engine = EpisodeEngine(
                self.engine,
                run_seed=self.seed,
                split=group.split,
                uid=group.uid,
                sample=episode.sample,
                attempt=episode.attempts,
                group_cache=group.cache,
                on_request=None if episode.admitted or group.job is None else lambda: self._admitted(episode),
            )
            episode.attempts += 1
            try:
                result = await workflow.arun_episode(engine, dict(group.row))
                if not episode.ended:
                    self._take_result(episode, result)
            except GeneratorExit:
                raise
            except BaseException as error:  # SystemExit and KeyboardInterrupt of a task would end the event loop
                if not episode.ended and self._try_again(episode, error):
                    continue
            break
        if not episode.ended:
            episode.seconds = loop.time() - start
            self._end(episode)

    def _try_again(self, episode: Episode, error: BaseException) -> bool:
        """Whether to play the episode once more after ``error``; if not, its outcome is set."""
        if episode.timed_out:
            limit = self.config.episode_timeout
            message = f"an episode took more than {limit:g} s (rollout.episode_timeout) and was cancelled"
            self._fail(episode, EpisodeTimeout(message))
        elif isinstance(error, EpisodeRejected):
            episode.reject(error.reason)
        elif isinstance(error, RewardError):
            episode.reject(f"reward_{error.kind}")
            episode.error = error
            self._watch_hanging_reward(error)
        elif isinstance(error, BadInputError):
            self._fail(episode, error)
            self._stop_for(error)
        elif episode.attempts <= self._retries and self.fatal is None:
            return True
        else:
            self._fail(episode, error)
        return False

    def _take_result(self, episode: Episode, result: Any) -> None:
        trajectories = as_trajectories(result, _name_of(episode.group.workflow))
        if not trajectories:
            episode.reject("workflow")
            return
        for trajectory in trajectories:
            trajectory.group_id = episode.group.uid
        episode.trajectories = trajectories
        if self.should_accept is not None and not all(map(self.should_accept, trajectories)):
            episode.reject("filter")
            return
        episode.outcome = "accepted"
        self._ever_scored = True

    def _watch_hanging_reward(self, error: RewardError) -> None:
        # A reward that hangs each time would take reward.timeout for every episode of the batch before it is noticed.
        if error.kind != "timeout":
            self._ever_scored = True
        if self._ever_scored:
            return
        self._hung_rewards += 1
        if self._hung_rewards >= _HUNG_REWARDS:
            message = f"the first {self._hung_rewards} calls of the reward all took too long: {error}"
            self._stop_for(BadInputError(message))

    def _fail(self, episode: Episode, error: BaseException) -> None:
        episode.outcome, episode.error = "failed", error
        episode.reason = type(error).__name__
        # Bad input stops the run, and is its one error: a traceback into the engine would only hide it.
        if not self._exceptions[_describe(error)] and not isinstance(error, BadInputError):
            logger.warning("an episode failed: %s", _describe(error), exc_info=error)
        self._exceptions[_describe(error)] += 1

    def _sweep(self) -> None:
        self._sweeper = None
        now = self.loop.time()
        for episode in list(self._running):
            if episode.deadline > now:
                self._sweeper = self.loop.call_at(episode.deadline, self._sweep)
                return
            # Out of the list: a workflow that swallows its cancellation must not be cancelled in a busy loop.
            del self._running[episode]
            episode.timed_out = True
            if episode.task is not None:
                episode.task.cancel()

    def _admitted(self, episode: Episode) -> None:
        job = episode.group.job
        if episode.admitted or job is None:
            return
        episode.admitted = True
        job.barrier -= 1
        if job.barrier == 0:
            # After this turn of the loop, when the request that is being made has reached the engine.
            self.loop.call_soon(self.notify)

    # --------------------------------------------------------------------------------------------------- the ends

    def _end(self, episode: Episode) -> None:
        self._running.pop(episode, None)
        if episode.ended:
            return
        episode.ended = True
        self.progress += 1
        group = episode.group
        lane_name = "train" if group.job is None else group.job.lane
        if episode.task is not None:
            del self.lanes[lane_name].running[episode]
            episode.task = None
        self._admitted(episode)
        if episode.outcome != "cancelled" and group.split != "eval":
            self._watch_failures(episode.outcome)
        group.remaining -= 1
        if group.remaining == 0:
            self._complete(group)
        if self.lanes[lane_name].queue:
            self._pump(lane_name)

    def _complete(self, group: Group) -> None:
        group.cache.clear()
        accepted = group.accepted
        if accepted and not self._group_passes(group, accepted):
            group.drop("filtered")
        if group.job is not None:
            group.job.remaining -= 1
            if group.job.remaining == 0:
                self.notify()
            return
        del self.inside[group]
        if self._stopping:
            self.staleness.running -= 1
            return
        if not group.dropped and len(accepted) < self.min_members:
            group.drop("incomplete")
        # Never fewer in the counters than there are: another thread reads them.
        if group.dropped:
            self.dropped.append(group)
        else:
            group.read_first_version()
            self.staleness.waiting += 1
            self.ready.append(group)
        self.staleness.running -= 1
        if group.dropped:
            self._admit()
        if group.dropped or len(self.ready) >= self.wanted or not self.inside:
            self.notify()

    def _group_passes(self, group: Group, accepted: list[Episode]) -> bool:
        if self.should_accept_group is None or group.split == "eval":
            return True
        try:
            return self.should_accept_group([t for episode in accepted for t in episode.trajectories])
        except Exception as error:
            failure = ArealError(f"should_accept_group raised {_describe(error)}")
            failure.__cause__ = error
            self._stop_for(failure)
            return False

    def _watch_failures(self, outcome: Outcome) -> None:
        window = self._window
        if len(window) == window.maxlen:
            self._failed_in_window -= window[0]
        failed = outcome == "failed"
        window.append(failed)
        self._failed_in_window += failed
        if not failed or len(window) < (window.maxlen or 0):
            return
        if self._failed_in_window / len(window) > self.config.max_failure_rate:
            self._stop_for(self.failure_error(self._failed_in_window, len(window)))

    def failure_error(self, failed: int, total: int) -> ArealError:
        """The error of a rollout in which too many episodes failed."""
        message, count = self._exceptions.most_common(1)[0] if self._exceptions else ("?", 0)
        return ArealError(
            f"{failed} of the last {total} episodes failed, more than rollout.max_failure_rate "
            f"({self.config.max_failure_rate:g}) allows. Most common exception ({count} times so far): {message}"
        )

    def behind_error(self, group: Group) -> ArealError:
        """The error of an engine that is not told of new versions: what it generates is too old from the start."""
        return ArealError(
            f"the inference engine generated with version {group.first_version} when training was at version "
            f"{group.version}. Bring it the new weights (or call its set_version) before the controller's set_version."
        )

    def _stop_for(self, error: BaseException) -> None:
        if self.fatal is None:
            self.fatal = error
            self.notify()

    # ------------------------------------------------------------------------------------------------ collecting

    def take(self, count: int) -> list[Group] | None:
        """The ``count`` oldest complete groups that are not stale; None when there are fewer. Drops stale ones."""
        fresh = []
        for group in self.ready:
            if self.staleness.is_stale(group.first_version):
                if group.version - group.first_version > self.staleness.max_staleness:
                    self._stop_for(self.behind_error(group))
                group.drop("stale")
                self.dropped.append(group)
                self.staleness.waiting -= 1
            else:
                fresh.append(group)
        self.ready = sorted(fresh, key=lambda group: group.order)
        if len(self.ready) < count:
            self._admit()
            return None
        taken, self.ready = self.ready[:count], self.ready[count:]
        self.staleness.waiting -= count
        self.staleness.consumed += count
        self._admit()
        return taken

    def take_dropped(self) -> list[Group]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def unfinished_rows(self) -> list[dict[str, Any]]:
        """Rows that were submitted and not consumed, oldest first."""
        groups = sorted([*self.ready, *self.inside, *self.pending], key=lambda group: group.order)
        return [dict(group.row) for group in groups]

    def cancel_job(self, job: Job) -> None:
        lane = self.lanes[job.lane]
        lane.queue = deque(episode for episode in lane.queue if episode.group.job is not job)
        self._cancel([episode for group in job.groups for episode in group.episodes])

    def cancel_all(self) -> None:
        """Cancel everything; the tasks have yet to notice."""
        self._stopping = True
        self.unused = [*self.ready, *self.inside]
        for lane in self.lanes.values():
            queue, lane.queue = lane.queue, deque()
            self._cancel(queue)
            self._cancel(list(lane.running))
        for group in self.unused:
            for episode in group.accepted:
                episode.outcome, episode.reason = "cancelled", "unused"
        self.pending.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def _cancel(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if episode.ended:
                continue
            task = episode.task
            if task is not None:
                task.cancel()
            # Ended here and now: a task that was never started is not told of its cancellation, and a workflow may
            # take its time over it.
            episode.outcome = "cancelled"
            self._end(episode)


def _name_of(workflow: Any) -> str:
    return type(workflow).__name__


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
