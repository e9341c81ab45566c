"""A slotted KV cache, and the attention over it that transformers models call.

Tokens of all sequences lie packed in one row ``[1, N]``, so nothing is padded outside attention. The model runs
without a transformers cache: its attention layers call ``slotted_attention``, registered under ``IMPLEMENTATION``,
which stores keys and values into the cache of the pass that is active in this thread, and reads from it.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

#: Name under which the attention function is registered with transformers. It has no mask function on purpose: a
#: model then builds no mask at all.
IMPLEMENTATION = "areal_local"

_CAPACITY_STEP = 64
_WINDOW_BLOCK = 256


class UnsupportedModelError(Exception):
    """The model's attention is not one that ``slotted_attention`` computes."""


class KVCache:
    """Keys and values of ``rows`` sequences: per layer two tensors ``[rows, kv_heads, capacity, head_dim]``.

    Layers appear when the model first stores into them. Memory is zeroed, because attention multiplies masked
    values by 0, and 0 times an uninitialised NaN is NaN.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.capacity = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, rows: int, capacity: int, max_rows: int) -> None:
        """Make room for ``rows`` sequences of ``capacity`` tokens; what is stored stays."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        if rows > self.rows:
            rows = min(max_rows, max(rows, 2 * self.rows))
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + self.capacity // 2)
        new_rows = max(rows, self.rows)
        new_capacity = -(-max(capacity, self.capacity) // _CAPACITY_STEP) * _CAPACITY_STEP
        for index, (keys, values) in self.layers.items():
            self.layers[index] = (
                self._grown(keys, new_rows, new_capacity),
                self._grown(values, new_rows, new_capacity),
            )
        self.rows, self.capacity = new_rows, new_capacity

    @staticmethod
    def _grown(old: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        new = torch.zeros(rows, old.shape[1], capacity, old.shape[3], dtype=old.dtype, device=old.device)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of one layer, made to fit ``keys`` and ``values`` ``[.., kv_heads, tokens, head_dim]``."""
        found = self.layers.get(index)
        if found is None:
            found = (
                torch.zeros(
                    self.rows, keys.shape[1], self.capacity, keys.shape[3], dtype=keys.dtype, device=keys.device
                ),
                torch.zeros(
                    self.rows, values.shape[1], self.capacity, values.shape[3], dtype=values.dtype, device=values.device
                ),
            )
            self.layers[index] = found
        return found

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` onto rows ``targets`` (int64, no row in both)."""
        for keys, values in self.layers.values():
            keys[targets, :, :length] = keys[sources, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self.rows = self.capacity = 0


class Pass(Protocol):
    """One forward pass over packed tokens."""

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
        """Query ``[1, heads, N, head_dim]``, key and value of ``kv_heads`` -> ``[1, N, heads, head_dim]``."""
        ...


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    causal: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention ``[B, heads, Lq, D] x [B, heads, Lk, D]``; ``mask`` is additive."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, is_causal=causal)
    scores = torch.matmul(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        size = query.shape[2]
        mask = torch.full((size, size), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, softcap: float | None, window: int
) -> torch.Tensor:
    """Causal attention to the last ``window`` tokens; in blocks of queries, so that no mask is quadratic."""
    size, outputs = query.shape[2], []
    for start in range(0, size, max(window, _WINDOW_BLOCK)):
        stop = min(size, start + max(window, _WINDOW_BLOCK))
        first = max(0, start - window + 1)
        age = (
            torch.arange(start, stop, device=query.device)[:, None]
            - torch.arange(first, stop, device=query.device)[None, :]
        )
        mask = torch.zeros(stop - start, stop - first, dtype=query.dtype, device=query.device)
        mask.masked_fill_((age < 0) | (age >= window), float("-inf"))
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
        """``[1, heads, N, D]`` -> ``[count, heads, length, D]``."""
        tokens = packed[0].transpose(0, 1)
        tokens = tokens[self.start : self.stop] if self.gather is None else tokens[self.gather]
        return tokens.reshape(self.count, self.length, *tokens.shape[1:]).transpose(1, 2)


class PrefillPass:
    """New sequences: causal attention within each, keys and values stored to their rows."""

    def __init__(self, cache: KVCache, buckets: list[PrefillBucket]) -> None:
        self.cache, self.buckets = cache, buckets

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
        all_keys, all_values = self.cache.layer(layer, key, value)
        groups = query.shape[1] // key.shape[1]
        outputs = []
        for bucket in self.buckets:
            q, k, v = bucket.padded(query), bucket.padded(key), bucket.padded(value)
            size = bucket.length
            all_keys[bucket.rows, :, :size] = k if bucket.source is None else k[bucket.source]
            all_values[bucket.rows, :, :size] = v if bucket.source is None else v[bucket.source]
            if groups > 1:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            if window is not None and window < size:
                out = _windowed(q, k, v, scale, softcap, window)
            else:
                out = _attention(q, k, v, None, scale, softcap, causal=True)
            out = out.transpose(1, 2).flatten(0, 1)
            outputs.append(out if bucket.gather is None else out[bucket.scatter])
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


class DecodePass:
    """One new token for each of the first ``len(positions)`` rows.

    Args:
        cache: where keys and values are.
        positions: int64 ``[B]``, position of the new token in its sequence.
        length: most tokens of a sequence, the new one included.
        dtype: type of computation.
    """

    def __init__(self, cache: KVCache, positions: torch.Tensor, length: int, dtype: torch.dtype) -> None:
        self.cache, self.positions = cache, positions
        self.batch = positions.shape[0]
        # Kernels on CUDA want aligned masks; the mask hides the surplus.
        self.length = min(cache.capacity, -(-length // 16) * 16)
        self.dtype = dtype
        self.masks: dict[int | None, torch.Tensor] = {}
        self.targets: dict[int, torch.Tensor] = {}

    def _mask(self, window: int | None) -> torch.Tensor:
        """Additive ``[B, 1, 1, length]``: 0 at the tokens that are visible."""
        if window not in self.masks:
            index = torch.arange(self.length, device=self.positions.device)[None, :]
            hidden = index > self.positions[:, None]
            if window is not None:
                hidden |= index <= self.positions[:, None] - window
            mask = torch.zeros(self.batch, self.length, dtype=self.dtype, device=self.positions.device)
            self.masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self.masks[window]

    def _targets(self, heads: int) -> torch.Tensor:
        """Flat indices of the new token's keys in ``[rows * kv_heads * capacity, head_dim]``."""
        if heads not in self.targets:
            device = self.positions.device
            lane = torch.arange(self.batch * heads, device=device).view(self.batch, heads) * self.cache.capacity
            self.targets[heads] = (lane + self.positions[:, None]).flatten()
        return self.targets[heads]

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
        all_keys, all_values = self.cache.layers[layer]
        heads, kv_heads = query.shape[1], key.shape[1]
        targets = self._targets(kv_heads)
        for storage, new in ((all_keys, key), (all_values, value)):
            flat = storage.view(-1, storage.shape[3])
            flat.index_copy_(0, targets, new[0].transpose(0, 1).reshape(-1, storage.shape[3]))
        # The query heads of one key head stand in for query positions: no key is repeated.
        q = query[0].transpose(0, 1).reshape(self.batch, kv_heads, heads // kv_heads, query.shape[3])
        k, v = all_keys[: self.batch, :, : self.length], all_values[: self.batch, :, : self.length]
        out = _attention(q, k, v, self._mask(window), scale, softcap)
        return out.reshape(1, self.batch, heads, out.shape[3])


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
    """The attention function that transformers models call; runs the pass that is active in this thread."""
    if _active.current is None:
        raise RuntimeError("slotted_attention was called outside a pass of areal_local")
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        raise UnsupportedModelError(f"attention with {', '.join(unknown) or 'a mask of its own'}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no layer_idx")
    return _active.current.attend(layer, query, key, value, scaling, sliding_window, softcap), None


class active_pass:
    """Context manager: attention layers called in this thread belong to ``current``."""

    def __init__(self, current: Pass) -> None:
        self.current = current

    def __enter__(self) -> None:
        _active.current = self.current

    def __exit__(self, *exc: object) -> None:
        _active.current = None


AttentionInterface.register(IMPLEMENTATION, slotted_attention)
