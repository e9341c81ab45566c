"""The real openai client, and others, against a session in this process."""

import asyncio
import json
import subprocess
import sys

import openai
import pytest
from agent_fakes import ADD, END, make_session, user

from areal_core.rollout.agents.client import AgentClients, import_openai

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(scope="module")
def clients():
    return AgentClients("test")


async def test_client_when_asked_parses_the_answer_and_goes_on(clients):
    session, engine = make_session(CALL + END, "3" + END)
    with clients.open(session) as access:
        messages = [user("1+2?")]
        first = await access.client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = first.choices[0].message
        call = message.tool_calls[0]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await access.client.chat.completions.create(model="policy", messages=messages, tools=[ADD])

    assert (message.content, call.function.name, json.loads(call.function.arguments)) == (None, "add", {"a": 1, "b": 2})
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "3"
    assert list(session.completions) == [first.id, second.id]
    assert session.stats["branches"] == 0
    assert first.usage.completion_tokens == len(engine.responses[0].output_tokens)


async def test_client_when_several_choices_gives_the_id_of_each(clients):
    session, _ = make_session("1" + END, "2" + END)
    with clients.open(session) as access:
        answer = await access.client.chat.completions.create(model="m", messages=[user("?")], n=2)

    assert [choice.completion_id for choice in answer.choices] == list(session.completions)
    assert [choice.message.content for choice in answer.choices] == ["1", "2"]


async def test_client_when_streaming_gives_what_it_gives_without(clients):
    session, _ = make_session("ok " + CALL + END)
    content, arguments, finish, usage = "", "", None, None
    with clients.open(session) as access:
        stream = await access.client.chat.completions.create(
            model="m", messages=[user("?")], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or ())
                finish = choice.finish_reason or finish

    assert (content, json.loads(arguments), finish) == ("ok", {"a": 1, "b": 2}, "tool_calls")
    assert usage.completion_tokens == len(next(iter(session.completions.values())).output_ids)


async def test_client_when_streaming_by_its_helper_puts_the_completion_together(clients):
    session, _ = make_session("two" + END)
    with clients.open(session) as access:
        async with access.client.chat.completions.stream(model="m", messages=[user("?")]) as stream:
            final = await stream.get_final_completion()

    assert final.choices[0].message.content == "two"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temperature": 0.3}, openai.BadRequestError, "temperature: training samples with"),
        ({"extra_body": {"mirostat": 1}}, openai.BadRequestError, "mirostat: is not a field"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"n": 9}, openai.RateLimitError, "max_completions"),
    ],
)
async def test_client_when_refused_raises_the_error_of_the_api_once(clients, fields, error, message):
    session, engine = make_session("x" + END, max_completions=8)
    with clients.open(session) as access:
        # Its own retries would play a refusal again and again.
        client = access.client.with_options(max_retries=2)
        with pytest.raises(error, match=message) as info:
            await client.chat.completions.create(**{"model": "m", "messages": [user("?")], **fields})

    assert info.value.body["message"] and session.stats["refused_requests"] == 1 and not engine.requests


async def test_client_when_engine_fails_raises_an_internal_error_once(clients):
    session, engine = make_session(RuntimeError("out of memory"))
    with clients.open(session) as access, pytest.raises(openai.InternalServerError, match="out of memory"):
        await access.client.with_options(max_retries=2).chat.completions.create(model="m", messages=[user("?")])

    assert len(engine.requests) == 1


async def test_client_when_asked_for_models_lists_the_policy(clients):
    session, _ = make_session()
    with clients.open(session) as access:
        models = [model.id async for model in access.client.models.list()]

    assert models == ["policy"]


async def test_client_when_route_is_not_served_says_what_is(clients):
    session, _ = make_session()
    with clients.open(session) as access, pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
        await access.client.embeddings.create(model="m", input="x")


async def test_client_when_episode_has_ended_reaches_nobody(clients):
    session, engine = make_session("x" + END)
    with clients.open(session) as access:
        pass

    with pytest.raises(openai.NotFoundError, match="this episode has ended"):
        await access.client.chat.completions.create(model="m", messages=[user("?")])
    assert not engine.requests


async def test_client_when_episodes_run_at_once_keeps_them_apart(clients):
    async def play(text):
        session, _ = make_session(text + END)
        with clients.open(session) as access:
            answer = await access.client.chat.completions.create(model="m", messages=[user("?")])
        return answer.choices[0].message.content

    assert await asyncio.gather(*(play(f"n{i}") for i in range(20))) == [f"n{i}" for i in range(20)]


async def test_access_when_a_library_makes_its_own_client_serves_it(clients):
    session, _ = make_session("two" + END)
    with clients.open(session) as access:
        client = openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, http_client=access.http_client, max_retries=0
        )
        answer = await client.chat.completions.create(model="m", messages=[user("?")])

    assert answer.choices[0].message.content == "two"


async def test_client_when_an_agent_closes_it_still_serves_others(clients):
    for text in ("1", "2"):
        session, _ = make_session(text + END)
        with clients.open(session) as access:
            async with access.client as client, access.http_client:
                answer = await client.chat.completions.create(model="m", messages=[user("?")])
        assert answer.choices[0].message.content == text


async def test_request_when_cancelled_cancels_the_engine(clients):
    session, _ = make_session()
    started, cancelled = asyncio.Event(), []

    async def agenerate(request):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    session.engine.agenerate = agenerate
    with clients.open(session) as access:
        task = asyncio.create_task(access.client.chat.completions.create(model="m", messages=[user("?")]))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert cancelled == [True]


async def test_body_when_not_json_is_a_bad_request(clients):
    session, _ = make_session()
    with clients.open(session) as access:
        response = await access.http_client.post(f"{access.base_url}/chat/completions", content=b"{")

    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


def test_import_when_openai_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)

    with pytest.raises(Exception, match=r"workflow 'calc' .*pip install 'areal-core\[agents\]'"):
        import_openai("calc")


def test_openai_when_a_command_starts_or_a_plain_workflow_is_built_is_not_imported():
    code = (
        "import sys, areal_core.cli.main, areal_core.rollout.build, areal_core.rollout.workflows.multi_turn\n"
        "import areal_core.rollout.agents.session\n"
        "assert not {'openai', 'httpx', 'httpx2'} & sys.modules.keys()"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
