"""A dense native model, Llama's architecture, and variants of it that do what third parties may do.

The checkpoints are Llama's under another model type, so that transformers' implementation is an independent reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from areal_core.api.model_api import BaseModelArgs, BaseStateDictAdapter, ModelSpec
from areal_core.api.packed_attention import PackedAttention

MODEL_TYPE = "areal_test_dense"


@attrs.define(kw_only=True)
class DenseArgs(BaseModelArgs):
    vocab_size: int
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> DenseArgs:
        text = getattr(hf_config, "text_config", hf_config)
        return cls(
            vocab_size=getattr(text, "vocab_size", 97),
            dim=text.hidden_size,
            hidden_dim=text.intermediate_size,
            n_layers=text.num_hidden_layers,
            n_heads=text.num_attention_heads,
            n_kv_heads=text.num_key_value_heads,
            norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            tied=text.tie_word_embeddings,
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class Attention(nn.Module):
    def __init__(self, args: DenseArgs, layer: int) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.inner = PackedAttention(layer)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, *packed: Any) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.inner(rotate(q, rope), rotate(k, rope), v, *packed).flatten(1))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = rope.to(x.dtype)[:, None].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, args: DenseArgs, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, layer)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: torch.Tensor, *packed: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *packed)
        hidden = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Dense(nn.Module):
    ties = True
    table = 256

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): self.make_block(args, i) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tied and self.ties:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope", torch.empty(0), persistent=False)

    def make_block(self, args: Any, layer: int) -> nn.Module:
        return Block(args, layer)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        tree_attn_meta: Any = None,
    ) -> torch.Tensor:
        x, rope = self.tok_embeddings(tokens), self.rope_of(positions, max_seqlen)
        for block in self.layers.values():
            x = block(x, rope, cu_seqlens, max_seqlen, tree_attn_meta)
        return self.output(self.norm(x))

    def rope_of(self, positions: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return self.rope[positions]

    def init_weights(self) -> None:
        if self.args.tied and self.ties:
            self.output.weight = self.tok_embeddings.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def init_buffers(self, buffer_device: torch.device | str) -> None:
        self.rope = self.make_rope(self.table).to(buffer_device)

    def make_rope(self, length: int) -> torch.Tensor:
        inverse = self.args.rope_theta ** -(torch.arange(0, self.args.head_dim, 2).double() / self.args.head_dim)
        angles = torch.arange(length).double()[:, None] * inverse
        return torch.cat([angles.cos(), angles.sin()], 1).float()


class GrowingTable(Dense):
    """Its table of rotary embeddings is as long as the longest sequence so far."""

    table = 0

    def rope_of(self, positions: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        if max_seqlen > len(self.rope):
            self.rope = self.make_rope(max_seqlen).to(self.rope.device)
        return self.rope[positions]


class Fp32Logits(Dense):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs).float()


class OneNumber(Dense):
    """Every layer says that it is the first."""

    def __init__(self, args: DenseArgs) -> None:
        super().__init__(args)
        for block in self.layers.values():
            block.attention.inner = PackedAttention(0)


class OddAttention(Attention):
    """Small values, a scale, and by layer a window or a soft cap."""

    value_dim = 6

    def __init__(self, args: DenseArgs, layer: int) -> None:
        super().__init__(args, layer)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.value_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.value_dim, args.dim, bias=False)
        self.inner = PackedAttention(
            layer, scale=0.3, window=8 if layer % 2 else None, softcap=5.0 if layer % 3 == 0 else None
        )

    def forward(self, x: torch.Tensor, rope: torch.Tensor, *packed: Any) -> torch.Tensor:
        q, k = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk))
        v = self.wv(x).unflatten(-1, (-1, self.value_dim))
        return self.wo(self.inner(rotate(q, rope), rotate(k, rope), v, *packed).flatten(1))


class Odd(Dense):
    def __init__(self, args: DenseArgs) -> None:
        super().__init__(args)
        for layer, block in enumerate(self.layers.values()):
            block.attention = OddAttention(args, layer)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


class Batched(Dense):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)[None]


class Untied(Dense):
    """Has two parameters where the checkpoint has one tensor."""

    ties = False


_TOP = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "w1.weight": "mlp.gate_proj.weight",
    "w2.weight": "mlp.down_proj.weight",
    "w3.weight": "mlp.up_proj.weight",
    None: "self_attn.rotary_emb.inv_freq",
}


class DenseAdapter(BaseStateDictAdapter):
    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        layer_names = {hf: native for native, hf in _LAYER.items()}
        names = {hf: native for native, hf in (_TOP | {"output.weight": "lm_head.weight"}).items()}
        found: dict[str, Any] = {}
        for name, tensor in hf_state_dict.items():
            if name.startswith("model.layers."):
                _, _, layer, rest = name.split(".", 3)
                if layer_names[rest] is not None:
                    found[f"layers.{layer}.{layer_names[rest]}"] = tensor
            else:
                found[names[name]] = tensor
        if self.model_args.tied:
            found["output.weight"] = found["tok_embeddings.weight"]
        return found

    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return dict(pair for name, tensor in state_dict.items() for pair in self.convert_single_to_hf(name, tensor))

    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if name == "output.weight":
            return [(_TOP["tok_embeddings.weight"] if self.model_args.tied else "lm_head.weight", tensor)]
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            return [(f"model.layers.{layer}.{_LAYER[rest]}", tensor)]
        return [(_TOP[name], tensor)]


class Skipping(DenseAdapter):
    """Has no name for the second end of a tie."""

    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [] if name == "output.weight" and self.model_args.tied else super().convert_single_to_hf(name, tensor)


class Splitting(DenseAdapter):
    """Says that queries and keys are one tensor of the checkpoint."""

    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        ((hf, piece),) = super().convert_single_to_hf(name, tensor)
        return [(hf.replace(".q_proj", ".QK_proj").replace(".k_proj", ".QK_proj"), piece)]


def no_parallelize(model: nn.Module, parallel_dims: Any, **kwargs: Any) -> nn.Module:
    raise NotImplementedError("these models only generate")


def _make_spec(model_class: type, adapter_class: type[BaseStateDictAdapter] = DenseAdapter) -> ModelSpec:
    return ModelSpec(
        name="areal-test-dense",
        model_class=model_class,
        model_args_class=DenseArgs,
        state_dict_adapter_class=adapter_class,
        parallelize_fn=no_parallelize,
        supported_model_types={MODEL_TYPE},
    )


DENSE = _make_spec(Dense)
GROWING_TABLE = _make_spec(GrowingTable)
FP32_LOGITS = _make_spec(Fp32Logits)
ONE_NUMBER = _make_spec(OneNumber)
ODD = _make_spec(Odd)
BATCHED = _make_spec(Batched)
UNTIED = _make_spec(Untied)
SKIPPING = _make_spec(Dense, Skipping)
UNTIED_SKIPPING = _make_spec(Untied, Skipping)
SPLITTING = _make_spec(Dense, Splitting)
