"""How native models decode: over the slotted cache, or by reading every sequence anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from areal_core.api.packed_attention import PackedAttention, packed_sdpa
from areal_core.logging import getLogger
from areal_local.attention import DecodePass, Pass, UnsupportedModelError, active_pass, current_pass
from areal_local.decoder import Decoder, SlottedDecoder, check_decoder, short_sequences, tokens_of_a_pass
from areal_local.native import NativeModel

_logger = getLogger("LocalDecoder")


def slotted_backend(
    attention: PackedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    tree_attn_meta: Any,
) -> torch.Tensor:
    """Runs the pass that is active in this thread; without one, attention as if no engine were there."""
    current = current_pass()
    if current is None:
        return packed_sdpa(attention, query, key, value, cu_seqlens, max_seqlen, tree_attn_meta)
    return current.attend(attention.layer, query, key, value, attention.scale, attention.window, attention.softcap)


class NativeNetwork:
    """A native model whose ``PackedAttention`` modules call the pass over the slotted cache.

    Args:
        head: the module that makes the logits out of ``[T, dim]``; it runs on the tokens that are asked for. None: on
            all of them.

    Raises:
        UnsupportedModelError: if the model has no ``PackedAttention``, or two with one number.
    """

    def __init__(self, native: NativeModel, head: nn.Module | None = None) -> None:
        self.native, self.head = native, head
        layers = attention_layers(native)
        if not layers:
            raise UnsupportedModelError("it has no PackedAttention")
        number, count = Counter(layer.layer for layer in layers).most_common(1)[0]
        if count > 1:
            raise UnsupportedModelError(f"{count} PackedAttention modules have the layer {number}")
        for layer in layers:
            layer.backend = slotted_backend

    def reserve(self, length: int) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        # Tables that are looked up by position must be as long as this, also where only new tokens come.
        longest = int(current.host_positions.max()) + 1 if isinstance(current, DecodePass) else max(current.lengths)
        if keep is None or self.head is None:
            with active_pass(current):
                logits = self.native.logits(tokens, positions, current.lengths, longest)
            return logits if keep is None else logits[keep]

        def only_kept(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            # Not for somebody who runs the model in another thread.
            return (args[0][keep], *args[1:]) if current_pass() is current else None

        hook = self.head.register_forward_pre_hook(only_kept)
        try:
            with active_pass(current):
                return self.native.logits(tokens, positions, current.lengths, longest, rows=len(keep))
        finally:
            hook.remove()


class RecomputingDecoder:
    """Reads every sequence anew for each token: slow, and right for any native model.

    Rows always have the weights of the moment, whatever they were when the row began.
    """

    def __init__(self, native: NativeModel, most_tokens: int) -> None:
        self.native, self.most_tokens = native, most_tokens
        self.rows: dict[int, list[int]] = {}

    def _read(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        chunk: list[Sequence[int]] = []
        for ids in sequences:
            if chunk and sum(map(len, chunk)) + len(ids) > self.most_tokens:
                logits.append(self.native.last_logits(chunk))
                chunk = []
            chunk.append(ids)
        return torch.cat([*logits, self.native.last_logits(chunk)])

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        for ids, targets in zip(sequences, rows, strict=True):
            self.rows.update({row: list(ids) for row in targets})
        return self._read(sequences)

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        sequences = [self.rows[row] for row in range(len(tokens))]
        for ids, token in zip(sequences, tokens.tolist(), strict=True):
            ids.append(token)
        return self._read(sequences)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows.pop(source)

    def clear(self) -> None:
        self.rows.clear()

    def weights_changed(self) -> None:
        pass


def attention_layers(native: NativeModel) -> list[PackedAttention]:
    return [module for module in native.model.modules() if isinstance(module, PackedAttention)]


def make_native_decoder(
    native: NativeModel, device: torch.device, max_rows: int, prefill_tokens: int, *, slow: bool = False
) -> Decoder:
    """A decoder with a cache if it gives the model's own logits on a short test; else, with a warning, one without."""
    if not slow:
        try:
            return _make_slotted(native, device, max_rows, prefill_tokens)
        except UnsupportedModelError as reason:
            _logger.warning(
                "%s reads every sequence anew for each token, which is slow: %s. Let its layers attend through "
                "areal_core.api.packed_attention.PackedAttention.",
                type(native.model).__name__,
                reason,
            )
    # It makes the logits of all of these tokens, at every token.
    return RecomputingDecoder(native, tokens_of_a_pass(prefill_tokens, device))


def _make_slotted(native: NativeModel, device: torch.device, max_rows: int, prefill_tokens: int) -> SlottedDecoder:
    """Raise ``UnsupportedModelError`` if the model's logits cannot be had over the cache."""
    sequences = short_sequences(native.vocab_size)
    layers = attention_layers(native)
    before = [layer.backend for layer in layers]
    with torch.inference_mode():
        expected, types, head = _observe(native, sequences)
        reason: Exception | None = None
        for candidate in (head, None) if head is not None else (None,):
            try:
                network = NativeNetwork(native, candidate)
                if len(types) != 1:
                    raise UnsupportedModelError(f"its layers attend in {' and '.join(sorted(map(str, types)))}")
                # Attention may compute in another type than that of the logits.
                (dtype,) = types
                exact = {dtype, expected.dtype, *(p.dtype for p in native.parameters())} == {torch.float32}
                check_decoder(
                    SlottedDecoder(network, device, dtype, 3, prefill_tokens), sequences, expected, exact=exact
                )
                return SlottedDecoder(network, device, dtype, max_rows, prefill_tokens)
            except Exception as error:  # any failure inside a foreign model's forward means: not this way
                reason = error
    for layer, backend in zip(layers, before, strict=True):
        layer.backend = backend
    raise UnsupportedModelError(str(reason) or type(reason).__name__) from reason


def _observe(
    native: NativeModel, sequences: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, set[torch.dtype], nn.Module | None]:
    """The model's own logits after the sequences, the types it attends in, and the module that makes the logits."""
    types: set[torch.dtype] = set()
    made: list[tuple[nn.Module, Any]] = []
    results: list[Any] = []
    total = sum(map(len, sequences))

    def attends(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        types.add((args[0] if args else kwargs["query"]).dtype)

    def made_by(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].dim() == 2 and len(args[0]) == total:
            made.append((module, output))

    def whole(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        results.append(output)

    hooks = [native.model.register_forward_hook(whole)]
    hooks += [module.register_forward_hook(made_by) for module in native.model.modules() if module is not native.model]
    hooks += [layer.register_forward_pre_hook(attends, with_kwargs=True) for layer in attention_layers(native)]
    try:
        expected = native.last_logits(sequences)
    finally:
        for hook in hooks:
            hook.remove()
    # The innermost one comes first.
    return expected, types, next((module for module, output in made if output is results[0]), None)
