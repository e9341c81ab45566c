"""Token truth: what an agent's requests send to the engine, and what the session records."""

import asyncio
import json

import pytest
from agent_fakes import ADD, END, GCONFIG, ScriptedEngine, make_session, make_settings, message_of, spelled, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, STRICT_TOOLS, TOOLS, tiny_tokenizer

from areal_core.errors import BadInputError
from areal_core.rollout.agents.errors import APIError
from areal_core.rollout.agents.session import AgentSession
from areal_core.rollout.context import EpisodeEngine

TOKENIZER = tiny_tokenizer(TOOLS)
MERGES = [("t", "w"), ("o", "o")]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_session_when_asked_once_answers_like_the_api():
    session, engine = make_session("two" + END)

    answer = await session.create({"model": "m", "messages": [user("1+1?")]})

    (completion,) = session.completions.values()
    assert answer["object"] == "chat.completion" and answer["model"] == "m" and answer["id"] == completion.id
    assert message_of(answer) == {"role": "assistant", "content": "two", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    prompt, output = engine.requests[0].input_ids, engine.responses[0].output_tokens
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "total_tokens": len(prompt) + len(output),
    }
    assert decode(session.settings.tokenizer, prompt) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_ids == prompt and completion.output_ids == output
    assert completion.logprobs == engine.responses[0].output_logprobs
    assert completion.versions == [0] * len(output) and completion.stop_reason == "stop"


async def test_session_when_chat_goes_on_with_tools_extends_the_sampled_ids():
    # Arrange: "two" and "too" have shorter encodings than the ones sampled, so that encoding again would show
    tokenizer = tiny_tokenizer(TOOLS, MERGES)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b": 1}}</tool_call>'
    texts = ["two? " + call + END, "too" + END, "two" + END]
    session, engine = make_session(*texts, tokenizer=tokenizer)
    messages = [user("1+1?")]

    # Act: three turns, with a tool's result after the first
    first = message_of(await session.create({"messages": messages, "tools": [ADD]}))
    messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}]
    second = message_of(await session.create({"messages": messages, "tools": [ADD]}))
    messages += [{"role": "assistant", "content": second["content"]}, user("sure?")]
    await session.create({"messages": messages, "tools": [ADD]})

    # Assert
    assert first["content"] == "two?"
    assert first["tool_calls"][0]["function"]["name"] == "add"
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 1}
    sampled = [spelled(tokenizer, text) for text in texts]
    assert sampled[1] != tokenizer.encode(texts[1], add_special_tokens=False)
    prompt = engine.requests[0].input_ids
    between = [
        "\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n",
    ]
    expected = list(prompt)
    for turn, text in enumerate(between, start=1):
        expected += sampled[turn - 1] + tokenizer.encode(text, add_special_tokens=False)
        assert engine.requests[turn].input_ids == expected
    completions = list(session.completions.values())
    assert [c.parent for c in completions] == [None, *completions[:2]]
    assert [c.output_ids for c in completions] == sampled
    assert session.stats["branches"] == 0 and session.stats["tool_calls"] == 1


async def test_session_when_template_wants_a_call_before_a_result_shows_it_one():
    tokenizer = tiny_tokenizer(STRICT_TOOLS)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    session, engine = make_session(call + END, "2" + END, tokenizer=tokenizer)

    first = message_of(await session.create({"messages": [user("?")], "tools": [ADD]}))
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
    await session.create({"messages": [user("?"), first, result], "tools": [ADD]})

    text = decode(tokenizer, engine.requests[1].input_ids)
    assert text == f"[user]?[/user]{call}<|im_end|>[RESULT]2[/RESULT]"


async def test_session_when_answer_was_cut_off_ends_its_turn_as_prompt():
    session, engine = make_session("tw", "2" + END, stop_reasons=["length"])

    answer = await session.create({"messages": [user("?")]})
    await session.create({"messages": [user("?"), message_of(answer), user("go on")]})

    assert answer["choices"][0]["finish_reason"] == "length"
    text = decode(session.settings.tokenizer, engine.requests[1].input_ids)
    assert text.endswith("tw<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")


async def test_session_when_stop_string_ended_an_answer_hides_it_but_keeps_its_ids():
    session, engine = make_session("thought\nObservation:", "2" + END)

    answer = await session.create({"messages": [user("?")], "stop": "\nObservation:"})
    await session.create({"messages": [user("?"), message_of(answer), user("3")]})

    assert message_of(answer)["content"] == "thought"
    assert engine.requests[0].gconfig.stop == ["\nObservation:"] and engine.requests[0].tokenizer is not None
    assert "thought\nObservation:<|im_end|>\n" in decode(session.settings.tokenizer, engine.requests[1].input_ids)


@pytest.mark.parametrize(
    "edit",
    [
        lambda messages: [user("other"), *messages[1:]],
        lambda messages: [messages[0], {"role": "assistant", "content": "2"}, *messages[2:]],
        lambda messages: [{"role": "system", "content": "s"}, *messages],
        lambda messages: [messages[0], user("again")],
    ],
    ids=["user", "answer", "system", "dropped"],
)
async def test_session_when_history_was_edited_begins_a_branch(edit):
    tokenizer = tiny_tokenizer(CHATML)
    session, engine = make_session("two" + END, "2" + END, tokenizer=tokenizer)
    messages = [user("1+1?")]
    messages += [message_of(await session.create({"messages": messages})), user("again")]

    edited = edit(messages)
    await session.create({"messages": edited})

    plain = [{"role": m["role"], "content": m["content"]} for m in edited]
    expected = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert engine.requests[1].input_ids == list(expected)
    assert [completion.parent for completion in session.completions.values()] == [None, None]
    assert session.stats["branches"] == 1


async def test_session_when_chats_run_at_once_counts_each_beyond_the_first():
    session, _ = make_session("a" + END, "b" + END, "c" + END)

    await asyncio.gather(*(session.create({"messages": [user(text)]}) for text in "xyz"))

    assert session.stats["branches"] == 2
    assert [completion.order for completion in session.completions.values()] == [0, 1, 2]


async def test_session_when_tools_change_begins_a_branch():
    session, _ = make_session("two" + END, "2" + END)
    first = message_of(await session.create({"messages": [user("?")]}))

    await session.create({"messages": [user("?"), first, user("!")], "tools": [ADD]})

    assert session.stats["branches"] == 1


@pytest.mark.parametrize(
    "echo",
    [
        lambda m: {"role": "assistant", "content": m["content"], "audio": None, "annotations": [], "refusal": None},
        lambda m: {"role": "assistant", "content": [{"type": "text", "text": m["content"]}]},
        lambda m: {"role": "assistant", "content": f"\n{m['content']} "},
        lambda m: {**m, "reasoning_content": "", "provider_specific_fields": {}, "tool_calls": []},
    ],
    ids=["client fields", "parts", "blanks", "empty fields"],
)
async def test_session_when_answer_comes_back_in_another_form_knows_it(echo):
    session, _ = make_session("two" + END, "2" + END)
    answer = message_of(await session.create({"messages": [user("?")]}))

    await session.create({"messages": [user("?"), echo(answer), user("!")]})

    assert session.stats["branches"] == 0


async def test_session_when_arguments_are_written_again_knows_the_call():
    session, _ = make_session('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' + END, "3" + END)
    answer = message_of(await session.create({"messages": [user("?")], "tools": [ADD]}))
    call = answer["tool_calls"][0]
    call = {**call, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}, "index": 0}

    await session.create(
        {
            "messages": [
                user("?"),
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "3"},
            ],
            "tools": [ADD],
        }
    )

    assert session.stats["branches"] == 0


async def test_session_when_two_answers_read_alike_continues_each_once():
    session, engine = make_session("2" + END, "2" + END, "x" + END, "y" + END)
    engine.version = 5
    first = message_of(await session.create({"messages": [user("?")], "n": 2}))

    for text in ("a", "b"):
        await session.create({"messages": [user("?"), first, user(text)]})

    parents = [completion.parent for completion in list(session.completions.values())[2:]]
    assert parents == list(session.completions.values())[:2]


async def test_session_when_several_choices_are_asked_for_records_all():
    session, engine = make_session("1" + END, "2" + END, "3" + END)

    answer = await session.create({"messages": [user("?")], "n": 3})

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["1", "2", "3"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    ids = [choice["completion_id"] for choice in answer["choices"]]
    assert ids == list(session.completions) and ids[0] == answer["id"] and len(set(ids)) == 3
    assert len({request.gconfig.seed for request in engine.requests}) == 3
    assert all(request.gconfig.n_samples == 1 for request in engine.requests)


@pytest.mark.parametrize("training", [True, False])
async def test_session_when_samples_of_a_group_ask_for_one_seed_tells_them_apart_in_training(training):
    # An agent that fixes its seed would sample the same answer for every sample of a prompt.
    seeds = []
    for sample in (0, 1, 0):
        engine = ScriptedEngine(TOKENIZER, "a" + END)
        episode = EpisodeEngine(engine, uid="0-0", sample=sample)
        session = AgentSession(episode, make_settings(TOKENIZER), training=training)
        await session.create({"messages": [user("?")], "seed": 7})
        seeds.append(engine.requests[0].gconfig.seed)

    assert seeds[0] == seeds[2] and (seeds[0] != seeds[1]) == training


@pytest.mark.parametrize("include_usage", [False, True])
async def test_session_when_streaming_gives_the_same_answer_in_chunks(include_usage):
    text = 'ok <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "b"}</tool_call>' + END
    request = {"messages": [user("?")], "tools": [ADD], "n": 2, "logprobs": True}
    whole = await make_session(text, "no" + END)[0].create(request)

    options = {"include_usage": True} if include_usage else None
    session, _ = make_session(text, "no" + END)
    chunks = list(await session.create({**request, "stream": True, "stream_options": options}))

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    usages = [chunk.get("usage") for chunk in chunks]
    assert usages == [None] * (len(chunks) - 1) + [whole["usage"] if include_usage else None]
    for choice in whole["choices"]:
        pieces = [p for chunk in chunks for p in chunk["choices"] if p["index"] == choice["index"]]
        deltas = [piece["delta"] for piece in pieces]
        assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
        calls: dict = {}
        for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
            call = calls.setdefault(part["index"], {"arguments": ""})
            call.update({k: v for k, v in part.items() if k in ("id", "type")})
            call["name"] = part["function"].get("name", call.get("name"))
            call["arguments"] += part["function"]["arguments"]
        expected = [
            {"id": c["id"], "type": "function", **c["function"]} for c in choice["message"].get("tool_calls", ())
        ]
        assert list(calls.values()) == expected
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert [p["logprobs"] for p in pieces if p["logprobs"]] == [choice["logprobs"]]


async def test_session_when_logprobs_are_asked_for_gives_those_of_the_sampled_tokens():
    session, engine = make_session("two" + END)

    answer = await session.create({"messages": [user("?")], "logprobs": True})

    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["t", "w", "o", END]
    assert [entry["logprob"] for entry in content] == engine.responses[0].output_logprobs
    assert bytes(content[0]["bytes"]) == b"t"


async def test_session_when_call_is_malformed_keeps_it_as_text_and_counts_it():
    text = "<tool_call>{broken</tool_call>"
    session, _ = make_session(text + END)

    answer = await session.create({"messages": [user("?")], "tools": [ADD]})

    assert message_of(answer)["content"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert session.stats["malformed_tool_calls"] == 1


async def test_session_when_tool_choice_is_none_shows_tools_and_leaves_calls_as_text():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    session, engine = make_session(call + END)

    answer = await session.create({"messages": [user("?")], "tools": [ADD], "tool_choice": "none"})

    assert message_of(answer)["content"] == call
    assert '"add"' in decode(session.settings.tokenizer, engine.requests[0].input_ids)


async def test_session_when_template_knows_no_tools_refuses_them():
    session, engine = make_session(tokenizer=tiny_tokenizer(CHATML))

    with pytest.raises(APIError, match=r"chat template .* does not show them") as info:
        await session.create({"messages": [user("?")], "tools": [ADD]})

    assert info.value.param == "tools" and not engine.requests
    assert session.stats["refused_requests"] == 1


async def test_session_when_template_does_not_tell_the_format_asks_for_a_parser():
    tokenizer = tiny_tokenizer("{{ tools }}" + CHATML)
    request = {"messages": [user("?")], "tools": [ADD]}

    with pytest.raises(APIError, match=r"set workflow\.agent\.tool_call_parser"):
        await make_session(tokenizer=tokenizer)[0].create(request)
    answer = await make_session("x" + END, tokenizer=tokenizer, tool_call_parser="none")[0].create(request)

    assert message_of(answer)["content"] == "x"


async def test_session_when_template_refuses_messages_says_so_to_the_agent():
    session, _ = make_session(tokenizer=tiny_tokenizer("{{ raise_exception('roles must alternate') }}"))

    with pytest.raises(APIError, match="roles must alternate") as info:
        await session.create({"messages": [user("?")]})

    assert info.value.status == 400


async def test_session_when_template_does_not_know_developer_calls_it_system():
    session, engine = make_session("x" + END)

    await session.create({"messages": [{"role": "developer", "content": "be brief"}, user("?")]})

    assert "<|im_start|>system\nbe brief" in decode(session.settings.tokenizer, engine.requests[0].input_ids)


async def test_session_when_completions_are_used_up_refuses_more():
    session, engine = make_session("1" + END, "2" + END, max_completions=2)
    await session.create({"messages": [user("?")]})

    with pytest.raises(APIError, match=r"max_completions of 2") as info:
        await session.create({"messages": [user("?")], "n": 2})
    await session.create({"messages": [user("?")]})

    assert (info.value.status, info.value.code, len(engine.requests)) == (429, "max_completions", 2)


async def test_session_when_chat_outgrows_the_context_says_so_from_the_second_request_on():
    session, _ = make_session("1" + END, BadInputError("the prompt has 99 tokens, too many"))
    first = message_of(await session.create({"messages": [user("?")]}))

    with pytest.raises(APIError, match="99 tokens") as info:
        await session.create({"messages": [user("?"), first, user("!")]})

    assert (info.value.status, info.value.code) == (400, "context_length_exceeded")
    assert session.failure is None


async def test_session_when_max_tokens_of_the_run_are_used_up_says_so():
    gconfig = GCONFIG.new(max_tokens=60)
    session, engine = make_session("1" + END, gconfig=gconfig)
    first = message_of(await session.create({"messages": [user("?")]}))

    with pytest.raises(APIError, match=r"gconfig\.max_tokens is 60"):
        await session.create({"messages": [user("?"), first, user("x" * 40)]})

    assert len(engine.requests) == 1


async def test_session_when_engine_fails_answers_500_and_keeps_the_error():
    error = BadInputError("input_ids holds an id outside the vocabulary")
    session, _ = make_session(error)

    with pytest.raises(APIError) as info:
        await session.create({"messages": [user("?")]})

    assert info.value.status == 500 and session.failure is error


async def test_session_when_samples_of_a_group_begin_alike_renders_the_prompt_once():
    session, engine = make_session("1" + END, "2" + END)

    await session.create({"messages": [user("?")]})
    await session.create({"messages": [user("?")]})

    assert engine.requests[0].input_ids is engine.requests[1].input_ids


def test_rewards_when_completion_is_unknown_say_which():
    session, _ = make_session()

    with pytest.raises(KeyError, match="chatcmpl-7"):
        session.set_reward("chatcmpl-7", 1.0)
    with pytest.raises(KeyError, match="no completion"):
        session.set_last_reward(1.0)


async def test_last_reward_when_several_choices_goes_to_the_one_that_came_back():
    session, _ = make_session("1" + END, "2" + END)
    await session.create({"messages": [user("?")], "n": 2})

    session.set_last_reward(0.5)

    assert [completion.reward for completion in session.completions.values()] == [0.5, None]


TEXT = st.text(alphabet="ab \n<|>", max_size=6)


def messages_in_common(completion, request):
    """How many messages of ``request`` a completion and its answer are; 0 if they are not its beginning."""

    def key(message):
        content = message["content"]
        return message["role"], content.strip() if message["role"] == "assistant" else content

    said = [*map(key, [*completion.messages, completion.message])]
    return len(said) if said == [*map(key, request[: len(said)])] else 0


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(TEXT, min_size=1, max_size=5),
    questions=st.lists(TEXT, min_size=6, max_size=6),
    edits=st.lists(st.sampled_from(["keep", "keep", "keep", "edit", "drop"]), min_size=5, max_size=5),
)
def test_prompt_when_history_is_kept_or_edited_extends_exactly_the_longest_kept_completion(answers, questions, edits):
    # Against a search over all completions: the parent is the one with the most messages that the request begins with.
    session, engine = make_session(*[spelled(TOKENIZER, text) for text in answers], tokenizer=TOKENIZER)

    async def play():
        messages = [user(questions[0])]
        for turn in range(len(answers)):
            known = list(session.completions.values())
            await session.create({"messages": messages})
            *_, completion = session.completions.values()
            best = max((messages_in_common(other, messages) for other in known), default=0)
            if best:
                assert completion.parent is not None and messages_in_common(completion.parent, messages) == best
                whole = completion.parent.prompt_ids + completion.parent.output_ids
                assert completion.prompt_ids[: len(whole)] == whole
            else:
                assert completion.parent is None
            assert completion.prompt_ids == engine.requests[turn].input_ids
            messages = [*messages, {"role": "assistant", "content": completion.message["content"]}]
            if edits[turn] == "edit":
                messages[0] = user(messages[0]["content"] + "!")
            elif edits[turn] == "drop":
                messages = messages[:1]
            messages.append(user(questions[turn + 1]))

    asyncio.run(play())
