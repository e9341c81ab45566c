"""What an episode sees of the inference engine: it seeds, tags and counts the episode's requests."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any

import attrs

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    WeightUpdateMeta,
)
from areal_core.errors import ArealError, BadInputError

_writers: dict[str, Callable[[Any, Any], None]] = {
    attribute.name: getattr(GenerationHyperparameters, attribute.name).__set__
    for attribute in attrs.fields(GenerationHyperparameters)
}
_write_seed = _writers.pop("seed")
_write_others = tuple(_writers.values())
_read_others = operator.attrgetter(*_writers)


def request_seed(run_seed: int, split: str, uid: str, sample: int, attempt: int, turn: int) -> int:
    """Seed of one request: a stable hash, equal in every process and on every platform.

    A row's uid names its epoch, so that a row is sampled differently each time it comes round, and the same way when a
    resumed run plays it again. 53 bits: exact in JSON, too.
    """
    key = f"{run_seed}\x1f{split}\x1f{uid}\x1f{sample}\x1f{attempt}\x1f{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 11


def _with_seed(gconfig: GenerationHyperparameters, seed: int) -> GenerationHyperparameters:
    # attrs.evolve would validate every field again, for each of thousands of requests a second.
    copy = object.__new__(GenerationHyperparameters)
    for write, value in zip(_write_others, _read_others(gconfig), strict=True):
        write(copy, value)
    _write_seed(copy, seed)
    return copy


class EpisodeEngine(InferenceEngine):
    """The engine that a workflow is given; one per attempt of an episode.

    ``agenerate`` fills ``gconfig.seed`` where the workflow left it out, and ``rid`` and ``metadata["episode_id"]``; it
    goes on by itself after ``stop_reason="interrupt"``. A workflow may also read ``get_version()`` and use
    ``group_cache``. Everything else of the engine is the trainer's business and raises.

    Attributes:
        episode_id: ``uid/sample/attempt``.
        sample: index of the episode in its group.
        group_cache: a dict that the episodes of one row share, e.g. for its tokenised prompt.
        requests, generated_tokens: sent and received so far.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        run_seed: int = 0,
        split: str = "train",
        uid: str = "",
        sample: int = 0,
        attempt: int = 0,
        group_cache: dict[Any, Any] | None = None,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._run_seed, self._split, self._uid = engine, run_seed, split, uid
        self.sample, self._attempt, self._on_request = sample, attempt, on_request
        self.group_cache: dict[Any, Any] = {} if group_cache is None else group_cache
        self.requests = 0
        self.generated_tokens = 0
        self.episode_id = f"{uid}/{sample}/{attempt}"

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        turn = self.requests
        self.requests = turn + 1
        gconfig = request.gconfig
        if gconfig.n_samples != 1:
            raise BadInputError(
                f"a request asked for n_samples={gconfig.n_samples}; a request makes one completion. "
                "Use gconfig.new(n_samples=1): the controller plays one episode for each sample of a group."
            )
        if gconfig.seed is None:
            seed = request_seed(self._run_seed, self._split, self._uid, self.sample, self._attempt, turn)
            gconfig = _with_seed(gconfig, seed)
        episode_id = self.episode_id
        # A copy: a workflow may send one request object twice.
        request = ModelRequest(
            input_ids=request.input_ids,
            gconfig=gconfig,
            rid=f"{episode_id}/{turn}",
            metadata={**request.metadata, "episode_id": episode_id},
            tokenizer=request.tokenizer,
            image_data=request.image_data,
            processor=request.processor,
        )
        if self._on_request is not None:
            self._on_request()
        response = await self._engine.agenerate(request)
        if response.stop_reason == "interrupt":
            response = await self._go_on(request, response)
        if response.stop_reason == "abort":
            raise ArealError("the inference engine aborted the request")
        self.generated_tokens += len(response.output_tokens)
        return response

    async def _go_on(self, request: ModelRequest, response: ModelResponse) -> ModelResponse:
        """Finish a completion that an engine gave up on a weight update, from the tokens it has."""
        whole = attrs.evolve(response, input_tokens=list(request.input_ids))
        part = 0
        while whole.stop_reason == "interrupt":
            part += 1
            done = len(whole.output_tokens)
            gconfig = request.gconfig
            if done >= gconfig.max_new_tokens:
                whole.stop_reason = "length"
                break
            rest = attrs.evolve(
                request,
                input_ids=[*request.input_ids, *whole.output_tokens],
                rid=f"{request.rid}+{part}",
                gconfig=gconfig.new(
                    max_new_tokens=gconfig.max_new_tokens - done,
                    min_new_tokens=max(0, gconfig.min_new_tokens - done),
                    # The rest of a completion must not repeat the random numbers of its beginning.
                    seed=None if gconfig.seed is None else (gconfig.seed + part) % (1 << 53),
                ),
            )
            more = await self._engine.agenerate(rest)
            whole.output_tokens = [*whole.output_tokens, *more.output_tokens]
            whole.output_logprobs = [*whole.output_logprobs, *more.output_logprobs]
            whole.output_versions = [*whole.output_versions, *more.output_versions]
            whole.stop_reason = more.stop_reason
            whole.latency += more.latency
        return whole

    def get_version(self) -> int:
        return self._engine.get_version()

    def _forbidden(self, name: str) -> RuntimeError:
        return RuntimeError(f"a workflow called {name}() of the inference engine; that is the trainer's to do")

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        raise self._forbidden("initialize")

    def destroy(self) -> None:
        raise self._forbidden("destroy")

    def pause_generation(self) -> None:
        raise self._forbidden("pause_generation")

    def continue_generation(self) -> None:
        raise self._forbidden("continue_generation")

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        raise self._forbidden("update_weights_from_disk")

    def set_version(self, version: int) -> None:
        raise self._forbidden("set_version")
