"""Divergences of on-policy distillation against their definitions, in fp64 with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from areal_core.algorithms.distill import distill_loss, distill_loss_weight, divergence
from areal_core.api.batch import PackedBatch, TokenOutput

KINDS: list[Any] = ["reverse_kl", "forward_kl", "jsd"]


def logits(seed: int, rows: int = 6, size: int = 11) -> torch.Tensor:
    return 2 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def formula(student: torch.Tensor, teacher: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    p, q = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (student, teacher))

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [sum(x * torch.log(x / y) for x, y in zip(u, v, strict=True)) for u, v in zip(a, b, strict=True)]
        )

    if kind == "jsd":
        m = beta * q + (1 - beta) * p
        return beta * kl(q, m) + (1 - beta) * kl(p, m)
    return kl(p, q) if kind == "reverse_kl" else kl(q, p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_divergence_equals_its_definition_with_gradient(kind: Any, beta: float) -> None:
    # Arrange
    student, teacher = logits(0).requires_grad_(), logits(1)

    # Act
    actual, expected = divergence(student, teacher, kind, beta), formula(student, teacher, kind, beta)

    # Assert
    assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    weights = torch.arange(1.0, 7, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((x * weights).sum(), student)[0] for x in (actual, expected))
    assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_when_models_agree_is_zero_without_gradient(kind: Any) -> None:
    # Arrange: logits that differ by a constant are one distribution.
    student = logits(0).requires_grad_()

    # Act
    value = divergence(student, logits(0) + 3, kind)

    # Assert
    assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-12)
    assert_close(torch.autograd.grad(value.sum(), student)[0], torch.zeros_like(student), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_when_the_teacher_rules_entries_out_is_finite_or_large(kind: Any) -> None:
    # Arrange: entries far out of reach, as a masked vocabulary has.
    teacher = logits(1)
    teacher[:, :3] -= 1e4
    student = logits(0).requires_grad_()

    # Act
    value = divergence(student, teacher, kind)

    # Assert
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), student)[0].isfinite().all()
    if kind == "jsd":
        assert float(value.detach().max()) <= float(torch.log(torch.tensor(2.0))) + 1e-9


def test_distill_loss_when_split_adds_up_and_counts_trained_tokens() -> None:
    # Arrange
    batch = PackedBatch(
        torch.tensor([0, 3, 5]).int(),
        {"input_ids": torch.zeros(5, dtype=torch.int64), "loss_mask": torch.tensor([False, True, True, False, True])},
    )
    values = torch.tensor([9.0, 1.0, 2.0, 9.0, 4.0], dtype=torch.float64)

    # Act
    whole = distill_loss(TokenOutput(logprobs=values, of_logits=values), batch)
    parts = [
        distill_loss(TokenOutput(logprobs=values[at], of_logits=values[at]), batch.select([i]))
        for i, at in enumerate((slice(0, 3), slice(3, 5)))
    ]

    # Assert
    assert float(whole.loss) == 7 == float(sum(part.loss for part in parts))
    assert [float(x) for x in whole.stats["divergence"]] == [7, 3]
    assert float(distill_loss_weight(batch)) == 3
