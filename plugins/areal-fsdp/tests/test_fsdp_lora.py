"""LoRA against peft alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.api.batch import TokenOutput
from areal_core.api.configs import LoRAConfig
from areal_core.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal_core.errors import BadInputError


def lora(**fields: Any) -> LoRAConfig:
    return LoRAConfig(**{"rank": 4, "alpha": 12.0, **fields})


@pytest.mark.parametrize(
    ("fields", "modules_to_save"),
    [
        ({}, []),
        ({"target_modules": ["q_proj", "down_proj"], "rank": 2, "alpha": 7.0}, []),
        ({"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}, ["lm_head"]),
    ],
    ids=str,
)
def test_train_batch_when_lora_expected_losses_and_parameters_of_peft_alone(
    fields: dict[str, Any], modules_to_save: list[str], tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    config = lora(**fields)
    engine = cases.make_engine(folder, optimizer=cases.sgd(lr=0.5), lora=config, seed=3)
    reference = cases.load_reference(folder, dtype=torch.float32)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(
        reference,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=fields.get("target_modules", "all-linear"),
            modules_to_save=modules_to_save or None,
        ),
    )
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)

    for seed in range(3):
        batch = cases.ragged_batch(seed)
        result = engine.train_batch(batch, cases.policy_loss, cases.token_weight)
        optimizer.zero_grad()
        logprobs, _ = cases.reference_logprobs(wrapped, batch)
        loss = cases.policy_loss(TokenOutput(logprobs), batch).loss / cases.token_weight(batch)
        loss.backward()
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        norm = torch.stack([p.grad.norm() for p in wrapped.parameters() if p.grad is not None]).norm().item()
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)
        optimizer.step()

    live = dict(engine.model.named_parameters())
    expected = {n.removeprefix("base_model.model."): p for n, p in wrapped.named_parameters()}
    assert live.keys() == expected.keys()
    for name, parameter in expected.items():
        trained = ".lora_" in name or ".modules_to_save." in name
        assert live[name].requires_grad == parameter.requires_grad == trained
        assert_close(live[name], parameter, rtol=1e-4, atol=1e-5)
    assert max(p.abs().max() for n, p in live.items() if "lora_B" in n) > 1e-3


def trained_engine(tmp_path: Path, **fields: Any) -> Any:
    folder = cases.make_folder("qwen3", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=cases.sgd(lr=0.5), lora=lora(**fields))
    for seed in range(2):
        engine.train_batch(cases.ragged_batch(seed), cases.policy_loss, cases.token_weight)
    return engine


def test_save_hf_when_lora_expected_merged_and_trained_weights_untouched(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path)
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    expected = engine.forward(cases.ragged_batch()).logprobs

    engine.save(SaveLoadMeta(path=tmp_path / "out"))

    merged = cases.make_engine(tmp_path / "out").forward(cases.ragged_batch()).logprobs
    assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    base = cases.make_engine(tmp_path / "model").forward(cases.ragged_batch()).logprobs
    assert (merged - base).abs().max() > 1e-2
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())
    names = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().keys()
    assert not any("lora" in n or "base_layer" in n for n in names)


def test_update_weights_when_lora_expected_merged_names(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path)
    received: dict[str, torch.Tensor] = {}

    class Receiver:
        def update_weights_from_memory(self, tensors: Any, version: int) -> None:
            received.update(tensors)

    receiver: Any = Receiver()
    engine.connect_engine(receiver, WeightUpdateMeta())
    engine.update_weights(WeightUpdateMeta())

    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert received.keys() == dict(plain.named_parameters()).keys()


def test_save_hf_when_lora_is_on_transposed_layers_expected_merged_as_peft_merges(tmp_path: Path) -> None:
    folder = cases.make_folder("gpt2", tmp_path / "model")
    engine = cases.make_engine(
        folder, optimizer=cases.sgd(lr=5.0), lora=lora(target_modules=["c_attn", "c_proj"]), attn_impl="sdpa"
    )
    engine.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)
    engine.save_adapter(tmp_path / "adapter")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()

    engine.save(SaveLoadMeta(path=tmp_path / "out"))

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"):
        assert (merged[name] - base[name]).abs().max() > 1e-3
    for name, value in expected.items():
        assert_close(merged[name], value, rtol=1e-6, atol=1e-6)


def test_load_hf_when_an_adapter_was_trained_expected_the_loaded_weights_alone(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path)
    other = cases.make_folder("qwen3", tmp_path / "other", seed=3)
    expected = cases.make_engine(other).forward(cases.ragged_batch()).logprobs

    engine.load(SaveLoadMeta(path=other))

    assert_close(engine.forward(cases.ragged_batch()).logprobs, expected, rtol=1e-5, atol=1e-5)


def test_disable_adapter_when_trained_expected_reference_logprobs(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path)
    base = cases.make_engine(tmp_path / "model").forward(cases.ragged_batch()).logprobs

    with engine.disable_adapter():
        disabled = engine.forward(cases.ragged_batch()).logprobs

    assert_close(disabled, base, rtol=0, atol=0)
    assert not torch.equal(engine.forward(cases.ragged_batch()).logprobs, base)


def test_save_adapter_when_trained_expected_peft_loads_it(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path, modules_to_save=["lm_head"])
    batch = cases.ragged_batch()
    expected = engine.forward(batch).logprobs

    engine.save_adapter(tmp_path / "adapter")

    loaded = peft.PeftModel.from_pretrained(
        cases.load_reference(tmp_path / "model", dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        logprobs, _ = cases.reference_logprobs(loaded.eval(), batch)
    assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_resume_when_lora_expected_bitwise_continuation(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path, dropout=0.1)
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)
    engine.save(meta)
    first = engine.train_batch(cases.ragged_batch(5), cases.policy_loss, cases.token_weight)
    other = cases.make_engine(tmp_path / "model", optimizer=cases.sgd(lr=0.5), lora=lora(dropout=0.1), seed=8)

    other.load(meta)

    assert other.train_batch(cases.ragged_batch(5), cases.policy_loss, cases.token_weight) == first


def test_initialize_when_lora_expected_no_warning(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases.make_engine(folder, optimizer=cases.sgd(), lora=lora())


def test_initialize_when_target_is_unknown_expected_error_that_lists_layers(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)

    with pytest.raises(BadInputError, match=r"lora.target_modules.*down_proj"):
        cases.make_engine(folder, optimizer=cases.sgd(), lora=lora(target_modules=["nothing"]))


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("target_modules", {"target_modules": ["lm_head"]}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("modules_to_save", {"modules_to_save": ["embed_tokens"]}),
    ],
)
def test_initialize_when_one_end_of_a_tie_is_trained_expected_error(
    key: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen2", tmp_path)  # tied: no checkpoint could hold the result

    with pytest.raises(BadInputError, match=rf"lora\.{key}.*tie_word_embeddings"):
        cases.make_engine(folder, optimizer=cases.sgd(), lora=lora(**fields))


class AdapterReceiver:
    """Reads the adapter as peft does, and remembers what it was told."""

    takes_adapters = True

    def __init__(self, base: Path) -> None:
        self.base = base
        self.logprobs: torch.Tensor | None = None

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        assert meta.type == "lora" and meta.path is not None
        model = peft.PeftModel.from_pretrained(cases.load_reference(self.base, dtype=torch.float32), meta.path)
        with torch.no_grad():
            self.logprobs, _ = cases.reference_logprobs(model.eval(), cases.ragged_batch())


def test_update_weights_when_lora_type_expected_adapter_folder_alone(tmp_path: Path) -> None:
    engine = trained_engine(tmp_path, target_modules=["q_proj", "down_proj"])
    receiver: Any = AdapterReceiver(tmp_path / "model")
    meta = WeightUpdateMeta(type="lora", path=tmp_path / "weights" / "update", version=2)
    engine.connect_engine(receiver, meta)

    for _ in range(2):  # the second replaces the first
        engine.update_weights(meta)

    assert_close(receiver.logprobs, engine.forward(cases.ragged_batch()).logprobs, rtol=1e-5, atol=1e-5)
    assert sorted(p.name for p in meta.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((meta.path / "adapter_config.json").read_text())
    # What vLLM and SGLang read.
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none"}
    assert {key: config[key] for key in expected} == expected
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    names = load_file(meta.path / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 2
    assert all(
        n.startswith("base_model.model.model.layers.") and ".lora_" in n and n.endswith(".weight") for n in names
    )


@pytest.mark.parametrize(
    ("fields", "takes", "message"),
    [
        (None, True, "`lora` is not set"),
        ({"modules_to_save": ["lm_head"]}, True, r"lora\.modules_to_save"),
        ({}, False, "AdapterReceiver takes no adapter"),
    ],
    ids=str,
)
def test_connect_engine_when_adapter_cannot_be_sent_expected_error(
    fields: dict[str, Any] | None, takes: bool, message: str, tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen3", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=cases.sgd(), lora=None if fields is None else lora(**fields))
    receiver: Any = AdapterReceiver(folder)
    receiver.takes_adapters = takes

    with pytest.raises(BadInputError, match=rf"weight_update\.type: .*{message}"):
        engine.connect_engine(receiver, WeightUpdateMeta(type="lora", path=tmp_path / "update"))
