"""Which log-probs a server gives: found by asking, and held against what a request needs.

The framework's log-prob of a token is ``log_softmax(logits / T)`` over the whole vocabulary, before truncation,
penalties and banned stop tokens. vLLM has four modes (``--logprobs-mode``), none of which is that for every request.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.errors import BadInputError
from areal_vllm.client import Client, RequestRefused
from areal_vllm.protocol import PATHS, Transport, token_of

_CANDIDATES = 16
_PROMPTS = ([1, 2], [3], [5, 4, 3])
_TEMPERATURE = 2.0
#: Relative to the spread of the candidates, far above the noise of bfloat16 and far below the effect of T = 2.
_TOLERANCE = 0.1
_SPREAD = 1e-3


class LogprobMode(enum.Enum):
    """What the log-prob that a server gives is of.

    The values are said to people. ``raw``: the model at temperature 1, whatever the request. ``processed``: what was
    sampled from, after everything. ``framework``: the framework's definition, as of servers that the plugin starts.
    ``unknown``: the model finds all tokens equally likely, as one of random weights may; asked again after an update.
    """

    RAW = "raw (temperature 1)"
    PROCESSED = "processed (after temperature and truncation)"
    FRAMEWORK = "by the framework's definition"
    UNKNOWN = "of a kind that this model's weights do not tell"


async def find_mode(client: Client, address: str, model: str, transport: Transport, *, timeout: float) -> LogprobMode:
    """Find out by a few requests for one token.

    Raises:
        BadInputError: if the server gives logits, or what fits no mode.
    """
    for prompt in _PROMPTS:

        async def ask(temperature: float, count: int, top_k: int = 0, prompt: list[int] = prompt) -> dict[int, float]:
            return await _candidates(client, address, model, transport, prompt, temperature, top_k, count, timeout)

        count = _CANDIDATES
        while True:
            try:
                plain = await ask(1.0, count)
                break
            except RequestRefused:
                if count == 1:
                    raise
                count //= 4  # Down to 1: the server may have a lower --max-logprobs.
        if sum(math.exp(min(value, 1.0)) for value in plain.values()) > 1 + 1e-2:
            raise BadInputError(
                f"{address} gives logits in place of log-probs. Start it with --logprobs-mode processed_logprobs."
            )
        spread = _spread(plain, plain)
        warm = await ask(_TEMPERATURE, count)
        best = max(plain, key=lambda token: plain[token])
        if spread < _SPREAD or abs(warm[best]) < _SPREAD:
            continue  # All tokens as likely, or one that is certain: neither temperature nor truncation would show.
        tempered = _spread(warm, plain) / spread
        # Without candidates: those that top-k removed have no log-prob that JSON can hold.
        single = await ask(_TEMPERATURE, 0, top_k=1)
        renormalised = abs(single[best] - warm[best]) > abs(warm[best]) / 2
        if abs(tempered - 1) < _TOLERANCE and not renormalised:
            return LogprobMode.RAW
        if abs(tempered - 1 / _TEMPERATURE) < _TOLERANCE:
            return LogprobMode.PROCESSED if renormalised else LogprobMode.FRAMEWORK
        raise BadInputError(
            f"{address} gives log-probs that fit no known --logprobs-mode (a temperature of {_TEMPERATURE:g} changes "
            f"their differences by a factor of {tempered:.3g}). Start it with --logprobs-mode processed_logprobs."
        )
    return LogprobMode.UNKNOWN


def check(mode: LogprobMode, gconfig: GenerationHyperparameters, address: str, *, supports: bool = False) -> None:
    """Whether the server's log-probs are the framework's for this request.

    Args:
        supports: whether log-probs over the tokens that truncation kept are wanted.

    Raises:
        BadInputError: naming the option, and what would be right.
    """
    if mode is LogprobMode.FRAMEWORK:
        return
    if mode is LogprobMode.UNKNOWN:
        raise BadInputError(
            f"{address}: its model finds all tokens equally likely, or one certain, so that its --logprobs-mode cannot "
            "be told. Serve another model, or update its weights first."
        )
    if mode is LogprobMode.RAW:
        if gconfig.effective_temperature != 1.0:
            raise BadInputError(
                f"gconfig.temperature is {gconfig.temperature:g}, but {address} gives log-probs at temperature 1 "
                "(--logprobs-mode raw_logprobs). Start it with --logprobs-mode processed_logprobs, let the run start "
                "its servers, or use temperature 1."
            )
        return
    changing = {"frequency_penalty": 0.0, "min_new_tokens": 0}
    if not gconfig.is_greedy and not supports:
        changing |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for name, neutral in changing.items():
        value = getattr(gconfig, name)
        if value != neutral:
            raise BadInputError(
                f"gconfig.{name} is {value:g}, but {address} gives log-probs of what is left after it "
                "(--logprobs-mode processed_logprobs). Start it with --logprobs-mode raw_logprobs and use temperature "
                f"1, let the run start its servers (on a GPU with VLLM_USE_V2_MODEL_RUNNER=0 in rollout.vllm.env), or "
                f"leave {name} at {neutral:g}."
            )


def _spread(values: dict[int, float], by: dict[int, float]) -> float:
    """From the likeliest token to the least likely of the candidates, both by ``by``."""
    common = [token for token in by if token in values]
    if len(common) < 2:
        return math.nan
    return values[max(common, key=lambda token: by[token])] - values[min(common, key=lambda token: by[token])]


async def _candidates(
    client: Client,
    address: str,
    model: str,
    transport: Transport,
    prompt: list[int],
    temperature: float,
    top_k: int,
    count: int,
    timeout: float,
) -> dict[int, float]:
    """Log-probs of the likeliest tokens after ``prompt``, by id."""
    params: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": top_k,
        "min_p": 0.0,
        "logprobs": count,
        "n": 1,
        "seed": 0,
        "ignore_eos": True,
    }
    if transport == "generate":
        body: dict[str, Any] = {"model": model, "token_ids": prompt, "sampling_params": {**params, "detokenize": False}}
        answer = await client.post(address, PATHS[transport], body=body, timeout=timeout)
        entry = answer["choices"][0]["logprobs"]["content"][0]
        entries = [entry, *entry.get("top_logprobs", ())]
        return {e["token_id"]: e["logprob"] for e in entries if e["logprob"] is not None}
    body = {**params, "model": model, "prompt": prompt, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    answer = await client.post(address, PATHS[transport], body=body, timeout=timeout)
    logprobs = answer["choices"][0]["logprobs"]
    found = dict(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)) | logprobs["top_logprobs"][0]
    return {token_of(text): value for text, value in found.items() if value is not None}
