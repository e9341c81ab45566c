"""Every mesh equals one process: log-probs, loss, every gradient, gradient norm, parameters after two steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import fsdp_cases as cases
import fsdp_mesh_cases as mesh_cases
import pytest
import torch
from fsdp_launch import launch
from fsdp_mesh_cases import Case
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.trainer.world import World

ARCHES = ("qwen2", "qwen3", "llama", "gemma3")
#: A small selection on two ranks, in one launch.
FAST = [
    "qwen3/fsdp:t2",
    "qwen2/fsdp:t2/nosp",
    "gemma3/fsdp:c2",
]
TWO_RANKS = [
    f"{arch}/{layout}"
    for arch in ARCHES
    for layout in ("fsdp:d2", "fsdp:d2/empty", "fsdp:t2", "fsdp:t2/nosp", "fsdp:c2")
] + [
    "qwen3/fsdp:t2/critic",
    "qwen3/fsdp:t2/nosp/critic",
    "qwen3/fsdp:c2/critic",
    "qwen3/fsdp:t2/lora",
    "llama/fsdp:t2/nosp/lora",
    "qwen3/fsdp:c2/lora",
    "qwen2/fsdp:t2/recompute",
    "qwen2/fsdp:c2/recompute",
    "llama/fsdp:t2/entropy",
    "llama/fsdp:c2/entropy",
    "qwen2/fsdp:t2/unshared",
    "qwen2/fsdp:t2/nosp/sdpa",
    "gpt_oss/fsdp:c2",
    "gemma2/fsdp:t2",
    "qwen3/fsdp:d2/offload",
]
FOUR_RANKS = [
    f"{arch}/{layout}"
    for arch in ARCHES
    for layout in (
        "fsdp:d4",
        "fsdp:d4/hsdp",
        "fsdp:d2t2",
        "fsdp:d2t2/empty",
        "fsdp:d2c2",
        "fsdp:d2c2/empty",
        "fsdp:t2c2",
        "fsdp:t2c2/nosp",
    )
] + ["qwen3/fsdp:c4", "qwen2/fsdp:d2t2/hsdp", "llama/fsdp:d2c2/hsdp", "qwen3/fsdp:t2c2/critic", "qwen3/fsdp:d2t2/lora"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in (*ARCHES, "gpt_oss", "gemma2"):
        cases.make_folder(arch, folder / arch)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> Callable[[Case], tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Results of a case in this process alone."""

    @functools.cache
    def run(case: Case) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        return mesh_cases.train(case, models / case.arch, World(0, 1, None))

    return lambda case: run(case.alone)


def run_all(processes: int, texts: list[str], models: Path, factory: pytest.TempPathFactory) -> Path:
    out = factory.mktemp(f"ranks{processes}")
    launch(processes, "fsdp_mesh_worker.py", out, [str(models), str(out), *texts])
    return out


@pytest.fixture(scope="module")
def fast(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(2, FAST, models, tmp_path_factory)


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(2, TWO_RANKS, models, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(4, FOUR_RANKS, models, tmp_path_factory)


def check(text: str, out: Path, reference: Callable[[Case], tuple[dict[str, float], dict[str, torch.Tensor]]]) -> None:
    case = Case.parse(text)
    numbers, tensors = reference(case)
    actual_numbers = json.loads((out / f"{case.file}.json").read_text())
    actual = load_file(out / f"{case.file}.safetensors")
    # There is something to compare, and the clipping is active.
    assert max(t.abs().max() for n, t in tensors.items() if n.startswith("gradient0.")) > 0.003
    assert numbers["grad_norm_0"] > mesh_cases.CLIP
    assert actual_numbers.keys() == numbers.keys()
    for name, value in numbers.items():
        assert actual_numbers[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert actual.keys() == tensors.keys()
    for name, tensor in tensors.items():
        atol = 1e-6 if name.startswith("gradient") else 1e-5
        assert_close(actual[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("text", FAST)
def test_training_when_on_two_ranks_expected_that_of_one(text: str, fast: Path, expected: Callable) -> None:
    check(text, fast, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all cases of a launch run in the first one's fixture
@pytest.mark.parametrize("text", TWO_RANKS)
def test_training_when_on_any_mesh_of_two_expected_that_of_one(text: str, two_ranks: Path, expected: Callable) -> None:
    check(text, two_ranks, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all cases of a launch run in the first one's fixture
@pytest.mark.parametrize("text", FOUR_RANKS)
def test_training_when_on_any_mesh_of_four_expected_that_of_one(
    text: str, four_ranks: Path, expected: Callable
) -> None:
    check(text, four_ranks, expected)
