"""Several rewards of one completion: their sum, their errors, and where their values go."""

import asyncio
import copy
import pickle

import numpy as np
import pytest
import reward_functions as rewards
import torch
from rollout_fakes import FakeEngine
from tiny_tokenizer import tiny_tokenizer

from areal_core.api.configs import DatasetConfig, PPOActorConfig, RewardConfig, RLConfig, WorkflowConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelResponse, Trajectory
from areal_core.api.reward_api import AsyncRewardWrapper, RewardError, Score
from areal_core.data.packing import pack_trajectories, reward_labels
from areal_core.errors import BadInputError, ConfigError
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.results import WorkflowResultError, as_trajectories
from areal_core.rollout.rewards import NoReward, ScoredReward, build_rewards
from areal_core.rollout.stats import trajectory_stats
from areal_core.rollout.workflows.multi_turn import MultiTurnWorkflow
from areal_core.rollout.workflows.rlvr import RLVRWorkflow

GCONFIG = GenerationHyperparameters(max_new_tokens=8)
ROW = {"messages": [{"role": "user", "content": "1+1?"}], "_uid": "0-0"}


class Manager:
    """The functions of ``reward_functions`` by name."""

    def load(self, registry, name, key=None):
        return getattr(rewards, name)


def config(reward=None, **named):
    return RLConfig(
        actor=PPOActorConfig(path="model"),
        train_dataset=DatasetConfig(name="data"),
        reward=reward,
        rewards={label: RewardConfig(**section) for label, section in named.items()},
    )


@pytest.fixture
def build():
    made = []

    def make(*args, **named):
        made.append(build_rewards(config(*args, **named), Manager()))
        return made[-1]

    yield make
    for reward in made:
        reward.destroy()


def response(n_output=2):
    return ModelResponse(
        input_tokens=[1, 2],
        output_tokens=[3] * n_output,
        output_logprobs=[-1.0] * n_output,
        output_versions=[0] * n_output,
        latency=0.5,
        ttft=0.125,
    )


async def test_combined_when_all_answer_gives_the_weighted_sum_and_the_parts(build):
    reward = build(
        length={"name": "length_reward_fn", "weight": 0.5, "timeout": 60.0},
        fine={"name": "async_reward_fn", "weight": -2.0},
    )

    score = await reward("p", "abc")

    assert isinstance(score, float) and isinstance(score, Score)
    assert score == 0.5 * 3 - 2.0 * 1.0
    assert list(score.terms.items()) == [("length", 3.0), ("fine", 1.0)]


async def test_combined_when_calls_wait_for_each_other_runs_them_together(build):
    # Arrange: each ends when the other has begun
    begun = {"a": asyncio.Event(), "b": asyncio.Event()}

    def meet(mine, other):
        async def fn(*args, **data):
            begun[mine].set()
            await begun[other].wait()
            return 1

        return fn

    made = build(a={"name": "length_reward_fn"}, b={"name": "length_reward_fn"})
    made.rewards["a"].reward = _wrapped(meet("a", "b"))
    made.rewards["b"].reward = _wrapped(meet("b", "a"))

    # Act
    score = await made("p", "c")

    # Assert
    assert score == 2.0


def _wrapped(fn):
    return AsyncRewardWrapper(fn, timeout=5.0)


async def test_combined_when_each_has_a_policy_follows_it_and_counts_by_label(build):
    reward = build(
        fine={"name": "length_reward_fn", "timeout": 60.0},
        lost={"name": "async_reward_fn", "weight": 3.0, "on_error": "zero"},
    )

    score = await reward("p", "nan")

    stats = reward.export_stats()
    assert (score, score.terms) == (3.0, {"fine": 3.0, "lost": 0.0})
    assert stats["reward/lost/errors/nan"] == 1.0
    assert {name for name in stats if "errors" in name} == {"reward/lost/errors/nan"}
    assert (stats["reward/fine/calls"], stats["reward/lost/calls"]) == (1.0, 1.0)


async def test_combined_when_several_fail_raises_the_first_by_name_and_counts_all(build):
    reward = build(
        slow={"name": "async_reward_fn", "timeout": 0.05},
        bad={"name": "misbehave_reward_fn", "timeout": 0.3},
    )

    with pytest.raises(RewardError, match=r"reward 'slow' took more than 0\.05 s \(rewards\.slow\.timeout\)") as info:
        await reward("p", "hang")

    assert info.value.kind == "timeout"
    stats = reward.export_stats()
    assert (stats["reward/slow/errors/timeout"], stats["reward/bad/errors/timeout"]) == (1.0, 1.0)


async def test_combined_when_one_stops_the_run_does_not_reject(build):
    reward = build(a={"name": "async_reward_fn"}, b={"name": "async_reward_fn", "on_error": "raise"})

    with pytest.raises(BadInputError, match=r"reward 'b' returned None.*rewards\.b\.on_error: reject or zero"):
        await reward("p", "none")


@pytest.mark.parametrize("form", ["single", "named"])
async def test_reward_when_its_weight_makes_it_too_large_is_rejected(build, form):
    section = {"name": "async_reward_fn", "weight": 1e39}
    reward = build(RewardConfig(**section)) if form == "single" else build(a=section)

    with pytest.raises(RewardError, match="weighted reward 1e\\+39 is too large") as info:
        await reward("p", "fine")

    assert info.value.kind == "inf"


async def test_single_when_it_has_a_weight_counts_it(build):
    reward = build(RewardConfig(name="length_reward_fn", weight=-0.5, timeout=60.0))

    assert isinstance(reward, ScoredReward)
    value = await reward("p", "abcd")
    assert value == -2.0 and type(value) is float
    assert reward.export_stats()["reward/calls"] == 1.0


async def test_combined_when_cancelled_cancels_its_calls(build):
    ended = []

    async def waits(*args, **data):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    reward = build(a={"name": "length_reward_fn"}, b={"name": "length_reward_fn"})
    for part in reward.rewards.values():
        part.reward = _wrapped(waits)
    task = asyncio.ensure_future(reward("p", "c"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "reward: is required"),
        ({"reward": RewardConfig(name="a"), "b": {"name": "a"}}, "rewards: both `reward` and `rewards` are given"),
    ],
)
def test_build_when_none_or_both_are_given_says_so(given, message):
    with pytest.raises(ConfigError, match=message):
        build_rewards(config(**given), Manager())


async def test_build_when_a_workflow_scores_by_itself_needs_no_reward():
    without = config()
    without.workflow = WorkflowConfig(name="my_agents:Agent")

    reward = build_rewards(without, Manager())

    assert reward.export_stats() == {}
    with pytest.raises(BadInputError, match="the workflow asked for a reward, and the run has none"):
        await reward("p", "c")
    reward.destroy()


def test_build_when_a_named_reward_is_no_function_names_its_key(monkeypatch):
    monkeypatch.setattr(rewards, "three", 3, raising=False)

    with pytest.raises(BadInputError, match=r"rewards\.odd\.name: 'three' is a int, not a function"):
        build_rewards(config(odd={"name": "three"}), Manager())


# --------------------------------------------------------------------------------------------------- Score and after


def test_score_when_copied_or_pickled_keeps_its_terms():
    score = Score(1.5, {"a": 1.0, "b": 0.5})

    for same in (copy.copy(score), copy.deepcopy(score), pickle.loads(pickle.dumps(score))):  # noqa: S301
        assert (same, same.terms) == (score, score.terms)
    assert type(score * 2) is float and Score(1.0).terms == {}


def test_trajectory_when_given_a_score_keeps_its_parts():
    made = Trajectory.from_response(response(), Score(1.5, {"a": 1.0, "b": 0.5}))
    own = Trajectory.from_response(response(), Score(1.5, {"a": 1.0}), rewards={"mine": 2.0})

    assert type(made.reward) is float
    assert (made.reward, made.rewards) == (1.5, {"a": 1.0, "b": 0.5})
    assert own.rewards == {"mine": 2.0}


def test_results_when_a_workflow_gives_a_score_keep_its_parts():
    fields = {"input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "versions": [-1, 0]}
    later = Trajectory.from_response(response())
    later.reward = Score(3.0, {"a": 3.0})

    (from_dict,) = as_trajectories({**fields, "reward": Score(2.0, {"a": 2.0})}, "w")
    (assigned,) = as_trajectories(later, "w")

    assert (from_dict.reward, from_dict.rewards) == (2.0, {"a": 2.0})
    assert (assigned.reward, assigned.rewards) == (3.0, {"a": 3.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"rewards\['a'\] is nan; it must be finite"),
        (None, r"rewards\['a'\] is a NoneType"),
        (True, "must be one number"),
    ],
)
def test_results_when_a_named_reward_is_no_number_say_which(value, message):
    with pytest.raises(WorkflowResultError, match=message):
        as_trajectories(Trajectory.from_response(response(), 1.0, rewards={"a": value}), "w")


async def test_rlvr_when_rewards_are_named_keeps_their_values(build):
    tokenizer = tiny_tokenizer()
    reward = build(a={"name": "async_reward_fn", "weight": 0.25})

    made = await RLVRWorkflow(GCONFIG, tokenizer, reward).arun_episode(EpisodeEngine(FakeEngine()), dict(ROW))

    assert (made.reward, made.rewards) == (0.25, {"a": 1.0})


async def test_multi_turn_when_discounted_keeps_the_last_answers_terms():
    scores = iter([Score(0.0, {"a": 0.0, "b": 7.0}), Score(1.0, {"a": 1.0, "b": 5.0})])

    async def reward(*args, **data):
        return next(scores)

    workflow = MultiTurnWorkflow(GCONFIG, tiny_tokenizer(), reward, max_turns=3, turn_discount=0.5)

    made = await workflow.arun_episode(EpisodeEngine(FakeEngine()), dict(ROW))

    assert (made.n_turns, made.reward, made.rewards) == (2, 0.5, {"a": 1.0, "b": 5.0})


def test_stats_when_rewards_are_named_report_mean_and_spread_of_each():
    values = [{"a": 1.0, "b": 4.0}, {"a": 0.0}, {"a": 0.5, "b": 2.0}]
    made = [Trajectory.from_response(response(), 1.0, rewards=rewards) for rewards in values]

    stats = trajectory_stats(made, version=0, prefix="eval")

    assert stats["eval/reward/a"] == pytest.approx(0.5)
    assert stats["eval/reward_std/a"] == pytest.approx(np.std([1.0, 0.0, 0.5]))
    assert (stats["eval/reward/b"], stats["eval/reward_std/b"]) == (3.0, 1.0)


def test_pack_when_rewards_are_named_gives_their_matrix():
    values = [{"b": 4.0, "a": 1.0}, {}, {"a": 0.5, "c": 9.0, "b": 2.0}]
    made = [Trajectory.from_response(response(n), 1.0, rewards=r) for n, r in enumerate(values, 1)]

    batch = pack_trajectories(made)

    expected = torch.tensor([[4.0, 1.0, np.nan], [np.nan] * 3, [2.0, 0.5, 9.0]])
    assert reward_labels(made) == ["b", "a", "c"]
    assert batch["reward_terms"].dtype == torch.float32
    torch.testing.assert_close(batch["reward_terms"], expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.select([2])["reward_terms"], expected[2:], rtol=0, atol=0)
    assert "reward_terms" not in pack_trajectories(made[1:2])


def test_trajectory_when_made_of_responses_knows_how_long_they_took():
    first, second = response(), response()
    second.input_tokens = [*first.input_tokens, *first.output_tokens]

    made = Trajectory.from_turns([first, second])
    unknown = Trajectory.from_response(
        ModelResponse(input_tokens=[1], output_tokens=[2], output_logprobs=[0.0], output_versions=[0])
    )

    assert (made.latency, made.ttft) == (1.0, 0.125)
    assert (unknown.latency, unknown.ttft) == (None, None)


# ---------------------------------------------------------------------------------- wrapped once more by a workflow


async def test_wrapper_when_given_the_rewards_of_a_run_hides_nothing_of_them(build):
    # Arrange: as a workflow of AReaL does in its constructor
    made = build(
        length={"name": "length_reward_fn", "weight": 0.5, "timeout": 60.0},
        odd={"name": "async_reward_fn", "timeout": 0.2},
    )
    wrapped = AsyncRewardWrapper(made, timeout=0.001)

    # Act
    score = await wrapped("p", "abc")
    with pytest.raises(RewardError) as hung:
        await wrapped("p", "hang")

    # Assert
    assert isinstance(score, Score) and score.terms == {"length": 3.0, "odd": 1.0}
    assert hung.value.kind == "timeout" and "reward 'odd' took more than 0.2 s (rewards.odd.timeout)" in str(hung.value)
    assert wrapped.stats["timeout"] == made.stats["timeout"] == 1
    assert wrapped.export_stats("x").keys() >= {"x/length/calls", "x/odd/errors/timeout"}


async def test_wrapper_when_given_a_reward_that_stops_the_run_lets_it(build):
    wrapped = AsyncRewardWrapper(build(RewardConfig(name="async_reward_fn", on_error="raise")))

    with pytest.raises(BadInputError, match=r"returned NaN.*reward\.on_error"):
        await wrapped("p", "nan")


async def test_wrapper_when_a_run_has_no_reward_says_so():
    wrapped = AsyncRewardWrapper(NoReward())

    with pytest.raises(BadInputError, match="the workflow asked for a reward, and the run has none"):
        await wrapped("p", "c")
    assert set(wrapped.stats.values()) == {0} and wrapped.export_stats() == {}


@pytest.mark.parametrize(("on_error", "words"), [("reject", "its episode is rejected"), ("zero", "it counts 0")])
async def test_reward_when_it_fails_logs_the_first_of_each_kind(build, caplog, on_error, words):
    reward = build(RewardConfig(name="async_reward_fn", on_error=on_error))

    await asyncio.gather(*(reward("p", case) for case in ("nan", "nan", "none")), return_exceptions=True)

    told = [record.getMessage() for record in caplog.records if record.name == "areal.Reward"]
    assert len(told) == 2
    assert f"reward 'async_reward_fn' returned NaN; {words} (reward.on_error: {on_error})" in told[0]
