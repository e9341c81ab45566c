"""Saving, loading, and weights for an inference engine, in one process."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig

ADAMW = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps=2)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.train_batch(cases.ragged_batch(step), cases.policy_loss, cases.token_weight)
        engine.lr_scheduler_step()


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ids[None]).logits


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("arch", ["qwen2", "llama"])  # tied, untied
def test_save_hf_when_trained_expected_same_logits_in_transformers(
    arch: str, max_shard_size: str, tmp_path: Path
) -> None:
    folder = cases.make_folder(arch, tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC, options=FSDPConfig(max_shard_size=max_shard_size))
    train(engine, 0, 1)

    engine.save(SaveLoadMeta(path=tmp_path / "out"))

    ids = torch.arange(3, 20)
    with torch.no_grad():
        engine.model.set_attn_implementation("sdpa")
        expected = engine.model(input_ids=ids[None]).logits
    assert_close(logits_of(tmp_path / "out", ids), expected, rtol=0, atol=0)
    assert not torch.equal(logits_of(folder, ids), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(engine.model).__name__]
    assert "areal" not in json.dumps(config)
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file() == (max_shard_size == "20KB")


def test_load_hf_when_saved_expected_same_weights(tmp_path: Path) -> None:
    folder = cases.make_folder("llama", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC)
    train(engine, 0, 1)
    engine.save(SaveLoadMeta(path=tmp_path / "out"))
    other = cases.make_engine(folder)

    other.load(SaveLoadMeta(path=tmp_path / "out"))

    expected = cases.parameters_of(engine)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())


def test_critic_when_saved_expected_head_comes_back(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path / "model")
    engine = cases.make_engine(folder, role="critic", optimizer=cases.sgd(lr=0.01))
    engine.train_batch(cases.ragged_batch(), cases.value_loss, cases.token_weight)
    expected = engine.forward(cases.ragged_batch()).values

    engine.save(SaveLoadMeta(path=tmp_path / "out"))
    values = cases.make_engine(tmp_path / "out", role="critic", seed=5).forward(cases.ragged_batch()).values

    assert values is not None and expected is not None
    assert_close(values, expected, rtol=1e-6, atol=1e-6)
    assert values.abs().max() > 0


def test_resume_when_dcp_saved_expected_bitwise_continuation(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC)
    train(engine, 0, 3)
    engine.set_version(3)
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)
    engine.save(meta)
    draws = torch.rand(3), np.random.rand(3), [random.random(), random.gauss(0.0, 1.0)]
    train(engine, 3, 5)
    other = cases.make_engine(cases.make_folder("qwen2", tmp_path / "other", seed=9), optimizer=ADAMW, ft_spec=SPEC)
    train(other, 7, 8)

    other.load(meta)

    assert torch.equal(torch.rand(3), draws[0])
    assert np.array_equal(np.random.rand(3), draws[1])
    assert [random.random(), random.gauss(0.0, 1.0)] == draws[2]
    assert other.get_version() == 3
    train(other, 3, 5)
    expected = cases.parameters_of(engine)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())
    result = other.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)
    assert result == engine.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)


def test_save_and_load_dcp_when_one_process_expected_no_warning(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"), optimizer=ADAMW, ft_spec=SPEC)
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save(meta)
        engine.load(meta)

    assert [str(warning.message) for warning in caught] == []


def test_load_dcp_when_without_optimizer_expected_weights_only(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC)
    train(engine, 0, 1)
    engine.save(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp"))
    other = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC)

    with pytest.raises(BadInputError, match="without optimizer state"):
        other.load(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True))
    other.load(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp"))

    expected = cases.parameters_of(engine)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())
    # Its optimizer begins, and so does its warm-up: one of two steps.
    result = other.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)
    assert result["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize("damage", ["data", "end", "metadata", "state", "steps", "shape", "folder"])
def test_load_dcp_when_damaged_expected_error_and_unchanged_model(damage: str, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW, ft_spec=SPEC)
    train(engine, 0, 1)
    path = tmp_path / "dcp"
    engine.save(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))
    train(engine, 1, 2)
    before = cases.parameters_of(engine)
    if damage == "data":
        data = next(path.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:2000])
    elif damage == "end":  # most tensors can be read
        data = next(path.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-4000])
    elif damage == "metadata":
        (path / ".metadata").write_bytes(b"nonsense")
    elif damage == "state":
        (path / "areal_state.json").write_text("{")
    elif damage == "steps":
        (path / "areal_state.json").write_text('{"version": 1, "schedule_step": 1}')
    elif damage == "shape":
        engine = cases.make_engine(cases.make_folder("llama", tmp_path / "llama"), optimizer=ADAMW, ft_spec=SPEC)
        before = cases.parameters_of(engine)
    else:
        path = tmp_path / "nowhere"

    with pytest.raises(BadInputError, match=str(path.name)):
        engine.load(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))

    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_save_when_folder_is_not_empty_expected_error(weight_format: Any, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()

    with pytest.raises(BadInputError, match="not an empty folder"):
        engine.save(SaveLoadMeta(path=tmp_path / "out", weight_format=weight_format))


class Receiver:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = -1
        self.path: Path | None = None

    def update_weights_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.tensors, self.version = {k: v.clone() for k, v in tensors}, version

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        self.path = meta.path


def test_update_weights_when_memory_expected_every_parameter_once(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))  # tied embeddings
    receiver: Any = Receiver()
    engine.connect_engine(receiver, WeightUpdateMeta())

    engine.update_weights(WeightUpdateMeta(version=4))

    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert receiver.version == 4
    assert receiver.tensors.keys() == expected.keys()
    assert all(torch.equal(receiver.tensors[k], v) for k, v in expected.items())


def test_update_weights_when_disk_expected_whole_folder_twice(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder)
    receiver: Any = Receiver()
    meta = WeightUpdateMeta(type="disk", path=tmp_path / "weights" / "update")
    engine.connect_engine(receiver, meta)

    engine.update_weights(meta)
    engine.update_weights(meta)

    assert receiver.path == meta.path
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["update"]
    ids = torch.arange(3, 9)
    assert torch.equal(logits_of(tmp_path / "weights" / "update", ids), logits_of(folder, ids))


def test_update_weights_when_a_killed_run_left_half_an_update_expected_nothing_of_it(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder)
    receiver: Any = Receiver()
    meta = WeightUpdateMeta(type="disk", path=tmp_path / "weights" / "update")
    engine.connect_engine(receiver, meta)
    engine.update_weights(meta)
    left = tmp_path / "weights" / ".update.partial"
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")

    engine.update_weights(meta)

    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["update"]
    assert not (meta.path / "model-00001-of-00002.safetensors").exists()
    ids = torch.arange(3, 9)
    assert torch.equal(logits_of(meta.path, ids), logits_of(folder, ids))


def test_connect_engine_when_distributed_to_an_engine_in_this_process_expected_clear_error(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = Receiver()
    receiver.weight_receivers = list

    with pytest.raises(BadInputError, match=r"weight_update\.type: Receiver takes no weights .* Use 'disk'"):
        engine.connect_engine(receiver, WeightUpdateMeta(type="distributed"))
