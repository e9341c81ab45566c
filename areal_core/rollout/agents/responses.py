"""Answers in the form of the OpenAI API: a chat.completion, or the chat.completion.chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from areal_core.rollout.agents.completions import Completion


def chat_completion(completions: Sequence[Completion], model: str, tokenizer: Any, *, logprobs: bool) -> dict[str, Any]:
    """The ``chat.completion`` whose choices are ``completions`` (of one request)."""
    first = completions[0]
    choices = []
    for completion in completions:
        message = completion.message
        answer = {"role": "assistant", "content": message["content"], "refusal": None}
        if completion.tool_calls:
            answer["content"] = message["content"] or None
            answer["tool_calls"] = completion.tool_calls
        choices.append(
            {
                "index": completion.index,
                "message": answer,
                "logprobs": _logprobs(completion, tokenizer) if logprobs else None,
                "finish_reason": completion.finish_reason,
                # Not of the OpenAI API: what a reward of this choice is given under.
                "completion_id": completion.id,
            }
        )
    prompt_tokens = len(first.prompt_ids)
    completion_tokens = sum(len(completion.output_ids) for completion in completions)
    return {
        "id": first.request_id,
        "object": "chat.completion",
        "created": first.created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "system_fingerprint": f"version-{first.versions[-1] if first.versions else 0}",
    }


def chunks(completion: dict[str, Any], *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """A ``chat.completion`` as the chunks of a stream; put together they are the same answer."""
    head = {key: completion[key] for key in ("id", "created", "model", "system_fingerprint")}
    head["object"] = "chat.completion.chunk"
    if include_usage:
        head["usage"] = None
    for choice in completion["choices"]:
        for piece in _pieces(choice):
            yield {**head, "choices": [piece]}
    if include_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}


def _pieces(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    message, index = choice["message"], choice["index"]

    def piece(delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        extra = {"completion_id": choice["completion_id"]}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **extra}

    yield piece({"role": "assistant", "content": "", "refusal": None})
    if message["content"]:
        yield piece({"content": message["content"]}, logprobs=choice["logprobs"])
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opened = {"name": function["name"], "arguments": ""}
        yield piece({"tool_calls": [{"index": number, "id": call["id"], "type": "function", "function": opened}]})
        yield piece({"tool_calls": [{"index": number, "function": {"arguments": function["arguments"]}}]})
    late = None if message["content"] else choice["logprobs"]
    yield piece({}, choice["finish_reason"], late)


def _logprobs(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(completion.output_ids, completion.logprobs, strict=True):
        token = tokenizer.decode([token_id], skip_special_tokens=False)
        content.append(
            {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}
