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
import transformers
from fsdp_launch import launch
from fsdp_mesh_cases import Case
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.api.io_struct import SaveLoadMeta
from areal_core.trainer.world import World

ARCHES = ("qwen2", "qwen3", "llama", "gemma3")
#: A small selection on two ranks, in one launch.
FAST = [
    "qwen3/fsdp:t2",
    "qwen2/fsdp:t2/nosp",
    "gemma3/fsdp:c2",
]
BROKEN = "qwen2/fsdp:d2/nan"
#: Vocabularies of a loss alone: even, uneven, and with nothing for the second rank.
VOCABULARIES = [8, 61, 1]
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
    "qwen3/fsdp:t2/bf16",
    "qwen3/fsdp:c2/bf16",
]
STORE = ["qwen2/fsdp:d2t2/store", "llama/fsdp:t2c2/nosp/store", "gemma3/fsdp:d4/hsdp/store"]
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
    for arch in ARCHES:
        cases.make_folder(arch, folder / f"{arch}-other", seed=1)
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
    return run_all(2, [*(f"vocab/{size}" for size in VOCABULARIES), *FAST, BROKEN], models, tmp_path_factory)


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(2, TWO_RANKS, models, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(4, FOUR_RANKS, models, tmp_path_factory)


@pytest.fixture(scope="module")
def stored(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(4, STORE, models, tmp_path_factory)


def check(text: str, out: Path, reference: Callable[[Case], tuple[dict[str, float], dict[str, torch.Tensor]]]) -> None:
    case = Case.parse(text)
    numbers, tensors = reference(case)
    actual_numbers = json.loads((out / f"{case.file}.json").read_text())
    actual = load_file(out / f"{case.file}.safetensors")
    # There is something to compare, and the clipping is active.
    assert max(t.abs().max() for n, t in tensors.items() if n.startswith("gradient0.")) > 0.002
    assert numbers["grad_norm_0"] > mesh_cases.CLIP
    low = "bf16" in case.flags
    assert actual_numbers.keys() == numbers.keys()
    for name, value in numbers.items():
        assert actual_numbers[name] == pytest.approx(value, rel=0.05 if low else 1e-5, abs=1e-6), name
    assert actual.keys() == tensors.keys()
    for name, tensor in tensors.items():
        atol = 1e-6 if name.startswith("gradient") else 1e-5
        if low:
            atol = 0.1 * float(tensor.abs().max())
        assert_close(actual[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def test_train_batch_when_one_rank_has_a_nan_expected_every_rank_skips(fast: Path) -> None:
    facts = json.loads((fast / f"{Case.parse(BROKEN).file}.json").read_text())

    # Skipped, nothing changed, and the next step is taken.
    assert facts["ranks"] == [[1.0, 1.0, 0.0]] * 2


@pytest.mark.parametrize("text", FAST)
def test_training_when_on_two_ranks_expected_that_of_one(text: str, fast: Path, expected: Callable) -> None:
    check(text, fast, expected)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_vocab_parallel_logprobs_expected_formula_and_its_gradient(size: int, fast: Path) -> None:
    logits, targets, weights = mesh_cases.vocab_inputs(size)
    whole = logits.double().requires_grad_()
    logp = torch.log_softmax(whole / 1.7, -1)
    logprobs, entropy = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()

    ranks = [load_file(fast / f"vocab{size}-rank{rank}.safetensors") for rank in range(2)]

    for rank in ranks:
        assert_close(rank["logprobs"], logprobs.float(), rtol=1e-5, atol=1e-5)
        assert_close(rank["entropy"], entropy.float(), rtol=1e-5, atol=1e-5)
    assert [rank["gradient"].shape[1] for rank in ranks] == {8: [4, 4], 61: [31, 30], 1: [1, 0]}[size]
    gradient = torch.cat([rank["gradient"] for rank in ranks], 1)
    assert_close(gradient, whole.grad.float(), rtol=1e-5, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", STORE)
def test_save_and_load_when_on_a_mesh_expected_whole_weights_and_resume_in_one_process(
    text: str, stored: Path, models: Path
) -> None:
    case = Case.parse(text)
    facts = json.loads((stored / f"{case.file}.json").read_text())
    tensors = load_file(stored / f"{case.file}.safetensors")
    saved = {n.removeprefix("saved."): t for n, t in tensors.items() if n.startswith("saved.")}
    straight = {n.removeprefix("straight."): t for n, t in tensors.items() if n.startswith("straight.")}
    plain = transformers.AutoModelForCausalLM.from_pretrained(models / case.arch)

    assert facts["resumed"] and facts["reloaded"] and facts["sent"] and facts["version"] == 7
    assert facts["names"] == sorted(dict(plain.named_parameters()))  # tied ones once
    assert facts["loaded"] == pytest.approx(float(plain.model.norm.weight.sum()), abs=1e-6)
    assert {"config.json", "model.safetensors"} <= set(facts["files"])
    exported = transformers.AutoModelForCausalLM.from_pretrained(stored / f"{case.file}-hf")
    for name, value in exported.named_parameters():
        assert_close(saved[name], value, rtol=0, atol=0)
    # The mesh's training state goes on in one process.
    alone = mesh_cases.make(case.alone, models / f"{case.arch}-other", mesh_cases.momentum())
    alone.load(SaveLoadMeta(path=stored / f"{case.file}-dcp", weight_format="dcp", with_optim=True))
    assert_same(cases.parameters_of(alone), saved, 0)
    alone.train_batch(cases.ragged_batch(1), cases.policy_loss, cases.token_weight)
    assert_same(cases.parameters_of(alone), straight, 1e-5)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
