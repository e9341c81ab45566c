"""Offload and onload between phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import SaveLoadMeta
from areal_fsdp import offload
from areal_fsdp.config import FSDPConfig
from areal_fsdp.offload import move

OPTIMIZERS = [
    OptimizerConfig(lr=1e-2),
    OptimizerConfig(type="muon", lr=1e-2),
    OptimizerConfig(lr=1e-2, state_dtype="bfloat16"),
]


def train(engine: Any, seed: int) -> dict[str, float]:
    return engine.train_batch(cases.ragged_batch(seed), cases.policy_loss, cases.token_weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "muon", "bf16 states"])
def test_onload_when_offloaded_between_steps_expected_bitwise_the_same_training(
    optimizer: OptimizerConfig, device: str, tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    straight, engine = cases.make_engine(folder, optimizer=optimizer), cases.make_engine(folder, optimizer=optimizer)
    train(straight, 0), train(engine, 0)

    engine.offload()
    engine.offload()  # twice is once
    assert {p.device.type for p in engine._scorer.parameters()} == {"cpu"}
    engine.onload()
    engine.onload()

    assert train(engine, 1) == train(straight, 1)
    expected = cases.parameters_of(straight)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(engine).items())
    assert {p.device.type for p in engine.model.parameters()} == {engine.device.type}


class EmptiedStorage:
    """Stands for a device that is not the CPU: what is moved to the host leaves nothing behind."""

    def __init__(self) -> None:
        self.kept: dict[torch.Tensor, torch.Tensor] = {}
        self.moves: list[str] = []

    def move(self, modules: Any, optimizer: Any, device: torch.device) -> None:
        self.moves.append("host" if device is offload.HOST else "device")
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        if optimizer is not None:
            tensors += [v for s in optimizer.state.values() for v in s.values() if v.ndim > 0]
        for tensor in tensors:
            if device is offload.HOST and tensor not in self.kept:
                self.kept[tensor] = tensor.data
                tensor.data = tensor.data.new_empty(0)
            elif device is not offload.HOST and tensor in self.kept:
                tensor.data = self.kept.pop(tensor)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> EmptiedStorage:
    """Engines that are made within the test move as on a device of its own memory."""
    other = EmptiedStorage()
    monkeypatch.setattr(offload, "move", other.move)
    plain = offload.Placement.__init__

    def init(self: Any, device: torch.device, *, is_fixed: bool) -> None:
        plain(self, device, is_fixed=is_fixed)
        self.is_fixed = is_fixed

    monkeypatch.setattr(offload.Placement, "__init__", init)
    return other


def bytes_of(module: torch.nn.Module) -> int:
    return sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()))


def test_offload_expected_memory_released_and_training_as_if_it_had_stayed(
    tmp_path: Path, emptied: EmptiedStorage
) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    optimizer = OptimizerConfig(lr=1e-2)
    straight, engine = cases.make_engine(folder, optimizer=optimizer), cases.make_engine(folder, optimizer=optimizer)
    size = bytes_of(engine.model)

    for step in range(2):
        engine.offload()
        assert bytes_of(engine.built()) == 0
        assert all(
            v.untyped_storage().nbytes() == 0 for s in engine.optimizer.state.values() for v in s.values() if v.ndim
        )
        engine.offload()
        engine.onload()
        engine.onload()
        assert bytes_of(engine.model) == size
        assert train(engine, step) == train(straight, step)

    assert emptied.moves == ["host", "device"] * 2  # none for nothing
    expected = cases.parameters_of(straight)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(engine).items())


def test_offload_when_logits_are_kept_expected_those_and_layers_released(
    tmp_path: Path, emptied: EmptiedStorage
) -> None:
    engine = cases.make_engine(cases.make_folder("qwen3", tmp_path))
    hidden = engine.hidden_states(cases.ragged_batch())
    expected = engine.logits(hidden)

    engine.offload(keep_logits=True)

    assert torch.equal(engine.logits(hidden), expected)
    assert bytes_of(engine.built().model.model.layers) == 0
    with pytest.raises(RuntimeError, match="call onload first"):
        engine.hidden_states(cases.ragged_batch())
    engine.offload()
    assert bytes_of(engine.built()) == 0
    with pytest.raises(RuntimeError, match="call onload first"):
        engine.logits(hidden)
    engine.offload(keep_logits=True)
    assert torch.equal(engine.logits(hidden), expected)
    engine.onload()
    assert torch.equal(engine.hidden_states(cases.ragged_batch()), hidden)
    assert emptied.moves == ["host", "host", "device", "host", "device"]


def test_save_when_offloaded_before_any_step_expected_training_state_that_loads(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=OptimizerConfig())
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)
    engine.offload()

    engine.save(meta)

    other = cases.make_engine(folder, optimizer=OptimizerConfig())
    train(other, 0)
    other.load(meta)
    engine.onload()
    expected = cases.parameters_of(engine)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())


def test_offload_when_shards_live_in_host_memory_expected_no_move(tmp_path: Path, emptied: EmptiedStorage) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), options=FSDPConfig(cpu_offload=True))

    engine.offload()
    engine.onload()

    assert emptied.moves == []


@pytest.mark.parametrize("call", ["forward", "train", "save"])
def test_engine_when_offloaded_expected_error_that_says_onload(call: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=OptimizerConfig())
    calls = {
        "forward": lambda: engine.forward(cases.ragged_batch()),
        "train": lambda: train(engine, 0),
        "save": lambda: engine.save(SaveLoadMeta(path=tmp_path / "out")),
    }
    engine.offload()

    with pytest.raises(RuntimeError, match="call onload first"):
        calls[call]()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "muon", "bf16 states"])
def test_move_when_called_expected_nothing_left_behind(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    # The meta device stands for the other one: what is there is nowhere else.
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=optimizer)
    train(engine, 0)
    module = engine.ready()

    move([module], engine.optimizer, torch.device("meta"))

    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for state in engine.optimizer.state.values() for v in state.values() if v.ndim > 0]
    assert tensors and {t.device.type for t in tensors} == {"meta"}
