"""Bad input gives one clear error that names what was wrong."""

from __future__ import annotations

import json
from pathlib import Path

import fsdp_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal_core.errors import BadInputError


@pytest.mark.parametrize("backend", ["fsdp:p2", "fsdp:d1e2"])
def test_create_process_group_when_size_is_not_implemented_expected_error(backend: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=rf"asks for {backend[-2:]}, but the fsdp engine has no"):
        cases.make_engine(tmp_path, backend=backend)


def test_create_process_group_when_too_few_processes_expected_error_with_torchrun(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="needs 2 processes, but 1 is running"):
        cases.make_engine(tmp_path, backend="fsdp:d2")


def test_initialize_when_folder_is_missing_expected_error(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"actor.path: .*nowhere is not a folder"):
        cases.make_engine(tmp_path / "nowhere")


def test_initialize_when_config_is_missing_expected_error(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no config.json"):
        cases.make_engine(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), (json.dumps({"model_type": "no_such_model"}), "no_such_model"), ("{}", "None")],
)
def test_initialize_when_config_is_bad_expected_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(BadInputError, match=rf"config.json: .*{message}"):
        cases.make_engine(tmp_path)


def test_initialize_when_no_weights_expected_error(tmp_path: Path) -> None:
    cases.model_config("qwen2").save_pretrained(tmp_path)

    with pytest.raises(BadInputError, match=r"no model\.safetensors"):
        cases.make_engine(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_initialize_when_safetensors_is_corrupt_expected_error_naming_it(damage: str, tmp_path: Path) -> None:
    path = cases.make_folder("qwen2", tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "text": b"not a safetensors file"}[damage])

    with pytest.raises(BadInputError, match=r"model.safetensors: not a valid safetensors file"):
        cases.make_engine(tmp_path)


def sharded(folder: Path) -> Path:
    engine = cases.make_engine(cases.make_folder("qwen2", folder / "one"))
    engine.options.max_shard_size = "20KB"
    engine.save(SaveLoadMeta(path=folder / "many"))
    return folder / "many"


def test_initialize_when_shard_is_missing_expected_error_naming_it(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(BadInputError, match=rf"{shard.name}: missing"):
        cases.make_engine(folder)


def test_initialize_when_shard_lacks_a_tensor_expected_error_naming_it(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})

    with pytest.raises(BadInputError, match=rf"{shard.name}: lacks tensor '{name}'"):
        cases.make_engine(folder)


@pytest.mark.parametrize("fault", ["missing", "shape", "unexpected"])
def test_load_hf_when_tensor_does_not_fit_expected_error_and_unchanged_model(fault: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    before = cases.parameters_of(engine)
    path = cases.make_folder("qwen2", tmp_path / "bad", seed=1) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif fault == "missing":
        del tensors[name]
    else:
        name = "model.layers.7.mlp.up_proj.weight"
        tensors[name] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(BadInputError, match=name):
        engine.load(SaveLoadMeta(path=tmp_path / "bad"))

    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())


def test_load_hf_when_other_architecture_expected_error_and_unchanged_model(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    other = cases.make_folder("llama", tmp_path / "llama")

    with pytest.raises(BadInputError, match=r"bias.* missing"):
        engine.load(SaveLoadMeta(path=other))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float32", "param_dtype": "bfloat16"}, "param_dtype"),
        ({"dtype": "float16", "optimizer": OptimizerConfig()}, "loss scaling"),
        ({"optimizer": OptimizerConfig(lr_scheduler_type="cosine")}, "number of training steps"),
        ({"attn_impl": "no_such_attention"}, "no_such_attention"),
        ({"role": "judge"}, "judge"),
    ],
    ids=str,
)
def test_initialize_when_option_is_bad_expected_error(fields: dict, message: str, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)

    with pytest.raises(BadInputError, match=message):
        cases.make_engine(folder, **fields)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]),
        ("linear", [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0 - 0.9 / 5]),
        ("cosine", [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.1 + 0.9 * (1 + 0.8090169943749475) / 2]),
    ],
)
def test_schedule_when_warming_up_expected_lr_of_each_step(shape: str, expected: list[float], tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=2.0, type="sgd", lr_scheduler_type=shape, warmup_steps=5, min_lr_ratio=0.1)
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=10, train_batch_size=1)
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=optimizer, ft_spec=spec)
    empty = cases.ragged_batch().select([])

    rates = []
    for _ in range(15):
        rates.append(engine.train_batch(empty, cases.policy_loss, cases.token_weight)["lr"])
        engine.lr_scheduler_step()

    assert rates[:7] == pytest.approx([2 * x for x in expected])
    assert rates[-1] == pytest.approx(2.0 if shape == "constant" else 0.2)


def test_initialize_when_from_scratch_expected_weights_by_torch_seed(tmp_path: Path) -> None:
    cases.model_config("qwen3").save_pretrained(tmp_path)

    first, second, other = (
        cases.parameters_of(cases.make_engine(tmp_path, init_from_scratch=True, seed=s)) for s in (1, 1, 2)
    )

    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
