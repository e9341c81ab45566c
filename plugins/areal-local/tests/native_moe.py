"""Native models as a third party would bring them: Qwen3's architecture with experts, and two odd ones.

``NATIVE`` attends through ``PackedAttention``, ``OWN_ATTENTION`` in its own way. The checkpoints are Qwen3-MoE's under
another model type, so that transformers' own implementation is an independent reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from native_dense import Dense, no_parallelize, rotate
from torch import nn

from areal_core.api.model_api import BaseModelArgs, BaseStateDictAdapter, ModelSpec
from areal_core.api.packed_attention import PackedAttention
from areal_core.errors import BadInputError

MODEL_TYPE = "areal_test_moe"


@attrs.define(kw_only=True)
class MoeArgs(BaseModelArgs):
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_dim: int
    norm_eps: float
    rope_theta: float
    tied: bool
    window: int | None

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> MoeArgs:
        if hf_config.hidden_act != "silu":
            raise BadInputError(f"hidden_act is {hf_config.hidden_act!r}; this model has 'silu' only")
        return cls(
            vocab_size=hf_config.vocab_size,
            dim=hf_config.hidden_size,
            n_layers=hf_config.num_hidden_layers,
            n_heads=hf_config.num_attention_heads,
            n_kv_heads=hf_config.num_key_value_heads,
            head_dim=hf_config.head_dim,
            experts=hf_config.num_local_experts,
            experts_per_token=hf_config.num_experts_per_tok,
            expert_dim=hf_config.moe_intermediate_size,
            norm_eps=hf_config.rms_norm_eps,
            rope_theta=hf_config.rope_parameters["rope_theta"],
            tied=hf_config.tie_word_embeddings,
            window=hf_config.sliding_window if getattr(hf_config, "use_sliding_window", False) else None,
        )


class OwnAttention(nn.Module):
    """Attention that no engine can look into."""

    def __init__(self, layer: int, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        total = len(query)
        sequence = torch.bucketize(torch.arange(total), cu_seqlens[1:].long(), right=True)
        visible = (sequence[:, None] == sequence[None, :]).tril()
        if self.window is not None:
            visible &= torch.arange(total)[None, :] > torch.arange(total)[:, None] - self.window
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, args: MoeArgs, layer: int, own: bool) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.inner: nn.Module = OwnAttention(layer, args.window) if own else PackedAttention(layer, window=args.window)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, *packed: Any) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.wo(self.inner(q, k, v, *packed).flatten(1))


class Experts(nn.Module):
    """All experts of a layer, stacked; each token goes to the best few of them."""

    def __init__(self, args: MoeArgs) -> None:
        super().__init__()
        self.top = args.experts_per_token
        self.router = nn.Linear(args.dim, args.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(args.experts, args.expert_dim, args.dim))
        self.w2 = nn.Parameter(torch.empty(args.experts, args.dim, args.expert_dim))
        self.w3 = nn.Parameter(torch.empty(args.experts, args.expert_dim, args.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in range(len(self.w1)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(x[token] @ self.w1[expert].T) * (x[token] @ self.w3[expert].T)
            out.index_add_(0, token, hidden @ self.w2[expert].T * weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self, args: MoeArgs, layer: int, own: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, layer, own)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.moe = Experts(args)

    def forward(self, x: torch.Tensor, *packed: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *packed)
        return x + self.moe(self.ffn_norm(x))


class NativeMoe(Dense):
    own_attention = False

    def make_block(self, args: MoeArgs, layer: int) -> nn.Module:
        return Block(args, layer, self.own_attention)


class OwnAttentionMoe(NativeMoe):
    own_attention = True


_TO_HF = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "moe.router.weight": "mlp.gate.weight",
}
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MoeAdapter(BaseStateDictAdapter):
    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        to_native = {hf: native for native, hf in _TO_HF.items()}
        found: dict[str, Any] = {}
        experts: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in hf_state_dict.items():
            layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
            expert = re.search(r"mlp\.experts\.(\d+)\.(\w+)\.weight", name)
            if layer and expert:
                native = next(key for key, hf in _EXPERTS.items() if hf == expert[2])
                experts.setdefault(f"layers.{layer[1]}.moe.{native}", {})[int(expert[1])] = tensor
            elif layer:
                found[f"layers.{layer[1]}.{to_native[layer[2]]}"] = tensor
            else:
                found[to_native[name]] = tensor
        for name, parts in experts.items():
            found[name] = torch.stack([parts[i] for i in sorted(parts)])
        return found

    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        pairs = [pair for name, tensor in state_dict.items() for pair in self.convert_single_to_hf(name, tensor)]
        return dict(pairs)

    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not name.startswith("layers."):
            return [(_TO_HF[name], tensor)]
        _, layer, rest = name.split(".", 2)
        if rest.rpartition(".")[2] in _EXPERTS:
            hf = _EXPERTS[rest.rpartition(".")[2]]
            return [(f"model.layers.{layer}.mlp.experts.{i}.{hf}.weight", tensor[i]) for i in range(len(tensor))]
        return [(f"model.layers.{layer}.{_TO_HF[rest]}", tensor)]


def _make_spec(name: str, model_class: type) -> ModelSpec:
    return ModelSpec(
        name=name,
        model_class=model_class,
        model_args_class=MoeArgs,
        state_dict_adapter_class=MoeAdapter,
        parallelize_fn=no_parallelize,
        supported_model_types=frozenset({MODEL_TYPE, "qwen3_moe"}),
    )


NATIVE = _make_spec("areal-test-moe", NativeMoe)
OWN_ATTENTION = _make_spec("areal-test-moe-own", OwnAttentionMoe)
