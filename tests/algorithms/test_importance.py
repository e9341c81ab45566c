"""Importance weights and proximal log-probs: formulas in plain Python, and their place in the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from areal_core.algorithms.grpo import GRPO
from areal_core.algorithms.importance import importance_weight
from areal_core.algorithms.proximal import loglinear_proximal
from areal_core.algorithms.reinforce import Reinforce
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import ImportanceConfig, PPOActorConfig

BatchOf = Callable[..., PackedBatch]
Level = Literal["token", "sequence"]
BOUNDS = [(None, None), (None, 1.1), (0.9, None), (0.8, 1.2)]


def written_out(
    batch: PackedBatch, level: str, mode: str, lower: float | None, upper: float | None, product: bool
) -> list[tuple[float, float, bool]]:
    """Weight, ratio and whether it is outside, for each token, by the formula."""
    result = [(1.0, 1.0, False)] * batch.num_tokens
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        actions = [t for t in range(start, end) if batch["loss_mask"][t]]
        logs = [float(batch["prox_logprobs"][t] - batch["logprobs"][t]) for t in actions]
        if level == "sequence" and logs:
            shared = sum(logs) if product else sum(logs) / len(logs)
            logs = [shared] * len(logs)
        for t, log in zip(actions, logs, strict=True):
            ratio = math.exp(log)
            bounded = min(max(ratio, lower if lower is not None else 0.0), upper if upper is not None else math.inf)
            outside = bounded != ratio
            weight = bounded if mode == "clamp" else ratio * (not outside)
            result[t] = (weight, ratio, outside)
    return result


@pytest.mark.parametrize(("lower", "upper"), BOUNDS)
@pytest.mark.parametrize("mode", ["clamp", "mask"])
@pytest.mark.parametrize(("level", "product"), [("token", False), ("sequence", False), ("sequence", True)])
def test_importance_weight_when_ragged_expected_formula(
    batch_of: BatchOf, level: Level, product: bool, mode: Any, lower: float | None, upper: float | None
) -> None:
    batch = batch_of(3, num_seqs=12)
    prox = batch["prox_logprobs"].clone().requires_grad_()

    result = importance_weight(
        prox,
        batch["logprobs"],
        batch["loss_mask"],
        batch.cu_seqlens,
        level=level,
        mode=mode,
        lower=lower,
        upper=upper,
        sequence_ratio="product" if product else "geometric",
    )

    expected = written_out(batch, level, mode, lower, upper, product)
    assert result.weight.tolist() == pytest.approx([weight for weight, _, _ in expected], rel=1e-9)
    assert result.ratio.tolist() == pytest.approx([ratio for _, ratio, _ in expected], rel=1e-9)
    assert result.outside.tolist() == [outside for _, _, outside in expected]
    assert any(outside for _, _, outside in expected) == ((lower, upper) != (None, None))
    assert not (result.weight.requires_grad or result.ratio.requires_grad)


def test_importance_weight_when_untrained_tokens_hold_garbage_expected_ones(batch_of: BatchOf) -> None:
    batch = batch_of(1)
    mask = batch["loss_mask"]
    garbage = torch.where(mask, batch["logprobs"], torch.inf)

    for level in ("token", "sequence"):
        result = importance_weight(batch["prox_logprobs"], garbage, mask, batch.cu_seqlens, level=level, upper=2.0)

        assert bool(result.weight.isfinite().all()) and bool((result.weight[~mask] == 1).all())


def test_importance_weight_when_ratio_overflows_expected_finite() -> None:
    prox, behave = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])

    free = importance_weight(prox, behave, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))

    assert bool(free.weight.isfinite().all())
    assert free.weight.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)


def test_loglinear_when_versions_differ_expected_interpolation() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behave = torch.tensor([-3.0, -3.0, -3.0, -3.0], dtype=torch.float64)
    versions = torch.tensor([7, 6, 4, -1], dtype=torch.int32)

    result = loglinear_proximal(current, behave, versions, torch.tensor(7))

    assert result.tolist() == pytest.approx([-3.0, -3 + 2 * 1 / 2, -3 + 2 * 3 / 4, -3 + 2 * 8 / 9], rel=1e-12)
    assert not result.requires_grad


def test_loglinear_when_a_token_is_newer_than_the_step_expected_the_samplers_logprob() -> None:
    current, behave = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -2.0])

    result = loglinear_proximal(current, behave, torch.tensor([8, 9]), torch.tensor(7))

    assert result.tolist() == [-3.0, -2.0]


# ------------------------------------------------------------------------------------------------- inside the loss


def actor(**fields: Any) -> PPOActorConfig:
    return PPOActorConfig(path="unused", **fields)


def output_for(batch: PackedBatch) -> TokenOutput:
    g = torch.Generator().manual_seed(9)
    noise = 0.2 * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)
    return TokenOutput((batch["prox_logprobs"] + noise).requires_grad_())


@pytest.mark.parametrize(("level", "product"), [("token", False), ("sequence", False), ("sequence", True)])
@pytest.mark.parametrize("mode", ["clamp", "mask"])
def test_loss_when_importance_is_set_expected_weighted_clip_around_the_proximal_policy(
    batch_of: BatchOf, level: Level, product: bool, mode: Any
) -> None:
    batch = batch_of(5, num_seqs=10)
    output = output_for(batch)
    chosen = ImportanceConfig(
        level=level, mode=mode, lower=0.8, upper=1.2, sequence_ratio="product" if product else "geometric"
    )

    result = GRPO(actor(importance=chosen)).loss(output, batch)
    (gradient,) = torch.autograd.grad(result.loss, output.logprobs)

    weights = written_out(batch, level, mode, 0.8, 1.2, product)
    total, slopes = 0.0, [0.0] * batch.num_tokens
    for t in range(batch.num_tokens):
        if not batch["loss_mask"][t]:
            continue
        a, w = float(batch["advantages"][t]), weights[t][0]
        ratio = math.exp(float(output.logprobs[t].detach() - batch["prox_logprobs"][t]))
        near = min(max(ratio, 0.8), 1.2)
        total -= w * min(ratio * a, near * a)
        slopes[t] = -w * ratio * a if ratio * a <= near * a else 0.0
    assert float(result.loss.detach()) == pytest.approx(total, rel=1e-6)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)
    stats = {name: float(total / count) for name, (total, count) in result.stats.items()}
    trained = [w for w, m in zip(weights, batch["loss_mask"].tolist(), strict=True) if m]
    assert stats["behave_ratio"] == pytest.approx(sum(r for _, r, _ in trained) / len(trained), rel=1e-6)
    assert stats["behave_weight"] == pytest.approx(sum(w for w, _, _ in trained) / len(trained), rel=1e-6)
    share = stats["behave_clamped_fraction" if mode == "clamp" else "behave_dropped_fraction"]
    assert share == pytest.approx(sum(o for _, _, o in trained) / len(trained))
    assert float(result.maxima["behave_ratio"]) == pytest.approx(max(r for _, r, _ in trained), rel=1e-6)


def test_loss_when_capped_expected_as_importance_mask(batch_of: BatchOf) -> None:
    batch = batch_of(4)
    output = output_for(batch)

    capped = GRPO(actor(use_decoupled_loss=True, behave_imp_weight_cap=1.2)).loss(output, batch)
    masked = GRPO(actor(importance=ImportanceConfig(mode="mask", upper=1.2))).loss(output, batch)

    assert float(capped.loss.detach()) == float(masked.loss.detach())
    assert capped.stats.keys() == masked.stats.keys()


@pytest.mark.parametrize("method", ["rollout", "loglinear"])
def test_loss_when_proximal_is_approximated_expected_no_recomputed_logprobs(batch_of: BatchOf, method: Any) -> None:
    batch = batch_of(2)
    del batch.tokens["prox_logprobs"]
    lag = torch.arange(batch.num_tokens) % 4
    batch = batch.with_tokens(versions=(9 - lag).int()).with_rows(trainer_version=torch.full((batch.num_seqs,), 9))
    g = torch.Generator().manual_seed(1)
    new = (batch["logprobs"] + 0.3 * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)).requires_grad_()

    result = GRPO(actor(use_decoupled_loss=True, prox_logp=method, eps_clip=0.9)).loss(TokenOutput(new), batch)

    total = 0.0
    for t in range(batch.num_tokens):
        if batch["loss_mask"][t]:
            log = float(new[t].detach() - batch["logprobs"][t])
            to_prox = 0.0 if method == "rollout" else log * int(lag[t]) / (int(lag[t]) + 1)
            a, ratio = float(batch["advantages"][t]), math.exp(log - to_prox)
            total -= math.exp(to_prox) * min(ratio * a, min(max(ratio, 0.1), 1.9) * a)
    assert float(result.loss.detach()) == pytest.approx(total, rel=1e-6)


def test_reinforce_loss_when_importance_is_set_expected_truncated_weight_times_logprob(batch_of: BatchOf) -> None:
    batch = batch_of(6)
    output = output_for(batch)
    config = actor(importance=ImportanceConfig(upper=1.1), loss_agg="seq_sum_const", loss_agg_const=1.0)

    loss = Reinforce(config).loss(output, batch).loss
    (gradient,) = torch.autograd.grad(loss, output.logprobs)

    weights = (batch["prox_logprobs"] - batch["logprobs"]).exp().clamp(max=1.1)
    expected = torch.where(batch["loss_mask"], -weights * batch["advantages"], 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
