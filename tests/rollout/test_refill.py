"""Groups that a filter refuses are replaced by other rows, up to a bound, in both modes."""

from collections import Counter

import pytest
from rollout_fakes import FakeEngine, FakeLoader

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.refill import NoGroupPassed

GCONFIG = GenerationHyperparameters(max_new_tokens=6)
SIZE = 4


class Differs:
    """Samples of a row have different rewards where ``differs(row)``, else 0.25 each."""

    def __init__(self, differs):
        self.differs = differs

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2], gconfig=GCONFIG))
        sample = int(engine.episode_id.rsplit("/", 2)[1])
        reward = float(sample) if self.differs(data) else 0.25
        return Trajectory.from_response(response, reward, metadata={"uid": data["_uid"]})


@pytest.fixture
def make():
    made = []

    def start(differs, *, bound=None, staleness=0, on_outcome=None, state=None):
        controller = RolloutController(
            FakeEngine(),
            Differs(differs),
            InferenceEngineConfig(max_head_offpolicyness=staleness),
            batch_size=SIZE,
            group_size=2,
            on_outcome=on_outcome,
            should_accept_group=lambda group: len({trajectory.reward for trajectory in group}) > 1,
            max_tried_groups=bound,
        )
        if state is not None:
            controller.load_state_dict(state)
        controller.start()
        made.append(controller)
        return controller

    yield start
    for controller in made:
        controller.stop()


def uids(result):
    return list(dict.fromkeys(trajectory.metadata["uid"] for trajectory in result.trajectories))


def odd(row):
    return row["n"] % 2 == 1


def test_prepare_batch_when_groups_are_refused_plays_other_rows_until_it_is_full(make):
    seen = Counter()
    controller = make(odd, on_outcome=lambda t, outcome, info: seen.update([(info["uid"], outcome)]))
    loader = FakeLoader(SIZE)

    first, second = (controller.prepare_batch(loader) for _ in range(2))

    # Half of the rows pass: 4 rows, then the 2 that are missing, then 1, and so on, none played in vain.
    assert uids(first) == ["0-1", "0-3", "1-1", "1-3"]
    assert uids(second) == ["2-1", "2-3", "3-1", "3-3"]
    assert first.stats["rollout/groups"] == 4 and first.stats["rollout/filtered_groups"] == 4
    assert first.stats["rollout/reward"] == 0.5
    assert first.stats["rollout/reward_unfiltered"] == pytest.approx((4 * 0.5 + 4 * 0.25) / 8)
    assert set(seen.values()) == {2}
    assert {outcome for (uid, outcome) in seen if uid.endswith(("-0", "-2"))} == {"rejected"}


def test_prepare_batch_when_no_group_passes_within_the_bound_raises_and_reports_all(make):
    outcomes = Counter()
    controller = make(lambda row: False, bound=10, on_outcome=lambda t, outcome, info: outcomes.update([outcome]))

    with pytest.raises(NoGroupPassed, match=r"refused all 8 groups .*mean reward 0\.25") as caught:
        controller.prepare_batch(FakeLoader(SIZE))

    assert (caught.value.tried, caught.value.mean_reward) == (8, 0.25)
    assert outcomes == {"rejected": 16}


def test_prepare_batch_when_few_groups_pass_within_the_bound_gives_what_there_is(make, caplog):
    controller = make(lambda row: row["_uid"] == "0-2", bound=7)

    with caplog.at_level("WARNING"):
        result = controller.prepare_batch(FakeLoader(SIZE))

    assert uids(result) == ["0-2"]
    assert result.stats["rollout/filtered_groups"] == 6
    assert "1 groups instead of 4: the group filter refused 6" in caplog.text


def test_prepare_batch_when_resumed_draws_the_rows_that_were_in_reserve(make):
    # Three of four rows pass, so that rows of the second draw are left over.
    straight, loader = make(lambda row: row["n"] > 0), FakeLoader(SIZE)
    straight.prepare_batch(loader)
    state, drawn = straight.state_dict(), loader.batches

    expected = uids(straight.prepare_batch(loader))
    again = FakeLoader(SIZE)
    again.batches = drawn
    resumed = uids(make(lambda row: row["n"] > 0, state=state).prepare_batch(again))

    assert [row["_uid"] for row in state["rows"]] == ["1-2", "1-3"]
    assert resumed == expected == ["1-2", "1-3", "2-1", "2-2"]


@pytest.mark.parametrize("staleness", [1, 3])
def test_prepare_batch_when_asynchronous_refills_and_keeps_the_staleness_bound(make, staleness):
    controller = make(odd, staleness=staleness)
    loader = FakeLoader(SIZE)

    for version in range(1, 5):
        result = controller.prepare_batch(loader)

        assert len(uids(result)) == SIZE
        assert all(int(uid.rsplit("-", 1)[1]) % 2 for uid in uids(result))
        assert result.stats["rollout/version_lag_max"] <= staleness
        controller.engine.set_version(version)
        controller.set_version(version)


def test_prepare_batch_when_asynchronous_and_no_group_passes_raises(make):
    controller = make(lambda row: False, bound=12, staleness=1)

    with pytest.raises(NoGroupPassed, match="refused all"):
        controller.prepare_batch(FakeLoader(SIZE))


def test_prepare_batch_when_asynchronous_and_few_pass_gives_what_there_is(make):
    controller = make(lambda row: row["_uid"] == "0-2", bound=12, staleness=1)

    result = controller.prepare_batch(FakeLoader(SIZE))

    assert uids(result) == ["0-2"]
    assert controller.state_dict()["consumed"] == SIZE
