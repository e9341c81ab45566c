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
from areal_core.api.supports import join
from areal_core.errors import ArealError, BadInputError

_MASK = (1 << 64) - 1


def group_seed(run_seed: int, split: str, uid: str) -> int:
    """Seed of one row: a stable 64-bit hash, equal in every process and on every platform.

    A row's uid names its epoch, so that a row is sampled differently each time it comes round, and the same way when a
    resumed run plays it again.
    """
    key = f"{run_seed}\x1f{split}\x1f{uid}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def request_seed(group: int, sample: int, attempt: int, turn: int) -> int:
    """Seed of one request of the row whose ``group_seed`` is ``group``; 53 bits, which JSON holds exactly, too.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) over a different odd step for
    each of the three: a hash for each request would cost as much as the rest of its way to the engine.
    """
    x = (group + sample * 0x9E3779B97F4A7C15 + attempt * 0xD1B54A32D192ED03 + turn * 0x8CB92BA72F3D8DD7) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 11


class _Unvalidated(GenerationHyperparameters):
    """While it is filled: without the check of each value that is assigned."""

    __slots__ = ()
    __setattr__ = object.__setattr__


def _with_seed(gconfig: GenerationHyperparameters, seed: int) -> GenerationHyperparameters:
    # attrs.evolve checks every field again, for each of tens of thousands of requests a second; a loop over the fields
    # costs four times as much as naming them. A test compares the copy with that of attrs.evolve.
    copy: GenerationHyperparameters = object.__new__(_Unvalidated)
    copy.n_samples = gconfig.n_samples
    copy.max_new_tokens = gconfig.max_new_tokens
    copy.min_new_tokens = gconfig.min_new_tokens
    copy.max_tokens = gconfig.max_tokens
    copy.greedy = gconfig.greedy
    copy.temperature = gconfig.temperature
    copy.top_p = gconfig.top_p
    copy.top_k = gconfig.top_k
    copy.min_p = gconfig.min_p
    copy.stop_token_ids = gconfig.stop_token_ids
    copy.stop = gconfig.stop
    copy.ignore_eos = gconfig.ignore_eos
    copy.seed = seed
    copy.frequency_penalty = gconfig.frequency_penalty
    copy.__class__ = GenerationHyperparameters
    return copy


def _as_ids(given: Any) -> list[int]:
    """Token ids as plain integers, which any engine takes. Raises BadInputError for anything else."""
    try:
        return [operator.index(token) for token in given]
    except TypeError as error:
        kind = type(given).__name__
        if isinstance(given, (list, tuple)) and given:
            kind += f" of {type(given[0]).__name__}"
        raise BadInputError(
            f"ModelRequest.input_ids is a {kind}; it must be a list of the prompt's token ids. A tokenizer's "
            "apply_chat_template gives one with return_dict=False (since transformers 5 it gives a mapping by default)."
        ) from error


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
        with_support: responses so far that came with supports.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        uid: str = "",
        sample: int = 0,
        attempt: int = 0,
        seed: int = 0,
        group_cache: dict[Any, Any] | None = None,
        on_request: Callable[[], None] | None = None,
        with_supports: bool = False,
    ) -> None:
        """``seed`` is the row's ``group_seed``; ``on_request`` is called before each request reaches the engine.

        ``with_supports``: ask for the supports of requests that truncate within the bound.
        """
        self._engine, self._attempt, self._seed, self._on_request = engine, attempt, seed, on_request
        self._with_supports = with_supports
        self.sample = sample
        self.group_cache: dict[Any, Any] = {} if group_cache is None else group_cache
        self.requests = self.generated_tokens = self.with_support = 0
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
        input_ids = request.input_ids
        if type(input_ids) is not list or (input_ids and type(input_ids[0]) is not int):
            input_ids = _as_ids(input_ids)
        if gconfig.seed is None:
            gconfig = _with_seed(gconfig, request_seed(self._seed, self.sample, self._attempt, turn))
        episode_id = self.episode_id
        # A copy: a workflow may send one request object twice.
        request = ModelRequest(
            input_ids=input_ids,
            gconfig=gconfig,
            rid=f"{episode_id}/{turn}",
            metadata={**request.metadata, "episode_id": episode_id},
            tokenizer=request.tokenizer,
            image_data=request.image_data,
            processor=request.processor,
            return_supports=request.return_supports or (self._with_supports and gconfig.has_bounded_support),
        )
        if self._on_request is not None:
            self._on_request()
        response = await self._engine.agenerate(request)
        if response.stop_reason == "interrupt":
            response = await self._go_on(request, response)
        if response.stop_reason == "abort":
            raise ArealError("the inference engine aborted the request")
        self.generated_tokens += len(response.output_tokens)
        if response.output_supports is not None:
            self.with_support += 1
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
            whole.output_supports = join([(whole.output_supports, done), (more.output_supports, more.output_len)])
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
