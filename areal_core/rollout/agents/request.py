"""A chat-completions request: which of its fields are honoured, and how."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.errors import did_you_mean
from areal_core.rollout.agents.errors import APIError, invalid, unsupported
from areal_core.rollout.agents.messages import Message, normalized

MAX_CHOICES = 128

# Fields that say nothing about what is generated.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
# Fields that are refused unless they have the value that changes nothing, and why.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), "is not supported by the engines; leave it out"),
    "logit_bias": (({},), "is not supported by the engines; leave it out"),
    "top_logprobs": ((0,), "the engines return the log-prob of the sampled token only; use logprobs alone"),
    "response_format": (({"type": "text"},), "constrained output is not supported; use {'type': 'text'}"),
    "parallel_tool_calls": ((True,), "the model decides how many calls it writes; leave it out"),
    "modalities": ((["text"],), "only text is supported"),
    "functions": ((), "is the old form of tools; use tools"),
    "function_call": ((), "is the old form of tool_choice; use tools"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "is not supported; leave it out"),
    "reasoning_effort": ((), "is not supported; use chat_template_kwargs for what the chat template takes"),
    "verbosity": ((), "is not supported; leave it out"),
    "web_search_options": ((), "is not supported; give a tool of your own"),
}
#: Fields of a request that change the distribution a token is drawn from, with their range.
_SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
}
_READ = frozenset(
    (
        "model",
        "messages",
        "tools",
        "tool_choice",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "chat_template_kwargs",
        *_SAMPLING,
    )
)
_KNOWN = _READ | _IGNORED | _NEUTRAL.keys()


@attrs.frozen(kw_only=True)
class ChatRequest:
    """A request that can be played.

    Attributes:
        messages: normalised, see ``messages.normalized``.
        tools: rendered by the chat template.
        parse_tools: whether calls in the answer are looked for (not with ``tool_choice: none``).
        n: choices.
        gconfig: sampling of each choice, but for its seed.
        seed: asked for, or None.
        stream, include_usage, logprobs: form of the answer.
        template_options: further variables of the chat template.
        model: echoed.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    parse_tools: bool
    n: int
    gconfig: GenerationHyperparameters
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    template_options: dict[str, Any]
    model: str


def parse_request(
    request: Any,
    gconfig: GenerationHyperparameters,
    *,
    training: bool,
    conflicts: Literal["refuse", "ignore"] = "refuse",
    default_model: str = "policy",
) -> ChatRequest:
    """Check a request and lay it over the run's sampling.

    Args:
        request: the body of ``POST /v1/chat/completions`` as a dict.
        gconfig: the run's sampling; what the request sets overrides it.
        training: the trainer computes log-probs with the temperature of ``gconfig`` over the whole vocabulary, so that
            a request with another distribution cannot be trained on.
        conflicts: such a request is refused, or played as the run says.

    Raises:
        APIError: naming the field.
    """
    if not isinstance(request, Mapping):
        raise APIError(f"the request must be a JSON object, got {type(request).__name__}", code="invalid_value")
    given = {key: value for key, value in request.items() if value is not None}
    for key, value in given.items():
        if key not in _KNOWN:
            message = f"is not a field that this server knows.{did_you_mean(str(key), _KNOWN)}"
            raise APIError(f"{key}: {message}", param=str(key), code="unknown_parameter")
        if key in _NEUTRAL and value not in _NEUTRAL[key][0]:
            raise unsupported(key, f"{_NEUTRAL[key][1]} (got {str(value)[:80]!r})")
    tools, parse_tools = _tools(given)
    return ChatRequest(
        messages=normalized(given.get("messages")),
        tools=tools,
        parse_tools=parse_tools,
        n=_integer(given, "n", 1, 1, MAX_CHOICES),
        gconfig=_sampling(given, gconfig, training, conflicts),
        seed=_integer(given, "seed", None, -(2**63), 2**63 - 1),
        stream=_boolean(given, "stream"),
        include_usage=_include_usage(given),
        logprobs=_boolean(given, "logprobs"),
        template_options=_template_options(given),
        model=str(given.get("model", default_model)),
    )


def choice_seed(request_seed: int, scope: str, choice: int) -> int:
    """Seed of one choice of a request with a seed, 53 bits.

    Args:
        scope: within it, the same request gives the same answer. In training that is the episode: samples of one
            prompt that were all the same would teach nothing.
    """
    key = f"{scope}\x1f{request_seed}\x1f{choice}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11


def _sampling(
    given: Mapping[str, Any],
    gconfig: GenerationHyperparameters,
    training: bool,
    conflicts: Literal["refuse", "ignore"],
) -> GenerationHyperparameters:
    changes: dict[str, Any] = {}
    for name, (low, high) in _SAMPLING.items():
        if name not in given:
            continue
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(name, f"must be a number from {low} to {high:g}, got {str(value)[:80]!r}")
        if name == "top_p" and value == 0:
            raise invalid(name, "must be above 0")
        if name == "top_k":
            value = max(0, int(value))
        if value == _in_force(gconfig, name):
            continue
        if not training:
            changes[name] = value
        elif conflicts == "refuse":
            raise unsupported(
                name,
                f"training samples with {_in_force(gconfig, name)} (gconfig.{name}), and the trainer computes its "
                f"log-probs for that; {value} would bias it. Leave the field out, or set "
                "workflow.agent.sampling_conflicts: ignore",
            )
    if "temperature" in changes:
        changes["greedy"] = False
    limits = [
        _integer(given, name, None, 1, 2**31 - 1)
        for name in ("max_completion_tokens", "max_tokens")
        if given.get(name) is not None
    ]
    if limits:
        changes["max_new_tokens"] = limits[0]
        changes["min_new_tokens"] = min(gconfig.min_new_tokens, limits[0])
    if "stop" in given:
        changes["stop"] = _stop(given["stop"])
    return gconfig.new(n_samples=1, **changes)


def _in_force(gconfig: GenerationHyperparameters, name: str) -> Any:
    return 0 if name == "temperature" and gconfig.is_greedy else getattr(gconfig, name)


def _stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) and string for string in strings):
        raise invalid("stop", f"must be a text or a list of texts, none of them empty, got {str(value)[:80]!r}")
    return list(strings)


def _tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    tools = given.get("tools") or []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise invalid("tools", "must be a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise unsupported(f"tools[{index}]", "only {'type': 'function', 'function': {...}} can be used")
        if not isinstance(function.get("name"), str):
            raise invalid(f"tools[{index}].function.name", "must be text")
    choice = given.get("tool_choice", "auto" if tools else "none")
    if choice not in ("none", "auto"):
        raise unsupported(
            "tool_choice", f"{str(choice)[:80]!r} would need constrained sampling; only 'auto' and 'none' are supported"
        )
    return [dict(tool) for tool in tools], bool(tools) and choice == "auto"


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("chat_template_kwargs", {})
    reserved = {"tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template", "conversation"}
    if not isinstance(options, Mapping) or reserved & options.keys():
        raise invalid("chat_template_kwargs", f"must be an object without {', '.join(sorted(reserved))}")
    return dict(options)


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not given.get("stream"):
        raise invalid("stream_options", "is only allowed with stream: true")
    unknown = options.keys() - {"include_usage", "include_obfuscation"} if isinstance(options, Mapping) else {"?"}
    if unknown:
        raise invalid("stream_options", f"must be an object with include_usage, got {str(options)[:80]!r}")
    return bool(options.get("include_usage"))


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, f"must be true or false, got {str(value)[:80]!r}")
    return value


def _integer(given: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = given.get(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"must be an integer from {low} to {high}, got {str(value)[:80]!r}")
    return value
