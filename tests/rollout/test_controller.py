import _thread
import asyncio
import gc
import json
import signal
import threading

import pytest
from rollout_fakes import FakeEngine, FakeLoader

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.api.reward_api import RewardError
from areal_core.data.loader import DataLoader
from areal_core.errors import ArealError, BadInputError
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episode import EpisodeRejected, RolloutInterrupted

GCONFIG = GenerationHyperparameters(max_new_tokens=6)


class Workflow:
    """One request, then ``then(data, sample, attempt)``: a reward, an exception to raise, or a result to return."""

    def __init__(self, then=lambda data, sample, attempt: 1.0):
        self.then = then
        self.seen = []

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2], gconfig=GCONFIG))
        uid, sample, attempt = engine.episode_id.rsplit("/", 2)
        self.seen.append((uid, int(sample), int(attempt)))
        result = self.then(data, int(sample), int(attempt))
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, float):
            return Trajectory.from_response(response, result, metadata={"uid": uid, "sample": int(sample)})
        return result


def rows(count, epoch=0):
    return [{"_uid": f"{epoch}-{index}", "n": index} for index in range(count)]


@pytest.fixture
def start():
    """Makes started controllers, and checks that stopping them leaves nothing."""
    made = []
    before = set(threading.enumerate())

    def make(workflow=None, engine=None, *, batch_size=4, group_size=2, on_outcome=None, options=None, **config):
        controller = RolloutController(
            engine or FakeEngine(),
            workflow or Workflow(),
            InferenceEngineConfig(**config),
            batch_size=batch_size,
            group_size=group_size,
            seed=1,
            on_outcome=on_outcome,
            **(options or {}),
        )
        controller.start()
        made.append(controller)
        return controller

    yield make
    for controller in made:
        controller.stop()
    assert set(threading.enumerate()) <= before


def outcomes(stats, prefix="rollout"):
    return {name: int(stats[f"{prefix}/{name}"]) for name in ("accepted", "rejected", "failed", "cancelled")}


# ------------------------------------------------------------------------------------------------------ synchronous


def test_rollout_batch_when_all_is_well_gives_groups_in_row_and_sample_order(start):
    controller = start(group_size=3)

    result = controller.rollout_batch(rows(4))

    expected = [(f"0-{row}", sample) for row in range(4) for sample in range(3)]
    assert [(t.group_id, t.metadata["sample"]) for t in result.trajectories] == expected
    assert outcomes(result.stats) == {"accepted": 12, "rejected": 0, "failed": 0, "cancelled": 0}
    assert result.stats["rollout/reward"] == 1.0
    assert result.stats["rollout/completion_len"] == 3.0
    assert result.stats["rollout/prompt_len"] == 2.0
    assert result.stats["rollout/version_lag_max"] == 0.0


def test_rollout_batch_when_episodes_finish_out_of_order_keeps_the_row_order(start):
    class Slow(Workflow):
        async def arun_episode(self, engine, data):
            for _ in range(10 - data["n"]):
                await asyncio.sleep(0)
            return await super().arun_episode(engine, data)

    result = start(Slow()).rollout_batch(rows(4))

    assert [t.group_id for t in result.trajectories] == ["0-0", "0-0", "0-1", "0-1", "0-2", "0-2", "0-3", "0-3"]


def test_rollout_batch_when_synchronous_admits_all_requests_before_generation_starts(start):
    engine = FakeEngine()
    controller = start(engine=engine)

    controller.rollout_batch(rows(4))

    assert engine.calls == ["pause", "continue:8"]


def test_rollout_batch_when_an_episode_ends_without_a_request_does_not_wait_for_it(start):
    class Silent(Workflow):
        async def arun_episode(self, engine, data):
            return None if data["n"] == 1 else await super().arun_episode(engine, data)

    engine = FakeEngine()

    result = start(Silent(), engine).rollout_batch(rows(4))

    assert engine.calls == ["pause", "continue:6"]
    assert outcomes(result.stats)["rejected"] == 2


def test_rollout_batch_when_concurrency_is_limited_runs_no_more_at_once(start):
    running, most = 0, 0

    class Counting(Workflow):
        async def arun_episode(self, engine, data):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            result = await super().arun_episode(engine, data)
            running -= 1
            return result

    result = start(Counting(), max_concurrent_rollouts=3).rollout_batch(rows(8))

    assert most == 3
    assert len(result.trajectories) == 16


def test_rollout_batch_when_played_again_sends_the_same_seeds(start):
    engines = [FakeEngine(), FakeEngine()]

    for engine in engines:
        start(engine=engine).rollout_batch(rows(4))

    first, second = ({r.rid: r.gconfig.seed for r in engine.requests} for engine in engines)
    assert first == second
    assert len(set(first.values())) == 8


def test_rollout_batch_when_rows_repeat_or_have_no_uid_keeps_groups_apart(start):
    result = start().rollout_batch([{"_uid": "0-0"}, {"_uid": "0-0"}, {"a": 1}, {"a": 1}])

    ids = [trajectory.group_id for trajectory in result.trajectories]
    assert len(set(ids)) == 4
    assert all(ids.count(group_id) == 2 for group_id in ids)


def test_prepare_batch_when_synchronous_is_rollout_batch_of_the_next_rows(start):
    loader = FakeLoader(4)
    controller = start()

    for version in range(3):
        controller.engine.set_version(version)
        controller.set_version(version)
        result = controller.prepare_batch(loader)
        assert [t.group_id for t in result.trajectories[::2]] == [f"{version}-{index}" for index in range(4)]
        assert result.stats["rollout/version_lag_max"] == 0.0


@pytest.mark.parametrize("bound", [0, 1])
def test_prepare_batch_when_the_engine_is_never_told_of_versions_says_so(start, bound):
    controller = start(max_head_offpolicyness=bound)
    controller.set_version(2)

    with pytest.raises(ArealError, match="engine generated with version 0 when training was at version 2"):
        controller.prepare_batch(FakeLoader(4))


# --------------------------------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("result", "outcome", "reason"),
    [
        (None, "rejected", "workflow"),
        ([], "rejected", "workflow"),
        (EpisodeRejected("too easy"), "rejected", "too easy"),
        (RewardError("nan", "reward 'x' returned NaN"), "rejected", "reward_nan"),
        (ValueError("boom"), "failed", "ValueError"),
        (SystemExit(3), "failed", "SystemExit"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (asyncio.CancelledError(), "failed", "CancelledError"),
        ("text", "failed", "WorkflowResultError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_episode_when_it_ends_has_exactly_one_outcome(start, result, outcome, reason):
    seen = []
    workflow = Workflow(lambda data, sample, attempt: result if data["n"] == 0 and sample == 0 else 1.0)
    controller = start(workflow, on_outcome=lambda *args: seen.append(args), group_size=3)

    stats = controller.rollout_batch(rows(4)).stats

    assert len(seen) == 12
    (trajectory, found, info), *others = seen
    assert (found, info["reason"], trajectory) == (outcome, reason, None)
    assert (info["uid"], info["sample"], info["split"]) == ("0-0", 0, "train")
    assert all(other[1] == "accepted" and other[0] is not None for other in others)
    assert outcomes(stats) == {"accepted": 11, "rejected": 0, "failed": 0, "cancelled": 0, outcome: 1}
    if outcome == "rejected":
        assert stats[f"rollout/rejected/{reason}"] == 1.0
    assert controller.export_stats()[f"rollout/total/{outcome}"] == 1.0


def test_episode_when_it_fails_is_tried_again_with_another_seed(start):
    workflow = Workflow(lambda data, sample, attempt: 1.0 if attempt == 2 else ValueError("boom"))
    controller = start(workflow, max_retries=2)

    result = controller.rollout_batch(rows(4))

    assert outcomes(result.stats)["accepted"] == 8
    assert result.stats["rollout/retries"] == 16.0
    assert len({r.gconfig.seed for r in controller.engine.requests}) == 24


def test_episode_when_retries_are_used_up_fails(start):
    workflow = Workflow(lambda data, sample, attempt: ValueError("boom") if data["n"] == 0 else 1.0)
    controller = start(workflow, max_retries=2)

    result = controller.rollout_batch(rows(4))

    assert sum(seen[0] == "0-0" for seen in workflow.seen) == 6
    assert outcomes(result.stats) == {"accepted": 6, "rejected": 0, "failed": 2, "cancelled": 0}
    assert result.stats["rollout/incomplete_groups"] == 1.0


def test_episode_when_rejected_is_not_tried_again(start):
    workflow = Workflow(lambda data, sample, attempt: None if data["n"] == 0 else 1.0)

    start(workflow).rollout_batch(rows(4))

    assert sum(seen[0] == "0-0" for seen in workflow.seen) == 2


def test_group_when_one_of_two_is_left_is_dropped_and_one_of_three_missing_is_kept(start):
    workflow = Workflow(lambda data, sample, attempt: None if data["n"] == 0 and sample == 0 else 1.0)

    two = start(workflow, group_size=2).rollout_batch(rows(4))
    three = start(workflow, group_size=3).rollout_batch(rows(4))

    assert [t.group_id for t in two.trajectories] == ["0-1"] * 2 + ["0-2"] * 2 + ["0-3"] * 2
    assert two.stats["rollout/rejected/incomplete_group"] == 1.0
    assert two.stats["rollout/incomplete_groups"] == 1.0
    assert [t.group_id for t in three.trajectories][:2] == ["0-0"] * 2
    assert len(three.trajectories) == 11


def test_episode_when_it_hangs_is_cancelled_at_the_timeout(start):
    cancelled = []

    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            if data["n"] == 0:
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(data["n"])
            return await super().arun_episode(engine, data)

    result = start(Hanging(), episode_timeout=0.5).rollout_batch(rows(4))

    assert cancelled == [0, 0]
    assert outcomes(result.stats) == {"accepted": 6, "rejected": 0, "failed": 2, "cancelled": 0}


def test_run_when_too_many_episodes_fail_stops_with_the_most_common_exception(start):
    workflow = Workflow(
        lambda data, sample, attempt: KeyError("rare") if data["n"] == 0 and sample == 0 else ValueError("often")
    )
    controller = start(workflow, max_retries=0)

    with pytest.raises(ArealError, match=r"8 of the last 8 episodes failed.*7 times so far\): ValueError: often"):
        controller.rollout_batch(rows(4))


def test_run_when_input_is_bad_stops_at_once_and_does_not_retry(start, caplog):
    workflow = Workflow(lambda data, sample, attempt: BadInputError("row 3 has no column") if data["n"] == 3 else 1.0)
    controller = start(workflow)

    with pytest.raises(BadInputError, match="row 3 has no column"):
        controller.rollout_batch(rows(4))

    assert sum(seen[0] == "0-3" for seen in workflow.seen) <= 2
    assert "row 3 has no column" not in caplog.text  # The error says it; a traceback beside it would hide it.


def test_run_when_every_reward_fails_is_bad_input(start):
    error = RewardError("none", "reward 'x' returned None")
    controller = start(Workflow(lambda data, sample, attempt: error))

    with pytest.raises(BadInputError, match=r"8 rejected \(reward_none\).*reward 'x' returned None"):
        controller.rollout_batch(rows(4))


def test_run_when_the_reward_hangs_from_the_start_stops_before_the_batch_ends(start):
    error = RewardError("timeout", "reward 'x' took more than 15 s")
    workflow = Workflow(lambda data, sample, attempt: error)
    controller = start(workflow, batch_size=100, max_concurrent_rollouts=1)

    with pytest.raises(BadInputError, match="the first 8 calls of the reward all took too long: reward 'x'"):
        controller.rollout_batch(rows(100))

    assert len(workflow.seen) == 8


def test_run_when_some_rewards_hang_goes_on(start):
    error = RewardError("timeout", "reward 'x' took more than 15 s")
    workflow = Workflow(lambda data, sample, attempt: error if data["n"] else 1.0)

    result = start(workflow, batch_size=20, max_concurrent_rollouts=1).rollout_batch(rows(20))

    assert len(result.trajectories) == 2
    assert result.stats["rollout/rejected/reward_timeout"] == 38.0


def test_run_when_the_workflow_rejects_everything_fails(start):
    controller = start(Workflow(lambda data, sample, attempt: None))

    with pytest.raises(ArealError, match=r"no episode of the batch was accepted: 8 rejected \(workflow\)") as info:
        controller.rollout_batch(rows(4))
    assert not isinstance(info.value, BadInputError)


def test_filters_when_given_reject_trajectories_and_groups(start):
    workflow = Workflow(lambda data, sample, attempt: float(data["n"] + (sample if data["n"] != 2 else 0)))
    options = {
        "should_accept": lambda trajectory: trajectory.reward < 4,
        "should_accept_group": lambda group: len({trajectory.reward for trajectory in group}) > 1,
    }
    controller = start(workflow, options=options, group_size=3)

    result = controller.rollout_batch(rows(4))

    # Row 2 has equal rewards; row 3 has 3, 4 and 5, of which one is left.
    assert [t.reward for t in result.trajectories] == [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    assert result.stats["rollout/rejected/filter"] == 2.0
    assert result.stats["rollout/filtered_groups"] == 2.0


def test_filter_when_it_raises_stops_the_run(start):
    def broken(group):
        raise ZeroDivisionError("oops")

    controller = start(options={"should_accept_group": broken})

    with pytest.raises(ArealError, match="should_accept_group raised ZeroDivisionError: oops"):
        controller.rollout_batch(rows(4))


# ----------------------------------------------------------------------------------------------------- asynchronous


def test_prepare_batch_when_asynchronous_respects_the_bound_and_consumes_each_row_once(start):
    engine, loader = FakeEngine(), FakeLoader(4)
    controller = start(engine=engine, max_head_offpolicyness=2)
    consumed = []

    for version in range(8):
        engine.set_version(version)
        controller.set_version(version)
        result = controller.prepare_batch(loader)
        assert len(result.trajectories) == 8
        assert result.stats["rollout/version_lag_max"] <= 2
        consumed += [t.group_id for t in result.trajectories[::2]]

    assert len(set(consumed)) == len(consumed) == 32
    assert controller.export_stats()["rollout/total/accepted"] == 64.0


def test_prepare_batch_when_capacity_is_used_submits_no_more(start):
    engine, loader = FakeEngine(), FakeLoader(4)
    controller = start(engine=engine, max_head_offpolicyness=1)

    controller.prepare_batch(loader)
    controller.drain()

    # Version 0 and bound 1: two batches of four groups of two, whatever has been consumed of them.
    assert len(engine.requests) == 16


def test_prepare_batch_when_groups_are_incomplete_refills(start):
    workflow = Workflow(lambda data, sample, attempt: None if data["n"] % 2 else 1.0)
    controller = start(workflow, max_head_offpolicyness=1)
    loader = FakeLoader(4)

    dropped = 0
    for version in range(4):
        controller.engine.set_version(version)
        controller.set_version(version)
        result = controller.prepare_batch(loader)
        assert len(result.trajectories) == 8
        dropped += result.stats["rollout/incomplete_groups"]

    assert dropped >= 12


def test_prepare_batch_when_a_group_grew_too_old_drops_and_counts_it(start):
    release = threading.Event()

    class Straggler(Workflow):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            while data["_uid"] == "0-0" and not release.is_set():
                await asyncio.sleep(0.001)
            return result

    engine, loader, seen = FakeEngine(), FakeLoader(4), []
    controller = start(Straggler(), engine, max_head_offpolicyness=1, on_outcome=lambda *args: seen.append(args))
    for version in range(3):
        engine.set_version(version)
        controller.set_version(version)
        controller.prepare_batch(loader)
    release.set()
    controller.drain()

    engine.set_version(3)
    controller.set_version(3)
    result = controller.prepare_batch(loader)

    assert result.stats["rollout/stale_groups"] == 1.0
    assert result.stats["rollout/rejected/stale_group"] == 2.0
    assert "0-0" not in {t.group_id for t in result.trajectories}
    assert [info["uid"] for _, outcome, info in seen if outcome == "rejected"] == ["0-0", "0-0"]


def test_submit_and_wait_when_used_directly_give_groups(start):
    controller = start(max_head_offpolicyness=1)
    for row in rows(3):
        controller.submit(row)

    result = controller.wait(3)

    assert [t.group_id for t in result.trajectories] == ["0-0", "0-0", "0-1", "0-1", "0-2", "0-2"]
    with pytest.raises(ArealError, match="cannot wait for 1 groups: 0 are under way"):
        controller.wait(1)


def test_pause_when_called_starts_nothing_until_resume_but_evaluation_goes_on(start):
    engine = FakeEngine()
    controller = start(engine=engine, max_head_offpolicyness=1)
    controller.pause()
    for row in rows(3):
        controller.submit(row)

    evaluation = controller.evaluate(rows(2, epoch="eval"))
    assert len(evaluation.trajectories) == 2
    assert len(engine.requests) == 2

    controller.resume()
    assert len(controller.wait(3).trajectories) == 6


def test_drain_when_paused_finishes_what_runs_and_starts_nothing(start):
    controller = start(max_head_offpolicyness=1, batch_size=2)
    for row in rows(6):
        controller.submit(row)
    controller.pause()

    controller.drain()

    stats = controller.export_stats()
    assert (stats["rollout/queue/running"], stats["rollout/queue/ready"], stats["rollout/queue/pending"]) == (0, 4, 2)


def test_evaluate_when_called_reports_under_its_own_name_and_leaves_training_alone(start):
    seen = []
    controller = start(on_outcome=lambda *args: seen.append(args), max_head_offpolicyness=1)
    before = controller.state_dict()

    result = controller.evaluate(rows(3), Workflow(lambda data, sample, attempt: float(data["n"])), group_size=2)

    assert [t.reward for t in result.trajectories] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert result.stats["eval/reward"] == 1.0
    assert outcomes(result.stats, "eval")["accepted"] == 6
    assert {info["split"] for _, _, info in seen} == {"eval"}
    assert controller.state_dict() == before


def test_evaluate_when_most_episodes_fail_raises(start):
    controller = start(max_retries=0)

    with pytest.raises(ArealError, match="3 of the last 4 episodes failed"):
        controller.evaluate(
            rows(4), Workflow(lambda data, sample, attempt: 1.0 if data["n"] == 0 else ValueError("boom"))
        )

    assert controller.rollout_batch(rows(4)).trajectories


# ------------------------------------------------------------------------------------------------ state, interrupts


def test_state_when_loaded_plays_unused_rows_again_within_the_bound(start):
    engine, loader = FakeEngine(), FakeLoader(4)
    first = start(engine=engine, max_head_offpolicyness=2)
    used = [t.group_id for t in first.prepare_batch(loader).trajectories[::2]]
    state = first.state_dict()
    first.stop()

    resumed_engine = FakeEngine()
    second = RolloutController(
        resumed_engine, Workflow(), InferenceEngineConfig(max_head_offpolicyness=2), batch_size=4, group_size=2, seed=1
    )
    second.load_state_dict(state)
    resumed_engine.set_version(1)
    second.set_version(1)
    with second:
        for _ in range(2):
            used += [t.group_id for t in second.prepare_batch(loader).trajectories[::2]]
            resumed_engine.set_version(second.version + 1)
            second.set_version(second.version + 1)

    assert len(set(used)) == 12
    assert used[4:] == [row["_uid"] for row in state["rows"][:8]]
    seeds = {r.rid: r.gconfig.seed for r in engine.requests}
    again = {r.rid: r.gconfig.seed for r in resumed_engine.requests}
    assert all(again[rid] == seeds[rid] for rid in again.keys() & seeds.keys()) and again.keys() & seeds.keys()


def test_state_when_a_row_is_no_json_says_so(start):
    controller = start(max_head_offpolicyness=1)
    controller.submit({"image": object()})

    with pytest.raises(ArealError, match="cannot be saved"):
        controller.state_dict()


def test_wait_when_told_to_stop_raises_and_cancels(start):
    cancelled = threading.Event()

    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            try:
                await super().arun_episode(engine, data)
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    seen = []
    controller = start(Hanging(), on_outcome=lambda *args: seen.append(args))
    calls = iter(range(100))

    with pytest.raises(RolloutInterrupted):
        controller.rollout_batch(rows(4), should_stop=lambda: next(calls) > 3)

    assert cancelled.wait(10)
    assert {outcome for _, outcome, _ in seen} == {"cancelled"} and len(seen) == 8
    assert controller.engine.calls[-1].startswith("continue")


@pytest.fixture
def ctrl_c_raises():
    """As in a terminal; a shell's background job inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_wait_when_interrupted_by_the_keyboard_cancels_and_can_go_on(start, ctrl_c_raises):
    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            if data["n"] == 3:
                await asyncio.Event().wait()
            return result

    seen = []
    controller = start(Hanging(), on_outcome=lambda *args: seen.append(args))

    def interrupt():
        while len(controller.engine.served) < 8:
            threading.Event().wait(0.01)
        _thread.interrupt_main()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        controller.rollout_batch(rows(4))
    helper.join()

    assert [outcome for _, outcome, _ in seen] == ["accepted"] * 6 + ["cancelled"] * 2
    assert len(controller.rollout_batch(rows(3)).trajectories) == 6


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_when_thousands_run_leaves_no_task_and_no_thread(start, stubborn):
    ended = 0

    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            nonlocal ended
            await engine.agenerate(ModelRequest(input_ids=[1], gconfig=GCONFIG))
            helper = asyncio.ensure_future(asyncio.Event().wait())
            try:
                await helper
            except asyncio.CancelledError:
                if stubborn:
                    await asyncio.sleep(0)
                raise
            finally:
                ended += 1

    engine = FakeEngine()
    controller = start(Hanging(), engine, max_head_offpolicyness=1, batch_size=1000)
    for row in rows(1000):
        controller.submit(row)
    while len(engine.requests) < 2000:
        threading.Event().wait(0.01)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "rollout")

    controller.stop()
    controller.stop()

    assert not thread.is_alive()
    assert ended == 2000


def test_stop_when_groups_are_unused_or_running_reports_their_episodes_as_cancelled(start):
    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            if data["n"] == 3 and engine.sample == 1:
                await asyncio.Event().wait()
            return result

    seen = []
    controller = start(Hanging(), max_head_offpolicyness=1, on_outcome=lambda *args: seen.append(args))
    for row in rows(4):
        controller.submit(row)
    controller.wait(2)
    while controller.export_stats()["rollout/queue/ready"] < 1:
        threading.Event().wait(0.01)

    controller.stop()

    reasons = [(outcome, info["reason"]) for _, outcome, info in seen]
    assert reasons[:4] == [("accepted", "")] * 4
    assert sorted(reasons[4:]) == [("cancelled", ""), *[("cancelled", "unused")] * 3]


def test_wait_when_a_workflow_blocks_the_event_loop_still_ends(start, monkeypatch):
    monkeypatch.setattr("areal_core.rollout.entrance._CANCEL_SECONDS", 0.1)
    free = threading.Event()

    class Blocking(Workflow):
        async def arun_episode(self, engine, data):
            free.wait(30)  # not async: against the contract
            return await super().arun_episode(engine, data)

    controller = start(Blocking(), batch_size=1, group_size=1)

    with pytest.raises(RolloutInterrupted):
        controller.rollout_batch(rows(1), should_stop=lambda: True)

    free.set()


def test_rollout_batch_when_the_reward_counts_reports_its_counters(start):
    class Scored(Workflow):
        class reward_fn:
            export_stats = staticmethod(lambda: {"reward/errors/nan": 2.0})

    assert start(Scored()).rollout_batch(rows(1)).stats["reward/errors/nan"] == 2.0


def test_controller_when_stopped_can_start_again(start):
    controller = start()
    controller.rollout_batch(rows(4))
    controller.stop()
    controller.start()

    assert len(controller.rollout_batch(rows(4)).trajectories) == 8


def test_workflow_when_it_is_none_of_ours_says_so():
    class Agent:
        async def run(self, data):
            return 1.0

    for workflow, message in [(Agent(), "is an agent"), (3, "int is not a workflow"), (Agent, "is an agent")]:
        with pytest.raises(BadInputError, match=message):
            RolloutController(FakeEngine(), workflow, InferenceEngineConfig(), batch_size=1)


def test_workflow_when_given_as_a_function_is_made(start):
    assert start(lambda: Workflow()).rollout_batch(rows(1)).trajectories


def test_controller_when_not_started_says_so():
    controller = RolloutController(FakeEngine(), Workflow(), InferenceEngineConfig(), batch_size=1)

    with pytest.raises(RuntimeError, match="not started"):
        controller.rollout_batch(rows(1))


def test_garbage_collector_when_controllers_overlap_is_as_before_after_the_last(start):
    before = gc.get_threshold()
    first = start()
    second = start()

    during = gc.get_threshold()
    first.stop()
    still = gc.get_threshold()
    second.stop()

    assert during[0] > before[0]
    assert still == during
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


# -------------------------------------------------------------------------------------------------- exact staleness


class SpreadEngine(FakeEngine):
    """The first token of an answer is of version ``first``, the others of the current one."""

    first = 0

    async def agenerate(self, request):
        response = await super().agenerate(request)
        response.output_versions[0] = self.first
        return response


def until(condition):
    while not condition():
        threading.Event().wait(0.005)


@pytest.mark.parametrize(("bound", "version", "fresh"), [(1, 1, True), (1, 2, False), (3, 3, True), (3, 4, False)])
def test_group_when_it_waits_complete_is_judged_by_its_first_token_at_consumption(start, bound, version, fresh):
    # Arrange: all but the first token are as new as they can be, and the group waits in `ready`.
    engine = SpreadEngine()
    controller = start(engine=engine, max_head_offpolicyness=bound, batch_size=2)
    engine.version = version
    for row in rows(2):
        controller.submit(row)
    until(lambda: controller.export_stats()["rollout/queue/ready"] == 2)

    # Act
    controller.set_version(version)

    # Assert
    if fresh:
        result = controller.wait(2)
        assert len(result.trajectories) == 4
        assert result.stats["rollout/version_lag_max"] == bound
        assert {t.first_version for t in result.trajectories} == {0}
    else:
        with pytest.raises(ArealError, match="cannot wait for 2 groups: 0 are under way"):
            controller.wait(2)
        engine.first = version
        for row in rows(2, epoch=1):
            controller.submit(row)
        result = controller.wait(2)
        assert {t.group_id for t in result.trajectories} == {"1-0", "1-1"}
        assert result.stats["rollout/stale_groups"] == 2.0
        assert result.stats["rollout/rejected/stale_group"] == 4.0
        assert outcomes(result.stats) == {"accepted": 4, "rejected": 4, "failed": 0, "cancelled": 0}


def test_group_when_one_of_its_samples_is_too_old_is_dropped_whole(start):
    engine = FakeEngine()
    controller = start(engine=engine, max_head_offpolicyness=1, batch_size=1, group_size=3)
    workflow = controller.workflow
    play = workflow.arun_episode

    async def play_one_early(engine_, data):
        engine.version = 0 if engine_.sample == 1 else 2
        return await play(engine_, data)

    workflow.arun_episode = play_one_early
    controller.submit(rows(1)[0])
    until(lambda: controller.export_stats()["rollout/queue/ready"] == 1)
    controller.set_version(2)

    with pytest.raises(ArealError, match="cannot wait"):
        controller.wait(1)

    controller.stop()
    assert controller.export_stats()["rollout/total/rejected"] == 3.0


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("steps", [0, 2])
def test_capacity_when_resumed_bounds_what_starts_exactly(start, bound, steps):
    # Arrange: a run that ends with groups complete, running and waiting.
    loader, engine = FakeLoader(4), FakeEngine()
    first = start(engine=engine, max_head_offpolicyness=bound)
    for version in range(steps):
        engine.set_version(version)
        first.set_version(version)
        first.prepare_batch(loader)
    engine.set_version(steps)
    first.set_version(steps)
    state = first.state_dict()
    first.stop()

    # Act: no episode of the resumed run ever ends.
    class Hanging(Workflow):
        async def arun_episode(self, engine, data):
            self.seen.append(data["_uid"])
            await asyncio.Event().wait()

    workflow = Hanging()
    second = RolloutController(
        FakeEngine(), workflow, InferenceEngineConfig(max_head_offpolicyness=bound), batch_size=4, group_size=2
    )
    second.load_state_dict(state)
    with second:
        for row in rows(100, epoch=9):
            second.submit(row)
        allowed = (bound + steps + 1) * 4 - steps * 4
        until(lambda: len(workflow.seen) >= 2 * allowed)
        started, stats = set(workflow.seen), second.export_stats()
        second.engine.set_version(steps + 1)
        second.set_version(steps + 1)
        until(lambda: len(workflow.seen) >= 2 * (allowed + 4))
        later = second.export_stats()

    # Assert
    assert len(started) == stats["rollout/queue/running"] == allowed
    assert later["rollout/queue/running"] == allowed + 4
    restored = [row["_uid"] for row in state["rows"]]
    assert set(restored[:allowed]) <= started
    assert stats["rollout/queue/running"] + stats["rollout/queue/pending"] == 100 + len(restored)


def test_interrupts_when_they_storm_count_every_episode_once(start):
    class Slow(Workflow):
        async def arun_episode(self, engine, data):
            for _ in range(data["n"]):
                await asyncio.sleep(0.001)
            return await super().arun_episode(engine, data)

    seen = []
    engine = FakeEngine()
    controller = start(Slow(), engine, on_outcome=lambda *args: seen.append(args[1]), max_concurrent_rollouts=3)
    interrupted = 0
    for storm in range(20):
        calls = iter(range(100))
        try:
            controller.rollout_batch(rows(4, epoch=storm), should_stop=lambda calls=calls, n=storm % 4: next(calls) > n)
        except RolloutInterrupted:
            interrupted += 1
        assert len(seen) == 8 * (storm + 1)

    result = controller.rollout_batch(rows(4, epoch=99))

    assert interrupted and len(result.trajectories) == 8
    totals = controller.export_stats()
    assert totals["rollout/total/accepted"] + totals["rollout/total/cancelled"] == 8 * 21
    assert totals["rollout/total/cancelled"] == seen.count("cancelled") and not engine.paused


def test_should_stop_when_episodes_never_wait_is_asked_while_they_play(start):
    # Most are rejected at once: other rows follow for long.
    workflow = Workflow(lambda data, sample, attempt: 1.0 if data["n"] == 0 else None)
    controller = start(workflow, max_head_offpolicyness=2, batch_size=50)

    with pytest.raises(RolloutInterrupted):
        controller.prepare_batch(FakeLoader(50), should_stop=lambda: len(workflow.seen) > 1000)

    assert len(workflow.seen) > 1000


# ---------------------------------------------------------------------------------------------------- as a library


def test_rollout_batch_when_the_reward_is_given_apart_reports_its_counters(start):
    class Counted:
        export_stats = staticmethod(lambda: {"reward/errors/nan": 2.0})

    controller = start(options={"reward_fn": Counted()})

    assert controller.rollout_batch(rows(1)).stats["reward/errors/nan"] == 2.0


def test_workflow_when_its_class_is_given_says_what_to_give():
    with pytest.raises(BadInputError, match=r"workflow Workflow is a class\. Give an object of it, Workflow\(\.\.\.\)"):
        RolloutController(FakeEngine(), Workflow, InferenceEngineConfig(), batch_size=1)


@pytest.mark.parametrize("bound", [0, 2])
def test_prepare_batch_when_given_a_list_says_what_it_takes(start, bound):
    with pytest.raises(TypeError, match=r"given a list, which has no next_batch\(\)\. Use .*DataLoader\(rows"):
        start(max_head_offpolicyness=bound).prepare_batch(rows(4))


def test_state_when_only_the_place_of_a_row_is_kept_plays_the_whole_row_again(start):
    # Arrange: rows that JSON cannot hold
    images = [object() for _ in range(12)]
    loader = DataLoader([{"image": image} for image in images], 4, seed=1)
    first = start(max_head_offpolicyness=1)
    used = [t.group_id for t in first.prepare_batch(loader).trajectories[::2]]
    state = json.loads(json.dumps(first.state_dict(loader.save_row)))
    first.stop()
    played = []

    def look(data, sample, attempt):
        played.append((data["_index"], data["image"]))
        return 1.0

    # Act
    second = RolloutController(
        FakeEngine(), Workflow(look), InferenceEngineConfig(max_head_offpolicyness=1), batch_size=4, group_size=2
    )
    second.load_state_dict(state, loader.load_row)
    with second:
        used += [t.group_id for t in second.prepare_batch(loader).trajectories[::2]]

    # Assert
    assert len(set(used)) == 8
    assert played and all(image is images[index] for index, image in played)
