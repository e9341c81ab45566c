"""Loading, optimizers and saving on two ranks: equal to one process, from less memory, and never a hang."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import peft
import pytest
import torch
import transformers
from fsdp_launch import launch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from areal_core.api.configs import LoRAConfig

ARCHES = ["qwen2", "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "gpt2"]  # tied, untied, buffers, two that are converted
BAD = ["shard", "corrupt", "shape", "missing", "unexpected", "index"]
CASES = [
    *(f"load-{arch}" for arch in ARCHES),
    "critic-qwen3",
    "adapter-qwen3",
    "reload-qwen2",
    "reload-qwen3_moe",
    *(f"bad-{name}" for name in BAD),
    *(f"optimizer-{name}" for name in cases.OPTIMIZERS),
    "background-qwen3",
    "export-qwen3",
]


def damage(folder: Path, kind: str) -> None:
    """Make a sharded model folder bad."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    if kind == "shard":
        file.unlink()
    elif kind == "corrupt":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "index":
        (folder / "model.safetensors.index.json").write_text("{")
    else:
        if kind == "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        elif kind == "missing":
            del tensors[name]
            del index["weight_map"][name]
        else:
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
            index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = file.name
        save_file(tensors, file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in ARCHES:
        cases.make_folder(arch, folder / arch)
    sharded = folder / "sharded"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    model.save_pretrained(sharded, max_shard_size="20KB")
    for kind in BAD:
        shutil.copytree(sharded, folder / kind)
        damage(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all cases on two ranks: one launch, as starting processes is what takes long."""
    out = tmp_path_factory.mktemp("d2")
    launch(2, "fsdp_state_worker.py", out, [str(models), str(out), *CASES])
    return out


def results(out: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors")


# ------------------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("name", [*(f"load-{arch}" for arch in ARCHES), "critic-qwen3", "adapter-qwen3"])
def test_initialize_when_streamed_to_two_ranks_expected_model_of_one(name: str, models: Path, two_ranks: Path) -> None:
    kind, _, arch = name.partition("-")
    fields: dict[str, Any] = {"role": "critic"} if kind == "critic" else {}
    if kind == "adapter":
        fields = {"lora": LoRAConfig(rank=4), "optimizer": cases.sgd()}
    engine = cases.make_engine(models / arch, **fields)
    output = engine.forward(cases.ragged_batch().select([0, 1, 2]))
    expected = output.values if kind == "critic" else output.logprobs

    _, found = results(two_ranks, name)

    # Buffers that are in no file (rotary frequencies, scales) show in the outputs.
    assert_close(found["values"], expected, rtol=1e-5, atol=1e-5)
    weights = {k.removeprefix("weight."): v for k, v in found.items() if k.startswith("weight.")}
    reference = cases.parameters_of(engine)
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[k], v) for k, v in reference.items())
    if kind == "adapter":
        trained = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        assert all(torch.equal(found[f"lora.{n}"], p) for n, p in trained.items())
        assert max(p.abs().max() for n, p in trained.items() if "lora_A" in n) > 0


@pytest.mark.parametrize("arch", ["qwen2", "qwen3_moe"])
def test_load_hf_when_on_two_ranks_expected_weights_of_the_folder(arch: str, models: Path, two_ranks: Path) -> None:
    expected = cases.parameters_of(cases.make_engine(models / arch))

    _, found = results(two_ranks, f"reload-{arch}")

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_save_adapter_when_sharded_expected_peft_loads_it(models: Path, two_ranks: Path) -> None:
    _, found = results(two_ranks, "adapter-qwen3")

    loaded = peft.PeftModel.from_pretrained(
        cases.load_reference(models / "qwen3", dtype=torch.float32), two_ranks / "adapter"
    )

    values = dict(loaded.named_parameters())
    names = [n.removeprefix("lora.") for n in found if n.startswith("lora.")]
    assert names
    for name in names:
        assert torch.equal(values[f"base_model.model.{name}"], found[f"lora.{name}"]), name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shard", r"safetensors: missing, but model\.safetensors\.index\.json lists it"),
        ("corrupt", "not a valid safetensors file"),
        ("shape", r"tensor 'model\.layers\.0\.mlp\.up_proj\.weight' has shape \(47, 32\), .*asks for \(48, 32\)"),
        ("missing", r"1 tensors are missing .*'model\.layers\.0\.mlp\.up_proj\.weight'"),
        ("unexpected", r"1 tensors have no place in a Qwen3ForCausalLM, .*'model\.layers\.9\.mlp\.up_proj\.weight'"),
        ("index", r"index\.json: not a valid index"),
    ],
)
def test_initialize_when_folder_is_bad_expected_one_error_on_every_rank(
    kind: str, message: str, two_ranks: Path
) -> None:
    messages = results(two_ranks, f"bad-{kind}")[0]["messages"]

    first, second = messages
    assert re.search(message, first) and first.startswith("BadInputError: ")
    assert second == first.replace("BadInputError: ", "BadInputError: rank 0 failed: ", 1)


@pytest.mark.slow
def test_initialize_when_on_two_ranks_expected_peak_below_1_3_models(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "models" / "big", max_shard_size="50MB")
    del model
    # A small one first: what libraries take when they are first used is not the model's.
    cases.make_folder("qwen3", tmp_path / "models" / "qwen3")

    launch(2, "fsdp_state_worker.py", tmp_path, [str(tmp_path / "models"), str(tmp_path), "load-qwen3", "memory-big"])

    result, _ = results(tmp_path, "memory-big")
    assert result["bytes"] > 190e6
    # The model is on two ranks: about 0.5 each, and room for one tensor and for what the allocator keeps.
    assert max(result["peaks"]) < 0.9 * result["bytes"], result
    assert min(result["peaks"]) > 0.4 * result["bytes"], result  # it is there at all


# ----------------------------------------------------------------------------------------------- optimizers, saving


@pytest.mark.parametrize("kind", list(cases.OPTIMIZERS))
def test_train_batch_when_states_are_sharded_expected_parameters_of_one_process(
    kind: str, models: Path, two_ranks: Path
) -> None:
    engine = cases.optimizer_engine(models, kind)
    start = cases.parameters_of(engine)
    for seed in range(2):
        engine.train_batch(cases.ragged_batch(seed), cases.policy_loss, cases.token_weight)
    expected = cases.parameters_of(engine)

    _, found = results(two_ranks, f"optimizer-{kind}")

    hidden = [n for n, p in engine.model.named_parameters() if p.ndim == 2 and ".layers." in n]
    exact = {"muon": hidden, "sgd": list(expected)}.get(kind, [])
    for name, value in expected.items():
        difference = (found[name].float() - value.float()).abs()
        if name in exact:
            assert difference.max() < 1e-5, name
        # AdamW turns a gradient near 0 into a step of either sign, and rounding by chance depends on the shards.
        step = (value.float() - start[name].float()).abs().mean()
        # Gradients in bf16 are rounded apart on each rank.
        assert difference.mean() < (0.5 if kind == "kahan" else 0.2) * step + 1e-6, name
    assert any(not torch.equal(start[name], found[name]) for name in start)


def test_save_when_in_background_on_two_ranks_expected_state_of_the_call(models: Path, two_ranks: Path) -> None:
    result, expected = results(two_ranks, "background-qwen3")

    messages = result.pop("messages")
    assert result == {"equal": True, "moved": True, "resumed": True, "saving": False}
    assert all("full: cannot write the checkpoint (OSError: " in m and "No space left" in m for m in messages), messages
    # One process reads it too.
    from areal_core.api.io_struct import SaveLoadMeta

    engine = cases.make_engine(models / "qwen3", optimizer=cases.sgd(lr=0.1, momentum=0.9))
    engine.load(SaveLoadMeta(path=two_ranks / "background", weight_format="dcp", with_optim=True))
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(engine).items())


def test_save_hf_when_sharded_expected_no_more_than_a_file_and_a_parameter_in_memory(
    models: Path, two_ranks: Path
) -> None:
    result, expected = results(two_ranks, "export-qwen3")

    (first, largest, left), (other, *_, other_left) = result["peaks"]
    total = sum(value.nbytes for value in expected.values())
    assert largest < 20_000 and total > 3 * (20_000 + largest)  # there is something to stream
    assert largest < first <= 20_000 + largest  # rank 0 holds a file
    assert other <= 2 * largest  # the others what is being gathered, and the one before
    assert left == other_left == 0
    saved = cases.load_reference(two_ranks / "export", dtype=torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in saved.named_parameters())


def test_save_hf_when_disk_gets_full_within_expected_error_on_every_rank(two_ranks: Path) -> None:
    result, _ = results(two_ranks, "export-qwen3")

    first, second = result["messages"]
    assert re.search(r"export-full: cannot write .*No space left on device", first)
    assert second == f"rank 0 failed: ArealError: {first}"
