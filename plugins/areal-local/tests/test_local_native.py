"""Native models that a model spec brings, against transformers' implementation of the same architecture."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, WeightUpdateMeta
from areal_core.errors import BadInputError, PluginError
from areal_core.plugins import get_plugin_manager
from areal_local.decoder import SlottedDecoder
from areal_local.native_decoder import RecomputingDecoder

VOCAB = 97
MODEL_TYPE = "areal_test_moe"
SPECS = {"packed": "native_moe:NATIVE", "own": "native_moe:OWN_ATTENTION"}


def build(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields | changes)).eval()


def save(model: Any, folder: Path) -> Path:
    """As a checkpoint of a type that transformers does not know."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}))
    return folder


def ragged_prompts(count: int) -> list[list[int]]:
    # With seed 1 two experts are as good as each other for one token, and rounding decides between them.
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (size,), generator=generator).tolist() for size in sizes]


@pytest.fixture
def check_greedy(transformers_greedy, reference_logprobs) -> Callable[[Any, list[list[int]], Any], None]:
    def check(model: Any, prompts: list[list[int]], answers: Any) -> None:
        assert len({token for answer in answers for token in answer.output_tokens}) > 10
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.output_tokens == transformers_greedy(model, prompt, answer.output_len)
            expected = reference_logprobs(model, prompt + answer.output_tokens, len(prompt))
            torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=2e-5)

    return check


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"use_sliding_window": True}], ids=str)
@pytest.mark.parametrize("kind", ["packed", "own"])
def test_greedy_when_native_equals_transformers(kind, changes, tmp_path, start_native, generate, check_greedy):
    if "use_sliding_window" in changes:
        changes = changes | {"sliding_window": 8, "max_window_layers": 0}
    model = build(**changes)
    prompts = ragged_prompts(10)
    # Fewer rows than requests: rows are freed, moved and used again.
    engine = start_native(save(model, tmp_path), spec=SPECS[kind], max_batch_size=4)

    answers = generate(engine, [(p, {"max_new_tokens": 5 + 3 * i}) for i, p in enumerate(prompts)], greedy=True)

    assert type(engine._loop.decoder) is (SlottedDecoder if kind == "packed" else RecomputingDecoder)
    check_greedy(model, prompts, answers)


def test_greedy_when_torch_computes_equals_transformers(
    tmp_path, start_native, generate, without_kernels, check_greedy
):
    model, prompts = build(), ragged_prompts(6)
    engine = start_native(save(model, tmp_path), spec=SPECS["packed"], max_batch_size=4)

    answers = generate(engine, [(prompt, {}) for prompt in prompts], greedy=True, max_new_tokens=12)

    assert type(engine._loop.decoder) is SlottedDecoder
    check_greedy(model, prompts, answers)


@pytest.mark.parametrize(
    ("kind", "process"), [("packed", False), ("own", False), pytest.param("packed", True, marks=pytest.mark.slow)]
)
def test_update_when_requests_run_expected_old_tokens_then_new(
    kind, process, tmp_path, start_native, generate, reference_logprobs, transformers_greedy
):
    old, new = build(), build(1)
    folder, update = save(old, tmp_path / "old"), save(new, tmp_path / "new")
    engine = start_native(folder, spec=SPECS[kind], process=process)
    prompt, length = [3, 1, 4, 1, 5], 120

    async def main():
        gconfigs = [GenerationHyperparameters(greedy=True, max_new_tokens=count) for count in (5, length)]
        tasks = [
            asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=prompt, gconfig=gconfig)))
            for gconfig in gconfigs
        ]
        await tasks[0]
        engine.pause_generation()
        engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=str(update), version=1))
        engine.continue_generation()
        return await tasks[1]

    answer = asyncio.run(main())

    cut = answer.output_versions.count(0)
    assert 5 <= cut < length
    assert answer.output_versions == [0] * cut + [1] * (length - cut)
    tokens, swap = prompt + answer.output_tokens, len(prompt) + cut
    assert answer.output_tokens[:cut] == transformers_greedy(old, prompt, cut)
    assert answer.output_tokens[cut:] == transformers_greedy(new, tokens[:swap], length - cut)
    expected = torch.cat([reference_logprobs(old, tokens[:swap], len(prompt)), reference_logprobs(new, tokens, swap)])
    torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=2e-5)


def test_update_when_tied_expected_either_name(tmp_path, start_native, generate, transformers_greedy):
    old, new = build(tie_word_embeddings=True), build(1, tie_word_embeddings=True)
    engine = start_native(save(old, tmp_path / "old"), spec=SPECS["packed"])
    save(new, tmp_path / "new")
    from areal_local.weights import read_safetensors

    tensors = dict(read_safetensors(tmp_path / "new"))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    engine.update_weights_from_memory(tensors.items(), 1)
    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=12)

    assert answer.output_tokens == transformers_greedy(new, [5, 6], 12)


@pytest.mark.parametrize("change", ["name", "shape", "missing", "adapter"])
def test_update_when_not_valid_expected_old_weights_and_a_named_error(
    change, tmp_path, start_native, generate, monkeypatch, transformers_greedy
):
    model = build()
    engine = start_native(save(model, tmp_path / "old"), spec=SPECS["packed"])
    save(build(1), tmp_path / "new")
    from areal_local.weights import read_safetensors

    tensors = dict(read_safetensors(tmp_path / "new"))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    if change == "name":
        tensors[name.replace("up_proj", "upp_proj")] = tensors.pop(name)
    elif change == "shape":
        tensors[name] = torch.zeros(3)
    elif change == "missing":
        del tensors[name]
    else:
        name = "layers.1.moe.w3"
        adapter = engine.model.adapter
        original = adapter.from_hf
        monkeypatch.setattr(
            adapter, "from_hf", lambda state: {k: v for k, v in original(state).items() if k != name}, raising=False
        )

    with pytest.raises(BadInputError, match="upp_proj" if change == "name" else name):
        engine.update_weights_from_memory(tensors.items(), 3)
    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=12)

    assert answer.output_tokens == transformers_greedy(model, [5, 6], 12)
    assert answer.output_versions == [0] * 12


def test_initialize_when_type_is_registered_expected_its_native_model(
    tmp_path, start_native, generate, monkeypatch, transformers_greedy
):
    site = tmp_path / "site"
    info = site / "areal_test_moe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-test-moe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[areal]\nareal_test_moe = areal_test_moe_plugin\n")
    (site / "areal_test_moe_plugin.py").write_text(
        "from areal_core import Registration, hookimpl\n"
        'AREAL_API_VERSION = "1.0"\n'
        "@hookimpl\n"
        "def areal_model_specs():\n"
        f"    return [Registration(name={MODEL_TYPE!r}, target='native_moe:NATIVE', description='A model.')]\n"
    )
    model = build()
    folder = save(model, tmp_path / "model")
    monkeypatch.syspath_prepend(str(site))
    get_plugin_manager.cache_clear()

    try:
        engine = start_native(folder)
        (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=12)
    finally:
        get_plugin_manager.cache_clear()

    assert answer.output_tokens == transformers_greedy(model, [5, 6], 12)


def test_initialize_when_transformers_knows_the_type_expected_native_only_if_named(tmp_path, start_native):
    build().save_pretrained(tmp_path)

    unnamed = start_native(tmp_path)
    named = start_native(tmp_path, spec=SPECS["packed"])

    assert type(unnamed.model).__name__ == "Qwen3MoeForCausalLM"
    assert type(named.model.model).__name__ == "NativeMoe"


@pytest.mark.parametrize(
    ("model_spec", "error", "message"),
    [
        (None, BadInputError, f"neither transformers .* nor a model spec knows the model type '{MODEL_TYPE}'"),
        ("llamma", PluginError, r"rollout\.local\.model_spec: unknown model spec 'llamma'"),
        ("native_moe:MoeArgs", PluginError, r"rollout\.local\.model_spec: .*must be a ModelSpec"),
        ("native_moe:NOWHERE", PluginError, r"rollout\.local\.model_spec: .*NOWHERE"),
    ],
)
def test_initialize_when_no_spec_fits_expected_a_named_error(model_spec, error, message, tmp_path, start_native):
    folder = save(build(), tmp_path)

    with pytest.raises(error, match=message):
        start_native(folder, spec=model_spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "is of model type 'llama'; the model spec 'areal-test-moe' reads areal_test_moe"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 4}, r"weights are missing: model\.layers\.3\.input_layernorm"),
        ({"moe_intermediate_size": 32}, r"has shape \[64, 48\], but the model's has \[64, 32\]"),
    ],
)
def test_initialize_when_the_checkpoint_does_not_fit_expected_a_named_error(change, message, tmp_path, start_native):
    folder = save(build(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(BadInputError, match=message):
        start_native(folder, spec=SPECS["packed"])


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", torch.float32), (None, torch.bfloat16)])
def test_initialize_when_bf16_expected_that_type_and_close_logprobs(
    dtype, stored, tmp_path, start_native, generate, reference_logprobs
):
    model = build()
    folder = save(model.to(stored), tmp_path)
    engine = start_native(folder, dtype=dtype, spec=SPECS["packed"])

    (answer,) = generate(engine, [([5, 6, 7], {})], greedy=True, max_new_tokens=8)

    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    expected = reference_logprobs(model.float(), [5, 6, 7, *answer.output_tokens], 3)
    torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=0.3)
