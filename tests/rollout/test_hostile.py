"""Workflows and callbacks that do what they should not: a run loses their episodes, not itself or its counts."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from rollout_fakes import FakeEngine, FakeLoader

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.api.reward_api import RewardError
from areal_core.errors import ArealError
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episode import RolloutInterrupted

REQUEST = {"input_ids": [1, 2], "gconfig": GenerationHyperparameters(max_new_tokens=6)}


def rows(count, epoch=0):
    return [{"_uid": f"{epoch}-{index}", "n": index} for index in range(count)]


@pytest.fixture
def start():
    """Makes started controllers whose workflow is ``async play(engine, data)``; stopping leaves no thread."""
    made, before = [], set(threading.enumerate())

    def make(play, *, batch_size=4, group_size=1, options=None, **config):
        workflow = type("Workflow", (), {"arun_episode": lambda self, engine, data: play(engine, data)})()
        config = InferenceEngineConfig(**{"max_retries": 0, "max_failure_rate": 1.0, **config})
        controller = RolloutController(
            FakeEngine(), workflow, config, batch_size=batch_size, group_size=group_size, **(options or {})
        )
        controller.start()
        made.append(controller)
        return controller

    yield make
    for controller in made:
        controller.stop()
    assert set(threading.enumerate()) <= before


async def one_request(engine, data):
    return Trajectory.from_response(await engine.agenerate(ModelRequest(**REQUEST)), 1.0)


def outcomes(stats):
    return {name: int(stats[f"rollout/{name}"]) for name in ("accepted", "rejected", "failed", "cancelled")}


async def exits():
    raise SystemExit(3)


async def gathered(engine, data):
    await asyncio.gather(exits())


async def grouped(engine, data):
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())


async def left_behind(engine, data):
    task = asyncio.create_task(exits())
    # What nobody awaits is logged when it is collected, in the middle of another test.
    task.add_done_callback(lambda task: task.exception())
    await asyncio.sleep(0.01)
    raise ValueError("boom")


async def interrupted(engine, data):
    async def interrupt():
        raise KeyboardInterrupt

    await asyncio.gather(interrupt())


async def closed(engine, data):
    raise GeneratorExit


@pytest.mark.parametrize("hostile", [gathered, grouped, left_behind, interrupted, closed])
@pytest.mark.parametrize("bound", [0, 2])
def test_episode_when_it_exits_the_program_fails_alone(start, hostile, bound):
    async def play(engine, data):
        return await (hostile if data["n"] % 4 == 1 else one_request)(engine, data)

    controller = start(play, max_head_offpolicyness=bound, batch_size=3 if bound else 4)

    loader = FakeLoader(4)
    accepted = [controller.prepare_batch(loader).stats["rollout/accepted"] for _ in range(2)]
    controller.drain()
    controller.stop()

    assert accepted == [3.0, 3.0]
    totals = controller.export_stats()
    assert totals["rollout/total/failed"] >= 1 and totals["rollout/total/rejected"] == 0


def test_episode_when_it_ignores_its_cancellation_for_good_is_given_up(start):
    release = threading.Event()

    async def play(engine, data):
        while data["n"] == 1 and not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return await one_request(engine, data)

    controller = start(play, episode_timeout=0.2, max_concurrent_rollouts=1)

    try:
        result = controller.rollout_batch(rows(4))
    finally:
        release.set()

    assert outcomes(result.stats) == {"accepted": 3, "rejected": 0, "failed": 1, "cancelled": 0}


@pytest.mark.parametrize("reason", ["rejected", "reward"])
def test_prepare_batch_when_asynchronous_and_nothing_is_ever_accepted_says_so(start, reason):
    async def play(engine, data):
        await engine.agenerate(ModelRequest(**REQUEST))
        if reason == "reward":
            raise RewardError("raised", "the reward raised ZeroDivisionError")
        return None

    controller = start(play, max_head_offpolicyness=2)
    seen = 0

    def stop():
        nonlocal seen
        seen += 1
        return seen > 1000

    with pytest.raises(ArealError, match=r"no episode of the last \d+ groups was accepted: .*\d+ rejected"):
        controller.prepare_batch(FakeLoader(4), should_stop=stop)

    totals = controller.export_stats()
    assert totals["rollout/total/rejected"] >= 12 and totals["rollout/total/incomplete_groups"] >= 12


def test_filter_of_trajectories_when_it_raises_stops_the_run(start):
    def broken(trajectory):
        raise ZeroDivisionError("oops")

    controller = start(one_request, options={"should_accept": broken}, max_retries=3)

    with pytest.raises(ArealError, match="should_accept raised ZeroDivisionError: oops"):
        controller.rollout_batch(rows(4))

    assert len(controller.engine.requests) <= 4


@pytest.mark.parametrize("wait", ["prepare_batch", "wait"])
def test_wait_when_paused_for_good_says_so(start, wait):
    controller = start(one_request, max_head_offpolicyness=2)
    controller.pause()
    for row in rows(12):
        controller.submit(row)
    calls = iter(range(100))

    wanted = 4 if wait == "wait" else FakeLoader(4)

    with pytest.raises(RuntimeError, match=r"paused; call resume"):
        getattr(controller, wait)(wanted, should_stop=lambda: next(calls) > 90)


def test_call_when_a_workflow_blocks_the_event_loop_can_be_interrupted(start):
    release = threading.Event()
    blocked = threading.Event()

    async def play(engine, data):
        blocked.set()
        release.wait(20)
        return await one_request(engine, data)

    controller = start(play, max_head_offpolicyness=2)
    controller.submit(rows(1)[0])
    blocked.wait()
    calls = iter(range(100))
    try:
        with pytest.raises(RolloutInterrupted):
            controller.prepare_batch(FakeLoader(4), should_stop=lambda: next(calls) > 3)
    finally:
        release.set()


def test_dropped_groups_when_resumed_are_counted_on(start):
    async def play(engine, data):
        return None if data["n"] == 0 else await one_request(engine, data)

    controller = start(play, max_head_offpolicyness=0)
    controller.rollout_batch(rows(4))
    state = controller.state_dict()

    second = RolloutController(FakeEngine(), controller.workflow, controller.config, batch_size=4)
    second.load_state_dict(state)

    assert second.export_stats()["rollout/total/incomplete_groups"] == 1.0


def test_no_group_passed_when_asynchronous_counts_what_was_tried(start):
    seen = []
    options = {
        "should_accept_group": lambda group: False,
        "max_tried_groups": 8,
        "on_outcome": lambda trajectory, outcome, info: seen.append(outcome),
    }
    controller = start(one_request, max_head_offpolicyness=1, options=options)

    for _ in range(2):
        before = len(seen)
        with pytest.raises(ArealError, match="refused all"):
            controller.prepare_batch(FakeLoader(4))
        assert len(seen) - before >= 4

    assert controller.export_stats()["rollout/total/rejected"] == len(seen) == seen.count("rejected")
