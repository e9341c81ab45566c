"""Any transformers causal LM: families that the fast decoder may not know, on whichever decoder takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from areal_core.api.configs import InferenceEngineConfig
from areal_core.errors import BadInputError
from areal_local.config import LocalConfig
from areal_local.decoder import RowwiseDecoder, SlottedDecoder
from areal_local.engine import LocalEngine

VOCAB = 97
#: Wide initial weights make greedy continuations varied, and attention matter.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

t = transformers
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=VOCAB, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3,
            eos_token_id=None, bos_token_id=None,
        )
    ),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**COMMON)),
    "opt": lambda: t.OPTForCausalLM(
        t.OPTConfig(
            vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, init_std=0.2, word_embed_proj_dim=64, pad_token_id=None, eos_token_id=None,
            bos_token_id=None, tie_word_embeddings=False,
        )
    ),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**COMMON)),
    "phi3-sliding": lambda: t.Phi3ForCausalLM(t.Phi3Config(**COMMON, sliding_window=8)),
    "mistral-sliding": lambda: t.MistralForCausalLM(t.MistralConfig(**COMMON, sliding_window=8)),
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**COMMON)),
    "gemma3-text": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8)),
    "starcoder2": lambda: t.Starcoder2ForCausalLM(t.Starcoder2Config(**COMMON, sliding_window=8)),
    "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**COMMON)),
    "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**COMMON, logit_scale=1.0)),
    "mixtral": lambda: t.MixtralForCausalLM(
        t.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    ),
    "mamba": lambda: t.MambaForCausalLM(
        t.MambaConfig(
            vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2, initializer_range=0.3,
            eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
        )
    ),
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], list(range(40, 60)), [11, 12, 13], [3, 1, 4]]


def build(family: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@pytest.mark.parametrize(
    ("family", "slow"),
    [
        *((family, False) for family in FAMILIES),
        *((f, True) for f in ("gpt2", "phi3-sliding", "gemma3-text", "mixtral")),
    ],
)
def test_greedy_when_any_family_equals_transformers(
    family, slow, make_engine, generate, reference_logprobs, transformers_greedy
):
    model = build(family)
    # Fewer rows than requests: rows are freed, moved and used again.
    engine = make_engine(model, max_batch_size=3, slow_decoder=slow)

    answers = generate(engine, [(p, {"max_new_tokens": 8 + 3 * i}) for i, p in enumerate(PROMPTS)], greedy=True)

    assert not slow or isinstance(engine._loop.decoder, RowwiseDecoder)
    assert len({token for answer in answers for token in answer.output_tokens}) > 10
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.output_tokens == transformers_greedy(model, prompt, answer.output_len)
        expected = reference_logprobs(model, prompt + answer.output_tokens, len(prompt))
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=5e-5)


_REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "areal-own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_initialize_when_the_model_brings_code_needs_trust_remote_code(
    process, tmp_path, generate, monkeypatch, transformers_greedy
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # of a process
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    model.save_pretrained(folder)
    (folder / "own.py").write_text(_REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "areal-own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))

    def start(trust: bool) -> LocalEngine:
        options = {"local": LocalConfig(process=process)}
        engine = LocalEngine(InferenceEngineConfig(trust_remote_code=trust, plugin_options=options))
        engine.initialize(str(folder))
        return engine

    with pytest.raises(BadInputError, match="trust_remote_code"):
        start(False)
    engine = start(True)
    (answer,) = generate(engine, [([1, 2, 3], {})], greedy=True, max_new_tokens=6)
    engine.destroy()

    assert answer.output_tokens == transformers_greedy(model, [1, 2, 3], 6)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_decoder_when_a_transformers_model_has_experts_expected_the_cache(family, make_engine):
    engine = make_engine(build(family))

    assert type(engine._loop.decoder) is SlottedDecoder
