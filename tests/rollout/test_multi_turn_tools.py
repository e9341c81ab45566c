"""The workflow multi_turn with tools."""

import pytest
import tool_functions
from agent_fakes import END, GCONFIG, ScriptedEngine, spelled
from tiny_tokenizer import CHATML, STRICT_TOOLS, TOOLS, tiny_tokenizer

from areal_core.errors import BadInputError
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.workflows.multi_turn import MultiTurnWorkflow

ROW = {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2", "_uid": "0-0"}
ADD = "tool_functions:add"


def call(name="add", arguments='{"a": 1, "b": 1}'):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Play:
    """One episode: answers of the model, rewards by the answer's text."""

    def __init__(self, *answers, tokenizer=None, gconfig=GCONFIG, **options):
        self.tokenizer = tokenizer or tiny_tokenizer(TOOLS)
        self.engine = ScriptedEngine(self.tokenizer, *answers)
        self.scored = []
        options = {"tools": [ADD], "feedback": "no", **options}
        self.workflow = MultiTurnWorkflow(gconfig, self.tokenizer, self.reward, **options)

    async def reward(self, prompt, completion, prompt_ids, completion_ids, answer, messages):
        self.scored.append(completion)
        return float(completion == answer)

    async def run(self):
        return await self.workflow.arun_episode(EpisodeEngine(self.engine), dict(ROW))

    def text(self, turn):
        return self.tokenizer.decode(self.engine.requests[turn].input_ids, skip_special_tokens=False)


async def test_multi_turn_when_a_tool_is_called_answers_it_and_scores_the_answer_alone():
    play = Play("let me: " + call() + END, "2" + END, turn_discount=0.5)

    trajectory = await play.run()

    responses = play.engine.responses
    between = "\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ids = responses[0].input_tokens + responses[0].output_tokens
    ids += play.tokenizer.encode(between, add_special_tokens=False)
    assert play.engine.requests[1].input_ids == ids
    assert trajectory.input_ids.tolist() == ids + responses[1].output_tokens
    trained = trajectory.input_ids[trajectory.loss_mask].tolist()
    assert trained == responses[0].output_tokens + responses[1].output_tokens
    assert (trajectory.reward, trajectory.n_turns, play.scored) == (1.0, 2, ["2"])
    assert '"name": "add"' in play.text(0)
    stats = {"tools/calls": 1.0, "tools/errors": 0.0, "tools/timeouts": 0.0, "tools/malformed": 0.0}
    assert play.workflow.export_stats() == stats


async def test_multi_turn_when_decode_and_encode_differ_keeps_the_sampled_ids():
    tokenizer = tiny_tokenizer(TOOLS, [("t", "o"), ("a", "d")])
    play = Play("too " + call() + END, "2" + END, tokenizer=tokenizer)

    trajectory = await play.run()

    first = spelled(tokenizer, "too " + call() + END)
    assert first != tokenizer.encode("too " + call() + END, add_special_tokens=False)
    prompt = len(play.engine.requests[0].input_ids)
    assert trajectory.input_ids[prompt : prompt + len(first)].tolist() == first


async def test_multi_turn_when_wrong_after_a_tool_asks_again_and_discounts_answers_only():
    play = Play(call() + END, "3" + END, call() + END, "2" + END, max_turns=2, turn_discount=0.5)

    trajectory = await play.run()

    assert play.scored == ["3", "2"] and trajectory.reward == 0.5
    assert play.text(2).endswith("3<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.metadata["turn_rewards"] == [0.0, 1.0]


async def test_multi_turn_when_template_wants_calls_before_results_shows_them():
    play = Play(call() + END, "2" + END, tokenizer=tiny_tokenizer(STRICT_TOOLS))

    await play.run()

    assert play.text(1) == f"[user]1+1?[/user]{call()}<|im_end|>[RESULT]2[/RESULT]"


async def test_multi_turn_when_calls_exceed_the_limit_refuses_the_rest_and_then_scores_calls():
    two = call() + call(arguments='{"a": 2, "b": 2}')
    play = Play(two + END, call() + END, max_tool_calls=1, max_turns=1)

    await play.run()

    assert "<tool_response>2</tool_response>" in play.text(1)
    assert "<tool_response>Error: no tool calls are left; answer now</tool_response>" in play.text(1)
    assert play.scored == [call()]
    assert play.workflow.export_stats()["tools/calls"] == 1.0


@pytest.mark.parametrize(
    ("written", "told", "counted"),
    [
        (call("leave", '{"how": "raise"}'), "Error: leave: ValueError: no such record", "tools/errors"),
        (call("sub"), "Error: there is no tool 'sub'", "tools/errors"),
        (call("hang", '{"text": "x"}'), "Error: hang took more than 0.01 s", "tools/timeouts"),
    ],
)
async def test_multi_turn_when_a_tool_fails_tells_the_model(written, told, counted):
    tools = [f"tool_functions:{name}" for name in ("add", "leave", "hang")]
    timeout = 0.01 if counted == "tools/timeouts" else 60.0
    play = Play(written + END, "2" + END, tools=tools, tool_timeout=timeout)

    trajectory = await play.run()
    tool_functions.RELEASE.set()
    tool_functions.RELEASE = type(tool_functions.RELEASE)()

    assert f"<tool_response>{told}" in play.text(1) and trajectory.reward == 1.0
    assert play.workflow.export_stats()[counted] == 1.0


async def test_multi_turn_when_a_call_is_malformed_scores_it_as_an_answer():
    play = Play("<tool_call>{</tool_call>" + END, "2" + END)

    trajectory = await play.run()

    assert play.scored == ["<tool_call>{</tool_call>", "2"] and trajectory.n_turns == 2
    assert play.workflow.export_stats()["tools/malformed"] == 1.0


@pytest.mark.parametrize("limit", ["engine", "gconfig"])
async def test_multi_turn_when_a_result_outgrows_the_context_scores_what_was_said(limit):
    tokenizer = tiny_tokenizer(TOOLS)
    long = call("echo", f'{{"text": "{"x" * 200}"}}')
    answers = [long + END] + ([BadInputError("too long")] if limit == "engine" else [])
    options = {"tools": ["tool_functions:echo"]}
    first = Play(long + END, tokenizer=tokenizer, max_tool_calls=0, max_turns=1, **options)
    length = len(await first.run())
    gconfig = GCONFIG.new(max_tokens=length + 100) if limit == "gconfig" else GCONFIG
    play = Play(*answers, tokenizer=tokenizer, gconfig=gconfig, **options)

    trajectory = await play.run()

    assert (trajectory.reward, trajectory.n_turns, play.scored) == (0.0, 1, [long])


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (CHATML, {}, r"workflow\.multi_turn\.tools: the chat template .* does not show `tools`"),
        ("{{ tools }}" + CHATML, {}, r"workflow\.multi_turn\.tool_call_parser: .* set hermes"),
    ],
)
def test_multi_turn_when_template_cannot_serve_tools_says_so(template, options, message):
    with pytest.raises(BadInputError, match=message):
        Play(tokenizer=tiny_tokenizer(template), **options)


def test_multi_turn_when_it_has_no_tools_shows_no_counts():
    assert Play(tokenizer=tiny_tokenizer(CHATML), tools=[]).workflow.export_stats() == {}
