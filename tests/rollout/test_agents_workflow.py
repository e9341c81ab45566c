"""Agents as workflows: what they are given, what they return, and what becomes of it."""

import contextlib
import math
import sys

import pytest
from agent_fakes import END, GCONFIG, ScriptedEngine, make_session, message_of, user
from rollout_fakes import FakeLoader
from tiny_tokenizer import TOOLS, tiny_tokenizer

from areal_core.api.configs import (
    AgentConfig,
    DatasetConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    RewardConfig,
    RLConfig,
    WorkflowConfig,
)
from areal_core.api.reward_api import RewardError
from areal_core.errors import BadInputError
from areal_core.rollout.agents.rewards import RewardJudge
from areal_core.rollout.agents.workflow import AgentRunner
from areal_core.rollout.build import build_workflow, check_workflow
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episode import EpisodeRejected

TOKENIZER = tiny_tokenizer(TOOLS)


class Agent:
    """Asks ``turns`` times, and gives what ``result`` makes of the answers' ids."""

    def __init__(self, result, turns=2):
        self.result, self.turns = result, turns

    async def run(self, data, session):
        messages, ids = [user("?")], []
        for _ in range(self.turns):
            answer = await session.create({"messages": messages})
            ids.append(answer["id"])
            messages = [*messages, message_of(answer), user("again")]
        return self.result(ids) if callable(self.result) else self.result


def runner(agent, **keywords):
    config = AgentConfig(**{k: keywords.pop(k) for k in list(keywords) if hasattr(AgentConfig(), k)})
    return AgentRunner(agent, GCONFIG, TOKENIZER, keywords.pop("reward_fn", None), config, **keywords)


def episode(*answers):
    return EpisodeEngine(ScriptedEngine(TOKENIZER, *(answers or ("a" + END, "b" + END, "c" + END))), uid="0-0")


async def test_agent_when_it_returns_a_float_rewards_the_last_completion():
    (trajectory,) = await runner(Agent(2), turn_discount=0.5).arun_episode(episode(), {})

    assert trajectory.metadata["turn_rewards"] == [None, 2.0] and trajectory.reward == 1.0


async def test_agent_when_it_returns_a_dict_rewards_each():
    agent = Agent(lambda ids: {ids[0]: 1, ids[1]: 3.0})

    first, second = await runner(agent, turn_discount=0.5, export="individual").arun_episode(episode(), {})

    assert (first.reward, second.reward) == (2.5, 3.0)


async def test_agent_when_it_returns_nothing_is_rejected_unless_the_session_was_given_rewards():
    class Rewarding(Agent):
        async def run(self, data, session):
            await super().run(data, session)
            session.set_last_reward(0.5)

    assert await runner(Agent(None)).arun_episode(episode(), {}) is None
    (trajectory,) = await runner(Rewarding(None)).arun_episode(episode(), {})
    assert trajectory.reward == 0.5


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        ("1.0", "type", "returned a str: '1.0' for completion"),
        (True, "type", "returned a bool"),
        ([1.0], "type", "returned a list"),
        (math.nan, "nan", "returned NaN"),
        (-math.inf, "inf", "returned -inf"),
        (lambda ids: {ids[0]: None}, "none", "returned None for completion"),
        (lambda ids: {"chatcmpl-7": 1.0}, "type", "has no place: completion 'chatcmpl-7' is not of this episode"),
        ({}, "none", "a dict without a reward"),
    ],
)
async def test_agent_when_its_reward_is_no_number_is_a_reward_error(result, kind, message):
    workflow = runner(Agent(result), name="mine")

    with pytest.raises(RewardError, match=message) as info:
        await workflow.arun_episode(episode(), {})

    assert info.value.kind == kind and "the agent 'mine'" in str(info.value)
    stats = workflow.export_stats()
    assert stats[f"agent/reward_errors/{kind}"] == 1 and stats["agent/completions"] == 2
    assert not any("reward_errors" in name for name in workflow.export_stats())


async def test_agent_when_its_reward_is_no_number_follows_on_error():
    (trajectory,) = await runner(Agent(math.nan), on_error="zero").arun_episode(episode(), {})
    assert trajectory.reward == 0.0

    with pytest.raises(BadInputError, match=r"returned NaN .*reward\.on_error"):
        await runner(Agent(math.nan), on_error="raise").arun_episode(episode(), {})


async def test_agent_when_it_asked_nothing_is_rejected_with_a_reason():
    with pytest.raises(EpisodeRejected, match="agent_no_completion"):
        await runner(Agent(1.0, turns=0)).arun_episode(episode(), {})


@pytest.mark.parametrize(
    ("options", "answers", "reason"),
    [
        ({"max_completions": 1}, ("a" + END,), "agent_max_completions"),
        ({}, ("a" + END, BadInputError("the prompt has 300 tokens")), "agent_context_length"),
    ],
)
async def test_agent_when_it_does_not_catch_a_limit_is_rejected(options, answers, reason):
    with pytest.raises(EpisodeRejected, match=reason):
        await runner(Agent(1.0), **options).arun_episode(episode(*answers), {})


async def test_agent_when_a_library_wraps_the_refusal_is_rejected_all_the_same():
    class Wrapping(Agent):
        async def run(self, data, client):
            try:
                for _ in range(2):
                    await client.chat.completions.create(model="policy", messages=[user("?")])
            except Exception as error:
                raise RuntimeError("the graph has failed") from error

    with pytest.raises(EpisodeRejected, match="agent_max_completions"):
        await runner(Wrapping(1.0), max_completions=1).arun_episode(episode(), {})


async def test_agent_when_it_fails_after_a_refusal_it_caught_shows_its_own_error():
    class Confused(Agent):
        async def run(self, data, session):
            with contextlib.suppress(Exception):
                await super().run(data, session)
            raise LookupError("my own mistake")

    with pytest.raises(LookupError, match="my own mistake"):
        await runner(Confused(1.0), max_completions=1).arun_episode(episode(), {})


async def test_agent_when_it_catches_a_limit_is_accepted():
    class Careful(Agent):
        async def run(self, data, session):
            try:
                return await super().run(data, session)
            except Exception:
                return 0.25

    (trajectory,) = await runner(Careful(1.0), max_completions=1).arun_episode(episode(), {})

    assert trajectory.reward == 0.25


@pytest.mark.parametrize("catches", [False, True])
async def test_agent_when_first_prompt_cannot_be_answered_stops_with_the_engines_error(catches):
    class Catching(Agent):
        async def run(self, data, session):
            try:
                await super().run(data, session)
            except Exception:
                if not catches:
                    raise
            return 1.0

    with pytest.raises(BadInputError, match="no room"):
        await runner(Catching(1.0)).arun_episode(episode(BadInputError("no room")), {})


async def test_agent_when_engine_breaks_shows_its_error_and_not_the_clients():
    class ByClient:
        async def run(self, data, client):
            await client.chat.completions.create(model="policy", messages=[user("?")])

    with pytest.raises(ZeroDivisionError):
        await runner(ByClient()).arun_episode(episode(ZeroDivisionError()), {})


async def test_agent_when_it_raises_passes_its_own_error_on():
    class Broken:
        async def run(self, data, session):
            raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await runner(Broken()).arun_episode(episode(), {})


async def test_agent_when_it_takes_any_keyword_gets_all():
    seen = {}

    class Any_:
        async def run(self, data, **kwargs):
            seen.update(kwargs, data=data)
            answer = await kwargs["client"].chat.completions.create(model=kwargs["model"], messages=data["messages"])
            return await kwargs["reward_fn"]("", answer.choices[0].message.content)

    async def reward(prompt, completion):
        return float(completion == "a")

    row = {"messages": [user("?")], "_uid": "0-0"}
    (trajectory,) = await runner(Any_(), reward_fn=reward).arun_episode(episode(), row)

    expected = {"client", "http_client", "base_url", "api_key", "model", "reward_fn", "engine", "session", "tokenizer"}
    assert seen.keys() == expected | {"data"} and seen["data"] == row and seen["tokenizer"] is TOKENIZER
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda self, data: 1.0, "must be `async def run"),
        (None, "must be `async def run"),
        ("needs", "`run` needs question, which nothing gives.*columns of the row are in `data`"),
        ("bare", "must take the dataset's row first"),
    ],
)
def test_agent_when_run_cannot_be_called_says_why(run, message):
    async def needs(self, data, question):
        pass

    async def bare(self):
        pass

    agent = type("Odd", (), {"run": {"needs": needs, "bare": bare}.get(run, run) if isinstance(run, str) else run})()

    with pytest.raises(BadInputError, match=message):
        runner(agent)


def test_agent_when_it_takes_a_client_and_openai_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)

    class ByClient:
        async def run(self, data, client):
            pass

    runner(Agent(1.0))  # takes only the session, which needs no package
    with pytest.raises(BadInputError, match=r"pip install 'areal-core\[agents\]'"):
        runner(ByClient())


def test_agent_when_tokenizer_has_no_chat_template_says_so():
    with pytest.raises(BadInputError, match="no chat template"):
        AgentRunner(Agent(1.0), GCONFIG, tiny_tokenizer(None), None)


class Manager:
    def __init__(self, **targets):
        self.targets = targets

    def load(self, registry, name, key=None):
        return self.targets[name]


def rl_config(**workflow):
    return RLConfig(
        actor=PPOActorConfig(path="model"),
        train_dataset=DatasetConfig(name="data"),
        reward=RewardConfig(name="mine", on_error="zero"),
        workflow=WorkflowConfig(name="calc", **workflow),
    )


def reward_fn(prompt, completions, prompt_ids=None, completion_ids=None, **data):
    return 1.0


@pytest.mark.parametrize("training", [True, False])
def test_build_when_workflow_is_an_agent_gives_a_runner_of_it(training):
    class Calc:
        def __init__(self, tokenizer, gconfig):
            self.tokenizer, self.gconfig = tokenizer, gconfig

        async def run(self, data, session):
            return None

    config = rl_config(agent=AgentConfig(export="individual"))
    manager = Manager(calc=Calc, mine=reward_fn)

    workflow, reward = build_workflow(config, TOKENIZER, manager, GCONFIG, training=training)

    assert isinstance(workflow, AgentRunner) and isinstance(workflow.agent, Calc)
    assert (workflow.name, workflow.training, workflow.config.export) == ("calc", training, "individual")
    assert workflow.agent.tokenizer is TOKENIZER and workflow.reward_fn is reward
    assert check_workflow(workflow) is workflow


def test_check_when_given_a_bare_agent_says_how_to_play_it():
    with pytest.raises(BadInputError, match=r"is an agent.*AgentRunner\(agent, gconfig, tokenizer, reward_fn\)"):
        check_workflow(Agent(1.0))


def test_judge_when_several_kinds_occur_counts_each():
    judge = RewardJudge("mine", "zero")

    assert [judge.checked(value, "x") for value in (math.nan, None, "a", 10**400, 2)] == [0.0, 0.0, 0.0, 0.0, 2.0]
    assert judge.errors == {"nan": 1, "none": 1, "type": 1, "inf": 1}


class Uneven:
    """Good, bad and rejected episodes, by the row's number."""

    async def run(self, data, session):
        answer = await session.create({"messages": [user("?")]})
        await session.create({"messages": [user("?"), message_of(answer), user("!")]})
        results = [1.0, "bad", None, 0.5]
        return results[data["n"]]


def test_controller_when_it_plays_an_agent_counts_every_outcome():
    # Arrange: four rows, each in groups of two
    engine = ScriptedEngine(TOKENIZER, *(["a" + END] * 16))
    workflow = runner(Uneven())
    controller = RolloutController(engine, workflow, InferenceEngineConfig(), batch_size=4, group_size=2)

    # Act
    with controller:
        result = controller.prepare_batch(FakeLoader(4))

    # Assert
    stats = result.stats
    assert len(result.trajectories) == 4 and {t.reward for t in result.trajectories} == {1.0, 0.5}
    assert stats["rollout/accepted"] == 4 and stats["rollout/failed"] == 0
    assert stats["rollout/rejected/reward_type"] == 2 and stats["rollout/rejected/workflow"] == 2
    assert stats["rollout/agent/completions"] == 16 and stats["rollout/agent/branches"] == 0
    assert stats["rollout/agent/reward_errors/type"] == 2


def test_controller_when_evaluating_counts_the_evaluations_workflow_alone():
    engine = ScriptedEngine(TOKENIZER, *(["a" + END] * 4))
    train, held_out = runner(Uneven()), runner(Uneven(), training=False)
    controller = RolloutController(engine, train, InferenceEngineConfig(), batch_size=1)

    with controller:
        result = controller.evaluate([{"n": 0}, {"n": 3}], workflow=held_out)

    assert result.stats["eval/agent/completions"] == 4
    assert train.export_stats()["agent/completions"] == 0


async def test_session_when_made_for_other_sessions_shares_nothing():
    one, _ = make_session("a" + END)
    two, _ = make_session("a" + END)
    await one.create({"messages": [user("?")]})

    assert not two.completions and not two.stats
