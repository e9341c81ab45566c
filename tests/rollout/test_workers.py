"""What an episode may rely on of the asyncio task it runs in, and the loop of the episodes.

The event loop runs in the test's own thread, on a clock of the test's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter

import numpy as np
import pytest
from rollout_fakes import FakeEngine

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import Trajectory
from areal_core.rollout.episode import Group, Job
from areal_core.rollout.runner import _TURN_SECONDS, EpisodeRunner
from areal_core.rollout.staleness import StalenessManager

VARIABLE: contextvars.ContextVar[object] = contextvars.ContextVar("VARIABLE", default=None)


def trajectory():
    return Trajectory(input_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0], versions=[-1, 0], reward=1.0)


class Stage:
    """Plays functions ``async (engine, data) -> result`` as workflows, on a virtual clock."""

    def __init__(self, limit=None, timeout=1e6, retries=0):
        self.now = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now
        config = InferenceEngineConfig(
            max_concurrent_rollouts=limit, episode_timeout=timeout, max_retries=retries, max_failure_rate=1.0
        )
        self.runner = EpisodeRunner(
            self.loop,
            FakeEngine(),
            config,
            seed=0,
            staleness=StalenessManager(1, 0),
            min_members=1,
            episodes_per_batch=1,
            notify=lambda: None,
        )

    def start(self, play, count):
        workflow = type("Workflow", (), {"arun_episode": lambda self, engine, data: play(engine, data)})()
        job = Job("sync")
        job.groups = [Group({"n": n}, str(n), 1, workflow, "train", job) for n in range(count)]
        self.runner.run_job(job)
        return job

    def turn(self):
        """One turn of the loop: what is ready now, and nothing that it makes ready."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def play(self, play, count, turns=50):
        job = self.start(play, count)
        for _ in range(turns):
            if job.remaining:
                self.turn()
        assert job.remaining == 0, "the episodes did not end"
        return [group.episodes[0] for group in job.groups]

    def close(self):
        self.runner.cancel_all()
        for _ in range(5):
            self.turn()
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not left


@pytest.fixture
def stage():
    made = []

    def make(**options):
        made.append(Stage(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def outcomes(episodes):
    return Counter(episode.outcome for episode in episodes)


@pytest.mark.parametrize("waits", [False, True])
def test_episodes_when_they_run_at_a_time_have_a_task_each(stage, waits):
    running: dict[asyncio.Task, int] = {}

    async def play(engine, data):
        task = asyncio.current_task()
        assert task is not None and task not in running
        running[task] = data["n"]
        for _ in range(data["n"] % 4 if waits else 0):
            await asyncio.sleep(0)
            assert asyncio.current_task() is task and running[task] == data["n"]
        del running[task]
        return trajectory()

    assert outcomes(stage().play(play, 40)) == {"accepted": 40}


def test_episodes_when_none_waits_leave_the_loop_its_turn(stage):
    stage = stage()
    played_in_a_turn = []
    ended = 0

    async def play(engine, data):
        nonlocal ended
        stage.now += _TURN_SECONDS / 8
        ended += 1
        return trajectory()

    job = stage.start(play, 200)
    while job.remaining:
        before = ended
        stage.turn()
        played_in_a_turn.append(ended - before)
        assert len(played_in_a_turn) < 100

    assert max(played_in_a_turn) <= 9
    assert sum(played_in_a_turn) == 200


def test_episodes_when_many_wake_in_one_turn_leave_the_loop_its_turn(stage):
    stage = stage(limit=32)
    gate = asyncio.Event()
    ended = 0

    async def play(engine, data):
        nonlocal ended
        if data["n"] < 32:
            await gate.wait()
        stage.now += _TURN_SECONDS / 4
        ended += 1
        return trajectory()

    job = stage.start(play, 400)
    for _ in range(10):
        stage.turn()
    assert ended == 0 and len(stage.runner.lanes["sync"].running) == 32
    gate.set()
    most = 0
    while job.remaining:
        before = ended
        stage.turn()
        most = max(most, ended - before)

    # Those that wake end in that turn, each by itself; the others share one turn's time.
    assert ended == 400 and most <= 32 + 5


def test_pause_when_episodes_never_wait_takes_effect_within_a_turn(stage):
    stage = stage()
    ended = 0

    async def play(engine, data):
        nonlocal ended
        stage.now += _TURN_SECONDS / 8
        ended += 1
        return trajectory()

    workflow = type("Workflow", (), {"arun_episode": lambda self, engine, data: play(engine, data)})()
    stage.runner.staleness.batch_size = 1000
    stage.runner.submit([Group({}, str(n), 1, workflow, "train") for n in range(500)])
    stage.turn()
    stage.turn()
    stage.loop.call_soon(stage.runner.pause)
    stage.turn()
    at_pause = ended
    for _ in range(10):
        stage.turn()

    assert 0 < ended <= at_pause + 9 < 500


def test_context_variables_when_set_by_an_episode_stay_its_own(stage):
    seen = []

    async def play(engine, data):
        seen.append(VARIABLE.get())
        if data["n"] % 3:
            # Compared with ==, an array would raise.
            VARIABLE.set(np.arange(3) if data["n"] % 2 else data["n"])
        if data["n"] % 5 == 0:
            await asyncio.sleep(0)
        return trajectory()

    assert outcomes(stage().play(play, 60, turns=400)) == {"accepted": 60}
    assert seen == [None] * 60


def test_timeout_when_used_in_a_workflow_cancels_only_its_block(stage):
    stage = stage()

    async def play(engine, data):
        if data["n"] % 2 == 0:
            return trajectory()
        try:
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        except TimeoutError:
            return trajectory()

    job = stage.start(play, 20)
    for _ in range(20):
        stage.turn()
    assert job.remaining == 10
    stage.now = 6.0
    for _ in range(20):
        stage.turn()

    assert outcomes(group.episodes[0] for group in job.groups) == {"accepted": 20}


def test_task_group_when_a_part_fails_fails_the_episode_alone(stage):
    async def fail():
        raise ValueError("boom")

    async def play(engine, data):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail() if data["n"] == 3 else asyncio.sleep(0))
        return trajectory()

    episodes = stage().play(play, 8)

    assert [episode.outcome for episode in episodes] == [*["accepted"] * 3, "failed", *["accepted"] * 4]
    assert episodes[3].reason == "ExceptionGroup"


def test_cancellation_when_an_episode_asks_for_its_own_reaches_no_other(stage):
    async def play(engine, data):
        if data["n"] % 2:
            asyncio.current_task().cancel()
            if data["n"] % 4 == 1:
                await asyncio.sleep(0)
        return trajectory()

    episodes = stage().play(play, 40, turns=200)

    # Where it never waits, its cancellation finds nothing to interrupt.
    expected = ["failed" if episode.sample or n % 4 == 1 else "accepted" for n, episode in enumerate(episodes)]
    assert [episode.outcome for episode in episodes] == expected


def test_timeout_when_a_workflow_swallows_its_cancellation_ends_once_as_failed(stage):
    stage = stage(timeout=10.0, limit=2)
    cancelled = Counter()
    gate = asyncio.Event()

    async def play(engine, data):
        while data["n"] == 0 and not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                cancelled[data["n"]] += 1
        if data["n"] == 1:
            await asyncio.Event().wait()
        return trajectory()

    job = stage.start(play, 6)
    for now in (0.0, 9.0, 11.0, 12.0, 20.0):
        stage.now = now
        for _ in range(10):
            stage.turn()
    assert cancelled == {0: 1} and job.remaining == 1
    gate.set()
    for _ in range(10):
        stage.turn()

    episodes = [group.episodes[0] for group in job.groups]
    # What it returned in the end counts: it was not stopped by anything.
    assert [episode.outcome for episode in episodes] == ["accepted", "failed", *["accepted"] * 4]
    assert episodes[1].reason == "EpisodeTimeout"


def test_retries_when_an_episode_never_waits_are_made_and_counted(stage):
    tries = Counter()

    async def play(engine, data):
        tries[data["n"]] += 1
        if tries[data["n"]] <= data["n"]:
            raise ValueError("boom")
        return trajectory()

    episodes = stage(retries=2).play(play, 5)

    assert [episode.outcome for episode in episodes] == ["accepted"] * 3 + ["failed"] * 2
    assert [episode.attempts for episode in episodes] == [1, 2, 3, 3, 3]


def test_concurrency_when_limited_to_one_plays_in_order(stage):
    order = []

    async def play(engine, data):
        order.append(data["n"])
        if data["n"] % 3 == 0:
            await asyncio.sleep(0)
            assert order[-1] == data["n"]
        return trajectory()

    stage(limit=1).play(play, 30, turns=200)

    assert order == list(range(30))


def test_cancel_when_it_storms_ends_every_episode_once(stage):
    stage = stage(limit=7)
    jobs = []

    async def play(engine, data):
        for _ in range(data["n"] % 4):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if data["n"] % 8 < 4:
                    await asyncio.sleep(0)
                raise
        return trajectory()

    for storm in range(60):
        jobs.append(stage.start(play, 30))
        for _ in range(storm % 6):
            stage.turn()
        stage.runner.cancel_job(jobs[-1])
        assert jobs[-1].remaining == 0
    last = stage.play(play, 30, turns=200)

    assert outcomes(last) == {"accepted": 30}
    episodes = [group.episodes[0] for job in jobs for group in job.groups]
    assert all(episode.ended and episode.task is None for episode in episodes)
    counted = outcomes(episodes)
    assert counted["accepted"] + counted["cancelled"] == 30 * 60 and counted["accepted"] and counted["cancelled"]
    assert stage.runner.progress == 30 * 61
    assert not stage.runner.lanes["sync"].running and not stage.runner.lanes["sync"].queue


def test_tasks_when_an_episode_cancels_all_that_it_finds_are_replaced(stage):
    async def play(engine, data):
        if data["n"] == 5:
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()
        await asyncio.sleep(0)
        return trajectory()

    counted = outcomes(stage(limit=4, retries=1).play(play, 40, turns=400))

    assert counted == {"accepted": 40}


def test_timeout_when_episodes_start_at_many_times_is_exact_for_each(stage):
    stage = stage(timeout=10.0)
    ends = {}

    async def play(engine, data):
        begin = stage.now
        try:
            await asyncio.Event().wait()
        finally:
            ends[data["n"]] = stage.now - begin

    workflow = type("Workflow", (), {"arun_episode": lambda self, engine, data: play(engine, data)})()
    for n in range(300):
        job = Job("eval" if n % 3 else "sync")
        job.groups = [Group({"n": n}, str(n), 1, workflow, "train", job)]
        stage.runner.run_job(job)
        stage.now += 0.0625
        for _ in range(3):
            stage.turn()
    for _ in range(200):
        stage.now += 0.0625
        for _ in range(3):
            stage.turn()

    assert len(ends) == 300 and max(ends.values()) <= 10.0625 and min(ends.values()) >= 10.0
