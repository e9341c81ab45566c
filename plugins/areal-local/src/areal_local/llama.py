"""The forward pass of Llama and its near relatives, written for few calls of torch per token.

The modules of transformers spend most of a decoding step of a small model between kernels. This file runs the same
arithmetic on the same parameters (nothing is copied but the norms' weights), into buffers that are used
again. ``make_decoder`` compares it with the model's own forward before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from areal_local.attention import Pass, UnsupportedModelError, layer_windows
from areal_local.compiled import kernels_for

#: Config ``model_type`` -> the kernel of a layer is the one below. Other models run through transformers' modules.
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
#: Rotary embeddings whose frequencies do not depend on the length of the sequence.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_KEPT_TOKENS = 4096
_NO_NORM, _NO_EPS = np.empty((0, 1), dtype=np.float32), np.float32(0)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of tensors that follow each other in memory (joined in dimension 0), or None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != end or tensor.dtype != first.dtype:
            return None
        end += tensor.numel() * tensor.element_size()
    rows = sum(tensor.shape[0] for tensor in tensors)
    storage = first.untyped_storage()
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


class Projection:
    """Linear layers with the same input, as few matrix products as their memory allows.

    Args:
        layers: their outputs follow each other.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.width = sum(layer.out_features for layer in layers)
        self.parts: list[tuple[slice, torch.Tensor, torch.Tensor | None]] = []
        weight = _joined([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = _joined(biases) if len(biases) == len(layers) else None
        if weight is not None and (bias is not None or not biases):
            self.parts.append((slice(0, self.width), weight.t(), bias))
            return
        start = 0
        for layer in layers:
            part = slice(start, start + layer.out_features)
            self.parts.append((part, layer.weight.detach().t(), None if layer.bias is None else layer.bias.detach()))
            start = part.stop

    def into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """``[N, in]`` -> ``out`` ``[N, width]``."""
        for columns, weight, bias in self.parts:
            target = out if len(self.parts) == 1 else out[:, columns]
            if bias is None:
                torch.mm(hidden, weight, out=target)
            else:
                torch.addmm(bias, hidden, weight, out=target)

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the output of a single layer to ``residual`` in place."""
        ((_, weight, bias),) = self.parts
        residual.addmm_(hidden, weight)
        if bias is not None:
            residual.add_(bias)


class RMSNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension (Zhang & Sennrich, 2019, equation 4).

    In fp32 on a CPU by four kernels: x / sqrt(sum(x^2) + size * eps), times weight * sqrt(size).

    Args:
        weight: ``[size]``, or with more dimensions in front, as the input has.
        eps: as in the formula.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps, self.size = weight.detach(), eps, weight.shape[-1]
        self.fast = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if self.fast:
            self._scaled = self.weight * self.size**0.5
            self._floor = weight.new_full((), (self.size * eps) ** 0.5)
            self.array, self.epsilon = self.weight.numpy(), np.float32(eps)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.fast:
            return F.rms_norm(hidden, (self.size,), None, self.eps).mul_(self.weight)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return torch.div(hidden, norm.hypot_(self._floor)).mul_(self._scaled)


@attrs.frozen
class _Layer:
    index: int
    window: int | None
    scale: float
    norm_in: RMSNorm
    qkv: Projection
    norm_qk: RMSNorm | None
    out: Projection
    norm_mlp: RMSNorm
    gate_up: Projection
    down: Projection


@attrs.frozen(slots=False)
class Buffers:
    """Memory of one forward pass over ``N`` tokens.

    Attributes:
        qkv: ``[N, width]``.
        by_head: the same ``[N, heads + 2 * kv_heads, head_dim]``; ``qk`` and ``value`` are its parts.
        rotated: queries and keys after norm and rotary embedding ``[N, heads + kv_heads, head_dim]``; ``query`` and
            ``key`` are its parts.
        gate_up: ``[N, 2 * intermediate]``.
        gated: ``[N, intermediate]``.
        normed: ``[N, hidden]``.
    """

    qkv: torch.Tensor
    by_head: torch.Tensor
    qk: torch.Tensor
    rotated: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    normed: torch.Tensor

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """The same memory for the compiled loops."""
        return {name: getattr(self, name).numpy() for name in ("by_head", "rotated", "gate_up", "gated", "normed")}


class TorchSteps:
    """What happens between the matrix products of a forward pass, by torch's kernels.

    Args:
        buffers: of the pass.
        rope: ``[positions, 2 * head_dim]``: cosines, minus the sines of the lower half, the sines of the upper.
        positions: int64 ``[N]``.
    """

    def __init__(self, buffers: Buffers, rope: torch.Tensor, positions: torch.Tensor) -> None:
        self.buffers = buffers
        size = rope.shape[1] // 2
        half = size // 2
        self.low, self.high = slice(0, half), slice(half, None)
        turn = rope.index_select(0, positions)[:, None]
        self.cos, self.sin_low, self.sin_high = turn.split((size, half, half), dim=-1)

    def norm(self, norm: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        return norm(hidden)

    def rotate(self, norm: RMSNorm | None) -> None:
        """``qk`` to ``rotated``."""
        out = self.buffers.rotated
        plain = self.buffers.qk if norm is None else norm(self.buffers.qk)
        torch.mul(plain, self.cos, out=out)
        out[..., self.low].addcmul_(plain[..., self.high], self.sin_low)
        out[..., self.high].addcmul_(plain[..., self.low], self.sin_high)

    def gate(self) -> torch.Tensor:
        """``silu(gate) * up``, in ``gated``."""
        gate, up = self.buffers.gate_up.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate, out=self.buffers.gated)
        return self.buffers.gated.mul_(up)


class CompiledSteps:
    """As ``TorchSteps``, by the compiled loops.

    Args:
        hidden: ``[N, hidden]``, what all but the last norm are of.
    """

    def __init__(
        self, kernels: Any, buffers: Buffers, rope: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        self.kernels, self.buffers, self.arrays = kernels, buffers, buffers.arrays
        self.rope, self.positions, self.hidden = rope.numpy(), positions.numpy(), hidden.numpy()

    def norm(self, norm: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        given = self.hidden if len(self.hidden) == len(hidden) else hidden.numpy()
        self.kernels.rms_norm(given, norm.array, norm.epsilon, self.arrays["normed"])
        return self.buffers.normed if len(self.hidden) == len(hidden) else self.buffers.normed[: len(hidden)]

    def rotate(self, norm: RMSNorm | None) -> None:
        weight, eps = (_NO_NORM, _NO_EPS) if norm is None else (norm.array, norm.epsilon)
        self.kernels.rotate(self.arrays["by_head"], weight, eps, self.rope, self.positions, self.arrays["rotated"])

    def gate(self) -> torch.Tensor:
        self.kernels.silu_mul(self.arrays["gate_up"], self.arrays["gated"])
        return self.buffers.gated


class LlamaNetwork:
    """Logits of a causal LM of one of ``MODEL_TYPES``.

    Args:
        model: of transformers.

    Raises:
        UnsupportedModelError: if it deviates from what is computed here.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        if config.model_type not in MODEL_TYPES:
            raise UnsupportedModelError(f"the model type {config.model_type}")
        if config.hidden_act != "silu" or rope.get("rope_type", "default") not in _STATIC_ROPE:
            raise UnsupportedModelError("an activation or a rotary embedding of another kind")
        self.model = model
        first = model.model.layers[0].self_attn
        self.head_dim: int = first.head_dim
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self.eps: float = model.model.norm.variance_epsilon
        self.windows = layer_windows(config, range(len(model.model.layers)))
        self._rope = torch.empty(0)
        self._scratch: dict[str, torch.Tensor]
        self._kept: Buffers | None
        self.weights_changed()

    def weights_changed(self) -> None:
        """Look up where the parameters lie; call it after any change of theirs."""
        model = self.model
        # They may be on another device than before.
        self._scratch, self._kept = {}, None
        self.embedding = model.model.embed_tokens.weight.detach()
        self.kernels = kernels_for(self.embedding.device, self.embedding.dtype)
        self.norm = RMSNorm(model.model.norm.weight, self.eps)
        self.head = Projection([_linear(model.lm_head)])
        self.layers = [self._layer(index, layer) for index, layer in enumerate(model.model.layers)]

    def _layer(self, index: int, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_qk = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            both = torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)))
            norm_qk = RMSNorm(both, self.eps)
        return _Layer(
            index,
            self.windows[index],
            attention.scaling,
            RMSNorm(layer.input_layernorm.weight, self.eps),
            Projection([_linear(module) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]),
            norm_qk,
            Projection([_linear(attention.o_proj)]),
            RMSNorm(layer.post_attention_layernorm.weight, self.eps),
            Projection([_linear(module) for module in (mlp.gate_proj, mlp.up_proj)]),
            Projection([_linear(mlp.down_proj)]),
        )

    def reserve(self, length: int) -> None:
        """Positions below ``length`` will be asked for."""
        if length <= self._rope.shape[0]:
            return
        positions = torch.arange(length, device=self.embedding.device)[None]
        cos, sin = self.model.model.rotary_emb(self.embedding[:1], positions)
        if cos.shape[-1] != self.head_dim:
            raise UnsupportedModelError("a rotary embedding of a part of the head")
        half = self.head_dim // 2
        self._rope = torch.cat((cos[0], -sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def _buffers(self, count: int) -> Buffers:
        if self._kept is not None and len(self._kept.qkv) == count:
            return self._kept
        heads = self.heads + self.kv_heads
        widths = {
            "qkv": self.layers[0].qkv.width,
            "rotated": heads * self.head_dim,
            "gate_up": self.layers[0].gate_up.width,
            "gated": self.layers[0].gate_up.width // 2,
            "normed": self.embedding.shape[1],
        }
        like = self.embedding
        if count > _KEPT_TOKENS:
            scratch = {name: like.new_empty(count, width) for name, width in widths.items()}
        else:
            if not self._scratch or self._scratch["qkv"].shape[0] < count or self._scratch["qkv"].dtype != like.dtype:
                self._scratch = {name: like.new_empty(count, width) for name, width in widths.items()}
            scratch = {name: tensor[:count] for name, tensor in self._scratch.items()}
        by_head = scratch["qkv"].view(count, -1, self.head_dim)
        rotated = scratch.pop("rotated").view(count, heads, self.head_dim)
        buffers = Buffers(
            by_head=by_head,
            qk=by_head[:, :heads],
            rotated=rotated,
            query=rotated[:, : self.heads],
            key=rotated[:, self.heads :],
            value=by_head[:, heads:],
            **scratch,
        )
        self._kept = buffers if count <= _KEPT_TOKENS else None
        return buffers

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        buffers = self._buffers(len(tokens))
        query, key, value = buffers.query, buffers.key, buffers.value
        hidden = F.embedding(tokens, self.embedding)
        steps: TorchSteps | CompiledSteps
        if self.kernels is None:
            steps = TorchSteps(buffers, self._rope, positions)
        else:
            steps = CompiledSteps(self.kernels, buffers, self._rope, positions, hidden)
        for layer in self.layers:
            layer.qkv.into(buffers.qkv, steps.norm(layer.norm_in, hidden))
            steps.rotate(layer.norm_qk)
            seen = current.attend(layer.index, query, key, value, layer.scale, layer.window, None)
            layer.out.add_to(hidden, seen.view(len(tokens), -1))
            layer.gate_up.into(buffers.gate_up, steps.norm(layer.norm_mlp, hidden))
            layer.down.add_to(hidden, steps.gate())
        if keep is not None:
            hidden = hidden.index_select(0, keep)
        out = hidden.new_empty(len(hidden), self.head.width)
        self.head.into(out, steps.norm(self.norm, hidden))
        return out


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise UnsupportedModelError(f"a layer of the type {type(module).__name__} where a Linear is expected")
    return module


def pack_weights(model: Any) -> None:
    """Move the weights of projections with a common input next to each other, so that one product computes them.

    The parameters stay what they are, only their memory changes: for a model that belongs to the engine alone. Models
    of other types are left as they are.
    """
    if model.config.model_type not in MODEL_TYPES:
        return
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for modules in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for name in ("weight", "bias"):
                found = [getattr(module, name, None) for module in modules]
                tensors = [tensor for tensor in found if tensor is not None]
                if len(tensors) != len(modules):
                    continue
                memory = torch.cat([tensor.detach() for tensor in tensors])
                for tensor, part in zip(tensors, memory.split([len(tensor) for tensor in tensors]), strict=True):
                    tensor.data = part
