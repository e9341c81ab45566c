"""What models write to call tools, and the functions that answer."""

import json

import pytest
import tool_functions
from agent_fakes import spelled
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, LLAMA3, TOOLS, tiny_tokenizer

from areal_core.errors import ArealError, BadInputError
from areal_core.rollout.tools.functions import ToolBox
from areal_core.rollout.tools.parsers import PARSERS, ParsedCall, find_parser, parse_hermes, parse_llama3_json


def calls_of(parsed):
    return [(call.name, call.as_dict()) for call in parsed.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls", "malformed"),
    [
        ("just text", "just text", [], 0),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})], 0),
        (
            'so: <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{}"}</tool_call>',
            "so:",
            [("f", {}), ("g", {})],
            0,
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', None, [], 1),
        ("<tool_call>{</tool_call>", None, [], 1),
        ('<tool_call>{"name": 3}</tool_call>', None, [], 1),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, [], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, [], 1),
        ("<tool_call>[[[</tool_call>", None, [], 1),
        (
            '<tool_call>{</tool_call> and <tool_call>{"name": "f"}</tool_call>',
            "<tool_call>{</tool_call> and",
            [("f", {})],
            1,
        ),
        (
            '<think>A <tool_call> will do.</think><tool_call>{"name": "f"}</tool_call>',
            "<think>A <tool_call> will do.</think>",
            [("f", {})],
            0,
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>',
            "",
            [("f", {"a": "<tool_call>"})],
            0,
        ),
    ],
)
def test_hermes_when_parsed_finds_calls_and_leaves_the_rest(text, content, calls, malformed):
    parsed = parse_hermes(text)

    assert (parsed.content, calls_of(parsed), parsed.malformed) == (
        text if content is None else content,
        calls,
        malformed,
    )


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        ("just text", [], 0),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], 0),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})], 0),
        ('{"name": "f", "arguments": {"a": 1}}; {"name": "g"}', [("f", {"a": 1}), ("g", {})], 0),
        ('{"answer": 42}', [], 0),
        ('{"name": "f", "parameters": {"a": 1}', [], 1),
        ('{"name": "f", "parameters": 3}', [], 1),
        ('{"name": "f"} trailing', [], 1),
        ("<|python_tag|>import os", [], 1),
    ],
)
def test_llama3_when_parsed_finds_calls_or_leaves_the_text(text, calls, malformed):
    parsed = parse_llama3_json(text)

    assert (calls_of(parsed), parsed.malformed) == (calls, malformed)
    assert parsed.content == ("" if calls else text)


@given(st.text(alphabet='<tol_ca>/{}[]"name:,; \n1', max_size=60), st.sampled_from(["", "<tool_call>", "{"]))
def test_parsers_when_given_anything_never_raise_and_never_lose_text_without_calls(text, start):
    for parser in PARSERS.values():
        parsed = parser.parse(start + text)

        assert parsed.calls or parsed.content == start + text
        assert all(isinstance(call.as_dict(), dict) for call in parsed.calls)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=8),
            st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=8)),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_parsers_when_given_written_calls_read_them_back(calls):
    hermes = "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)
    llama3 = ";".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    # What a string holds does not end a call.
    if not any("</tool_call>" in str(call) for call in calls):
        assert calls_of(parse_hermes(hermes)) == calls
    assert calls_of(parse_llama3_json(llama3)) == calls


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TOOLS, "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('ipython {"name": function name, "parameters": ...}', "llama3_json"),
        (CHATML, None),
        (LLAMA3, None),
    ],
)
def test_parser_when_auto_goes_by_the_template(template, expected):
    parser = find_parser("auto", tiny_tokenizer(template), "key")

    assert (parser.name if parser else None) == expected


def test_parser_when_named_is_that_one():
    tokenizer = tiny_tokenizer(CHATML)

    assert find_parser("hermes", tokenizer, "key").name == "hermes" and find_parser("none", tokenizer, "key") is None
    with pytest.raises(BadInputError, match=r"key: 'mistral' is no tool-call parser. Known: auto, none, hermes"):
        find_parser("mistral", tokenizer, "key")


def test_text_when_marker_is_a_special_token_keeps_it():
    tokenizer = tiny_tokenizer(TOOLS)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = spelled(tokenizer, 'a<tool_call>{"name": "f"}</tool_call>')

    assert calls_of(parse_hermes(PARSERS["hermes"].text_of(tokenizer, ids))) == [("f", {})]


# ------------------------------------------------------------------------------------------------------- functions


def toolbox(*names, timeout=30.0):
    return ToolBox([f"tool_functions:{name}" for name in names], timeout=timeout, key="workflow.multi_turn.tools")


def test_tools_when_made_have_the_schemas_of_transformers():
    (schema,) = toolbox("add").schemas

    assert schema["function"]["name"] == "add" and schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["required"] == ["a"]
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first."}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("add", {"a": 5}, "5"),
        ("echo", {"text": "naïve"}, "naïve"),
        ("wait", {"text": "ü"}, '{"text": "ü"}'),
    ],
)
async def test_tool_when_called_answers_as_text(name, arguments, expected):
    tools = toolbox("add", "echo", "wait")

    assert await tools.call(ParsedCall(name, json.dumps(arguments))) == expected
    assert tools.export_stats() == {"tools/calls": 1.0, "tools/errors": 0.0, "tools/timeouts": 0.0}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("leave", {"how": "raise"}, "Error: leave: ValueError: no such record"),
        ("leave", {"how": "exit"}, "Error: leave: RuntimeError: SystemExit: 3"),
        ("leave", {"how": "stop"}, "Error: leave: RuntimeError: StopIteration: "),
        ("leave", {"how": "timeout"}, "Error: leave: TimeoutError: the database is slow"),
        ("leave", {}, "Error: leave: missing a required argument: 'how'"),
        ("leave", {"how": "x", "why": 1}, "Error: leave: got an unexpected keyword argument 'why'"),
        ("leaf", {}, "Error: there is no tool 'leaf'. Tools: leave. Did you mean 'leave'?"),
    ],
)
async def test_tool_when_it_fails_tells_the_model_and_counts(name, arguments, message):
    tools = toolbox("leave")

    assert await tools.call(ParsedCall(name, json.dumps(arguments))) == message
    assert tools.stats == {"calls": 1, "errors": 1}


@pytest.mark.parametrize(("name", "arguments"), [("hang", {"text": ""}), ("hang_async", {})])
async def test_tool_when_it_hangs_is_given_up(name, arguments):
    tools = toolbox("hang", "hang_async", timeout=0.01)

    try:
        result = await tools.call(ParsedCall(name, json.dumps(arguments)))
    finally:
        tool_functions.RELEASE.set()
        tool_functions.RELEASE = type(tool_functions.RELEASE)()

    assert result == f"Error: {name} took more than 0.01 s"
    assert tools.stats == {"calls": 1, "timeouts": 1}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["undocumented"], r"tool_functions:undocumented has no schema"),
        (["NotAFunction"], "is a type, not a function"),
        (["ad"], "Did you mean 'add'"),
        (["add", "Other.add"], "two tools are called 'add'"),
    ],
)
def test_tools_when_they_cannot_be_used_say_which_and_why(names, message):
    with pytest.raises(ArealError, match=rf"workflow\.multi_turn\.tools: .*{message}"):
        toolbox(*names)
