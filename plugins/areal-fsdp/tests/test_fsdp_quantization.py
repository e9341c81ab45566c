"""torchao: 8-bit reference models and float8 training. Skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch

from areal_core.api.configs import LoRAConfig, OptimizerConfig
from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
KINDS = ["int8_weight_only", "float8_weight_only"]


def stored_bytes(model: torch.nn.Module) -> int:
    """What the parameters take, also those that torchao holds as values and scales."""

    def size(tensor: torch.Tensor) -> int:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor.numel() * tensor.element_size()
        names, _ = tensor.__tensor_flatten__()
        return sum(size(getattr(tensor, name)) for name in names)

    return sum(size(parameter.data) for parameter in model.parameters())


@needs_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_when_quantized_expected_logprobs_close_to_fp32_from_less_memory(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    plain = cases.make_engine(folder, role="ref")
    batch = cases.ragged_batch()
    expected = plain.forward(batch, with_entropy=True)

    engine = cases.make_engine(folder, role="ref", quantization=kind, dtype=dtype)
    found = engine.forward(batch, with_entropy=True)

    error = (found.logprobs - expected.logprobs).abs()
    spread = expected.logprobs[batch["loss_mask"]].std()
    assert error.mean() < 0.1 * spread
    assert error.max() > 0  # it is another model
    assert found.entropy is not None and (found.entropy - expected.entropy).abs().mean() < 0.1
    names = {name for name, p in engine.model.named_parameters() if type(p.data) is not torch.Tensor}
    assert names and all(".layers." in name and name.endswith("proj.weight") for name in names)
    # The tests' model is so narrow that scales, embeddings and head weigh a lot.
    assert stored_bytes(engine.model) < (0.7 if dtype == "float32" else 0.4) * stored_bytes(plain.model)


@needs_torchao
def test_train_batch_when_float8_is_emulated_expected_gradients_near_fp32(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    _, exact = cases.step_difference(cases.make_engine(folder, optimizer=cases.sgd()), cases.ragged_batch())
    engine = cases.make_engine(folder, optimizer=cases.sgd(), options=FSDPConfig(float8="emulated"))

    _, found = cases.step_difference(engine, cases.ragged_batch())

    assert found.keys() == exact.keys()
    differs = 0
    for name, gradient in exact.items():
        cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.95, name
        differs += not torch.equal(found[name], gradient)
    assert differs > len(exact) / 2


@needs_torchao
def test_train_batch_when_float8_is_emulated_expected_the_loss_falls(tmp_path: Path) -> None:
    folder = cases.make_folder("llama", tmp_path)
    engine = cases.make_engine(
        folder, optimizer=OptimizerConfig(lr=1e-2), options=FSDPConfig(float8="emulated"), dtype="bfloat16"
    )

    losses = [engine.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)["loss"] for _ in range(6)]

    assert losses[-1] < losses[0] - 0.05


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_initialize_when_device_has_no_float8_expected_refusal(recipe: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        pytest.skip("this device has float8")
    folder = cases.make_folder("qwen2", tmp_path)

    with pytest.raises(BadInputError, match=rf"actor\.fsdp\.float8: {recipe} needs a GPU of compute capability"):
        cases.make_engine(folder, optimizer=cases.sgd(), options=FSDPConfig(float8=recipe))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "int8_weight_only", "optimizer": cases.sgd()}, r"actor\.quantization: .*cannot be trained"),
        ({"quantization": "int8_weight_only", "lora": LoRAConfig()}, r"actor\.quantization: .*lora"),
        ({"options": FSDPConfig(float8="emulated")}, r"actor\.fsdp\.float8: is for a model that is trained"),
        (
            {"options": FSDPConfig(float8="emulated"), "optimizer": cases.sgd(), "lora": LoRAConfig()},
            r"actor\.fsdp\.float8: .*lora",
        ),
    ],
    ids=str,
)
def test_initialize_when_options_do_not_fit_expected_error(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=message):
        cases.make_engine(cases.make_folder("qwen2", tmp_path), **fields)


@pytest.mark.parametrize(
    "fields",
    [{"quantization": "int8_weight_only"}, {"options": FSDPConfig(float8="emulated"), "optimizer": cases.sgd()}],
    ids=str,
)
def test_initialize_when_torchao_is_missing_expected_what_to_install(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))

    with pytest.raises(BadInputError, match=r"needs torchao.*pip install 'areal-fsdp\[torchao\]'"):
        cases.make_engine(cases.make_folder("qwen2", tmp_path), **fields)
