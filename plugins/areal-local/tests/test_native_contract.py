"""What third parties may do in a native model, its adapter and its checkpoint; against transformers' Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import BadInputError, PluginError
from areal_core.plugins import get_plugin_manager
from areal_local.decoder import SlottedDecoder
from areal_local.engine import LocalEngine
from areal_local.native_decoder import RecomputingDecoder

MODEL_TYPE = "areal_test_dense"
PROMPTS = [[5, 6, 7], [1] * 40, list(range(20, 33))]
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def start(start_native: Callable[..., LocalEngine]) -> Callable[..., LocalEngine]:
    def run(folder: Path, spec: str | None = "DENSE", **options: Any) -> LocalEngine:
        return start_native(folder, spec and f"native_dense:{spec}", **options)

    return run


def save(model: Any, folder: Path, **options: Any) -> Path:
    """As a checkpoint of a type that transformers does not know."""
    model.save_pretrained(folder, **options)
    change_config(folder, lambda config: {**config, "model_type": MODEL_TYPE})
    return folder


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | tensors, file, {"format": "pt"})


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def check_greedy(model: Any, answers: Any) -> None:
    """Each token is the most likely one by transformers' model, with its log-prob."""
    assert len({token for answer in answers for token in answer.output_tokens}) > 10
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = logits_of(model, prompt + answer.output_tokens)[len(prompt) - 1 : -1]
        assert answer.output_tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=2e-5)


def requests(count: int = 16) -> list[tuple[list[int], dict[str, Any]]]:
    return [(prompt, {"greedy": True, "max_new_tokens": count}) for prompt in PROMPTS]


# ------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("spec", "tied"),
    [
        ("DENSE", False),
        ("DENSE", True),
        ("GROWING_TABLE", False),
        ("SKIPPING", True),
        ("UNTIED", True),
        ("UNTIED_SKIPPING", True),
    ],
)
def test_greedy_when_dense_equals_transformers(spec, tied, tmp_path, start, generate, make_model):
    model = make_model("llama", tie_word_embeddings=tied)
    engine = start(save(model, tmp_path), spec)

    answers = generate(engine, requests(60))

    assert type(engine._loop.decoder) is SlottedDecoder
    check_greedy(model, answers)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_greedy_when_attention_is_odd_equals_the_reference_attention(
    with_kernels, tmp_path, start, generate, request, make_model
):
    if not with_kernels:
        request.getfixturevalue("without_kernels")
    import native_dense

    config = make_model("llama", num_hidden_layers=6).config
    args = native_dense.DenseArgs.from_hf_config(config)
    torch.manual_seed(0)
    model = native_dense.Odd(args)
    model.init_weights()
    model.init_buffers("cpu")
    config.save_pretrained(tmp_path)
    change_config(tmp_path, lambda plain: {**plain, "model_type": MODEL_TYPE})
    tensors = native_dense.DenseAdapter(args).to_hf(model.state_dict())
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    engine = start(tmp_path, "ODD")

    answers = generate(engine, requests(40))

    assert type(engine._loop.decoder) is SlottedDecoder
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor(prompt + answer.output_tokens)
        with torch.no_grad():
            logits = model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        assert answer.output_tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_initialize_when_logits_are_of_another_type_than_attention_expected_the_cache(
    computed, tmp_path, start, generate, make_model
):
    model = make_model("llama")
    engine = start(save(model, tmp_path), "FP32_LOGITS", dtype=computed)

    answers = generate(engine, requests())

    assert type(engine._loop.decoder) is SlottedDecoder
    assert {keys.dtype for keys, _ in engine._loop.decoder.cache.layers.values()} == {getattr(torch, computed)}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = logits_of(model, prompt + answer.output_tokens)[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=0.3)


def test_initialize_when_layers_have_one_number_expected_the_slow_way_and_the_reason(
    tmp_path, start, generate, make_model, caplog
):
    model = make_model("llama")
    engine = start(save(model, tmp_path), "ONE_NUMBER")

    answers = generate(engine, requests())

    assert type(engine._loop.decoder) is RecomputingDecoder
    assert "3 PackedAttention modules have the layer 0" in caplog.text
    check_greedy(model, answers)


def test_prefill_when_a_module_makes_the_logits_expected_those_of_last_tokens_only(
    tmp_path, start, generate, make_model
):
    model = make_model("llama")
    engine = start(save(model, tmp_path))
    sizes: list[int] = []
    engine.model.model.output.register_forward_hook(lambda module, args, output: sizes.append(len(output)))

    answers = generate(engine, requests(4))

    assert sizes == [len(PROMPTS)] * 4
    check_greedy(model, generate(engine, requests()))
    assert [len(answer.output_tokens) for answer in answers] == [4] * 3


def test_model_when_run_beside_the_engine_expected_its_logits(tmp_path, start, generate, make_model):
    model = make_model("llama")
    engine = start(save(model, tmp_path))
    generate(engine, requests(2))

    with torch.no_grad():
        found = engine.model.last_logits(PROMPTS)

    expected = torch.stack([logits_of(model, prompt)[-1] for prompt in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_initialize_when_in_a_thread_expected_no_random_number_of_the_trainer_is_used(tmp_path, start, make_model):
    folder = save(make_model("llama"), tmp_path)
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)

    start(folder)

    assert torch.equal(torch.rand(4), expected)


def test_initialize_when_logits_have_a_batch_dimension_expected_a_named_error(tmp_path, start, make_model):
    folder = save(make_model("llama"), tmp_path)

    with pytest.raises(
        PluginError, match=r"Batched\.forward gives \[1, 26, 97\] .* must give logits of shape \[26, voc"
    ):
        start(folder, "BATCHED")


# ------------------------------------------------------------------------------------------------------------ configs


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": MODEL_TYPE, "dtype": config["dtype"], "text_config": config | {"model_type": "acme_text"}}


def _older(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    return {**config, "rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}


def _without_vocabulary(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "vocab_size"}


@pytest.mark.parametrize("change", [_nested, _older, _without_vocabulary])
def test_initialize_when_the_config_is_unusual_equals_transformers(change, tmp_path, start, generate, make_model):
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    folder = save(model, tmp_path)
    change_config(folder, change)
    engine = start(folder)

    answers = generate(engine, requests())

    assert engine._host.facts.vocab_size == 97
    assert engine._host.facts.context == 256
    check_greedy(model, answers)


def test_initialize_when_the_args_read_a_key_that_is_not_there_expected_the_folder_and_the_key(
    tmp_path, start, make_model
):
    folder = save(make_model("llama"), tmp_path)
    change_config(folder, lambda config: {key: value for key, value in config.items() if key != "rms_norm_eps"})

    message = rf"{tmp_path}: config\.json has no 'rms_norm_eps', which DenseArgs\.from_hf_config .*'areal-test-dense'"
    with pytest.raises(BadInputError, match=message):
        start(folder)


def test_initialize_when_the_plugin_of_a_type_did_not_load_expected_its_reason(
    tmp_path, start, make_model, monkeypatch
):
    site = tmp_path / "site"
    info = site / "acme_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[areal]\nacme_models = acme_models_plugin\n")
    (site / "acme_models_plugin.py").write_text("import module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(site))
    folder = save(make_model("llama"), tmp_path / "model")
    get_plugin_manager.cache_clear()

    try:
        with pytest.raises(BadInputError, match=r"(?s)'areal_test_dense'.*acme-models is broken: .*module_that_nobody"):
            start(folder, spec=None)
    finally:
        get_plugin_manager.cache_clear()


def test_initialize_when_the_type_is_registered_with_transformers_expected_that_model(tmp_path, start, make_model):
    class OwnConfig(transformers.LlamaConfig):
        model_type = MODEL_TYPE

    class OwnModel(transformers.LlamaForCausalLM):
        config_class = OwnConfig

    folder = save(make_model("llama"), tmp_path)
    transformers.AutoConfig.register(MODEL_TYPE, OwnConfig)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel)
    try:
        engine = start(folder, spec=None)
    finally:
        CONFIG_MAPPING._extra_content.pop(MODEL_TYPE)
        transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(OwnConfig)

    assert type(engine.model) is OwnModel


# ------------------------------------------------------------------------------------------------------------ weights


def test_initialize_when_the_checkpoint_is_in_several_files_equals_transformers(tmp_path, start, generate, make_model):
    model = make_model("llama")
    folder = save(model, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2

    answers = generate(start(folder), requests())

    check_greedy(model, answers)


def test_weights_when_the_adapter_skips_a_name_expected_it_ignored(tmp_path, start, generate, make_model):
    old, new = make_model("llama"), make_model("llama", seed=1)
    folder = save(old, tmp_path)
    add_tensors(folder, **{FREQUENCIES: torch.ones(8)})
    engine = start(folder)

    before = generate(engine, requests())
    engine.update_weights_from_memory([*new.named_parameters(), (FREQUENCIES, torch.zeros(8))], 1)
    after = generate(engine, requests())

    check_greedy(old, before)
    check_greedy(new, after)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.7.mlp.up_proj.weight"])
def test_initialize_when_the_model_has_no_place_for_a_weight_expected_its_name(name, tmp_path, start, make_model):
    folder = save(make_model("llama"), tmp_path)
    add_tensors(folder, **{name: torch.ones(96, 64), FREQUENCIES: torch.ones(8)})

    with pytest.raises(BadInputError, match=rf"{tmp_path}: the model has no weight '{name}'(?!.*weight_update)"):
        start(folder)


def test_initialize_when_one_tensor_stands_for_two_parameters_expected_a_named_error(tmp_path, start, make_model):
    folder = save(make_model("llama"), tmp_path)

    with pytest.raises(PluginError, match=r"Splitting\.convert_single_to_hf .*'model\.layers\.0\.self_attn\.QK_proj"):
        start(folder, "SPLITTING")


def test_update_when_the_trainer_has_other_names_expected_the_way_over_the_disk(tmp_path, start, generate, make_model):
    model, new = make_model("llama"), make_model("llama", seed=1)
    engine = start(save(model, tmp_path / "old"))
    tensors = {name: tensor for name, tensor in new.named_parameters() if ".mlp." not in name}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 8, 64)

    with pytest.raises(
        BadInputError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj'.*weight_update\.type=disk"
    ):
        engine.update_weights_from_memory(tensors.items(), 1)
    check_greedy(model, generate(engine, requests()))
    engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=str(save(new, tmp_path / "new")), version=1))

    check_greedy(new, generate(engine, requests()))
    assert engine.get_version() == 1


def test_update_when_transformers_runs_the_model_expected_no_word_of_native_models(tmp_path, start, make_model):
    make_model("llama").save_pretrained(tmp_path)
    engine = start(tmp_path, spec=None)

    with pytest.raises(BadInputError, match=r"no weight 'experts'\.$"):
        engine.update_weights_from_memory([("experts", torch.ones(1))], 1)


@pytest.mark.slow
def test_process_when_native_expected_what_a_thread_gives(tmp_path, start, generate, make_model):
    old, new = make_model("llama"), make_model("llama", seed=1)
    folder = save(old, tmp_path / "old")
    add_tensors(folder, **{FREQUENCIES: torch.ones(8)})
    update = [*new.named_parameters(), (FREQUENCIES, torch.zeros(8))]
    sampled = [(prompt, {"seed": 3, "top_k": 5, "return_supports": True, "max_new_tokens": 12}) for prompt in PROMPTS]
    thread, process = start(folder), start(folder, process=True)

    found = []
    for engine in (thread, process):
        with pytest.raises(BadInputError, match=r"'experts'.*weight_update\.type=disk"):
            engine.update_weights_from_memory([("experts", torch.ones(1))], 1)
        before = generate(engine, sampled)
        engine.offload()
        engine.update_weights_from_memory(update, 1)
        engine.onload()
        found.append([*before, *generate(engine, sampled)])

    for here, there in zip(*found, strict=True):
        assert here.output_tokens == there.output_tokens
        assert here.output_logprobs == there.output_logprobs
        assert [list(row) for row in here.output_supports] == [list(row) for row in there.output_supports]
    assert found[0][0].output_tokens != found[0][3].output_tokens
