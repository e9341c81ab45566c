"""Tokens with supports: log-probs, entropies and gradients over what the sampler had kept, against formulas in fp64."""

from __future__ import annotations

from pathlib import Path

import fsdp_cases as cases
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_fsdp.config import FSDPConfig
from areal_fsdp.support import TokenSupports, support_logprobs

TARGETS = torch.tensor([3, 0, 5, 2])
#: Some, one alone, all of six, and padding in the middle of what is kept.
SUPPORTS = torch.tensor([[1, 3, 4, -1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, 5], [2, -1, 0, -1, -1, -1]])


def formula(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``log p_x - log sum_{s in S} p_s`` with ``p = softmax(z / T)`` over the vocabulary, and the entropy over S."""
    logprobs, entropies = [], []
    for row, target, kept in zip(logits, TARGETS.tolist(), SUPPORTS.tolist(), strict=True):
        p = torch.softmax(row / temperature, -1)
        ids = [i for i in kept if i >= 0]
        q = p[ids] / p[ids].sum()
        logprobs.append(torch.log(p[target] / p[ids].sum()))
        entropies.append(-(q * q.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def test_support_logprobs_expected_renormalised_softmax() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3

    logprobs, entropy = support_logprobs(logits, TARGETS, SUPPORTS, temperature=0.7, with_entropy=True)
    plain, none = support_logprobs(logits, TARGETS, SUPPORTS, temperature=0.7, with_entropy=False)

    expected, expected_entropy = formula(logits, 0.7)
    assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    assert none is None
    assert_close(plain, logprobs, rtol=0, atol=0)


def test_support_logprobs_expected_gradient_of_the_formula() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    logits.requires_grad_()
    weights = torch.tensor([[0.3, -1.0, 2.0, 0.7], [1.1, 0.4, -0.2, -1.3]], dtype=torch.float64)

    def actual(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return support_logprobs(z, TARGETS, SUPPORTS, temperature=0.7, with_entropy=True)

    assert torch.autograd.gradcheck(actual, logits)
    (gradient,) = torch.autograd.grad((torch.stack(actual(logits)) * weights).sum(), logits)
    (expected,) = torch.autograd.grad((torch.stack(formula(logits, 0.7)) * weights).sum(), logits)
    assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
    # What was not kept has none.
    assert torch.equal(gradient[0, [0, 2, 5]], torch.zeros(3, dtype=torch.float64))


def test_support_logprobs_when_logits_are_extreme_expected_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 3.0]], requires_grad=True)

    logprobs, entropy = support_logprobs(
        logits, torch.tensor([2]), torch.tensor([[2, 3, -1]]), temperature=1.0, with_entropy=True
    )
    (logprobs + entropy).sum().backward()

    assert_close(logprobs, torch.log_softmax(torch.tensor([0.0, 3.0]), -1)[:1], rtol=1e-6, atol=1e-6)
    assert torch.isfinite(logits.grad).all() and logits.grad[0, :2].abs().max() == 0


def test_token_supports_when_some_tokens_have_none_expected_them_named() -> None:
    supports = np.array([[4, 7], [-1, -1], [2, -1]], np.int32)

    made = TokenSupports.of(supports, np.array([7, 3, 2]))

    assert made.ids.tolist() == [[4, 7], [3, -1], [2, -1]]
    assert made.full is not None and made.full.tolist() == [False, True, False]
    assert supports.tolist() == [[4, 7], [-1, -1], [2, -1]]
    assert TokenSupports.of(supports[::2], np.array([7, 2])).full is None


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_forward_when_tokens_have_supports_expected_transformers_over_them(
    arch: str, chunk: int, tmp_path: Path
) -> None:
    folder = cases.make_folder(arch, tmp_path)
    batch = cases.with_supports(cases.ragged_batch())
    engine = cases.make_engine(folder, options=FSDPConfig(logits_chunk_tokens=chunk), temperature=0.7, max_tokens=100)
    with torch.no_grad():
        expected, entropies = cases.reference_logprobs(cases.load_reference(folder), batch, temperature=0.7)

    output = engine.forward(batch, with_entropy=True)

    assert_close(output.logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert_close(output.entropy, entropies.float(), rtol=1e-5, atol=1e-5)
    whole = engine.forward(batch.without("supports")).logprobs
    assert (output.logprobs - whole).abs().max() > 0.5


@pytest.mark.parametrize("chunk", [7, 1024])
def test_train_batch_when_tokens_have_supports_expected_gradient_of_the_formula(chunk: int, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.with_supports(cases.ragged_batch())
    options = FSDPConfig(logits_chunk_tokens=chunk)
    engine = cases.make_engine(folder, options=options, optimizer=cases.sgd(), temperature=0.7, max_tokens=60)
    model = cases.load_reference(folder)
    logprobs, entropy = cases.reference_logprobs(model, batch, 0.7)
    reference = cases.policy_loss(TokenOutput(logprobs), batch).loss + 0.1 * (entropy * batch["loss_mask"]).sum()
    (reference / cases.token_weight(batch)).backward()

    def loss_fn(output: TokenOutput, part: PackedBatch) -> LossOutput:
        assert "supports" not in part and output.entropy is not None
        return LossOutput(cases.policy_loss(output, part).loss + 0.1 * (output.entropy * part["loss_mask"]).sum())

    before = cases.parameters_of(engine)
    engine.train_batch(batch, loss_fn, cases.token_weight, with_entropy=True)
    after = cases.parameters_of(engine)

    for name, parameter in model.named_parameters():
        step = (before[name] - after[name]).double()
        assert_close(step, parameter.grad, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_forward_when_no_token_has_a_support_expected_the_whole_vocabulary(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("llama", tmp_path))
    batch = cases.ragged_batch()
    expected = engine.forward(batch, with_entropy=True)

    output = engine.forward(
        batch.with_tokens(supports=torch.full((batch.num_tokens, 3), -1, dtype=torch.int32)), with_entropy=True
    )

    assert torch.equal(output.logprobs, expected.logprobs)
    assert torch.equal(output.entropy, expected.entropy)
