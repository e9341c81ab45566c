"""Plays episodes in an event loop. Everything here runs in that loop's thread and needs no lock."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import Trajectory
from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_core.rollout.context import EpisodeEngine, group_seed
from areal_core.rollout.episode import Episode, Group, Job, read_first_versions
from areal_core.rollout.failures import FailureWatch, describe
from areal_core.rollout.results import as_trajectories, check_supports, is_sound
from areal_core.rollout.staleness import StalenessManager

#: How long episodes that never wait for anything may keep the event loop from its other work.
_TURN_SECONDS = 0.01
_MOST_STANDBYS = 64
_CANCEL_SECONDS = 2.5

logger = getLogger("RolloutController")


class _Lane:
    """Episodes that wait for their turn, and those that run, in the order of their start."""

    __slots__ = ("newest", "paused", "queue", "running", "standbys", "wanted")

    def __init__(self) -> None:
        self.queue: deque[Episode] = deque()
        self.running: dict[Episode, None] = {}
        self.standbys = 0  # workers that are about to start
        self.newest: asyncio.Task[None] | None = None  # the last of them
        self.wanted = 1  # as many of them
        self.paused = False


class EpisodeRunner:
    """Starts episodes, ends each in exactly one outcome, and completes groups.

    Two ways in: ``run_job`` plays groups at once for a caller that waits for all of them (synchronous rollout,
    evaluation); ``submit`` queues groups that start as the staleness bound allows, and collects them in ``ready``.

    **Workers.** An episode that waits for nothing does not need a task of its own: a worker, which is an asyncio task,
    plays one episode after the other as long as none suspends it. Before each it makes sure that a standby is
    scheduled; if the episode suspends its worker, the standby gets the event loop's next turn and goes on with the
    queue. An episode therefore never shares its task with another that runs, and has one that ``asyncio.timeout``
    and cancellation find. A worker whose episode was cancelled or changed a context variable plays no other.

    Args:
        engine: answers the requests.
        config: concurrency, retries, timeout, failure rate.
        seed: the run's seed.
        staleness: the bound on submitted groups.
        min_members: accepted episodes that a group needs, or it is dropped.
        notify: called when a waiting thread should look again.
        should_accept, should_accept_group: filters of trajectories and of complete groups.
        with_supports: ask for the supports of what is sampled for training.
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
        with_supports: bool = False,
    ) -> None:
        self.loop, self.engine, self.config, self.seed = loop, engine, config, seed
        self.staleness, self.min_members, self.notify = staleness, min_members, notify
        self.should_accept, self.should_accept_group = should_accept, should_accept_group
        self.with_supports = with_supports
        self.watch = FailureWatch(config, episodes_per_batch, notify)
        self.lanes = {"train": _Lane(), "sync": _Lane(), "eval": _Lane()}
        self.pending: deque[Group] = deque()  # submitted, not yet let in
        self.inside: dict[Group, None] = {}  # let in, not complete
        self.ready: list[Group] = []  # complete, not yet taken
        self.dropped: list[Group] = []  # complete, not to be used; to be reported
        self.unused: list[Group] = []  # after cancel_all: let in, and neither taken nor dropped
        self.wanted = 1  # complete groups that a thread waits for
        self.progress = 0  # changes with every episode that ends
        self._limit = config.max_concurrent_rollouts or (1 << 62)
        self._sweeper: asyncio.TimerHandle | None = None
        self._turn_end = 0.0
        self._context = contextvars.copy_context()
        self._order = 0
        self._stopping = self._holding = False

    @property
    def fatal(self) -> BaseException | None:
        """The error that ends the run, once there is one."""
        return self.watch.fatal

    # ------------------------------------------------------------------------------------------------- submission

    def run_job(self, job: Job) -> None:
        """Play all groups of ``job``, at once as far as the concurrency limit allows."""
        job.remaining = len(job.groups)
        lane = self.lanes[job.lane]
        for group in job.groups:
            self._number(group)
            lane.queue.extend(group.episodes)
        job.barrier = min(len(lane.queue), max(0, self._limit - len(lane.running)))
        self._pump(lane)

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
        self._pump(lane)

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
        self._pump(lane)
        return was_paused

    def release(self, paused: bool) -> None:
        """Undo ``hold``."""
        self._holding, self.lanes["train"].paused = False, paused
        self._admit()

    def set_version(self, version: int) -> None:
        self.staleness.set_version(version)
        self._admit()

    @property
    def stuck(self) -> bool:
        """Whether nothing that was submitted can go on before ``resume``."""
        lane = self.lanes["train"]
        return lane.paused and not lane.running

    def room(self) -> int:
        """Groups that could be submitted and would start now."""
        return max(0, self.staleness.capacity - len(self.pending))

    # ---------------------------------------------------------------------------------------------------- workers

    def _pump(self, lane: _Lane) -> None:
        """Have workers for what waits, unless some are about to start."""
        if lane.paused or self._stopping or self.fatal is not None:
            return
        if lane.standbys and lane.newest is not None:
            if not lane.newest.done():
                return
            lane.standbys = 0  # An episode has cancelled every task it found, these before they started.
        count = min(lane.wanted, len(lane.queue), self._limit - len(lane.running))
        for number in range(count):
            lane.standbys += 1
            # In a context of its own, not that of the episode which happens to be playing.
            lane.newest = self.loop.create_task(self._work(lane, first=number == 0), context=self._context.copy())

    async def _work(self, lane: _Lane, first: bool) -> None:
        lane.standbys -= 1
        task, loop, running, queue = asyncio.current_task(), self.loop, lane.running, lane.queue
        assert task is not None
        context = contextvars.copy_context()
        now = loop.time()
        if first:  # At most one starts in a turn of the loop: all that start in it share the time.
            self._turn_end = now + _TURN_SECONDS
            # Where episodes suspend, one worker would be all that starts in a turn.
            lane.wanted = min(2 * lane.wanted, _MOST_STANDBYS) if running else 1
        try:
            while queue and now < self._turn_end and len(running) < self._limit:
                if lane.paused or self._stopping or self.watch.fatal is not None:
                    return
                episode = queue.popleft()
                if episode.ended:
                    continue
                episode.task, episode.start = task, now
                running[episode] = None
                if queue and not lane.standbys:
                    self._pump(lane)
                if self._sweeper is None:
                    self._sweeper = loop.call_at(now + self.config.episode_timeout, self._sweep)
                await self._play(episode)
                now = loop.time()
                if not episode.ended:
                    episode.seconds = now - episode.start
                    self._end(episode, lane)
                if task.cancelling() or not _equal(context, contextvars.copy_context()):
                    return
        except Exception as error:
            self.watch.stop_for(error)
        finally:
            self._pump(lane)

    async def _play(self, episode: Episode) -> None:
        """Play until the episode has an outcome, or was ended from outside."""
        group = episode.group
        seed, job = group.seed, group.job
        if seed is None:
            seed = group.seed = group_seed(self.seed, group.split, group.uid)
        while True:
            on_request = partial(self._admitted, episode) if job is not None and job.barrier > 0 else None
            engine = EpisodeEngine(
                self.engine,
                group.uid,
                episode.sample,
                episode.attempts,
                seed,
                group.cache,
                on_request,
                self.with_supports and group.split != "eval",
            )
            episode.attempts += 1
            try:
                result = await group.workflow.arun_episode(engine, dict(group.row))
                if not episode.ended:
                    self._take_result(episode, result, has_supports=0 < engine.requests == engine.with_support)
                return
            except BaseException as error:  # A workflow may raise anything, SystemExit for one.
                if isinstance(error, GeneratorExit) and not self.loop.is_running():
                    raise  # The task is being thrown away, with its loop.
                if episode.ended or not self.watch.try_again(episode, error):
                    return

    def _take_result(self, episode: Episode, result: Any, *, has_supports: bool) -> None:
        group = episode.group
        if type(result) is Trajectory and is_sound(result):
            trajectories = [result]
        else:
            trajectories = as_trajectories(result, type(group.workflow).__name__)
            if not trajectories:
                episode.reject("workflow")
                return
        if has_supports:
            check_supports(trajectories, type(group.workflow).__name__)
        for trajectory in trajectories:
            _set_group_id(trajectory, group.uid)
        episode.trajectories = trajectories
        should_accept = self.should_accept
        if should_accept is not None and not self._passes(
            "should_accept", lambda: all(map(should_accept, trajectories))
        ):
            episode.reject("filter")
            return
        episode.outcome = "accepted"
        self.watch.scored = True

    def _sweep(self) -> None:
        """Cancel the episodes whose time is over, and come back when that of the next one is."""
        now, limit = self.loop.time(), self.config.episode_timeout
        overdue, upcoming = [], []
        for lane in self.lanes.values():
            for episode in lane.running:
                if episode.timed_out:
                    continue
                if episode.start + limit > now:
                    upcoming.append(episode.start + limit)
                    break
                overdue.append((episode, lane))
        self._sweeper = self.loop.call_at(min(upcoming), self._sweep) if upcoming else None
        for episode, lane in overdue:
            episode.timed_out = True
            if episode.task is not None:
                episode.task.cancel()
            # It may clean up, or swallow its cancellation, but not for ever.
            self.loop.call_later(limit, self._give_up, episode, lane)

    def _give_up(self, episode: Episode, lane: _Lane) -> None:
        """End an episode that was cancelled as long ago as it may take, and still runs."""
        if episode.ended:
            return
        if episode.task is not None:
            episode.task.cancel()
        episode.seconds = self.loop.time() - episode.start
        self.watch.time_out(episode)
        self._end(episode, lane)
        self._pump(lane)

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

    def _end(self, episode: Episode, lane: _Lane) -> None:
        episode.ended = True
        self.progress += 1
        if episode.task is not None:
            del lane.running[episode]
            episode.task = None
        group = episode.group
        if group.job is not None and group.job.barrier > 0:
            self._admitted(episode)
        if episode.outcome != "cancelled" and group.split != "eval":
            self.watch.count(episode.outcome)
        group.remaining -= 1
        if group.remaining == 0:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        group.cache.clear()
        accepted = group.accepted
        group.n_accepted = len(accepted)
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
        if not group.dropped and group.n_accepted < self.min_members:
            group.drop("incomplete")
        # Never fewer in the counters than there are: another thread reads them.
        if group.dropped:
            self.dropped.append(group)
        else:
            self.staleness.waiting += 1
            self.ready.append(group)
        self.staleness.running -= 1
        if group.dropped:
            self._admit()
        if group.dropped or len(self.ready) >= self.wanted or not self.inside:
            self.notify()

    def _group_passes(self, group: Group, accepted: list[Episode]) -> bool:
        should_accept = self.should_accept_group
        if should_accept is None or group.split == "eval":
            return True
        trajectories = [trajectory for episode in accepted for trajectory in episode.trajectories]
        return self._passes("should_accept_group", lambda: should_accept(trajectories))

    def _passes(self, name: str, ask: Callable[[], bool]) -> bool:
        """Ask a filter; the run stops if it raises."""
        try:
            return ask()
        except Exception as error:
            failure = ArealError(f"{name} raised {describe(error)}")
            failure.__cause__ = error
            self.watch.stop_for(failure)
            return False

    # ------------------------------------------------------------------------------------------------ collecting

    def take(self, count: int) -> list[Group] | None:
        """The ``count`` oldest complete groups that are not stale; None when there are fewer. Drops stale ones."""
        fresh = []
        read_first_versions(self.ready)
        for group in self.ready:
            if self.staleness.is_stale(group.first_version):
                if group.version - group.first_version > self.staleness.max_staleness:
                    self.watch.stop_for(behind_error(group))
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
        """Rows whose groups were submitted and not collected, oldest first.

        Dropped ones among them: who goes on from these rows has not been told of their episodes.
        """
        groups = [*self.ready, *self.inside, *self.pending, *self.dropped]
        groups.sort(key=lambda group: group.order)
        return [dict(group.row) for group in groups]

    def cancel_job(self, job: Job) -> None:
        lane = self.lanes[job.lane]
        kept = [episode for episode in lane.queue if episode.group.job is not job]
        lane.queue.clear()
        lane.queue.extend(kept)
        self._cancel(lane, [episode for group in job.groups for episode in group.episodes])
        self._pump(lane)

    def cancel_all(self) -> None:
        """Cancel everything; the tasks have yet to notice."""
        self._stopping = True
        self.unused = [*self.ready, *self.inside]
        for lane in self.lanes.values():
            queued = list(lane.queue)
            lane.queue.clear()
            self._cancel(lane, [*queued, *lane.running])
        for group in self.unused:
            for episode in group.accepted:
                episode.outcome, episode.reason = "cancelled", "unused"
            group.n_accepted = 0
        self.pending.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    async def shut_down(self) -> None:
        """Cancel everything; returns when it has ended, or when nothing ends any more."""
        self.cancel_all()
        # Also what episodes left behind: tasks that they started and did not await.
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks(self.loop) if task is not current]
        for task in tasks:
            task.cancel()
        since = self.loop.time()
        while tasks and self.loop.time() - since < _CANCEL_SECONDS:
            await asyncio.sleep(0.01)
            alive = [task for task in tasks if not task.done()]
            if len(alive) < len(tasks):
                tasks, since = alive, self.loop.time()
                self.progress += 1
        if tasks:
            logger.warning("%d tasks ignore their cancellation and are abandoned", len(tasks))

    def _cancel(self, lane: _Lane, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if episode.ended:
                continue
            if episode.task is not None:
                episode.task.cancel()
            # Ended here and now: a workflow may take its time over it.
            episode.outcome = "cancelled"
            self._end(episode, lane)


def behind_error(group: Group) -> ArealError:
    """The error of an engine that is not told of new versions: what it generates is too old from the start."""
    return ArealError(
        f"the inference engine generated with version {group.first_version} when training was at version "
        f"{group.version}. Bring it the new weights (or call its set_version) before the controller's set_version."
    )


# Past the conversion that attrs makes of every assignment.
_set_group_id: Callable[[Trajectory, str], None] = vars(Trajectory)["group_id"].__set__


def _equal(before: contextvars.Context, after: contextvars.Context) -> bool:
    try:
        return before == after
    except Exception:  # values that cannot be compared, such as arrays
        return False
