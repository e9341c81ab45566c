"""The embedded inference engine: any transformers causal LM, in pure torch, in this process or one of its own."""

from __future__ import annotations

import asyncio
import atexit
import random
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from areal_core.api.alloc import ParallelStrategy
from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from areal_core.api.supports import MAX_SUPPORT
from areal_core.api.vision import is_vision_language
from areal_core.errors import ArealError, BadInputError
from areal_local.config import LocalConfig
from areal_local.decoder import shared_copy
from areal_local.host import Host, ModelHost, as_ids, load_model
from areal_local.rows import Pending
from areal_local.vision import ImageReader
from areal_local.weights import FROM_TRAINER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MASK64 = (1 << 64) - 1


class LocalEngine(InferenceEngine):
    """Generates in a thread of this process, or in a process of its own (``local.process``), with equal results.

    Requests submitted while paused are all admitted, in order, before the first step after ``continue_generation``
    (up to ``max_batch_size``); a run that submits that way is bitwise repeatable on one machine and thread count.

    Args:
        config: ``dtype`` None means the type the weights are stored in.

    Raises:
        BadInputError: if the backend string asks for more than one process.
    """

    returns_supports: ClassVar[bool] = True

    def __init__(self, config: InferenceEngineConfig) -> None:
        mesh = config.parsed_backend.parallel
        if mesh != ParallelStrategy():
            raise BadInputError(
                f"rollout.backend: the engine 'local' has one model, it has no mesh of {mesh}. "
                f"Write {config.parsed_backend.name!r}, or use an engine with servers."
            )
        self.config = config
        self.options: LocalConfig = config.options if isinstance(config.options, LocalConfig) else LocalConfig()
        self.tokenizer: Any = None
        self._host: Host | None = None
        self._version = 0
        self._seeds = random.Random(self.options.seed)
        self._images = ImageReader()
        self._exported: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------- life

    @property
    def device(self) -> torch.device:
        if self.options.device is not None:
            return torch.device(self.options.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def model(self) -> Any:
        """The model that generates; None where it is in another process, and after ``destroy``."""
        return getattr(self._host, "model", None)

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        self._check_stopped()
        config, options = self.config, self.options
        host: Host
        if options.process:
            from areal_local.remote import ProcessHost

            host = ProcessHost(str(model_path), config, options, self.device)
        else:
            model = load_model(
                model_path,
                dtype=config.dtype,
                device=self.device,
                trust_remote_code=config.trust_remote_code,
                model_spec=options.model_spec,
            )
            host = ModelHost(
                model,
                options,
                keep_kv=config.weight_update_keep_kv,
                # Asynchronous generation goes on during the optimizer step: it must not read half of the new weights.
                may_borrow=options.share_weights and config.max_head_offpolicyness == 0,
            )
        self._start(host, tokenizer)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, config: InferenceEngineConfig | None = None, tokenizer: Any = None
    ) -> LocalEngine:
        """An engine over the parameters of a model in memory, not copied: ``update_weights_*`` writes into them.

        The model itself may go on being used; its config and modules are left alone.

        Raises:
            BadInputError: with ``local.process``: another process cannot have this one's model.
        """
        engine = cls(config if config is not None else InferenceEngineConfig())
        if engine.options.process:
            raise BadInputError(
                "rollout.local.process: a model in memory belongs to this process. Save it and call initialize, or "
                "leave process false."
            )
        engine._start(
            ModelHost(shared_copy(model), engine.options, keep_kv=engine.config.weight_update_keep_kv), tokenizer
        )
        return engine

    def _check_stopped(self) -> None:
        if self._host is not None:
            raise ArealError("the engine is running already; destroy() it first")

    def _start(self, host: Host, tokenizer: Any) -> None:
        self._host, self.tokenizer = host, tokenizer
        self._exported = {}
        host.set_version(self._version)
        # Neither a thread nor a process may outlive the interpreter that it answers to.
        atexit.register(_destroy_if_alive, weakref.ref(self))

    def destroy(self) -> None:
        host, self._host = self._host, None
        self._images = ImageReader()
        if host is not None:
            host.stop()

    @property
    def _loop(self) -> Any:
        return getattr(self._host, "loop", None)

    def _running(self) -> Host:
        if self._host is None:
            raise ArealError("the engine is not running: it was not initialised, or destroyed")
        if self._host.error is not None:
            raise self._host.error
        return self._host

    # ------------------------------------------------------------------------------------------- generation

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        host = self._running()
        pending = self._accept(request, host)
        host.submit(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            host.cancel(pending)
            raise

    def _accept(self, request: ModelRequest, host: Host) -> Pending:
        """Check a request against this engine.

        Raises:
            BadInputError: if it can never be answered.
        """
        gconfig, prompt, facts = request.gconfig, request.input_ids, host.facts
        if gconfig.n_samples != 1:
            raise BadInputError(f"gconfig.n_samples is {gconfig.n_samples}: send one request per sample")
        if not prompt:
            raise BadInputError("input_ids is empty: a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
            raise BadInputError(f"input_ids holds an id outside the model's vocabulary of {facts.vocab_size}")
        max_out = request.room_for_completion(facts.context)
        tokenizer = request.tokenizer if request.tokenizer is not None else self.tokenizer
        if gconfig.stop and tokenizer is None:
            raise BadInputError("gconfig.stop: stop strings need request.tokenizer")
        if request.return_supports and not gconfig.has_bounded_support:
            raise BadInputError(
                f"return_supports: needs samples of a bounded number of tokens. Set gconfig.top_k to 1..{MAX_SUPPORT} "
                f"(it is {gconfig.top_k}), and a temperature above 0."
            )
        if "" in gconfig.stop:
            raise BadInputError("gconfig.stop holds an empty string: give text that ends a completion")
        stop_ids = tuple(gconfig.stop_token_ids)
        if not gconfig.ignore_eos:
            stop_ids += facts.eos_ids + as_ids(getattr(tokenizer, "eos_token_id", None))
        images = self._read_images(request) if request.image_data else {}
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
            images=images,
        )

    def _read_images(self, request: ModelRequest) -> Mapping[str, torch.Tensor]:
        model = self.model
        if model is None:
            raise BadInputError(
                "rollout.local.process: images are not sent to another process yet. Set it to false, to generate in a "
                "thread."
            )
        if not is_vision_language(model.config):
            raise BadInputError(
                f"image_data: model type {model.config.model_type!r} reads text only. Use a vision-language model, or "
                "a workflow without images."
            )
        return self._images.read(request, model)

    def pause_generation(self) -> None:
        self._running().pause()

    def continue_generation(self) -> None:
        self._running().resume()

    # ------------------------------------------------------------------------------------------- weights

    def update_weights_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See the contract. In synchronous mode the tensors may be read in place until the next update."""
        self._running().update_from_memory(tensors, version, FROM_TRAINER)
        self._version = version

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        if meta.path is None:
            raise BadInputError("update_weights_from_disk: meta.path is not set; it must name a folder of safetensors")
        self._running().update_from_disk(Path(meta.path), meta.version)
        self._version = meta.version

    def set_version(self, version: int) -> None:
        self._version = version
        if self._host is not None:
            self._host.set_version(version)

    def get_version(self) -> int:
        return self._version

    def offload(self) -> None:
        self._running().offload()

    def onload(self) -> None:
        self._running().onload()

    # ------------------------------------------------------------------------------------------- statistics

    def export_stats(self) -> dict[str, float]:
        """Counters since the last call (``generated_tokens``, ``prefill_tokens``: computed, ``shared_prefill_tokens``:
        saved by sharing, ``decode_steps``, ``finished``, ``busy_seconds``, ``tokens_per_second`` while busy), and the
        gauges ``running`` and ``waiting``.
        """
        if self._host is None:
            return {}
        now = self._host.counters()
        gauges = {name: now.pop(name) for name in ("running", "waiting")}
        stats = {name: value - self._exported.get(name, 0.0) for name, value in now.items()}
        self._exported = now
        busy = stats.pop("busy")
        stats["busy_seconds"] = busy
        stats["tokens_per_second"] = stats["generated_tokens"] / busy if busy > 0 else 0.0
        return {**stats, **gauges}


def _destroy_if_alive(reference: weakref.ref[LocalEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.destroy()
