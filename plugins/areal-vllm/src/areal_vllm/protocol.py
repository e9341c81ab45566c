"""What is said to a vLLM server to generate, and what it answers: both of its ways to take and give tokens."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import attrs

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.errors import BadInputError
from areal_vllm.client import Client, ServerError, ServerGone

Transport = Literal["generate", "completions"]

PATHS: dict[Transport, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}

#: vLLM raises lower temperatures to it without a word, and refuses higher ones than the other.
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0


@attrs.frozen
class Span:
    """Output tokens ``[start, end)`` and the label of the weights that made them."""

    label: str
    start: int
    end: int


@attrs.define
class Part:
    """What one server has given for one request so far.

    Attributes:
        tokens, logprobs: of equal length.
        spans: the labels of all tokens; empty until the end, and where a server does not tell them.
        candidates: for each token the log-probs of the likeliest ones, if the call asked for them; else empty.
        finish: vLLM's ``finish_reason``; None until the end.
    """

    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[Span] = attrs.field(factory=list)
    candidates: list[dict[int, float]] = attrs.field(factory=list)
    finish: str | None = None


def sampling_params(
    gconfig: GenerationHyperparameters,
    *,
    max_new_tokens: int,
    stop_token_ids: list[int],
    seed: int | None,
    done: int = 0,
) -> dict[str, Any]:
    """vLLM's sampling parameters for a request of which ``done`` tokens exist already.

    Args:
        max_new_tokens: the bound, the context considered; ``done`` among them.

    Raises:
        BadInputError: naming the option that vLLM cannot honour.
    """
    temperature = 0.0 if gconfig.is_greedy else gconfig.temperature
    if temperature > _HIGHEST_TEMPERATURE or 0 < temperature < _LOWEST_TEMPERATURE:
        raise BadInputError(
            f"gconfig.temperature is {temperature:g}: vLLM samples at {_LOWEST_TEMPERATURE:g} to "
            f"{_HIGHEST_TEMPERATURE:g}, or greedily (0)."
        )
    # Where nothing stops there is no minimum, which would ban EOS in vLLM.
    least = gconfig.min_new_tokens if stop_token_ids or gconfig.stop or not gconfig.ignore_eos else 0
    params: dict[str, Any] = {
        "max_tokens": max_new_tokens - done,
        "temperature": temperature,
        # All values are given: a server's defaults come from the model's generation_config.json.
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
        "min_p": gconfig.min_p,
        "frequency_penalty": gconfig.frequency_penalty,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": gconfig.ignore_eos,
        "min_tokens": max(0, min(least, max_new_tokens) - done),
        "n": 1,
    }
    if stop_token_ids:
        params["stop_token_ids"] = stop_token_ids
    if gconfig.stop:
        if "" in gconfig.stop:
            raise BadInputError("gconfig.stop holds an empty string: give text that ends a completion")
        # As everywhere in the framework, the text that is searched shows the special tokens.
        params.update(stop=list(gconfig.stop), skip_special_tokens=False)
    if seed is not None:
        params["seed"] = seed
    return params


def as_seed(seed: int) -> int:
    """A seed that JSON and torch take: 63 bits, so never -1, which vLLM reads as none."""
    return seed & ((1 << 63) - 1)


@attrs.frozen(kw_only=True)
class Call:
    """One request to one server.

    Attributes:
        model: the served name, or an adapter's.
        prompt: token ids.
        params: ``sampling_params``.
        request_id: unique on that server.
        cache_salt: only requests of the same salt share keys and values.
        candidates: how many of the likeliest tokens to tell for each token.
        stream_interval: tokens from one partial answer to the next; None: the whole answer at once.
        timeout: seconds for all of it.
        on_tokens: called when some have come.
    """

    model: str
    prompt: list[int]
    params: dict[str, Any]
    request_id: str
    cache_salt: str | None = None
    candidates: int = 0
    stream_interval: int | None = None
    timeout: float = 3600.0
    on_tokens: Callable[[], None] = lambda: None


class Speaker(abc.ABC):
    """One way to generate.

    Attributes:
        path: where.
        tells_versions: whether an answer says which weights made which token.
    """

    path: ClassVar[str]
    tells_versions: ClassVar[bool]

    async def run(self, client: Client, address: str, call: Call, part: Part) -> None:
        """Fill ``part`` as tokens arrive; returns when it is finished.

        Raises:
            ServerGone, ServerError, RequestRefused: see ``areal_vllm.client``.
        """

        def take(answer: dict[str, Any]) -> None:
            try:
                for choice in answer.get("choices", ()):
                    self._take(choice, part, call.candidates > 0)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ServerError(f"{address}{self.path} answered in a shape that is not vLLM's: {error}") from error
            if part.tokens:
                call.on_tokens()

        params = {**call.params, "logprobs": call.candidates}
        if call.stream_interval is not None:
            params["stream_interval"] = call.stream_interval
        body = self._body(call, params)
        if call.cache_salt is not None:
            body["cache_salt"] = call.cache_salt
        if call.stream_interval is None:
            take(await client.generate(address, self.path, body=body, timeout=call.timeout))
        else:
            body["stream"] = True
            await client.stream(address, self.path, body=body, timeout=call.timeout, on_event=take)
        if part.finish is None:
            raise ServerGone(f"{address}{self.path} ended its answer in the middle")
        if part.finish == "error":
            raise ServerError(f"{address}{self.path} failed in the middle of an answer")

    @abc.abstractmethod
    def _body(self, call: Call, params: dict[str, Any]) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _take(self, choice: dict[str, Any], part: Part, with_candidates: bool) -> None: ...


class GenerateSpeaker(Speaker):
    """``/inference/v1/generate``: tokens, log-probs, and the version of each span of tokens."""

    path = PATHS["generate"]
    tells_versions = True

    def _body(self, call: Call, params: dict[str, Any]) -> dict[str, Any]:
        if "stop" not in params:
            # Nobody reads the text. With stop strings the server needs it.
            params["detokenize"] = False
        return {
            "model": call.model,
            "token_ids": call.prompt,
            "request_id": call.request_id,
            "sampling_params": params,
        }

    def _take(self, choice: dict[str, Any], part: Part, with_candidates: bool) -> None:
        content = (choice.get("logprobs") or {}).get("content") or []
        _extend(part, choice.get("token_ids") or [], [entry["logprob"] for entry in content])
        if with_candidates:
            for entry in content:
                shown = {other["token_id"]: other["logprob"] for other in entry["top_logprobs"]}
                part.candidates.append({**shown, entry["token_id"]: entry["logprob"]})
        for span in choice.get("weight_versions") or ():
            part.spans.append(Span(str(span["version"]), span["start"], span["end"]))
        part.finish = choice.get("finish_reason") or part.finish


class CompletionsSpeaker(Speaker):
    """``/v1/completions`` with token ids: no versions, which the engine then keeps track of."""

    path = PATHS["completions"]
    tells_versions = False

    def _body(self, call: Call, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": call.model,
            "prompt": call.prompt,
            "request_id": call.request_id,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # A prompt is what it is: no token may be added in front of it.
            "add_special_tokens": False,
            **params,
        }

    def _take(self, choice: dict[str, Any], part: Part, with_candidates: bool) -> None:
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        tokens = choice.get("token_ids")
        if tokens is None and values:
            raise ValueError("no token ids: it does not know return_token_ids, a newer vLLM does")
        _extend(part, tokens or [], values)
        if with_candidates and tokens:
            rows = zip(tokens, values, choice["logprobs"]["top_logprobs"], strict=True)
            for token, value, row in rows:
                part.candidates.append({**{token_of(text): other for text, other in row.items()}, token: value})
        part.finish = choice.get("finish_reason") or part.finish


SPEAKERS: dict[Transport, Speaker] = {"generate": GenerateSpeaker(), "completions": CompletionsSpeaker()}


def token_of(text: str) -> int:
    """The id in ``token_id:17``, which is how a server writes a token that it is asked to name by its id."""
    return int(text.removeprefix("token_id:"))


def _extend(part: Part, tokens: list[int], logprobs: list[Any]) -> None:
    if len(logprobs) != len(tokens) or None in logprobs:
        found = sum(value is not None for value in logprobs)
        raise ValueError(f"{found} log-probs for {len(tokens)} tokens")
    part.tokens += tokens
    part.logprobs += logprobs
