"""Offload and onload between phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import SaveLoadMeta
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

    move(module, engine.optimizer, torch.device("meta"))

    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for state in engine.optimizer.state.values() for v in state.values() if v.ndim > 0]
    assert tensors and {t.device.type for t in tensors} == {"meta"}
