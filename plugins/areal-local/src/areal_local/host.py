"""A model in this process, and the thread that generates with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from areal_core.api.vision import is_vision_language
from areal_core.errors import BadInputError
from areal_local.config import LocalConfig
from areal_local.decoder import Decoder, make_decoder
from areal_local.generation import Done, GenerationLoop, resolve_futures
from areal_local.llama import pack_weights
from areal_local.native import NativeModel, NativeWeights, choose_spec, load_native
from areal_local.native_decoder import make_native_decoder
from areal_local.rows import Pending
from areal_local.vision import VisionDecoder
from areal_local.weights import ModelWeights, read_safetensors

_THREADS_WORTH_WHILE = 10_000_000


@attrs.frozen
class ModelFacts:
    """What is needed of a model to check a request.

    Attributes:
        context: most tokens of prompt and completion, or None.
        vocab_size: ids are below it.
        eos_ids: ids that end a completion, by the model's generation config.
    """

    context: int | None
    vocab_size: int
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, options: LocalConfig) -> ModelFacts:
        native = isinstance(model, NativeModel)
        config = model.text_config if native else model.config.get_text_config()
        limits = (getattr(config, "max_position_embeddings", None), options.max_seq_len)
        return cls(
            min((limit for limit in limits if limit is not None), default=None),
            model.vocab_size if native else model.get_input_embeddings().num_embeddings,
            as_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None)),
        )


class Host(Protocol):
    """Where the model is and generates: a thread of this process (``ModelHost``) or another process.

    ``error`` is what ended it, if it ended by itself.
    """

    facts: ModelFacts

    @property
    def error(self) -> BaseException | None: ...

    def submit(self, pending: Pending) -> None: ...

    def cancel(self, pending: Pending) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def set_version(self, version: int) -> None: ...

    def update_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, source: str) -> None: ...

    def update_from_disk(self, folder: Path, version: int) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def counters(self) -> dict[str, float]:
        """Totals since the start, and the gauges ``running`` and ``waiting``."""
        ...

    def stop(self) -> None:
        """End every request with what it has (``abort``) and free everything."""
        ...


class ModelHost:
    """Generates in a thread of this process.

    Args:
        model: a transformers or native model on its device.
        options: of the engine.
        keep_kv: keep keys and values of running requests over a weight update.
        may_borrow: whether new weights may be read where they are (see ``ModelWeights``).
        deliver: gets the results of a step; None: they go to the futures of their requests.
    """

    def __init__(
        self,
        model: Any,
        options: LocalConfig,
        *,
        keep_kv: bool = False,
        may_borrow: bool = False,
        deliver: Callable[[list[Done]], None] = resolve_futures,
    ) -> None:
        self.model = model.eval()
        self.facts = ModelFacts.of(model, options)
        self.device = next(model.parameters()).device
        self.keep_kv = keep_kv
        native = isinstance(model, NativeModel)
        self.weights = NativeWeights(model) if native else ModelWeights(model, may_borrow=may_borrow)
        decoder: Decoder
        if not native and is_vision_language(model.config):
            decoder = VisionDecoder(model, self.device)
        else:
            decoder = (make_native_decoder if native else make_decoder)(
                model, self.device, options.max_batch_size, options.prefill_tokens, slow=options.slow_decoder
            )
        threads = options.num_threads if options.num_threads is not None else default_threads(model, self.device)
        self.loop = GenerationLoop(
            decoder, self.device, self.facts.vocab_size, options.max_batch_size, threads, deliver
        )
        self.submit, self.cancel = self.loop.submit, self.loop.cancel
        self.pause, self.resume, self.stop = self.loop.pause, self.loop.resume, self.loop.stop

    @property
    def error(self) -> BaseException | None:
        return self.loop.error

    def set_version(self, version: int) -> None:
        self.loop.version = version

    def update_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, source: str) -> None:
        self.swap(self.weights.table.plan(tensors, source), version)

    def swap(self, planned: Mapping[int, torch.Tensor], version: int) -> None:
        """Take over tensors that the plan of ``weights.table`` has matched, here or elsewhere."""
        with self.loop.exclusive():
            self.weights.apply(planned)
            self.loop.weights_changed(keep_kv=self.keep_kv)
            self.loop.version = version

    def update_from_disk(self, folder: Path, version: int) -> None:
        self.update_from_memory(read_safetensors(folder), version, str(folder))

    def offload(self) -> None:
        self.loop.pause()
        self.loop.decoder.clear()
        if self.device.type != "cpu":
            self.model.to("cpu")
        # After the move: what the decoder knows of the old place would keep its memory.
        self.loop.weights_changed(keep_kv=False)

    def onload(self) -> None:
        if self.device.type != "cpu":
            self.model.to(self.device)
        self.loop.weights_changed(keep_kv=False)
        self.loop.resume()

    def counters(self) -> dict[str, float]:
        gauges = {"running": float(self.loop.rows.running), "waiting": float(len(self.loop.waiting))}
        return {**self.loop.counters, **gauges}


def load_model(
    path: str, *, dtype: str | None, device: torch.device, trust_remote_code: bool, model_spec: str | None = None
) -> Any:
    """A causal or vision-language LM of a Hugging Face folder or hub id; ``dtype`` None: that of its files.

    Args:
        model_spec: ``rollout.local.model_spec``.

    Returns:
        A transformers model, or a ``NativeModel`` for a model spec that is named or found by the model's type.

    Raises:
        BadInputError: if it cannot be loaded, or its safetensors lack a weight.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    spec = choose_spec(path, model_spec, trust_remote_code=trust_remote_code)
    if spec is not None:
        return load_native(path, spec, dtype=dtype, device=device)
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        auto: Any = AutoModelForImageTextToText if is_vision_language(hf_config) else AutoModelForCausalLM
        model, info = auto.from_pretrained(
            path,
            dtype=getattr(torch, dtype) if dtype is not None else "auto",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # nothing that must be unpickled
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be loaded as a causal LM: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would go on with random numbers in their place.
        raise BadInputError(
            f"{path}: {len(missing)} tensors are missing from the safetensors, the first is {missing[0]!r}"
        )
    model = model.to(device)
    pack_weights(model)
    return model


def default_threads(model: Any, device: torch.device) -> int | None:
    """CPU threads of generation where the config names none; None: torch's setting.

    A step of a small model is over before a second thread has woken up.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 1 if device.type == "cpu" and parameters < _THREADS_WORTH_WHILE else None


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids of a config's ``eos_token_id``: None, one, or a list."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
