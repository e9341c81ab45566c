"""Gradient checkpointing: the same gradients from less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig

MODES: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": "none"},
    "full": {"gradient_checkpointing": "full"},
    "true": {"gradient_checkpointing": True},
    "layers": {"gradient_checkpointing": "selective"},
    "ops": {"gradient_checkpointing": "selective", "options": FSDPConfig(recompute="ops")},
}


class CountProducts(TorchDispatchMode):
    """Counts products of matrices, wherever they come from."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def run(folder: Path, mode: str) -> tuple[dict[str, torch.Tensor], int, int, int]:
    """Gradients, bytes that autograd keeps, how often a layer's MLP ran, and products of matrices in all."""
    engine = cases.make_engine(folder, optimizer=cases.sgd(), **MODES[mode])
    kept, calls = 0, 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for name, module in engine.model.named_modules():
        if name.endswith(".mlp.act_fn"):
            module.register_forward_pre_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), CountProducts() as products:
        _, gradients = cases.step_difference(engine, cases.ragged_batch())
    return gradients, kept, calls, products.count


@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_train_batch_when_recomputing_expected_equal_gradients_from_less_memory(arch: str, tmp_path: Path) -> None:
    folder = cases.make_folder(arch, tmp_path)

    results = {mode: run(folder, mode) for mode in MODES}

    expected, most, _, products = results["none"]
    for name, gradient in expected.items():
        for mode in MODES:
            assert_close(
                results[mode][0][name], gradient, rtol=0, atol=1e-6, msg=lambda t, m=mode, n=name: f"{m} {n} {t}"
            )
    assert max(g.abs().max() for g in expected.values()) > 0.01
    kept = {mode: result[1] for mode, result in results.items()}
    assert kept["full"] == kept["true"] < kept["layers"] < most
    # What `ops` keeps beside the layers' inputs is not in the graph; it shows in the products that are not repeated.
    assert kept["ops"] < most
    assert results["ops"][3] == products < results["layers"][3] < results["full"][3]
    # Two layers, each run once; then again as far as they are recomputed.
    assert {mode: result[2] for mode, result in results.items()} == {
        "none": 2,
        "full": 4,
        "true": 4,
        "layers": 3,
        "ops": 4,
    }


def test_initialize_when_architecture_cannot_recompute_expected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "supports_gradient_checkpointing", False)

    with pytest.raises(BadInputError, match="gradient_checkpointing: Qwen2ForCausalLM"):
        cases.make_engine(
            cases.make_folder("qwen2", tmp_path), optimizer=cases.sgd(), gradient_checkpointing="selective"
        )
