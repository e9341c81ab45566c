"""The embedded inference engine: any transformers causal LM, in this process, in pure torch."""

from __future__ import annotations

import asyncio
import atexit
import random
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal_core.api.alloc import ParallelStrategy
from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_local.config import LocalConfig
from areal_local.decoder import make_decoder, shared_copy
from areal_local.generation import GenerationLoop
from areal_local.rows import Pending
from areal_local.weights import apply_update, plan_update, read_safetensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = getLogger("LocalEngine")

_MASK64 = (1 << 64) - 1


class LocalEngine(InferenceEngine):
    """Generates in a thread of this process.

    Requests submitted while paused are all admitted, in order, before the first step after ``continue_generation``
    (up to ``max_batch_size``); a run that submits that way is bitwise repeatable on one machine and thread count.

    Args:
        config: ``dtype`` None means the type the weights are stored in.

    Raises:
        BadInputError: if the backend string asks for more than one process.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        mesh = config.parsed_backend.parallel
        if mesh != ParallelStrategy():
            raise BadInputError(
                f"rollout.backend: the engine 'local' runs in one process, it has no mesh of {mesh}. "
                f"Write {config.parsed_backend.name!r}, or use an engine with servers."
            )
        self.config = config
        self.options: LocalConfig = config.options if isinstance(config.options, LocalConfig) else LocalConfig()
        self.tokenizer: Any = None
        self.model: Any = None
        self._loop: GenerationLoop | None = None
        self._version = 0
        self._context: int | None = None
        self._vocab_size = 0
        self._eos_ids: tuple[int, ...] = ()
        self._seeds = random.Random(self.options.seed)
        self._exported: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------- life

    @property
    def device(self) -> torch.device:
        if self.options.device is not None:
            return torch.device(self.options.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, self.config.dtype) if self.config.dtype is not None else "auto"
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                model_path,
                dtype=dtype,
                trust_remote_code=self.config.trust_remote_code,
                use_safetensors=True,  # nothing that must be unpickled
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise BadInputError(f"{model_path}: cannot be loaded as a causal LM: {error}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            # transformers would go on with random numbers in their place.
            raise BadInputError(
                f"{model_path}: {len(missing)} tensors are missing from the safetensors, the first is {missing[0]!r}"
            )
        self._start(model.to(self.device), tokenizer)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, config: InferenceEngineConfig | None = None, tokenizer: Any = None
    ) -> LocalEngine:
        """An engine over the parameters of a model in memory, not copied: ``update_weights_*`` writes into them.

        The model itself may go on being used; its config and modules are left alone.
        """
        engine = cls(config if config is not None else InferenceEngineConfig())
        engine._start(shared_copy(model), tokenizer)
        return engine

    def _start(self, model: Any, tokenizer: Any) -> None:
        if self._loop is not None:
            raise ArealError("the engine is running already; destroy() it first")
        options = self.options
        self.model, self.tokenizer = model.eval(), tokenizer
        text = model.config.get_text_config()
        limits = [
            limit
            for limit in (getattr(text, "max_position_embeddings", None), options.max_seq_len)
            if limit is not None
        ]
        self._context = min(limits, default=None)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._eos_ids = _as_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
        device = next(model.parameters()).device
        decoder = make_decoder(model, device, options.max_batch_size, options.prefill_tokens, slow=options.slow_decoder)
        self._exported = {}
        self._loop = GenerationLoop(decoder, device, self._vocab_size, options.max_batch_size, options.num_threads)
        self._loop.version = self._version
        # A daemon thread must not run while the interpreter takes torch down.
        atexit.register(_destroy_if_alive, weakref.ref(self))

    def destroy(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
        self.model = None

    def _running(self) -> GenerationLoop:
        if self._loop is None:
            raise ArealError("the engine is not running: it was not initialised, or destroyed")
        if self._loop.error is not None:
            raise self._loop.error
        return self._loop

    # ------------------------------------------------------------------------------------------- generation

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        loop = self._running()
        pending = self._accept(request)
        loop.submit(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            loop.cancel(pending)
            raise

    def _accept(self, request: ModelRequest) -> Pending:
        """Check a request against this engine.

        Raises:
            BadInputError: if it can never be answered.
        """
        gconfig, prompt = request.gconfig, request.input_ids
        if gconfig.n_samples != 1:
            raise BadInputError(f"gconfig.n_samples is {gconfig.n_samples}: send one request per sample")
        if request.image_data:
            raise BadInputError("image_data: the local engine runs text models only")
        size = len(prompt)
        if not size:
            raise BadInputError("input_ids is empty: a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise BadInputError(f"input_ids holds an id outside the model's vocabulary of {self._vocab_size}")
        max_out = gconfig.max_new_tokens
        for limit, name in ((gconfig.max_tokens, "max_tokens"), (self._context, "the context")):
            if limit is None:
                continue
            if size >= limit:
                raise BadInputError(
                    f"the prompt has {size} tokens, which leaves no room for a completion: {name} is {limit}, "
                    f"so a prompt may have at most {limit - 1} (max_new_tokens={gconfig.max_new_tokens}). "
                    f"max_length of the dataset (train_dataset.max_length) drops longer rows"
                )
            max_out = min(max_out, limit - size)
        tokenizer = request.tokenizer if request.tokenizer is not None else self.tokenizer
        if gconfig.stop and tokenizer is None:
            raise BadInputError("gconfig.stop: stop strings need request.tokenizer")
        if "" in gconfig.stop:
            raise BadInputError("gconfig.stop holds an empty string: give text that ends a completion")
        stop_ids = tuple(gconfig.stop_token_ids)
        if not gconfig.ignore_eos:
            stop_ids += self._eos_ids + _as_ids(getattr(tokenizer, "eos_token_id", None))
        seed = gconfig.seed if gconfig.seed is not None else self._seeds.getrandbits(63)
        loop = asyncio.get_running_loop()
        return Pending(
            request=request,
            max_out=max_out,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            seed=seed & _MASK64,
            tokenizer=tokenizer,
            future=loop.create_future(),
            loop=loop,
        )

    def pause_generation(self) -> None:
        self._running().pause()

    def continue_generation(self) -> None:
        self._running().resume()

    # ------------------------------------------------------------------------------------------- weights

    def update_weights_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._update(tensors, version, "update_weights_from_memory")

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        if meta.path is None:
            raise BadInputError("update_weights_from_disk: meta.path is not set; it must name a folder of safetensors")
        folder = Path(meta.path)
        self._update(read_safetensors(folder), meta.version, str(folder))

    def _update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, source: str) -> None:
        loop = self._running()
        pairs = plan_update(self.model, tensors, source)
        with loop.exclusive():
            apply_update(pairs)
            if not self.config.weight_update_keep_kv:
                loop.invalidate()
            self.set_version(version)

    def set_version(self, version: int) -> None:
        self._version = version
        if self._loop is not None:
            self._loop.version = version

    def get_version(self) -> int:
        return self._version

    def offload(self) -> None:
        loop = self._running()
        loop.pause()
        loop.decoder.clear()
        loop.invalidate()
        if self.device.type != "cpu":
            self.model.to("cpu")

    def onload(self) -> None:
        loop = self._running()
        if self.device.type != "cpu":
            self.model.to(self.device)
        loop.resume()

    # ------------------------------------------------------------------------------------------- statistics

    def export_stats(self) -> dict[str, float]:
        """Counters since the last call (``generated_tokens``, ``prefill_tokens``: computed, ``shared_prefill_tokens``:
        saved by sharing, ``decode_steps``, ``finished``, ``busy_seconds``, ``tokens_per_second`` while busy), and the
        gauges ``running`` and ``waiting``.
        """
        if self._loop is None:
            return {}
        now = dict(self._loop.counters)
        stats = {name: value - self._exported.get(name, 0.0) for name, value in now.items()}
        self._exported = now
        busy = stats.pop("busy")
        stats["busy_seconds"] = busy
        stats["tokens_per_second"] = stats["generated_tokens"] / busy if busy > 0 else 0.0
        stats["running"] = float(self._loop.rows.running)
        stats["waiting"] = float(len(self._loop.waiting))
        return stats


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _destroy_if_alive(reference: weakref.ref[LocalEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.destroy()
