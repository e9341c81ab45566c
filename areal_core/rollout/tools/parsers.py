"""What models write to call tools, read back into calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from areal_core.errors import BadInputError

ParserName = Literal["auto", "hermes", "llama3_json", "none"]

_HERMES = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|\Z)", re.DOTALL)
_HERMES_OPEN = "<tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@attrs.frozen
class ParsedCall:
    """One call: the function's name, and its arguments as JSON text of an object."""

    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.arguments)
        return loaded


@attrs.frozen
class ParsedAnswer:
    """An answer taken apart.

    Attributes:
        content: the text around the calls; it keeps malformed ones as they were written.
        calls: in the order in which they were written.
        malformed: calls that could not be read.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    malformed: int = 0


def _as_call(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        return ParsedCall(value["name"], json.dumps(arguments, allow_nan=False))
    except ValueError:
        return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_hermes(text: str) -> ParsedAnswer:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times (Hermes, Qwen)."""
    calls: list[ParsedCall] = []
    malformed = 0
    kept: list[str] = []
    position = 0
    for match in _HERMES.finditer(text):
        start = match.start()
        call = _as_call(_loads(match[1])) if match[2] else None
        if call is None and match[2] and _HERMES_OPEN in match[1]:
            # An opening tag that was only mentioned, in a thought, or never closed.
            start = text.rindex(_HERMES_OPEN, start, match.end())
            call = _as_call(_loads(text[start + len(_HERMES_OPEN) : match.end(1)]))
        if call is None:
            malformed += 1
            continue
        calls.append(call)
        kept.append(text[position:start])
        position = match.end()
    if not calls:
        return ParsedAnswer(text, malformed=malformed)
    kept.append(text[position:])
    return ParsedAnswer("".join(kept).strip(), tuple(calls), malformed)


def parse_llama3_json(text: str) -> ParsedAnswer:
    """One ``{"name": ..., "parameters": {...}}``, or several apart by semicolons, as the whole answer (Llama 3)."""
    body = text.replace(_PYTHON_TAG, "").strip()
    if not body.startswith("{"):
        return ParsedAnswer(text, malformed=int(_PYTHON_TAG in text))
    decoder = json.JSONDecoder()
    calls: list[ParsedCall] = []
    position = 0
    while position < len(body):
        try:
            value, position = decoder.raw_decode(body, position)
        except (ValueError, RecursionError):
            return ParsedAnswer(text, malformed=1)
        call = _as_call(value)
        if call is None:
            # JSON that is no call may well be the answer.
            looks_like_call = isinstance(value, dict) and "name" in value
            return ParsedAnswer(text, malformed=int(looks_like_call or bool(calls)))
        calls.append(call)
        rest = body[position:].lstrip()
        if rest and not rest.startswith(";"):
            return ParsedAnswer(text, malformed=1)
        rest = rest[1:].lstrip()
        position = len(body) - len(rest)
    return ParsedAnswer("", tuple(calls))


@attrs.frozen
class ToolCallParser:
    """How one family of models calls tools.

    Attributes:
        name: as in the configuration.
        parse: from the text of an answer.
        markers: texts that the parser needs to see. Where one is a special token of the tokenizer, the answer is
            decoded with its special tokens.
    """

    name: str
    parse: Callable[[str], ParsedAnswer]
    markers: tuple[str, ...]

    def text_of(self, tokenizer: Any, ids: Sequence[int]) -> str:
        """Decode an answer (without its end-of-turn token) for ``parse``."""
        special = getattr(tokenizer, "all_special_tokens", ())
        return str(tokenizer.decode(ids, skip_special_tokens=not any(marker in special for marker in self.markers)))


PARSERS = {
    "hermes": ToolCallParser("hermes", parse_hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolCallParser("llama3_json", parse_llama3_json, (_PYTHON_TAG,)),
}


def template_of(tokenizer: Any, tools: Any = None) -> str:
    """The text of the chat template that is used with (or without) tools."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else str(tokenizer.get_chat_template(tools=tools or [{}]))


def find_parser(name: ParserName, tokenizer: Any, key: str) -> ToolCallParser | None:
    """The parser that ``name`` says; ``auto`` looks at the chat template. None: tool calls stay text.

    Args:
        key: the configuration key, for messages.

    Raises:
        BadInputError: for a name that is none.
    """
    if name == "auto":
        template = template_of(tokenizer)
        if "<tool_call>" in template:
            return PARSERS["hermes"]
        if _PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
            return PARSERS["llama3_json"]
        return None
    if name == "none":
        return None
    if name not in PARSERS:
        raise BadInputError(f"{key}: {name!r} is no tool-call parser. Known: auto, none, {', '.join(PARSERS)}.")
    return PARSERS[name]


def check_tools_template(tokenizer: Any, what: str) -> None:
    """Raises BadInputError if the chat template would not tell the model of its tools."""
    if "tools" not in template_of(tokenizer):
        raise BadInputError(
            f"{what}: the chat template of the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} does not show "
            "`tools`, so that the model would not know of them. Use a template with tools."
        )
