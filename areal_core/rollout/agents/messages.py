"""Messages of a chat: checked, compared, and in the form that chat templates take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_core.rollout.agents.errors import invalid, unsupported

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a client library adds to an answer that it hands back, and no chat template reads.
_ECHOED = frozenset(("refusal", "annotations", "audio", "function_call", "parsed"))


def normalized(messages: Any) -> list[Message]:
    """Checked copies: contents are text, absent fields are gone, a tool call has ``id``, ``name`` and parsed arguments.

    Raises:
        APIError: naming the message and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise invalid("messages", "must be a non-empty list of {'role': ..., 'content': ...}")
    return [_normalized(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalized(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise invalid(where, f"needs a role out of {', '.join(_ROLES)}, got {str(role)[:80]!r}")
    result: Message = {k: v for k, v in message.items() if v is not None and k not in ("content", "tool_calls")}
    if result["role"] == "assistant":
        if message.get("function_call"):
            raise unsupported(f"{where}.function_call", "is the old form of tool calls; use tool_calls")
        # Libraries also add fields of their own, empty ones.
        result = {k: v for k, v in result.items() if k not in _ECHOED and v not in ("", [], {})}
    result["content"] = text_of(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls:
        if result["role"] != "assistant":
            raise invalid(f"{where}.tool_calls", "belongs to an assistant's message")
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def text_of(content: Any, where: str) -> str:
    """A content as text: None, a text, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise invalid(where, f"must be text or a list of parts, got {type(content).__name__}")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "refusal":
            parts.append(str(part.get("refusal", "")))
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise unsupported(where, f"a part of type {kind!r} cannot be used; only text")
        else:
            parts.append(part["text"])
    return "".join(parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(where, "must be {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            loaded = arguments
        # Chat templates write the arguments as JSON themselves.
        arguments = loaded if isinstance(loaded, dict) else arguments
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def for_template(messages: Sequence[Message], template: str) -> list[Message]:
    """Normalised messages as a template takes them: ``developer`` is ``system`` where the template does not know it."""
    if "developer" in template:
        return list(messages)
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def chain(messages: Sequence[Message], start: bytes) -> Iterator[bytes]:
    """A key for each prefix of normalised messages, from the empty one on; equal keys mean equal chats.

    Args:
        start: key of what the chat is rendered with: tools and template options.
    """
    key = start
    yield key
    for message in messages:
        key = extend(key, message)
        yield key


def extend(key: bytes, message: Message) -> bytes:
    """The key of a chat with one message more."""
    if message["role"] == "assistant":
        # Client libraries strip answers; the ids that were sampled count, not these blanks.
        message = {**message, "content": message["content"].strip()}
    return digest(message, key)


def digest(value: Any, key: bytes = b"") -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(key + text.encode(), digest_size=16).digest()
