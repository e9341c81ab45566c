"""Two ranks on gloo equal one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import transformers
from fsdp_launch import launch
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.api.configs import LoRAConfig, OptimizerConfig

CASES = [
    "grad-qwen3-uneven",
    "grad-qwen3-empty",
    "grad-gemma3-empty",
    "adamw-llama-uneven",
    "lora-qwen3-empty",
    "critic-qwen3-empty",
    "scratch-qwen3-uneven",
    "export-qwen2-uneven",
    "failing-qwen2-uneven",
    "badload-qwen2-uneven",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in ("qwen2", "qwen3", "llama", "gemma3"):
        cases.make_folder(arch, folder / arch)
    return folder


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all cases on two ranks: one launch, as starting processes is what takes long."""
    out = tmp_path_factory.mktemp("d2")
    launch(2, "fsdp_worker.py", out, [str(models), str(out), *CASES])
    return out


def results(out: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors")


def assert_all_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("grad")])
def test_train_batch_when_on_two_ranks_expected_loss_and_gradients_of_one(
    name: str, models: Path, two_ranks: Path
) -> None:
    engine = cases.make_engine(models / name.split("-")[1], optimizer=cases.sgd())
    expected, gradients = cases.step_difference(engine, cases.ragged_batch())
    evaluated = engine.eval_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)

    result, actual = results(two_ranks, name)

    assert max(g.abs().max() for g in gradients.values()) > 0.01  # there is something to compare
    assert_all_close(actual, gradients, atol=2e-6)
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    for key, value in evaluated.items():
        assert result[f"eval_{key}"] == pytest.approx(value, rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("name", ["adamw-llama-uneven", "lora-qwen3-empty"])
def test_parameters_when_two_adamw_steps_on_two_ranks_expected_those_of_one(
    name: str, models: Path, two_ranks: Path
) -> None:
    lora = LoRAConfig(rank=4, target_modules=["all-linear"]) if name.startswith("lora") else None
    optimizer = OptimizerConfig(lr=1e-3, gradient_clipping=0.5, warmup_steps=2)
    engine = cases.make_engine(models / name.split("-")[1], optimizer=optimizer, lora=lora)
    start = cases.parameters_of(engine)
    expected: dict[str, float] = {}
    for step in range(2):
        more = engine.train_batch(cases.ragged_batch(step), cases.policy_loss, cases.token_weight)
        expected.update({f"{k}_{step}": v for k, v in more.items()})
        engine.lr_scheduler_step()

    result, actual = results(two_ranks, name)

    for key, value in expected.items():
        # LoRA starts from random A: the ranks share a seed with this process, so the numbers agree too.
        assert result[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert result["lr_0"] == pytest.approx(5e-4)
    for key, value in cases.parameters_of(engine).items():
        difference = (actual[key] - value).abs()
        # AdamW turns a gradient near 0 into a step of either sign: a few elements may differ by more.
        assert (difference > 1e-5).float().mean() < 0.01, key
        assert difference.max() <= 2.1e-3, key
    assert any(not torch.equal(start[key], actual[key]) for key in start)


def test_critic_when_one_rank_is_empty_expected_parameters_of_one(models: Path, two_ranks: Path) -> None:
    engine = cases.make_engine(models / "qwen3", optimizer=cases.sgd(lr=0.1), role="critic")
    engine.train_batch(cases.ragged_batch(), cases.value_loss, cases.token_weight)

    _, actual = results(two_ranks, "critic-qwen3-empty")

    assert_all_close(actual, cases.parameters_of(engine), atol=1e-5)


def test_initialize_when_from_scratch_expected_weights_of_rank_0(models: Path, two_ranks: Path) -> None:
    engine = cases.make_engine(models / "qwen3", init_from_scratch=True, seed=7)

    _, actual = results(two_ranks, "scratch-qwen3-uneven")

    assert_all_close(actual, cases.parameters_of(engine), atol=0)


def test_save_hf_when_sharded_expected_exact_weights(models: Path, two_ranks: Path) -> None:
    saved = transformers.AutoModelForCausalLM.from_pretrained(two_ranks / "export")
    original = transformers.AutoModelForCausalLM.from_pretrained(models / "qwen2")

    for name, value in original.state_dict().items():
        assert_close(saved.state_dict()[name], value, rtol=0, atol=0)
    _, sent = results(two_ranks, "export-qwen2-uneven")
    assert sent.keys() == dict(original.named_parameters()).keys()  # tied embeddings once
    assert_all_close(sent, dict(original.named_parameters()), atol=0)


def test_update_weights_when_engine_raises_on_rank_0_expected_every_rank_raises(two_ranks: Path) -> None:
    result, _ = results(two_ranks, "failing-qwen2-uneven")

    assert result["messages"] == ["disk on fire", "rank 0 failed: OSError: disk on fire"]


def test_load_when_checkpoint_missing_expected_error_not_hang(two_ranks: Path) -> None:
    result, _ = results(two_ranks, "badload-qwen2-uneven")

    assert "nowhere" in result["error"]


@pytest.mark.slow
def test_resume_when_on_two_ranks_expected_bitwise_equal(models: Path, tmp_path: Path) -> None:
    launch(2, "fsdp_worker.py", tmp_path, [str(models), str(tmp_path), "resume-qwen3-empty"])

    result, straight = results(tmp_path, "resume-qwen3-empty")

    assert result["equal"]
    assert result["version"] == 2
    # The same checkpoint goes on in one process, in another layout.
    from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta

    spec = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=1)
    optimizer = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", warmup_steps=2)
    engine = cases.make_engine(models / "qwen3", optimizer=optimizer, ft_spec=spec)
    engine.load(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True))
    for step in (2, 3):
        engine.train_batch(cases.ragged_batch(step), cases.policy_loss, cases.token_weight)
        engine.lr_scheduler_step()
    for name, value in cases.parameters_of(engine).items():
        assert ((value - straight[name]).abs() > 1e-5).float().mean() < 0.01, name
