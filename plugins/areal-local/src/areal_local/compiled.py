"""Where the compiled loops of ``kernels`` are used, and how they are called with tensors of torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from areal_core.logging import getLogger
from areal_local.sampling import uniform

_logger = getLogger("LocalCompiled")

_UNLIMITED = 1 << 40
#: Keys of a call to attention from which on a second thread is worth waking.
_KEYS_PER_THREAD = 16384


@cache
def _kernels() -> ModuleType | None:
    try:
        from areal_local import kernels
    except Exception as error:  # numba may be missing, or fail on a new Python or machine
        _logger.warning("generation on this CPU is slower than it could be: numba does not load (%s)", error)
        return None
    return kernels


def kernels_for(device: torch.device, dtype: torch.dtype) -> Any:
    """The module ``kernels``, or None where it does not apply: it is for fp32 on a CPU."""
    return _kernels() if device.type == "cpu" and dtype == torch.float32 else None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="areal-local-attention")


def _flat(tensor: torch.Tensor) -> tuple[npt.NDArray[np.float32], int]:
    """``[N, heads, head_dim]`` as one array in which the heads of a token follow each other; the tokens' distance."""
    if tensor.stride()[1:] != (tensor.shape[2], 1):
        tensor = tensor.contiguous()
    stride = tensor.stride(0)
    size = (len(tensor) - 1) * stride + tensor.shape[1] * tensor.shape[2]
    return tensor.as_strided((size,), (1,)).numpy(), stride


class SlottedAttention:
    """Attention of packed tokens over the slotted cache: each sees its own row up to itself.

    Args:
        kernels: the module.
        rows: int64 ``[N]``, of the cache.
        positions: int64 ``[N]`` in these rows; the caller may move them on.
        threads: to use at most.
    """

    def __init__(
        self, kernels: Any, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], threads: int
    ) -> None:
        self.kernels, self.rows, self.positions, self.threads = kernels, rows, positions, threads
        self._scores: dict[tuple[int, int], list[npt.NDArray[np.float32]]] = {}
        self._given: tuple[tuple[torch.Tensor, ...], tuple[Any, ...]] | None = None
        self._layers: dict[int, tuple[tuple[torch.Tensor, torch.Tensor], tuple[Any, Any]]] = {}

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
        """Whether attention of this kind is compiled."""
        return (
            softcap is None
            and key.shape[2] == value.shape[2] == query.shape[2]
            and query.shape[1] <= self.kernels.MAX_GROUP * key.shape[1]
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor],
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend; ``[N, heads, head_dim]``."""
        count, heads, size = query.shape
        arrays = self._arrays(query, key, value)
        keys, values = self._cached(cached)
        self.kernels.store(*arrays[2:], keys, values, self.rows, self.positions)
        # Not of torch's default type: loading a model in another thread changes it for all.
        out = query.new_empty(count, heads, size)
        given = (*arrays[:2], keys, values, self.rows, self.positions)
        factor = np.float32(size**-0.5 if scale is None else scale)
        seen = _UNLIMITED if window is None else window
        runs = self._runs(keys.shape[1])
        scores = self._scratch(len(runs), heads // keys.shape[1], keys.shape[2])
        attend, result = self.kernels.attention(size), out.numpy()
        others = [
            _pool().submit(attend, *given, first, last, factor, seen, part, result)
            for (first, last), part in zip(runs[1:], scores[1:], strict=True)
        ]
        attend(*given, *runs[0], factor, seen, scores[0], result)
        for other in others:
            other.result()
        return out

    def _arrays(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Query, key and value, flat, each with its stride; the same tensors come for every layer."""
        if self._given is None or any(a is not b for a, b in zip(self._given[0], tensors, strict=True)):
            kept = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in tensors)
            arrays = tuple(part for tensor in tensors for part in _flat(tensor))
            if not kept:
                return arrays
            self._given = (tensors, arrays)
        return self._given[1]

    def _cached(self, cached: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        found = self._layers.get(id(cached))
        if found is None or found[0] is not cached:
            found = self._layers[id(cached)] = (cached, (cached[0].numpy(), cached[1].numpy()))
        return found[1]

    def _runs(self, kv_heads: int) -> list[tuple[int, int]]:
        """(first, last) tokens of each thread, with about the same number of keys."""
        total = np.cumsum(self.positions + 1)
        threads = min(self.threads, len(total), max(1, int(total[-1]) * kv_heads // _KEYS_PER_THREAD))
        if threads == 1:
            return [(0, len(total))]
        cuts = np.searchsorted(total, total[-1] * np.arange(1, threads) / threads).tolist()
        edges = [0, *cuts, len(total)]
        return list(pairwise(edges))

    def _scratch(self, threads: int, group: int, capacity: int) -> Sequence[npt.NDArray[np.float32]]:
        found = self._scores.setdefault((group, capacity), [])
        while len(found) < threads:
            found.append(np.empty((group, capacity), dtype=np.float32))
        return found[:threads]


def fast_uniform(
    device: torch.device, starts: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """``sampling.uniform``, compiled where the device is a CPU."""
    kernels = kernels_for(device, torch.float32)
    if kernels is None:
        return uniform(starts, positions)
    out = np.empty(len(starts), dtype=np.float64)
    kernels.uniform(starts, positions, out)
    return out


def sample_plain(
    kernels: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    greedy: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens and log-probs ``[B]`` from logits ``[B, V]`` by temperature alone; see ``sampling.SamplingParams``."""
    batch, vocab = logits.shape
    tokens, logprobs = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.float32)
    kernels.sample(
        logits.contiguous().numpy(),
        np.ones(batch, dtype=np.float32) if temperature is None else temperature.numpy(),
        np.zeros(batch, dtype=np.bool_) if greedy is None else greedy.numpy(),
        uniforms.numpy(),
        np.empty(vocab, dtype=np.float32),
        tokens,
        logprobs,
    )
    return tokens, logprobs
