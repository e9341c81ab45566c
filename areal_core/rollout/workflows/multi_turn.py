"""Several attempts at one question, as one trajectory of exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import attrs

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.api.reward_api import awaitable_reward
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.config.fields import option
from areal_core.errors import BadInputError
from areal_core.rollout.tools.functions import ToolBox
from areal_core.rollout.tools.parsers import ParsedAnswer, check_tools_template, find_parser
from areal_core.rollout.turns import Message, TurnEncoder
from areal_core.rollout.workflows.chat import (
    check_length,
    check_tokenizer,
    first_prompt,
    messages_of,
    reward_columns,
    template_errors,
)


@attrs.define(kw_only=True)
class MultiTurnConfig:
    """Options of the workflow `multi_turn`."""

    max_turns: int = option(2, "Most answers in one episode.", ge=1)
    turn_discount: float = option(0.9, "The reward counts turn_discount ** (turns - 1).", ge=0, le=1)
    success_threshold: float = option(0.0, "An answer with a reward above this ends the episode.")
    feedback: str = option(
        "Your answer is wrong or could not be read. Think it over, and answer again.",
        "What the user says after a wrong answer.",
    )
    tools: list[str] = option(factory=list, help="Functions that the model may call: package.module:function.")
    max_tool_calls: int = option(8, "Most tool calls in one episode; later ones are answers.", ge=0)
    tool_timeout: float = option(30.0, "Seconds for one tool call.", gt=0)
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = option(
        "auto", "How the model writes tool calls. auto: by the chat template."
    )


class MultiTurnWorkflow(RolloutWorkflow):
    """Asks again after a wrong answer, and lets the model call tools before it answers.

    The next prompt is the tokens so far, sampled ids included and untouched, and then the tokens that the chat template
    puts between an answer and the next one (see ``TurnEncoder``).

    The loss is on sampled tokens only: not on what users and tools say. The reward is that of the last answer, times
    ``turn_discount ** (turns - 1)``; named rewards are kept as they are. Calls of tools are no answers: they are not
    scored, and do not count as turns. Where an answer holds calls beyond ``max_tool_calls``, those get an error; once
    none are left, whatever the model writes is an answer.

    Args:
        gconfig, tokenizer, reward_fn: as for ``rlvr``; the reward is asked after each answer.
        max_turns, turn_discount, success_threshold, feedback, tools, max_tool_calls, tool_timeout, tool_call_parser:
            see ``MultiTurnConfig``.

    Raises:
        BadInputError: as for ``rlvr``, or a template that does not show the assistant's answers, or tools that cannot
            be used. A later turn that no longer fits the context ends the episode instead.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        reward_fn: Callable[..., Awaitable[float] | float],
        max_turns: int = 2,
        turn_discount: float = 0.9,
        success_threshold: float = 0.0,
        feedback: str = MultiTurnConfig().feedback,
        tools: Sequence[str] = (),
        max_tool_calls: int = 8,
        tool_timeout: float = 30.0,
        tool_call_parser: Literal["auto", "hermes", "llama3_json"] = "auto",
    ) -> None:
        check_tokenizer(tokenizer, "multi_turn")
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.reward_fn = awaitable_reward(reward_fn)
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.success_threshold, self.feedback = success_threshold, feedback
        self.max_tool_calls = max_tool_calls if tools else 0
        self._turns = TurnEncoder(tokenizer, self.gconfig.stop_token_ids, "workflow 'multi_turn'")
        self._tools = ToolBox(tools, timeout=tool_timeout, key="workflow.multi_turn.tools")
        self._parser = find_parser(tool_call_parser, tokenizer, "workflow.multi_turn.tool_call_parser")
        self._malformed = 0
        if tools:
            check_tools_template(tokenizer, "workflow.multi_turn.tools")
            if self._parser is None:
                raise BadInputError(
                    "workflow.multi_turn.tool_call_parser: the chat template does not tell how its model writes calls; "
                    "set hermes or llama3_json."
                )

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        columns, decode = reward_columns(data), self.tokenizer.decode
        cache: dict[Any, Any] = getattr(engine, "group_cache", {})
        chat: list[Message] = list(messages_of(data))
        if "prompt" not in cache:
            first = first_prompt(self.tokenizer, chat, data, self._tools.schemas)
            check_length(first, self.gconfig.max_tokens, data)
            cache["prompt"] = (first, decode(first, skip_special_tokens=True))
        first, prompt = cache["prompt"]
        ids: list[int] = first
        responses: list[ModelResponse] = []
        rewards: list[float] = []
        calls_left = self.max_tool_calls

        async def score(response: ModelResponse) -> float:
            text = decode(response.output_tokens, skip_special_tokens=True)
            return await self.reward_fn(prompt, text, response.input_tokens, response.output_tokens, **columns)

        while True:
            request = ModelRequest(input_ids=ids, gconfig=self.gconfig, rid="", tokenizer=self.tokenizer)
            try:
                response = await engine.agenerate(request)
            except BadInputError:
                if not responses:
                    raise
                if not rewards:  # the dialogue has outgrown the context in the midst of tool calls
                    rewards.append(await score(responses[-1]))
                break
            responses.append(response)
            parsed = self._parse(response) if calls_left else ParsedAnswer("")
            if parsed.calls:
                answer, after = await self._call_tools(parsed, calls_left, len(responses))
                calls_left -= min(calls_left, len(parsed.calls))
            else:
                rewards.append(await score(response))
                if rewards[-1] > self.success_threshold or len(rewards) >= self.max_turns:
                    break
                answer = {"role": "assistant", "content": "..."}
                after = [{"role": "user", "content": self.feedback}]
            ids = [*ids, *response.output_tokens, *self._between(response, chat, answer, after, data, cache)]
            chat += [answer, *after]
            if self.gconfig.max_tokens is not None and len(ids) >= self.gconfig.max_tokens:
                if not rewards:
                    rewards.append(await score(response))
                break
        whole = [*responses[-1].input_tokens, *responses[-1].output_tokens]
        return Trajectory.from_turns(
            responses,
            rewards[-1] * self.turn_discount ** (len(rewards) - 1),
            rewards=dict(getattr(rewards[-1], "terms", {})),
            metadata={
                "prompt": decode(first, skip_special_tokens=False),
                "completion": decode(whole[len(first) :], skip_special_tokens=False),
                "turn_rewards": rewards,
            },
        )

    def export_stats(self) -> dict[str, float]:
        """Since the last call, if there are tools: ``tools/calls``, ``errors``, ``timeouts`` and ``malformed``."""
        if not self._tools.schemas:
            return {}
        malformed, self._malformed = self._malformed, 0
        return {**self._tools.export_stats(), "tools/malformed": float(malformed)}

    def _parse(self, response: ModelResponse) -> ParsedAnswer:
        assert self._parser is not None
        parsed = self._parser.parse(self._parser.text_of(self.tokenizer, self._turns.said(response)))
        self._malformed += parsed.malformed
        return parsed

    async def _call_tools(self, parsed: ParsedAnswer, left: int, turn: int) -> tuple[Message, list[Message]]:
        """The assistant's message with its calls, and the tools' answers to them."""
        results = await asyncio.gather(*(self._tools.call(call) for call in parsed.calls[:left]))
        results += ["Error: no tool calls are left; answer now"] * (len(parsed.calls) - len(results))
        calls: list[Message] = []
        answers: list[Message] = []
        for number, (call, result) in enumerate(zip(parsed.calls, results, strict=True)):
            # Nine characters, as some templates demand.
            identity = f"call{turn % 1000:03d}{number % 100:02d}"
            function = {"name": call.name, "arguments": call.as_dict()}
            calls.append({"id": identity, "type": "function", "function": function})
            answers.append({"role": "tool", "tool_call_id": identity, "name": call.name, "content": result})
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}, answers

    def _between(
        self,
        response: ModelResponse,
        chat: Sequence[Message],
        answer: Message,
        after: Sequence[Message],
        data: dict[str, Any],
        cache: dict[Any, Any],
    ) -> list[int]:
        """Ids from the end of the sampled ``answer`` to where the next one begins."""
        end = self._turns.sampled_end(response)
        key = ("between", len(chat), end)
        # The samples of a group share them as long as no tool has spoken.
        shared = not any(message["role"] == "tool" for message in (*chat, *after))
        if shared and key in cache:
            ids: list[int] = cache[key]
            return ids
        with template_errors(data):
            ids = self._turns.continuation(self._turns.tail(chat, answer, after, self._tools.schemas), end)
        if shared:
            cache[key] = ids
        return ids
