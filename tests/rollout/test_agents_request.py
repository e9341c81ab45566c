"""Which fields of a request are honoured, and which are refused by name."""

import pytest
from agent_fakes import ADD, GCONFIG, user

from areal_core.rollout.agents.errors import APIError
from areal_core.rollout.agents.request import choice_seed, parse_request

ASK = {"messages": [user("?")]}


def parse(training=True, conflicts="refuse", gconfig=GCONFIG, **fields):
    return parse_request({**ASK, **fields}, gconfig, training=training, conflicts=conflicts)


def test_request_when_bare_samples_as_the_run_says():
    gconfig = GCONFIG.new(temperature=0.7, stop=["a"], stop_token_ids=[3])

    chat = parse(gconfig=gconfig)

    assert chat.gconfig == gconfig.new(n_samples=1)
    assert (chat.n, chat.stream, chat.logprobs, chat.seed, chat.tools, chat.model) == (
        1,
        False,
        False,
        None,
        [],
        "policy",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_completion_tokens": 8, "max_tokens": 7}, {"max_new_tokens": 8}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"temperature": 1.0, "top_p": 1, "frequency_penalty": 0, "top_k": -1}, {}),
        ({"presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "user": "u"}, {}),
        ({"temperature": None, "n": None, "tools": None, "stream": None}, {}),
    ],
)
def test_request_when_training_overrides_what_leaves_log_probs_alone(fields, expected):
    assert parse(**fields).gconfig == GCONFIG.new(n_samples=1, **expected)


SAMPLING = [("temperature", 0.7), ("temperature", 0), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)]
SAMPLING += [("frequency_penalty", 0.5)]


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_request_when_training_refuses_another_distribution_by_name(name, value):
    with pytest.raises(APIError, match=rf"{name}: training samples with .*gconfig\.{name}") as info:
        parse(**{name: value})

    assert (info.value.status, info.value.param, info.value.code) == (400, name, "unsupported_parameter")
    assert parse(conflicts="ignore", **{name: value}).gconfig == GCONFIG.new(n_samples=1)


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_request_when_evaluating_samples_as_it_says(name, value):
    greedy = parse(training=False, gconfig=GCONFIG.new(greedy=True), **{name: value}).gconfig
    sampled = parse(training=False, **{name: value}).gconfig

    assert getattr(sampled, name) == value
    assert greedy.is_greedy == (name != "temperature" or value == 0)
    assert greedy.is_greedy or greedy.temperature == value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "non-empty list"),
        ({"messages": "hi"}, "messages", "non-empty list"),
        ({"messages": [{"content": "?"}]}, "messages[0]", "needs a role"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "messages[0]", "'robot'"),
        ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content", "'image_url' cannot be used; only text"),
        ({"messages": [user(3)]}, "messages[0].content", "text or a list"),
        ({"messages": [user("?"), {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]", "function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "text"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "only 'auto' and 'none'"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "only"),
        ({"n": 0}, "n", "integer from 1"),
        ({"n": True}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "integer from 1"),
        ({"seed": "7"}, "seed", "integer"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": 3}, "stop", "text or a list"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"temperature": float("nan")}, "temperature", "from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "sampled token only"),
        ({"response_format": {"type": "json_object"}}, "response_format", "constrained output"),
        ({"presence_penalty": 0.1}, "presence_penalty", "not supported"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "the model decides"),
        ({"functions": []}, "functions", "use tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "without"),
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
    ],
)
def test_request_when_a_field_cannot_be_honoured_names_it(fields, param, message):
    with pytest.raises(APIError) as info:
        parse(**fields)

    assert info.value.param == param and message in info.value.message
    body = info.value.body()["error"]
    assert body["type"] == "invalid_request_error" and body["param"] == param and body["message"]


def test_request_when_not_an_object_is_refused():
    with pytest.raises(APIError, match="must be a JSON object"):
        parse_request([1], GCONFIG, training=True)


def test_choice_seed_when_scope_and_choice_differ_differs_and_repeats():
    seeds = {choice_seed(7, scope, choice) for scope in ("0-0/0/0", "0-0/1/0") for choice in range(2)}

    assert len(seeds) == 4 and choice_seed(7, "0-0/0/0", 0) in seeds
    assert all(0 <= seed < 1 << 53 for seed in seeds)
