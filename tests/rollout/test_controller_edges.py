"""Where the rules of the controller meet: a later first version, filters, drain and pause, what a resume counts."""

from __future__ import annotations

import asyncio
import threading

import pytest
from rollout_fakes import FakeEngine

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.rollout.controller import RolloutController

REQUEST = {"input_ids": [1, 2], "gconfig": GenerationHyperparameters(max_new_tokens=6)}


def rows(count, epoch=0):
    return [{"_uid": f"{epoch}-{index}", "n": index} for index in range(count)]


def until(condition):
    while not condition():
        threading.Event().wait(0.005)


async def one_request(engine, data):
    return Trajectory.from_response(await engine.agenerate(ModelRequest(**REQUEST)), 1.0)


async def hang(engine, data):
    await asyncio.Event().wait()


@pytest.fixture
def make():
    """Makes controllers whose workflow is ``async play(engine, data)``, and stops them."""
    made = []

    def build(play=one_request, *, batch_size=4, group_size=1, options=None, **config):
        workflow = type("Workflow", (), {"arun_episode": lambda self, engine, data: play(engine, data)})()
        config = InferenceEngineConfig(**{"max_head_offpolicyness": 1, **config})
        made.append(
            RolloutController(
                FakeEngine(), workflow, config, batch_size=batch_size, group_size=group_size, **(options or {})
            )
        )
        return made[-1]

    yield build
    for controller in made:
        controller.stop()


def queue(controller):
    # In the loop's thread, where the counters agree with each other.
    stats = controller._inside.call(controller.export_stats)
    return {name: int(stats[f"rollout/queue/{name}"]) for name in ("pending", "running", "ready")}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("bound", [1, 3])
def test_capacity_when_a_run_begins_at_a_later_version_is_that_of_a_first_step(make, bound, started):
    # As with weights of another run: the steps before have consumed their batches.
    controller = make(hang, max_head_offpolicyness=bound)
    if started:
        controller.start()
    controller.set_version(5)
    controller.start()

    for row in rows(50):
        controller.submit(row)

    allowed = (bound + 1) * 4
    assert queue(controller) == {"pending": 50 - allowed, "running": allowed, "ready": 0}


def test_batch_when_a_filter_left_it_short_counts_as_a_whole_one_for_the_bound(make):
    # Arrange: 12 groups are tried for the first batch, one of which passes.
    options = {"should_accept_group": lambda group: group[0].metadata["n"] == 2, "max_tried_groups": 12}

    async def play(engine, data):
        if data["_uid"].startswith("9-"):
            await hang(engine, data)
        made = await one_request(engine, data)
        made.metadata["n"] = data["n"]
        return made

    controller = make(play, options=options)
    controller.start()

    class Rows:
        drawn = 0

        def next_batch(self):
            self.drawn += 1
            return [{"_uid": f"{self.drawn}-{n}", "n": n if self.drawn == 1 else 7} for n in range(4)]

    assert len(controller.prepare_batch(Rows()).trajectories) == 1
    until(lambda: queue(controller) == {"pending": 0, "running": 0, "ready": 0})  # the others are refused

    # Act
    for row in rows(50, epoch=9):
        controller.submit(row)

    # Assert: (1 + 0 + 1) * 4 in all, of which 4 count as consumed.
    assert queue(controller) == {"pending": 46, "running": 4, "ready": 0}


def test_rollout_batch_when_synchronous_waits_for_requests_that_come_late(make):
    release = threading.Event()

    async def play(engine, data):
        while not release.is_set():
            await asyncio.sleep(0.001)
        return await one_request(engine, data)

    controller = make(play, max_head_offpolicyness=0)
    controller.start()

    # Asked while the controller waits, and not before.
    controller.rollout_batch(rows(4), should_stop=release.set)

    assert controller.engine.calls == ["pause", "continue:4"]


def test_filter_when_one_trajectory_of_an_episode_is_refused_rejects_the_episode(make):
    async def play(engine, data):
        made = [await one_request(engine, data) for _ in range(2)]
        made[data["n"] % 2].reward = float(data["n"])
        return made

    controller = make(play, options={"should_accept": lambda trajectory: trajectory.reward < 2})
    controller.start()

    result = controller.rollout_batch(rows(4))

    # Rows 2 and 3 have one trajectory too good each.
    assert [t.group_id for t in result.trajectories] == ["0-0", "0-0", "0-1", "0-1"]
    assert result.stats["rollout/rejected/filter"] == 2.0


def test_evaluate_when_a_filter_refuses_such_groups_in_training_keeps_them(make):
    controller = make(options={"should_accept_group": lambda group: False})
    controller.start()

    result = controller.evaluate(rows(3), group_size=2)

    assert len(result.trajectories) == 6 and result.stats["eval/rejected"] == 0.0


def test_evaluate_when_training_has_taken_every_place_runs_beside_it(make):
    async def play(engine, data):
        return await (hang if "n" in data else one_request)(engine, data)

    controller = make(play, max_concurrent_rollouts=1)
    controller.start()
    controller.submit(rows(1)[0])

    assert len(controller.evaluate([{"a": 1}, {"a": 2}]).trajectories) == 2
    assert queue(controller)["running"] == 1


def test_drain_when_paused_leaves_it_paused_and_starts_nothing(make):
    controller = make()
    controller.start()
    controller.pause()
    for row in rows(3):
        controller.submit(row)

    controller.drain()

    with pytest.raises(RuntimeError, match="paused"):
        controller.wait(1)
    assert not controller.engine.requests
    controller.resume()
    assert len(controller.wait(3).trajectories) == 3


def test_drain_when_groups_are_dropped_meanwhile_lets_no_other_in(make):
    release = asyncio.Event()
    seen = []

    async def play(engine, data):
        seen.append(data["_uid"])
        if not data["_uid"].startswith("1-"):
            await release.wait()
            return None
        await hang(engine, data)

    # Arrange: all that the bound allows are under way; they will be dropped, which makes room for others.
    controller = make(play)
    controller.start()
    for row in [*rows(8), *rows(8, epoch=1)]:
        controller.submit(row)
    until(lambda: len(seen) == 8)
    told = []

    def stop():
        # Asked in the midst of the drain.
        if not told:
            controller._inside.runner.loop.call_soon_threadsafe(release.set)
        told.append(len(seen))
        return len(seen) > 8

    # Act: with another let in, which never ends, this would not return.
    controller.drain(should_stop=stop)

    assert set(told) == {8}


def test_state_when_groups_were_dropped_and_not_reported_plays_them_again(make):
    # Arrange: one of three groups is dropped, and no batch has been told.
    async def play(engine, data):
        return None if data["n"] == 0 else await one_request(engine, data)

    first = make(play, group_size=2)
    first.start()
    for row in rows(3):
        first.submit(row)
    first.drain()
    state = first.state_dict()
    reported = []

    # Act
    second = make(play, group_size=2, options={"on_outcome": lambda t, outcome, info: reported.append(outcome)})
    second.load_state_dict(state)
    second.start()
    result = second.wait(2)

    # Assert: every episode of the rows counts once in the metrics, as in a run without the interruption.
    assert [row["_uid"] for row in state["rows"]] == ["0-0", "0-1", "0-2"]  # the oldest first
    straight = first.wait(2).stats
    outcomes = ("accepted", "rejected", "failed", "cancelled")
    assert [result.stats[f"rollout/{name}"] for name in outcomes] == [4, 2, 0, 0]
    assert [straight[f"rollout/{name}"] for name in outcomes] == [4, 2, 0, 0]
    assert sorted(reported) == ["accepted"] * 4 + ["rejected"] * 2


def test_stop_when_episodes_left_tasks_behind_cancels_them(make):
    tasks, ended = [], []

    async def linger():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def play(engine, data):
        tasks.append(asyncio.create_task(linger()))
        await asyncio.sleep(0)
        return await one_request(engine, data)

    controller = make(play)
    controller.start()
    controller.rollout_batch(rows(2))
    before = list(ended)

    controller.stop()

    assert (before, ended) == ([], ["cancelled"] * 2)
