"""What the engine and its process say to each other: frames of a JSON header and raw arrays.

A frame is ``<header bytes: u32><array bytes: u64>``, the header, and the arrays it lists one after the other. Requests
and answers travel many to a frame, so that a thousand of them cost one system call and one parse. Nothing is pickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.api.supports import Supports, from_ragged, to_ragged
from areal_core.errors import ArealError, BadInputError
from areal_local.rows import Pending

Arrays = dict[str, npt.NDArray[Any]]

_HEAD = struct.Struct("<IQ")
_REASONS = ("stop", "length", "tool_calls", "abort", "interrupt")
#: Fields of ``gconfig`` that the generation loop reads, beside the seed and the lengths.
_SAMPLING = ("min_new_tokens", "greedy", "temperature", "top_p", "top_k", "min_p", "frequency_penalty")


def frame(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> bytes:
    arrays = arrays or {}
    specs = [[name, array.dtype.str, array.size] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": specs}, separators=(",", ":")).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    return b"".join((_HEAD.pack(len(text), sum(map(len, parts))), text, *parts))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], Arrays]]:
        """The frames that ``data`` completes."""
        self._data += data
        frames, position = [], 0
        while len(self._data) - position >= _HEAD.size:
            text_size, body_size = _HEAD.unpack_from(self._data, position)
            start = position + _HEAD.size
            end = start + text_size + body_size
            if len(self._data) < end:
                break
            header = json.loads(self._data[start : start + text_size])
            body = bytes(self._data[start + text_size : end])
            arrays, offset = {}, 0
            for name, dtype, size in header.pop("arrays"):
                arrays[name] = np.frombuffer(body, dtype, size, offset)
                offset += arrays[name].nbytes
            frames.append((header, arrays))
            position = end
        del self._data[:position]
        return frames


def pack_requests(requests: Sequence[Pending], tokenizers: Sequence[int]) -> bytes:
    """One ``submit`` frame. ``tokenizers``: for each request the number of its tokenizer, -1 where none is needed."""
    kinds: dict[tuple[Any, ...], int] = {}
    kind: list[int] = []
    for pending, tokenizer in zip(requests, tokenizers, strict=True):
        gconfig = pending.request.gconfig
        key = (
            *(getattr(gconfig, name) for name in _SAMPLING),
            tuple(gconfig.stop),
            pending.stop_ids,
            tokenizer,
        )
        kind.append(kinds.setdefault(key, len(kinds)))
    header = {
        "op": "submit",
        "kinds": [
            {**dict(zip(_SAMPLING, key, strict=False)), "stop": key[-3], "stop_ids": key[-2], "tokenizer": key[-1]}
            for key in kinds
        ],
    }
    prompts = [pending.request.input_ids for pending in requests]
    return frame(
        header,
        {
            "number": np.array([pending.number for pending in requests], np.int64),
            "kind": np.array(kind, np.int32),
            "max_out": np.array([pending.max_out for pending in requests], np.int64),
            "seed": np.array([pending.seed for pending in requests], np.uint64),
            "supports": np.array([pending.request.return_supports for pending in requests], np.bool_),
            "length": np.array([len(prompt) for prompt in prompts], np.int64),
            "prompt": np.array([token for prompt in prompts for token in prompt], np.int32),
        },
    )


def unpack_requests(header: Mapping[str, Any], arrays: Arrays, tokenizers: Mapping[int, Any]) -> list[Pending]:
    """Requests for a loop in this process; their answers go back by ``number``, so they have no futures."""
    configs = [
        GenerationHyperparameters(stop=kind["stop"], **{name: kind[name] for name in _SAMPLING})
        for kind in header["kinds"]
    ]
    stops = [tuple(kind["stop_ids"]) for kind in header["kinds"]]
    tokens = arrays["prompt"].tolist()
    requests, start = [], 0
    columns = (arrays[name].tolist() for name in ("number", "kind", "max_out", "seed", "supports", "length"))
    for number, kind, max_out, seed, supports, length in zip(*columns, strict=True):
        requests.append(
            Pending(
                request=ModelRequest(
                    input_ids=tokens[start : start + length], gconfig=configs[kind], rid="", return_supports=supports
                ),
                max_out=max_out,
                stop_ids=stops[kind],
                seed=seed,
                tokenizer=tokenizers.get(header["kinds"][kind]["tokenizer"]),
                future=None,  # type: ignore[arg-type]
                loop=None,  # type: ignore[arg-type]
                number=number,
            )
        )
        start += length
    return requests


def pack_answers(done: Iterable[tuple[Pending, ModelResponse | BaseException]]) -> bytes:
    """One ``done`` frame."""
    good: list[tuple[Pending, ModelResponse]] = []
    errors: list[tuple[int, list[str]]] = []
    for pending, result in done:
        if isinstance(result, BaseException):
            errors.append((pending.number, error_to_plain(result)))
        else:
            good.append((pending, result))
    return frame(
        {"op": "done", "errors": errors},
        {
            "number": np.array([pending.number for pending, _ in good], np.int64),
            "reason": np.array([_REASONS.index(answer.stop_reason) for _, answer in good], np.int8),
            # From its first token to its end: the two clocks need not agree.
            "decoding": np.array([answer.latency - answer.ttft for _, answer in good], np.float64),
            "length": np.array([answer.output_len for _, answer in good], np.int64),
            "tokens": np.array([token for _, answer in good for token in answer.output_tokens], np.int32),
            "logprobs": np.array([value for _, answer in good for value in answer.output_logprobs], np.float32),
            "versions": np.array([version for _, answer in good for version in answer.output_versions], np.int32),
            **_pack_supports([answer for _, answer in good]),
        },
    )


def _pack_supports(answers: Sequence[ModelResponse]) -> Arrays:
    """Of the answers that have them, ragged: most rows are far from the longest."""
    ragged = [(i, *to_ragged(a.output_supports)) for i, a in enumerate(answers) if a.output_supports is not None]
    if not ragged:
        return {}
    return {
        "supported": np.array([index for index, _, _ in ragged], np.int64),
        "kept_counts": np.concatenate([counts for _, counts, _ in ragged]),
        "kept": np.concatenate([ids for _, _, ids in ragged]),
    }


def _unpack_supports(arrays: Arrays, lengths: npt.NDArray[np.int64]) -> dict[int, Supports]:
    """By the answer's place among those of the frame."""
    if "supported" not in arrays:
        return {}
    places, counts = arrays["supported"], arrays["kept_counts"]
    by_answer = np.split(counts, lengths[places].cumsum()[:-1])
    ids = np.split(arrays["kept"], np.cumsum([part.sum() for part in by_answer])[:-1])
    return {i: from_ragged(part, of) for i, part, of in zip(places.tolist(), by_answer, ids, strict=True)}


@attrs.frozen
class Answer:
    """The generated part of a response; ``decoding`` in seconds."""

    number: int
    reason: Any
    decoding: float
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    supports: Supports | None


def unpack_answers(header: Mapping[str, Any], arrays: Arrays) -> tuple[list[Answer], list[tuple[int, ArealError]]]:
    tokens, logprobs, versions = (arrays[name].tolist() for name in ("tokens", "logprobs", "versions"))
    answers, start = [], 0
    supports = _unpack_supports(arrays, arrays["length"])
    columns = (arrays[name].tolist() for name in ("number", "reason", "decoding", "length"))
    for place, (number, reason, decoding, length) in enumerate(zip(*columns, strict=True)):
        end = start + length
        parts = (tokens[start:end], logprobs[start:end], versions[start:end], supports.get(place))
        answers.append(Answer(number, _REASONS[reason], decoding, *parts))
        start = end
    return answers, [(number, error_from_plain(plain)) for number, plain in header["errors"]]


def error_to_plain(error: BaseException) -> list[str]:
    kind = "BadInputError" if isinstance(error, BadInputError) else type(error).__name__
    return [kind, str(error)]


def error_from_plain(plain: Sequence[str]) -> ArealError:
    kind, message = plain
    if kind == "BadInputError":
        return BadInputError(message)
    return ArealError(message if kind == "ArealError" else f"in the generation process: {kind}: {message}")
