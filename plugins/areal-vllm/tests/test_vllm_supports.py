"""Samples of a truncating sampler, with the ids that it kept and log-probs over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_server import log_softmax, logits_of, make_request

from areal_core.api.io_struct import GenerationHyperparameters, ModelResponse
from areal_core.errors import BadInputError
from areal_vllm.truncation import kept

Serve = Connect = Callable[..., Any]


def ask(engine: Any, **fields: Any) -> ModelResponse:
    request = make_request([1, 2], max_new_tokens=16, **fields)
    request.return_supports = True
    return asyncio.run(engine.agenerate(request))


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("framework", {"top_k": 4}),
        ("framework", {"top_k": 1}),
        ("framework", {"top_k": 9, "top_p": 0.7, "temperature": 0.8}),
        ("framework", {"top_k": 9, "min_p": 0.2, "temperature": 1.4}),
        ("framework", {"top_k": 12, "min_p": 0.02, "top_p": 0.9}),
        ("framework", {"top_k": 5, "min_new_tokens": 9, "stop_token_ids": [3, 4, 5, 6, 7, 8]}),
        ("raw_logprobs", {"top_k": 4, "top_p": 0.8}),
        ("processed_logprobs", {"top_k": 9, "top_p": 0.7, "temperature": 0.8}),
        ("processed_logprobs", {"top_k": 9, "min_p": 0.2}),
    ],
)
def test_agenerate_when_supports_are_wanted(
    serve: Serve, connect: Connect, scale_out: bool, mode: str, fields: dict[str, Any]
) -> None:
    server = serve(scale_out=scale_out, logprobs_mode=mode)
    engine = connect(server, stream_interval=5)
    start = len(server.kept)

    response = ask(engine, **fields)

    supports = response.output_supports
    assert supports is not None and supports.dtype == np.int32 and len(supports) == response.output_len
    expected = server.kept[start:]
    assert [set(row[row >= 0].tolist()) for row in supports] == expected
    for i, token in enumerate(response.output_tokens):
        logits = logits_of("start", [1, 2, *response.output_tokens[:i]]) / fields.get("temperature", 1.0)
        ids = sorted(expected[i])
        np.testing.assert_allclose(
            response.output_logprobs[i], log_softmax(logits[ids])[ids.index(token)], rtol=0, atol=1e-9
        )


def test_agenerate_when_supports_are_wanted_and_a_server_breaks_off(serve: Serve, connect: Connect) -> None:
    server = serve(logprobs_mode="framework")
    engine = connect(server, stream_interval=2)
    server.faults = [("break", 5)]

    response = ask(engine, top_k=4)

    assert response.output_supports is not None and response.output_supports.shape == (16, 4)
    assert all(token in row for token, row in zip(response.output_tokens, response.output_supports, strict=True))


def test_agenerate_when_supports_go_on_beyond_the_minimum_expected_stops_among_them(
    serve: Serve, connect: Connect
) -> None:
    server = serve(logprobs_mode="framework")
    engine = connect(server, stream_interval=1)
    start = len(server.kept)
    # The minimum is reached by the partial answer: in the rest nothing is banned.
    server.faults = [("break", 4)]
    stops = list(range(3, 20))

    response = ask(engine, top_k=6, min_new_tokens=4, stop_token_ids=stops, seed=11)

    supports = response.output_supports
    assert supports is not None and response.output_len > 4
    assert [set(row[row >= 0].tolist()) for row in supports] == server.kept[start:]
    assert not set(supports[:4].ravel().tolist()) & set(stops)
    assert set(supports[4].tolist()) & set(stops)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"return_supports: .* Set gconfig.top_k"),
        ({"top_k": 3, "greedy": True}, r"return_supports: .* temperature above 0"),
        ({"top_k": 3, "frequency_penalty": 1.0}, r"gconfig.frequency_penalty is 1"),
    ],
)
def test_agenerate_when_supports_cannot_be_told(
    serve: Serve, connect: Connect, fields: dict[str, Any], message: str
) -> None:
    engine = connect(serve(logprobs_mode="framework"))

    with pytest.raises(BadInputError, match=message):
        ask(engine, **fields)


def test_kept_when_the_token_is_just_beyond_the_bound() -> None:
    candidates = {7: np.log(0.5), 8: np.log(0.3), 9: np.log(0.2)}

    ids, logprob = kept(candidates, 9, GenerationHyperparameters(top_k=3, top_p=0.8))

    # The server drew it, so it had kept it.
    assert ids.tolist() == [7, 8, 9]
    np.testing.assert_allclose(logprob, np.log(0.2), rtol=1e-12)


def test_kept_when_likelier_tokens_have_higher_ids_expected_ids_ascending() -> None:
    candidates = {9: np.log(0.5), 7: np.log(0.2), 8: np.log(0.3)}

    ids, _ = kept(candidates, 8, GenerationHyperparameters(top_k=3))

    assert ids.tolist() == [7, 8, 9]
