"""Turns of a chat as token ids, without ever encoding again what was sampled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from areal_core.api.io_struct import ModelResponse
from areal_core.errors import BadInputError

Message = Mapping[str, Any]


class TurnEncoder:
    """Makes prompts of a chat template, and what the template puts between a sampled answer and the next one.

    The latter is found by rendering the chat with a placeholder for the sampled answer and keeping what comes after it.
    An end-of-turn token that was sampled is not added again, and one that a truncated answer lacks is added.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        stop_token_ids: ids that end a sampled answer.
        what: who asks, for messages, e.g. ``"workflow 'multi_turn'"``.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Collection[int], what: str) -> None:
        self.tokenizer, self.what = tokenizer, what
        self._stop_ids = frozenset(stop_token_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        self._special_ids = special.union(getattr(tokenizer, "all_special_ids", ()))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> str:
        """The chat with a generation prompt, as text. Raises whatever the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(options or {}),
            )
        )

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: the template wrote the special tokens, none is added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def tail(
        self,
        before: Sequence[Message],
        answer: Message,
        after: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """What the template puts after ``answer``, up to where the next one begins.

        Args:
            before, after: the chat around the answer.
            answer: the assistant's message; only its ``tool_calls`` are looked at, and only where the template wants to
                see them.

        Raises:
            BadInputError: if the template does not show what the assistant said.
        """
        mark = _unused_mark([*before, *after])
        problem: Exception | None = None
        try:
            text = self.render([*before, {"role": "assistant", "content": mark}, *after], tools, options)
        except Exception as error:  # some templates want a tool's answer to follow a call
            if not answer.get("tool_calls"):
                raise
            text, problem = "", error
        if mark in text:
            return text[text.rfind(mark) + len(mark) :]
        if answer.get("tool_calls"):
            text = self.render([*before, _marked_call(answer, mark), *after], tools, options)
            if mark in text:
                return self._from_end_of_turn(text[text.rfind(mark) + len(mark) :])
        raise BadInputError(
            f"{self.what}: the chat template does not show the assistant's answers, so turns cannot be appended. Use "
            "another template, or a workflow with one turn such as 'rlvr'."
        ) from problem

    def _from_end_of_turn(self, text: str) -> str:
        """``text`` from the end-of-turn token on: what stands before it only closes the marked call."""
        ends = [self.tokenizer.decode([i], skip_special_tokens=False) for i in sorted(self._stop_ids)]
        found = [at for at in (text.find(end) for end in ends if end) if at >= 0]
        if not found:
            raise BadInputError(
                f"{self.what}: the chat template puts no end-of-turn token after a tool call, so that turns cannot be "
                "appended. Name its id in gconfig.stop_token_ids."
            )
        return text[min(found) :]

    def sampled_end(self, response: ModelResponse) -> str | None:
        """Text of the end-of-turn token that an answer ends with; None if it was cut off."""
        if not response.output_tokens:
            return None
        last = response.output_tokens[-1]
        # An engine also knows the ends that the model's own generation_config.json names.
        by_engine = response.stop_reason != "length" and last in self._special_ids
        ended = last in self._stop_ids or by_engine
        return self.tokenizer.decode([last], skip_special_tokens=False) if ended else None

    def said(self, response: ModelResponse) -> list[int]:
        """Ids of an answer without its end-of-turn token."""
        ids = response.output_tokens
        return ids if self.sampled_end(response) is None else ids[:-1]

    def continuation(self, tail: str, end: str | None) -> list[int]:
        """Ids of ``tail`` after an answer that ended with ``end`` (see ``sampled_end``)."""
        if end:
            before, found, after = tail.partition(end)
            # Blanks that the template puts before its end-of-turn token are left out with it.
            if found and not before.strip():
                tail = after
        return self.encode(tail)


def _unused_mark(messages: Sequence[Message]) -> str:
    """A placeholder without blanks, which a template could strip, that no message holds."""
    text, number = "", 0
    for message in messages:
        text += str(message.get("content"))
    mark = "[[sampled-answer]]"
    while mark in text:
        number += 1
        mark = f"[[sampled-answer-{number}]]"
    return mark


def _marked_call(answer: Message, mark: str) -> Message:
    calls = [dict(call) for call in answer["tool_calls"]]
    calls[-1]["function"] = {**calls[-1]["function"], "arguments": {mark: mark}}
    return {**answer, "role": "assistant", "content": "", "tool_calls": calls}
