"""The episode runner under random completion order, failures, pauses, new versions, timeouts and resumes.

The event loop runs on a virtual clock, one turn at a time, in the test's own thread: nothing depends on real time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_fakes import FakeEngine

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.rollout.episode import EpisodeRejected, Group, Job
from areal_core.rollout.runner import EpisodeRunner
from areal_core.rollout.staleness import StalenessManager

BATCH, GROUP, TIMEOUT, RETRIES = 3, 2, 100.0, 1
GCONFIG = GenerationHyperparameters(max_new_tokens=2)
ENDS = (*["accept"] * 9, "reject", "reject with reason", "fail")


class HeldEngine(FakeEngine):
    """Requests wait until the test lets one go; the first token is of the version at its request."""

    def __init__(self):
        super().__init__()
        self.held: dict[str, asyncio.Future] = {}

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        start, future = self.version, asyncio.get_running_loop().create_future()
        self.held[request.rid] = future
        self.requests.append(request)
        try:
            end = await future
        finally:
            del self.held[request.rid]
        if end == "fail":
            raise ValueError("boom")
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=[3, 4],
            output_logprobs=[-1.0, -1.0],
            output_versions=[start, self.version],
            metadata={"end": end},
        )


class Workflow:
    """Waits for the engine, or ends at once where the row says how."""

    async def arun_episode(self, engine, data):
        if "end" in data:
            return self._end_at_once(engine, data["end"])
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2], gconfig=GCONFIG))
        if response.metadata["end"] == "reject":
            return None
        if response.metadata["end"] == "reject with reason":
            raise EpisodeRejected("dull")
        return Trajectory.from_response(response, 1.0)

    @staticmethod
    def _end_at_once(engine, end):
        if end == "fail":
            raise ValueError("boom")
        if end == "reject with reason":
            raise EpisodeRejected("dull")
        version = engine.get_version()
        return (
            None
            if end == "reject"
            else Trajectory(
                input_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], versions=[-1, version, version]
            )
        )


class Simulation:
    """A runner, and what must be true of it."""

    def __init__(self, bound: int, limit: int | None) -> None:
        self.bound, self.limit = bound, limit
        self.config = InferenceEngineConfig(
            max_head_offpolicyness=bound,
            max_concurrent_rollouts=limit,
            episode_timeout=TIMEOUT,
            max_retries=RETRIES,
            max_failure_rate=1.0,
        )
        self.clock = 0.0
        self.submitted = 0
        self.consumed: list[str] = []
        self.dropped: list[str] = []
        self.stale = self.restarts = 0
        self.skipped = 0
        self.paused_at: int | None = None
        self.outcomes: Counter[str] = Counter()
        self.job: Job | None = None
        self._start(StalenessManager(BATCH, bound))

    def _start(self, staleness: StalenessManager) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.clock
        self.engine = HeldEngine()
        self.engine.version = staleness.version
        self.staleness = staleness
        self.runner = EpisodeRunner(
            self.loop,
            self.engine,
            self.config,
            seed=0,
            staleness=staleness,
            min_members=GROUP,
            episodes_per_batch=BATCH * GROUP,
            notify=lambda: None,
        )

    def settle(self) -> None:
        """Run the loop until nothing is left to do at this time."""
        for _ in range(16):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    # Actions ------------------------------------------------------------------------------------------------------

    def submit(self, count: int, end: str | None = None) -> None:
        groups = []
        for _ in range(count):
            uid = f"0-{self.submitted}"
            row = {"_uid": uid} if end is None else {"_uid": uid, "end": end}
            groups.append(Group(row, uid, GROUP, Workflow(), "train"))
            self.submitted += 1
        self.runner.submit(groups)
        self.settle()

    def end_request(self, choice: int, end: str) -> None:
        rids = list(self.engine.held)
        if rids:
            self.engine.held[rids[choice % len(rids)]].set_result(end)
            self.settle()

    def new_version(self) -> None:
        self.engine.version += 1
        before = self.staleness.consumed
        self.runner.set_version(self.engine.version)
        # A run that begins at a later version counts as if the earlier ones had consumed their batches.
        self.skipped += self.staleness.consumed - before
        self.settle()

    def take(self) -> None:
        groups = self.runner.take(BATCH)
        if groups is not None:
            for group in groups:
                versions = [t.first_version for e in group.accepted for t in e.trajectories]
                assert len(group.accepted) >= GROUP
                assert min(versions) >= self.staleness.version - self.bound
                self._account(group, self.consumed)
        self._take_dropped()
        self.settle()

    def pause(self) -> None:
        self.runner.pause()
        self.paused_at = len(self._first_requests())

    def resume(self) -> None:
        self.paused_at = None
        self.runner.resume()
        self.settle()

    def pass_time(self, seconds: float) -> None:
        self.clock += seconds
        self.settle()

    def evaluate(self) -> None:
        if self.job is None:
            self.job = Job("eval")
            self.job.groups = [Group({}, f"eval-{n}", 1, Workflow(), "eval", self.job) for n in range(2)]
            self.runner.run_job(self.job)
            self.settle()

    def cancel_evaluation(self) -> None:
        if self.job is not None:
            self.runner.cancel_job(self.job)
            assert self.job.remaining == 0
            self.job = None
            self.settle()

    def restart(self) -> None:
        """Stop as a killed run would, and go on from the saved state."""
        rows = self.runner.unfinished_rows()
        saved = StalenessManager(BATCH, self.bound, version=self.staleness.version, consumed=self.staleness.consumed)
        self.stop(collect=False)
        self.restarts += 1
        self.job = self.paused_at = None
        self._start(saved)
        self.runner.submit([Group(row, row["_uid"], GROUP, Workflow(), "train") for row in rows])
        self.settle()

    def stop(self, *, collect: bool = True) -> None:
        if collect:
            self._take_dropped()
        self.runner.cancel_all()
        self.settle()
        assert not asyncio.all_tasks(self.loop)
        assert not self.engine.held
        assert all(not lane.running and not lane.queue for lane in self.runner.lanes.values())
        self.loop.close()

    # Truths -------------------------------------------------------------------------------------------------------

    def _first_requests(self) -> list[str]:
        return [r.rid for r in self.engine.requests if r.rid.endswith("/0/0") and not r.rid.startswith("eval")]

    def _account(self, group: Group, where: list[str]) -> None:
        where.append(group.uid)
        for episode in group.episodes:
            assert episode.ended
            self.outcomes[episode.outcome] += 1

    def _take_dropped(self) -> None:
        for group in self.runner.take_dropped():
            assert group.dropped in ("stale", "incomplete")
            self.stale += group.dropped == "stale"
            self._account(group, self.dropped)

    def check(self) -> None:
        runner, staleness = self.runner, self.staleness
        assert runner.fatal is None
        where = Counter(self.consumed)
        where.update(self.dropped)
        where.update(g.uid for part in (runner.pending, runner.inside, runner.ready, runner.dropped) for g in part)
        assert where == Counter({f"0-{n}": 1 for n in range(self.submitted)}), "a row was lost or played twice"
        assert staleness.running == len(runner.inside)
        assert staleness.waiting == len(runner.ready)
        assert staleness.consumed == len(self.consumed) + self.skipped
        let_in = staleness.consumed + staleness.waiting + staleness.running
        assert let_in <= (self.bound + staleness.version + 1) * BATCH
        running = runner.lanes["train"].running
        if self.limit is not None:
            assert len(running) <= self.limit
        if self.paused_at is not None:
            assert len(self._first_requests()) == self.paused_at, "an episode was started while paused"
        elif self.limit is None:
            assert not runner.lanes["train"].queue, "an episode waits although it may run"
        if self.paused_at is None:
            assert staleness.capacity <= 0 or not runner.pending, "a group waits although there is room"
        for group in runner.ready:
            assert group.remaining == 0 and len(group.accepted) >= GROUP
        for group in runner.inside:
            assert group.remaining == sum(not episode.ended for episode in group.episodes) > 0
        if self.job is not None and self.job.remaining == 0:
            self.job = None
        assert self.outcomes.total() == GROUP * (len(self.consumed) + len(self.dropped))


class RunnerMachine(RuleBasedStateMachine):
    @rule(bound=st.integers(0, 3), limit=st.sampled_from([None, 1, 4]))
    @precondition(lambda self: not hasattr(self, "sim"))
    def create(self, bound, limit):
        self.sim = Simulation(bound, limit)

    started = precondition(lambda self: hasattr(self, "sim"))

    @started
    @rule(count=st.integers(1, 8), end=st.sampled_from([None, None, *ENDS]))
    def submit(self, count, end):
        self.sim.submit(count, end)

    @started
    @rule(choice=st.integers(0, 1000), end=st.sampled_from(ENDS))
    def end_request(self, choice, end):
        self.sim.end_request(choice, end)

    @started
    @rule()
    def new_version(self):
        self.sim.new_version()

    @started
    @rule()
    def take(self):
        self.sim.take()

    @started
    @rule(paused=st.booleans())
    def pause_or_resume(self, paused):
        self.sim.pause() if paused else self.sim.resume()

    @started
    @rule(seconds=st.sampled_from([1.0, 60.0, 150.0]))
    def pass_time(self, seconds):
        self.sim.pass_time(seconds)

    @started
    @rule(cancel=st.booleans())
    def evaluate(self, cancel):
        self.sim.cancel_evaluation() if cancel else self.sim.evaluate()

    @started
    @rule()
    def restart(self):
        self.sim.restart()

    @invariant()
    def holds(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.stop()


RunnerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRunner = RunnerMachine.TestCase


def play(steps: int, seed: int) -> Simulation:
    rng = random.Random(seed)
    sim = Simulation(bound=rng.randrange(4), limit=rng.choice([None, 4]))
    for _ in range(steps):
        if rng.random() < 0.7:
            sim.end_request(rng.randrange(1000), rng.choice(ENDS))
        elif rng.random() < 0.5:
            sim.take()
            room = min(8, max(0, sim.staleness.capacity - len(sim.runner.pending)))
            sim.submit(room, rng.choice([None, None, None, *ENDS]))
        else:
            action = rng.choice(["new_version", "pause", "resume", "resume", "evaluate", "cancel_evaluation", "time"])
            if action == "time":
                sim.pass_time(rng.choice([1.0, 40.0, 150.0]))
            elif action == "new_version":
                # Mostly as a trainer does, after a batch; at times out of turn, so that groups grow too old.
                if sim.staleness.consumed >= (sim.staleness.version + 1) * BATCH or rng.random() < 0.3:
                    sim.new_version()
            else:
                getattr(sim, action)()
            if rng.random() < 0.01:
                sim.restart()
        sim.check()
    return sim


def test_runner_when_played_at_random_for_long_consumes_and_keeps_its_invariants():
    played = [play(800, seed) for seed in (1, 2, 3, 4)]

    for sim in played:
        sim.stop()
        assert sim.outcomes["accepted"] == GROUP * len(sim.consumed)
        assert len(sim.consumed) >= 5 * BATCH
        assert sim.outcomes["rejected"] and sim.outcomes["failed"]
    assert any(sim.stale for sim in played)


@pytest.mark.slow
def test_runner_when_played_for_100000_steps_keeps_its_invariants():
    totals = Counter()
    for seed in range(100):
        sim = play(1_000, 1000 + seed)
        sim.stop()
        totals.update(consumed=len(sim.consumed), stale=sim.stale, restarts=sim.restarts, **sim.outcomes)

    assert min(totals[name] for name in ("rejected", "failed", "stale", "restarts")) > 30
    assert totals["accepted"] == GROUP * totals["consumed"] > 1_000
