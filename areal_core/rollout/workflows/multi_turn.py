"""Several attempts at one question, as one trajectory of exactly the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.config.fields import option
from areal_core.errors import BadInputError
from areal_core.rollout.workflows.chat import check_length, check_tokenizer, messages_of, render, reward_columns

# Stands for a sampled answer while a template is rendered: no blanks that a template could strip.
_ANSWER = "[[sampled-answer]]"


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


class MultiTurnWorkflow(RolloutWorkflow):
    """Asks again after a wrong answer.

    The next prompt is the tokens so far, sampled ids included and untouched, and then the tokens that the chat template
    puts between an answer and the next one. Those are found by rendering the chat with a placeholder for each answer;
    an end-of-turn token that was sampled is not added again, and one that a truncated answer lacks is added as prompt.

    The loss is on sampled tokens only. The reward is that of the last answer, times ``turn_discount ** (turns - 1)``;
    named rewards are kept as they are.

    Args:
        gconfig, tokenizer, reward_fn: as for ``rlvr``; the reward is asked after each answer.
        max_turns, turn_discount, success_threshold, feedback: see ``MultiTurnConfig``.

    Raises:
        BadInputError: as for ``rlvr``, or a template that does not show the assistant's answers. A later turn that no
            longer fits the context ends the episode instead.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        reward_fn: Callable[..., Awaitable[float]],
        max_turns: int = 2,
        turn_discount: float = 0.9,
        success_threshold: float = 0.0,
        feedback: str = MultiTurnConfig().feedback,
    ) -> None:
        check_tokenizer(tokenizer, "multi_turn")
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.reward_fn = reward_fn
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.success_threshold, self.feedback = success_threshold, feedback
        self._stop_ids = frozenset(self.gconfig.stop_token_ids)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        columns, decode = reward_columns(data), self.tokenizer.decode
        cache: dict[Any, Any] = getattr(engine, "group_cache", {})
        if "prompt" not in cache:
            first = list(render(self.tokenizer, messages_of(data), data, tokenize=True))
            check_length(first, self.gconfig.max_tokens, data)
            cache["prompt"] = (first, decode(first, skip_special_tokens=True))
        first, prompt = cache["prompt"]
        ids: list[int] = first
        responses: list[ModelResponse] = []
        rewards: list[float] = []
        while True:
            request = ModelRequest(input_ids=ids, gconfig=self.gconfig, rid="", tokenizer=self.tokenizer)
            try:
                response = await engine.agenerate(request)
            except BadInputError:
                if not responses:
                    raise
                break  # the dialogue has outgrown the context
            responses.append(response)
            answer = decode(response.output_tokens, skip_special_tokens=True)
            rewards.append(await self.reward_fn(prompt, answer, ids, response.output_tokens, **columns))
            if rewards[-1] > self.success_threshold or len(responses) >= self.max_turns:
                break
            ids = [*ids, *response.output_tokens, *self._between(response, data, len(responses), cache)]
            if self.gconfig.max_tokens is not None and len(ids) >= self.gconfig.max_tokens:
                break
        whole = [*responses[-1].input_tokens, *responses[-1].output_tokens]
        return Trajectory.from_turns(
            responses,
            rewards[-1] * self.turn_discount ** (len(responses) - 1),
            rewards=dict(getattr(rewards[-1], "terms", {})),
            metadata={
                "prompt": decode(first, skip_special_tokens=False),
                "completion": decode(whole[len(first) :], skip_special_tokens=False),
                "turn_rewards": rewards,
            },
        )

    def _between(self, response: ModelResponse, data: dict[str, Any], turns: int, cache: dict[Any, Any]) -> list[int]:
        """Ids from the end of the sampled answer number ``turns`` to where the next one begins."""
        if ("tail", turns) not in cache:
            cache["tail", turns] = self._tail(data, turns)
        tail: str = cache["tail", turns]
        last = response.output_tokens[-1] if response.output_tokens else None
        end = self.tokenizer.decode([last], skip_special_tokens=False) if last in self._stop_ids else None
        key = ("between", turns, end)
        if key not in cache:
            cache[key] = self.tokenizer.encode(_after(tail, end), add_special_tokens=False)
        ids: list[int] = cache[key]
        return ids

    def _tail(self, data: dict[str, Any], turns: int) -> str:
        """What the template puts after the last of ``turns`` answers, up to where the next one begins."""
        dialogue = list(messages_of(data))
        for _ in range(turns):
            dialogue.append({"role": "assistant", "content": _ANSWER})
            dialogue.append({"role": "user", "content": self.feedback})
        text: str = render(self.tokenizer, dialogue, data, tokenize=False)
        at = text.rfind(_ANSWER)
        if at < 0:
            raise BadInputError(
                "workflow 'multi_turn': the chat template does not show the assistant's answers, so turns cannot be "
                "appended. Use another template or the workflow 'rlvr'."
            )
        return text[at + len(_ANSWER) :]


def _after(tail: str, end: str | None) -> str:
    """``tail`` without the end-of-turn token that was sampled already (and blanks the template puts before it)."""
    if end:
        before, found, after = tail.partition(end)
        if found and not before.strip():
            return after
    return tail
