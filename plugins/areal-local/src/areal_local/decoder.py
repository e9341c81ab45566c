"""From tokens to logits: the fast decoder over the slotted cache, and a slow one that any model can use."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from areal_core.logging import getLogger
from areal_local.attention import (
    IMPLEMENTATION,
    DecodePass,
    Pass,
    PrefillPass,
    UnsupportedModelError,
    active_pass,
    layer_windows,
)
from areal_local.cache import KVCache
from areal_local.llama import LlamaNetwork

_logger = getLogger("LocalDecoder")

#: Activations of more tokens than this leave the caches of a CPU, and larger products are no faster.
_CPU_PREFILL_TOKENS = 1024
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def tokens_of_a_pass(prefill_tokens: int, device: torch.device) -> int:
    """Most tokens to read in one forward pass; ``prefill_tokens`` is the option."""
    return prefill_tokens if device.type != "cpu" else min(prefill_tokens, _CPU_PREFILL_TOKENS)


class Decoder(Protocol):
    """Holds the keys and values of rows 0, 1, ..., and computes logits of next tokens."""

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        """Read whole sequences. Sequence ``i`` is stored in every row of ``rows[i]``; logits ``[n, V]``, in order.

        ``capacity``: most tokens that any row will hold soon.
        """
        ...

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Append one token to each of the first ``B`` rows; logits ``[B, V]``."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy rows of at most ``length`` tokens."""
        ...

    def clear(self) -> None:
        """Forget all rows and free their memory."""
        ...

    def weights_changed(self) -> None:
        """The model's parameters have other values, or lie elsewhere."""
        ...


class Network(Protocol):
    """A model over packed tokens; its attention layers call the pass."""

    def reserve(self, length: int) -> None:
        """Positions below ``length`` will be asked for."""
        ...

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits ``[n, V]`` at the packed indices ``keep``, or at all of the ``N`` tokens."""
        ...

    def weights_changed(self) -> None:
        """The parameters have other values, or lie elsewhere."""
        ...


class ModuleNetwork:
    """Any transformers causal LM that uses the attention ``IMPLEMENTATION``, through its own modules."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def reserve(self, length: int) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        with active_pass(current):
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            )
        return output.logits[0]


class SlottedDecoder:
    """Decodes all rows in one forward pass."""

    def __init__(
        self, network: Network, device: torch.device, dtype: torch.dtype, max_rows: int, prefill_tokens: int
    ) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self.max_rows, self.prefill_tokens = max_rows, prefill_tokens
        self.cache = KVCache(device)
        self._decoding: DecodePass | None = None

    def _tensor(self, values: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(values, dtype=np.int64))
        return tensor.to(self.device, non_blocking=True)

    def _reserve(self, rows: int, capacity: int) -> None:
        self.cache.reserve(rows, capacity, self.max_rows)
        self.network.reserve(self.cache.capacity)

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        self._reserve(1 + max(map(max, rows)), max(capacity, max(map(len, sequences))))
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        most = tokens_of_a_pass(self.prefill_tokens, self.device)
        logits: list[torch.Tensor] = []
        chunk: list[int] = []
        size = 0
        for i in order:
            if chunk and size + len(sequences[i]) > most:
                logits.append(self._prefill_chunk(chunk, sequences, rows))
                chunk, size = [], 0
            chunk.append(i)
            size += len(sequences[i])
        logits.append(self._prefill_chunk(chunk, sequences, rows))
        inverse = np.argsort(np.asarray(order))
        return (logits[0] if len(logits) == 1 else torch.cat(logits))[self._tensor(inverse)]

    def _prefill_chunk(
        self, chunk: list[int], sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        lengths = [len(sequences[i]) for i in chunk]
        ends = np.cumsum(lengths)
        tokens = np.concatenate([np.asarray(sequences[i], dtype=np.int64) for i in chunk])
        positions = np.concatenate([np.arange(length) for length in lengths])
        current = PrefillPass(self.cache, lengths, [rows[i] for i in chunk], self.dtype)
        return self.network.logits(current, self._tensor(tokens), self._tensor(positions), self._tensor(ends - 1))

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        self._reserve(len(tokens), int(positions.max()) + 1)
        current = self._decoding
        if current is None or not current.advance(positions):
            current = self._decoding = DecodePass(self.cache, positions, self.dtype)
        return self.network.logits(current, self._tensor(tokens), current.positions, None)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        self.cache.move(self._tensor(sources), self._tensor(targets), length)

    def clear(self) -> None:
        self.cache.clear()
        self._decoding = None

    def weights_changed(self) -> None:
        self.network.weights_changed()


class _WindowRecorder:
    """A network that notes the sliding window that each layer asks for."""

    def __init__(self, inner: Network) -> None:
        self.inner = inner
        self.windows: dict[int, int | None] = {}
        self.reserve, self.weights_changed = inner.reserve, inner.weights_changed

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        return self.inner.logits(_RecordingPass(current, self.windows), tokens, positions, keep)


class _RecordingPass:
    def __init__(self, inner: Pass, windows: dict[int, int | None]) -> None:
        self.inner, self.windows = inner, windows
        self.lengths = inner.lengths

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self.windows[layer] = window
        return self.inner.attend(layer, query, key, value, scale, window, softcap)


class RowwiseDecoder:
    """One sequence at a time with the model's own cache: slow, and right for any causal LM."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[1])
        self.keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.caches: dict[int, Any] = {}

    def _forward(self, tokens: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        output = self.model(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            use_cache=True,
            **({self.cache_name: cache} if cache is not None else {}),
            **self.keep,
        )
        return output.logits[0, -1], getattr(output, self.cache_name)

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        logits = []
        for tokens, targets in zip(sequences, rows, strict=True):
            last, cache = self._forward(tokens, None)
            logits.append(last)
            for row in targets[1:]:
                self.caches[row] = copy.deepcopy(cache)
            self.caches[targets[0]] = cache
        return torch.stack(logits)

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        logits = []
        for row, token in enumerate(tokens.tolist()):
            last, self.caches[row] = self._forward([token], self.caches[row])
            logits.append(last)
        return torch.stack(logits)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.caches[target] = self.caches.pop(source)

    def clear(self) -> None:
        self.caches.clear()

    def weights_changed(self) -> None:
        pass


def shared_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the modules and the config over the same parameter tensors."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo)


def make_decoder(
    model: Any, device: torch.device, max_rows: int, prefill_tokens: int, *, slow: bool = False
) -> Decoder:
    """The fastest decoder that gives this model's logits on a short test; a warning where only the slow one does."""
    if slow:
        return RowwiseDecoder(model, device)
    with torch.inference_mode():
        sequences, expected = _short_test(model, device)
        for make in (LlamaNetwork, ModuleNetwork):
            original = model.config._attn_implementation
            try:
                if make is ModuleNetwork:
                    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
                        raise UnsupportedModelError("its forward has no logits_to_keep")
                    model.set_attn_implementation(IMPLEMENTATION)
                network = _WindowRecorder(make(model))
                decoder = SlottedDecoder(network, device, expected.dtype, 3, prefill_tokens)
                check_decoder(decoder, sequences, expected)
                windows = layer_windows(model.config.get_text_config(), list(network.windows))
                for layer, found in network.windows.items():
                    # A short test cannot see a window of thousands of tokens.
                    if found != windows[layer]:
                        raise UnsupportedModelError(
                            f"layer {layer} uses the window {found}, the config says {windows[layer]}"
                        )
                return SlottedDecoder(network.inner, device, expected.dtype, max_rows, prefill_tokens)
            except Exception as error:  # any failure inside a foreign model's forward means: not this way
                model.set_attn_implementation(original)
                reason = error
                _logger.debug("%s is not for %s: %s", make.__name__, type(model).__name__, error or type(error))
    _logger.warning(
        "%s runs on the slow decoder, one sequence at a time: %s", type(model).__name__, reason or type(reason)
    )
    return RowwiseDecoder(model, device)


def short_sequences(vocab_size: int) -> list[list[int]]:
    """What decoders are tried on."""
    return [[(7 * i + 3 * j) % vocab_size for i in range(size)] for j, size in enumerate((4, 7, 15))]


def _short_test(model: Any, device: torch.device) -> tuple[list[list[int]], torch.Tensor]:
    """Three sequences, and the logits of the model after each, ``[3, V]``."""
    sequences = short_sequences(model.config.get_text_config().vocab_size)
    logits = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1] for ids in sequences]
    return sequences, torch.stack(logits)


def check_decoder(
    decoder: SlottedDecoder, sequences: list[list[int]], expected: torch.Tensor, *, exact: bool | None = None
) -> None:
    """Raise ``UnsupportedModelError`` unless the decoder gives the logits ``expected [n, V]`` after ``sequences``.

    Args:
        exact: whether to allow for rounding in fp32 only; None: by the decoder's type.
    """
    decoder.prefill([ids[:-2] for ids in sequences], [[0], [1], [2]], 16)
    for back in (2, 1):
        tokens = np.array([ids[-back] for ids in sequences])
        found = decoder.decode(tokens, np.array([len(ids) - back for ids in sequences]))
    found = found.clone()  # decoders may use their buffers again
    # After the decoding, which must not find the keys and values of the whole sequences.
    read = decoder.prefill(sequences, [[0], [1], [2]], 16)
    expected = expected.float()
    error = float((torch.stack([found, read]).float() - expected).abs().max())
    exact = decoder.dtype == torch.float32 if exact is None else exact
    allowed = (1 + float(expected.abs().max())) * (1e-4 if exact else 5e-2)
    if not error <= allowed:
        raise UnsupportedModelError(f"the fast decoder's logits differ by {error:.3g} from the model's own")
