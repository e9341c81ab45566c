"""Attention over the slotted cache, for packed tokens, and the hook through which transformers models call it.

Tokens of all sequences lie packed in one row ``[N]``, so nothing is padded outside attention. A model runs without a
transformers cache: its attention layers call the pass that is active, which stores keys and values into the slotted
cache and reads from it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from areal_local.cache import KVCache
from areal_local.compiled import SlottedAttention, kernels_for

#: Name under which the attention function is registered with transformers. It has no mask function on purpose: a
#: model then builds no mask at all.
IMPLEMENTATION = "areal_local"

_WINDOW_BLOCK = 256
#: What one more call of attention costs, in bytes of keys and values that could be read instead.
_CALL_COST_CPU, _CALL_COST_GPU = 256 << 10, 64 << 20


class UnsupportedModelError(Exception):
    """The model's attention is not one that this module computes."""


class Pass(Protocol):
    """One forward pass over ``N`` packed tokens, ``lengths`` of them from each sequence."""

    lengths: Sequence[int]

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
        """Query ``[N, heads, head_dim]``, key and value ``[N, kv_heads, head_dim]`` -> ``[N, heads, head_dim]``."""
        ...


def visibility_mask(queries: torch.Tensor, keys: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask of causal attention: 0 where a key is visible, -inf elsewhere.

    Args:
        queries: positions ``[.., Q, 1]``.
        keys: positions ``[.., 1, K]``.
        window: how many tokens are seen, the own one included; None: all.
        dtype: of the mask ``[.., Q, K]``.
    """
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Scaled dot-product attention ``[B, heads, Lq, D] x [B, heads, Lk, D]``; ``mask`` None: causal, Lq = Lk."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, is_causal=mask is None)
    if mask is None:
        index = torch.arange(query.shape[2], device=query.device)
        mask = visibility_mask(index[:, None], index[None, :], None, query.dtype)
    scores = torch.matmul(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, softcap: float | None, window: int
) -> torch.Tensor:
    """Causal attention to the last ``window`` tokens; in blocks of queries, so that no mask is quadratic."""
    size, outputs = query.shape[2], []
    index = torch.arange(size, device=query.device)
    for start in range(0, size, max(window, _WINDOW_BLOCK)):
        stop = min(size, start + max(window, _WINDOW_BLOCK))
        first = max(0, start - window + 1)
        mask = visibility_mask(index[start:stop, None], index[None, first:stop], window, query.dtype)
        block = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
        outputs.append(_attention(*block, mask, scale, softcap))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class PrefillBucket:
    """Sequences of similar length whose attention runs as one padded call.

    Args:
        starts: first packed index of each sequence.
        lengths: tokens of each sequence.
        source: for each row to fill, the sequence of the bucket it takes.
        rows: the cache rows to fill.
    """

    def __init__(
        self, starts: list[int], lengths: list[int], source: list[int], rows: list[int], device: torch.device
    ) -> None:
        self.count, self.length = len(starts), max(lengths)
        self.start, self.stop = starts[0], starts[-1] + lengths[-1]
        # Sequences of one bucket are neighbours in the packed row; equal lengths need no gather.
        self.gather: torch.Tensor | None = None
        if min(lengths) != self.length:
            first = torch.tensor(starts)[:, None]
            size = torch.tensor(lengths)[:, None]
            offset = torch.arange(self.length)[None, :]
            # Padding repeats the last token. It comes after every real one, so causal attention never reads it.
            self.gather = (first + torch.minimum(offset, size - 1)).flatten().to(device)
            self.scatter = (offset < size).flatten().nonzero().flatten().to(device)
        self.rows = torch.tensor(rows).to(device)
        self.source = None if source == list(range(self.count)) else torch.tensor(source).to(device)

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """``[N, heads, D]`` -> ``[count, heads, length, D]``."""
        tokens = packed[self.start : self.stop] if self.gather is None else packed[self.gather]
        return tokens.reshape(self.count, self.length, *tokens.shape[1:]).transpose(1, 2)


class PrefillPass:
    """New sequences, packed one behind the other: causal attention within each, keys and values stored to their rows.

    Args:
        cache: where keys and values go.
        lengths: tokens of each sequence, ascending.
        rows: the rows that each sequence fills.
        dtype: type of computation.
    """

    def __init__(
        self, cache: KVCache, lengths: Sequence[int], rows: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> None:
        self.cache, self.lengths, self.rows = cache, lengths, rows
        kernels = kernels_for(cache.device, dtype)
        self._compiled = None
        if kernels is not None:
            first: npt.NDArray[np.int64] = np.repeat([targets[0] for targets in rows], lengths)
            positions = np.concatenate([np.arange(length) for length in lengths])
            self._compiled = SlottedAttention(kernels, first, positions, torch.get_num_threads())

    @cached_property
    def _buckets(self) -> list[PrefillBucket]:
        """A bucket pads its sequences to the longest of them, inside attention only."""
        starts = (np.cumsum(self.lengths) - self.lengths).tolist()
        buckets, first = [], 0
        for stop in range(1, len(self.lengths) + 1):
            if stop < len(starts) and self.lengths[stop] <= self.lengths[first] + self.lengths[first] // 4 + 8:
                continue
            members = self.rows[first:stop]
            source = [j for j, targets in enumerate(members) for _ in targets]
            targets = [row for targets in members for row in targets]
            lengths = list(self.lengths[first:stop])
            buckets.append(PrefillBucket(starts[first:stop], lengths, source, targets, self.cache.device))
            first = stop
        return buckets

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
        cached = all_keys, all_values = self.cache.layer(layer, key, value)
        if self._compiled is not None and self._compiled.takes(query, key, value, softcap):
            out = self._compiled(query, key, value, cached, scale, window)
            for length, targets in zip(self.lengths, self.rows, strict=True):
                for stored in (all_keys, all_values) if len(targets) > 1 else ():
                    stored[list(targets[1:]), :, :length] = stored[targets[0], :, :length]
            return out
        groups = query.shape[1] // key.shape[1]
        outputs = []
        for bucket in self._buckets:
            q, k, v = bucket.padded(query), bucket.padded(key), bucket.padded(value)
            size = bucket.length
            all_keys[bucket.rows, :, :size] = k if bucket.source is None else k[bucket.source]
            all_values[bucket.rows, :, :size] = v if bucket.source is None else v[bucket.source]
            if groups > 1:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            if window is not None and window < size:
                out = _windowed(q, k, v, scale, softcap, window)
            else:
                out = _attention(q, k, v, None, scale, softcap)
            out = out.transpose(1, 2).flatten(0, 1)
            outputs.append(out if bucket.gather is None else out[bucket.scatter])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodePass:
    """One new token for each of the first ``len(positions)`` rows.

    In fp32 on a CPU, compiled loops read of each row what it holds. Elsewhere attention runs in buckets of neighbouring
    rows, each as long as its longest row, so that short rows do not pay for one long one. ``advance`` moves on by a
    token; rows that enter or leave need a new pass.

    Args:
        cache: where keys and values are.
        positions: int64 ``[B]``, position of the new token in its sequence.
        dtype: type of computation.
    """

    def __init__(self, cache: KVCache, positions: npt.NDArray[np.int64], dtype: torch.dtype) -> None:
        self.cache, self.dtype = cache, dtype
        self.host_positions = positions.copy()
        self.positions = torch.from_numpy(self.host_positions.copy()).to(cache.device)
        self.batch, self.capacity, self.generation = len(positions), cache.capacity, cache.generation
        self.lengths = [1] * self.batch
        kernels = kernels_for(cache.device, dtype)
        lanes = np.arange(len(positions))
        self._compiled = kernels and SlottedAttention(kernels, lanes, self.host_positions, torch.get_num_threads())
        self._index = torch.arange(self.capacity, device=cache.device)
        self._lanes = torch.arange(self.batch, device=cache.device)
        self._buckets: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._views: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._masks: dict[int | None, torch.Tensor] = {}
        self._targets: dict[int, torch.Tensor] = {}

    def advance(self, positions: npt.NDArray[np.int64]) -> bool:
        """Go on to ``positions`` if they are the next ones of the same rows; False if they are not."""
        if (
            len(positions) != self.batch
            or self.cache.generation != self.generation
            or not np.array_equal(positions, self.host_positions + 1)
        ):
            return False
        self.host_positions += 1
        self.positions.add_(1)
        self._measure()
        for targets in self._targets.values():
            targets.add_(1)
        full = self._masks.pop(None, None)
        self._masks.clear()
        if full is not None:
            # One more token of each row is visible.
            full.view(-1).index_fill_(0, self._lanes * self.capacity + self.positions, 0.0)
            self._masks[None] = full
        else:
            self._views.clear()
        return True

    def _measure(self) -> None:
        """Bucket sizes; kernels on CUDA want aligned masks, and the mask hides the surplus."""
        longest = [int(self.host_positions[start:stop].max()) + 1 for start, stop in self._buckets]
        sizes = [min(self.capacity, -(-length // 16) * 16) for length in longest]
        if sizes != self._sizes:
            self._sizes = sizes
            self._views.clear()

    def _layer_views(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, values and mask of each bucket; the same tensors serve several steps."""
        if not self._buckets:
            self._buckets = self._split(keys, values)
            self._measure()
        found = self._views.get(layer)
        if found is None or window is not None:
            mask = self._mask(window)
            found = self._views[layer] = [
                (keys[start:stop, :, :size], values[start:stop, :, :size], mask[start:stop, ..., :size])
                for (start, stop), size in zip(self._buckets, self._sizes, strict=True)
            ]
        return found

    def _mask(self, window: int | None) -> torch.Tensor:
        """Additive ``[B, 1, 1, capacity]``: 0 at the tokens that are visible."""
        if window not in self._masks:
            mask = visibility_mask(self.positions[:, None], self._index[None, :], window, self.dtype)
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]

    def _flat_targets(self, heads: int) -> torch.Tensor:
        """Indices ``[B, heads]`` of the new token's keys in ``[rows * heads * capacity, head_dim]``."""
        if heads not in self._targets:
            lane = torch.arange(self.batch * heads, device=self.positions.device).view(self.batch, heads)
            self._targets[heads] = lane * self.capacity + self.positions[:, None]
        return self._targets[heads]

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
        cached = all_keys, all_values = self.cache.layers[layer]
        if self._compiled is not None and self._compiled.takes(query, key, value, softcap):
            return self._compiled(query, key, value, cached, scale, window)
        heads, kv_heads = query.shape[1], key.shape[1]
        targets = (self._flat_targets(kv_heads),)
        all_keys.view(-1, all_keys.shape[3]).index_put_(targets, key)
        all_values.view(-1, all_values.shape[3]).index_put_(targets, value)
        found = self._layer_views(layer, all_keys, all_values, window)
        # The query heads of one key head stand in for query positions: no key is repeated.
        query = query.unflatten(1, (kv_heads, heads // kv_heads))
        queries = [query[start:stop] for start, stop in self._buckets] if len(self._buckets) > 1 else [query]
        outputs = [_attention(q, *views, scale, softcap) for q, views in zip(queries, found, strict=True)]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(self.batch, heads, out.shape[3])

    def _split(self, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[int, int]]:
        token_bytes = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
        call_cost = _CALL_COST_CPU if keys.device.type == "cpu" else _CALL_COST_GPU
        return split_rows(self.host_positions + 1, call_cost / token_bytes)


def split_rows(lengths: npt.NDArray[np.int64], call_cost: float) -> list[tuple[int, int]]:
    """Cut rows into (start, stop) runs, each as long as its longest, while a cut saves over ``call_cost`` tokens."""
    todo, runs = [(0, len(lengths))], []
    while todo:
        start, stop = todo.pop()
        part = lengths[start:stop]
        size: npt.NDArray[np.int64] = np.arange(1, len(part))
        left = np.maximum.accumulate(part)[:-1]
        right = np.maximum.accumulate(part[::-1])[::-1][1:]
        cost = size * left + (len(part) - size) * right
        cut = int(cost.argmin()) if len(cost) else 0
        if len(cost) and len(part) * int(part.max()) - int(cost[cut]) > call_cost:
            todo += [(start + cut + 1, stop), (start, start + cut + 1)]
        else:
            runs.append((start, stop))
    return runs


class _Active(threading.local):
    current: Pass | None = None


_active = _Active()

#: Keyword arguments of a model's attention call that ``slotted_attention`` may ignore.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cache",
        "past_key_values",
    }
)


def slotted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers models call; runs the pass that is active in this thread.

    Query ``[1, heads, N, head_dim]``, key and value of ``kv_heads`` -> ``[1, N, heads, head_dim]``.
    """
    if _active.current is None:
        raise RuntimeError("slotted_attention was called outside a pass of areal_local")
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        raise UnsupportedModelError(f"attention with {', '.join(unknown) or 'a mask of its own'}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no layer_idx")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _active.current.attend(layer, q, k, v, scaling, sliding_window, softcap)[None], None


def current_pass() -> Pass | None:
    """The pass that is active in this thread."""
    return _active.current


class active_pass:
    """Context manager: attention layers called in this thread belong to ``current``."""

    def __init__(self, current: Pass) -> None:
        self.current = current

    def __enter__(self) -> None:
        _active.current = self.current

    def __exit__(self, *exc: object) -> None:
        _active.current = None


AttentionInterface.register(IMPLEMENTATION, slotted_attention)


def layer_windows(config: Any, layers: Sequence[int]) -> dict[int, int | None]:
    """The sliding window of each layer by a model's text config.

    Raises:
        UnsupportedModelError: for a kind of layer that is neither full nor sliding attention.
    """
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False and types is None:
        window = None
    windows: dict[int, int | None] = {}
    for layer in layers:
        kind = types[layer] if types else "sliding_attention" if window else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer {layer} is of the kind {kind}")
        windows[layer] = window if kind == "sliding_attention" else None
    return windows
