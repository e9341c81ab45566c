"""Agents that do several things at once, leave things running, or change what they were given."""

import asyncio
import random

import numpy as np
import pytest
from agent_fakes import ADD, END, GCONFIG, WITH_TOOLS, ScriptedEngine, make_session, message_of, user

from areal_core.api.configs import AgentConfig
from areal_core.api.reward_api import RewardError
from areal_core.errors import BadInputError
from areal_core.rollout.agents.completions import chosen
from areal_core.rollout.agents.errors import APIError
from areal_core.rollout.agents.export import export_concat, export_individual
from areal_core.rollout.agents.workflow import AgentRunner
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.episode import EpisodeRejected


class HeldEngine(ScriptedEngine):
    """Holds its answers until ``release`` is set, and counts the requests that were cancelled."""

    def __init__(self, *answers):
        super().__init__(WITH_TOOLS, *answers)
        self.release = asyncio.Event()
        self.waiting = self.cancelled = 0

    async def agenerate(self, request):
        self.waiting += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await super().agenerate(request)


async def turns_of_the_loop(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def play(agent, engine, data=None, **options):
    on_error = options.pop("on_error", "reject")
    runner = AgentRunner(agent, GCONFIG, WITH_TOOLS, None, AgentConfig(**options), on_error=on_error)
    return runner.arun_episode(EpisodeEngine(engine, uid="0-0"), {} if data is None else data)


async def test_row_when_an_agent_appends_to_its_messages_is_as_before():
    class Appending:
        async def run(self, data, session):
            messages = data["messages"]
            messages.append(message_of(await session.create({"messages": messages})))
            messages[0]["content"] = "changed"
            return 1.0

    row = {"messages": [user("?")]}
    engine = ScriptedEngine(WITH_TOOLS, "a" + END)

    await play(Appending(), engine, row)

    assert row == {"messages": [user("?")]}


async def test_requests_when_left_running_by_an_agent_that_failed_are_cancelled():
    class Gathering:
        async def run(self, data, session):
            requests = [{"messages": [user("1")]}, {"messages": [user("2")]}, {"messages": []}]
            await asyncio.gather(*map(session.create, requests))

    engine = HeldEngine()

    with pytest.raises(APIError, match="non-empty list"):
        await play(Gathering(), engine)

    await turns_of_the_loop(lambda: not engine.waiting)
    assert engine.cancelled == 2


async def test_session_when_kept_after_the_episode_refuses_requests():
    class Keeping:
        async def run(self, data, session):
            self.session = session
            await session.create({"messages": [user("?")]})
            return 1.0

    agent = Keeping()
    engine = ScriptedEngine(WITH_TOOLS, "a" + END, "b" + END)
    await play(agent, engine)

    with pytest.raises(APIError, match="this episode has ended") as caught:
        await agent.session.create({"messages": [user("?")]})

    assert caught.value.status == 404 and len(engine.requests) == 1


class Grouped:
    """Does things in a task group, which raises an ExceptionGroup."""

    def __init__(self, *todo):
        self.todo = todo

    async def run(self, data, client):
        async with asyncio.TaskGroup() as group:
            for work in self.todo:
                group.create_task(work(client))
        return 1.0


async def ask(client):
    await client.chat.completions.create(model="policy", messages=[user("?")])


async def fail(client):
    raise LookupError("my own mistake")


async def no_reward(client):
    raise RewardError("nan", "the reward returned NaN")


async def test_agent_when_its_tasks_exceed_a_limit_is_rejected():
    engine = ScriptedEngine(WITH_TOOLS, "a" + END, "b" + END)

    with pytest.raises(EpisodeRejected, match="agent_max_completions"):
        await play(Grouped(ask, ask), engine, max_completions=1)


async def test_agent_when_a_reward_fails_in_a_task_is_a_reward_error():
    with pytest.raises(RewardError, match="returned NaN"):
        await play(Grouped(no_reward), ScriptedEngine(WITH_TOOLS))


async def test_agent_when_a_task_has_a_mistake_of_its_own_shows_it():
    with pytest.raises(ExceptionGroup) as caught:
        await play(Grouped(fail, no_reward), ScriptedEngine(WITH_TOOLS))

    assert caught.value.subgroup(LookupError) is not None


async def test_agent_when_engine_refuses_the_prompt_in_a_task_stops_with_its_error():
    engine = ScriptedEngine(WITH_TOOLS, BadInputError("the prompt has 300 tokens"))

    with pytest.raises(BadInputError, match="300 tokens"):
        await play(Grouped(ask), engine)


async def test_agent_when_it_rewards_an_unknown_completion_follows_on_error():
    class Confused:
        async def run(self, data, session):
            await session.create({"messages": [user("?")]})
            return {"chatcmpl-?": 1.0}

    (trajectory,) = await play(Confused(), ScriptedEngine(WITH_TOOLS, "a" + END), on_error="zero")
    assert trajectory.reward == 0.0

    with pytest.raises(RewardError, match="has no place"):
        await play(Confused(), ScriptedEngine(WITH_TOOLS, "a" + END))
    with pytest.raises(BadInputError, match="has no place"):
        await play(Confused(), ScriptedEngine(WITH_TOOLS, "a" + END), on_error="raise")


async def test_session_when_two_chats_with_one_answer_go_on_at_once_continues_each():
    session, _ = make_session()
    session.engine = engine = HeldEngine("a" + END, "a" + END, "b" + END, "c" + END)
    engine.release.set()
    first, _ = await asyncio.gather(*(session.create({"messages": [user("?")]}) for _ in range(2)))
    engine.release.clear()
    messages = [user("?"), message_of(first), user("and?")]

    tasks = [asyncio.create_task(session.create({"messages": messages})) for _ in range(2)]
    await turns_of_the_loop(lambda: engine.waiting == 2)
    engine.release.set()
    await asyncio.gather(*tasks)

    assert [len(completion.children) for completion in session.completions.values()] == [1, 1, 0, 0]


async def test_session_when_a_request_that_went_on_was_cancelled_goes_on_from_the_same_answer():
    session, _ = make_session()
    session.engine = engine = HeldEngine("a" + END, "a" + END, "b" + END)
    engine.release.set()
    first, _ = await asyncio.gather(*(session.create({"messages": [user("?")]}) for _ in range(2)))
    engine.release.clear()
    messages = [user("?"), message_of(first), user("and?")]
    task = asyncio.create_task(session.create({"messages": messages}))
    await turns_of_the_loop(lambda: engine.waiting == 1)
    task.cancel()
    await asyncio.wait([task])
    engine.release.set()

    await session.create({"messages": messages})

    assert [len(completion.children) for completion in session.completions.values()] == [1, 0, 0]


async def test_completions_when_a_request_was_refused_do_not_count_it():
    session, _ = make_session("a" + END, max_completions=1)
    with pytest.raises(APIError, match="cannot render"):
        await session.create({"messages": [user("?")], "chat_template_kwargs": {"messages": 1}})

    await session.create({"messages": [user("?")]})

    assert len(session.completions) == 1


async def test_choices_when_an_evaluation_has_a_seed_differ():
    session, engine = make_session("a" + END, "b" + END, training=False, gconfig=GCONFIG.new(seed=5))

    await session.create({"messages": [user("?")], "n": 2})

    one, two = (request.gconfig.seed for request in engine.requests)
    assert one != two


class MoodyEngine(ScriptedEngine):
    """Answers late, out of order, at random; now and then it fails or is cut off."""

    def __init__(self, rng):
        super().__init__(WITH_TOOLS)
        self.rng = rng

    async def agenerate(self, request):
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.05:
            raise RuntimeError("out of memory")
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        text = self.rng.choice(["a", "b", "", "<think>x</think>a", call])
        self.answers = [text + (END if self.rng.random() < 0.9 else "")]
        return await super().agenerate(request)


async def wander(session, rng):
    """One chat: several choices, tools, edits, rewards."""
    messages = [user(rng.choice("xy"))]
    for _ in range(rng.randrange(1, 5)):
        try:
            answer = await session.create({"messages": messages, "tools": [ADD], "n": rng.choice([1, 1, 2])})
        except APIError:
            continue
        choice = rng.choice(answer["choices"])
        if rng.random() < 0.3:
            session.set_reward(choice["completion_id"], rng.random())
        calls = choice["message"].get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        messages = [*messages, choice["message"], *results, user(rng.choice("uv"))]
        if rng.random() < 0.2:
            messages = messages[:1]


@pytest.mark.parametrize("seed", range(20))
async def test_session_when_chats_wander_at_once_keeps_and_trains_every_sampled_token_once(seed):
    rng = random.Random(seed)
    session, _ = make_session(max_completions=None)
    session.engine = MoodyEngine(rng)

    await asyncio.gather(*(wander(session, rng) for _ in range(4)))

    completions = list(session.completions.values())
    for completion in completions:
        if completion.parent is not None:
            whole = completion.parent.prompt_ids + completion.parent.output_ids
            assert completion.prompt_ids[: len(whole)] == whole
    # Every token of the engine has a log-prob of its own.
    expected = sorted(logprob for completion in chosen(completions) for logprob in completion.logprobs)
    for export in (export_concat, export_individual):
        trained = [t.logprobs[t.loss_mask] for t in export(completions, 0.9, WITH_TOOLS)]
        np.testing.assert_allclose(np.sort(np.concatenate(trained)), expected, rtol=0, atol=1e-6)
