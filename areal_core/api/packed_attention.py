"""The attention of native models: one module that a model holds in each layer, whose way of computing engines set.

A native model projects and rotates; between that and its output projection it calls a :class:`PackedAttention`. What
happens there is the engine's business: a train engine may compute with a kernel for sequences of different lengths,
over the ranks of a context-parallel group, or over a tree of samples with a common prompt; an inference engine stores
keys and values and reads those of earlier tokens. The model is the same code in all of them.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class AttentionBackend(Protocol):
    """Computes the attention of one layer."""

    def __call__(
        self,
        attention: PackedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        tree_attn_meta: Any,
    ) -> torch.Tensor:
        """Shapes as of :meth:`PackedAttention.forward`; ``attention`` has layer, scale, window and softcap."""
        ...


class PackedAttention(nn.Module):
    """Causal attention of one layer over packed sequences. It has no parameters.

    Args:
        layer: number of the layer in the whole model, from 0; each layer has its own.
        scale: factor of the scores; None: ``head_dim ** -0.5``.
        window: how many tokens a token sees, itself included; None: all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.

    Attributes:
        backend: computes it. Set by the engine; :func:`packed_sdpa` until then.
    """

    def __init__(
        self, layer: int, *, scale: float | None = None, window: int | None = None, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.layer, self.scale, self.window, self.softcap = layer, scale, window, softcap
        self.backend: AttentionBackend = packed_sdpa

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        tree_attn_meta: Any = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: ``[T, heads, head_dim]``, after rotary embeddings.
            key: ``[T, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``, and query head ``h`` reads key
                head ``h // (heads // kv_heads)``.
            value: ``[T, kv_heads, value_dim]``.
            cu_seqlens: int32 ``[sequences + 1]``, from 0 to ``T``: sequence ``i`` is tokens ``cu_seqlens[i]`` up to
                ``cu_seqlens[i + 1]``.
            max_seqlen: no sequence has more tokens.
            tree_attn_meta: what the train engine gave the model's ``forward``.

        Returns:
            ``[T, heads, value_dim]``.
        """
        return self.backend(self, query, key, value, cu_seqlens, max_seqlen, tree_attn_meta)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend":
            # A backend that is a module, too, belongs to the engine: it is no part of the model and its state dict.
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        given = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return ", ".join(
            [f"layer={self.layer}", *(f"{name}={value}" for name, value in given.items() if value is not None)]
        )


def packed_sdpa(
    attention: PackedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    tree_attn_meta: Any,
) -> torch.Tensor:
    """The reference: PyTorch's attention, one sequence after the other. Right on any device, and slow.

    Raises:
        NotImplementedError: for a tree.
        ValueError: if ``cu_seqlens`` does not end at the number of tokens.
    """
    if tree_attn_meta is not None:
        raise NotImplementedError("packed_sdpa knows no trees; the engine that makes one sets a backend that does")
    bounds = cu_seqlens.tolist()
    if bounds[-1] != len(query):
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {len(query)} tokens")
    outputs = [
        _one_sequence(attention, query[start:stop], key[start:stop], value[start:stop])
        for start, stop in itertools.pairwise(bounds)
    ]
    return torch.cat(outputs)


def _one_sequence(
    attention: PackedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    size, window = len(query), attention.window
    if size == 0:
        return query.new_empty(0, query.shape[1], value.shape[2])
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    hidden = None
    if (window is not None and window < size) or attention.softcap is not None:
        index = torch.arange(size, device=query.device)
        hidden = index[None, :] > index[:, None]
        if window is not None:
            hidden |= index[None, :] <= index[:, None] - window
    if attention.softcap is None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if hidden is None else ~hidden,
            is_causal=hidden is None,
            scale=attention.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out[0].transpose(0, 1)
    assert hidden is not None
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * (attention.scale if attention.scale is not None else q.shape[-1] ** -0.5)
    scores = attention.softcap * torch.tanh(scores / attention.softcap)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=accurate)
    return (weights.to(v.dtype) @ v)[0].transpose(0, 1)
