"""GRPO and PPO as wholes: advantages and loss against formulas written out, invariance under splits, and checks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.grpo import GRPO
from areal_core.algorithms.ppo import PPO
from areal_core.algorithms.sft import sft_loss, sft_loss_weight
from areal_core.api.algorithm_api import Algorithm
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import ImportanceConfig, NormConfig, PPOActorConfig
from areal_core.data.packing import concat
from areal_core.errors import ConfigError

BatchOf = Callable[..., PackedBatch]
GROUP = NormConfig(mean_level="group", std_level="group")


def actor(**fields: Any) -> PPOActorConfig:
    return PPOActorConfig(path="unused", **fields)


def grpo(**fields: Any) -> GRPO:
    return GRPO(actor(reward_norm=GROUP, **fields) if "reward_norm" not in fields else actor(**fields))


def ppo(**fields: Any) -> PPO:
    return PPO(actor(**{"reward_norm": None, "gae_lambda": 0.95, **fields}))


# ------------------------------------------------------------------------------------------------------ advantages


@pytest.mark.parametrize("seed", range(3))
def test_grpo_advantages_when_ragged_groups_expected_equation(batch_of: BatchOf, seed: int) -> None:
    batch = batch_of(seed)
    algorithm = grpo(reward_bias=-0.5, reward_scaling=3.0, reward_clip=2.0)

    result, stats = algorithm.compute_advantages(batch)

    shaped = [min(max((r - 0.5) * 3.0, -2.0), 2.0) for r in batch["rewards"].tolist()]
    groups = batch["group_ids"].tolist()
    for row, advantages in enumerate(result.sequences("advantages")):
        peers = [r for r, g in zip(shaped, groups, strict=True) if g == groups[row]]
        mean = sum(peers) / len(peers)
        expected = 0.0
        if len(set(peers)) > 1:
            std = math.sqrt(sum((p - mean) ** 2 for p in peers) / (len(peers) - 1))
            expected = (shaped[row] - mean) / (std + 1e-5)
        mask = list(batch.sequences("loss_mask"))[row].tolist()
        assert advantages.tolist() == pytest.approx([expected if m else 0.0 for m in mask], abs=1e-9)
    by_group = {g: {r for r, h in zip(batch["rewards"].tolist(), groups, strict=True) if h == g} for g in groups}
    constant = sum(len(values) == 1 for values in by_group.values())
    assert stats["group_zero_variance"] == pytest.approx(constant / len(by_group))
    assert stats["reward/mean"] == pytest.approx(float(batch["rewards"].mean()))
    assert stats["reward/std"] == pytest.approx(float(batch["rewards"].std(unbiased=False)))
    assert stats["reward/max"] == float(batch["rewards"].max())
    assert stats["reward/min"] == float(batch["rewards"].min())
    trained = result["advantages"][batch["loss_mask"]]
    assert stats["advantage/mean"] == pytest.approx(float(trained.mean()))
    assert stats["advantage/abs_mean"] == pytest.approx(float(trained.abs().mean()))
    assert stats["advantage/max"] == pytest.approx(float(trained.max()))
    assert stats["advantage/min"] == pytest.approx(float(trained.min()))


def test_grpo_advantages_when_token_rewards_and_discount_expected_returns(batch_of: BatchOf) -> None:
    batch = batch_of(3)
    token_rewards = torch.where(batch["loss_mask"], torch.randn(batch.num_tokens).double(), 0.0)

    result, _ = grpo(reward_norm=None, discount=0.9, reward_scaling=2.0).compute_advantages(
        batch.with_tokens(token_rewards=token_rewards)
    )

    sequences = batch.with_tokens(token_rewards=token_rewards, advantages=result["advantages"])
    for row in range(batch.num_seqs):
        mask, rewards, advantages = (
            list(sequences.sequences(name))[row].tolist() for name in ("loss_mask", "token_rewards", "advantages")
        )
        actions = [t for t, trained in enumerate(mask) if trained]
        following = 0.0
        for t in reversed(actions):
            own = 2.0 * rewards[t] + (2.0 * float(batch["rewards"][row]) if t == actions[-1] else 0.0)
            following = own + 0.9 * following
            assert advantages[t] == pytest.approx(following, abs=1e-9)


def test_grpo_advantages_when_kl_is_in_the_reward_expected_kl_to_go_subtracted(batch_of: BatchOf) -> None:
    batch = batch_of(4)
    plain, _ = grpo().compute_advantages(batch.select(range(batch.num_seqs)))
    del batch.tokens["prox_logprobs"]

    result, _ = grpo(kl_ctl=0.3, kl_in_reward=True).compute_advantages(batch)

    kl = 0.3 * (batch["logprobs"] - batch["ref_logprobs"])
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            if batch["loss_mask"][t]:
                to_go = sum(float(kl[s]) for s in range(t, end) if batch["loss_mask"][s])
                assert float(result["advantages"][t]) == pytest.approx(float(plain["advantages"][t]) - to_go, abs=1e-9)


def test_grpo_advantages_when_normalised_expected_zero_mean_unit_deviation(batch_of: BatchOf) -> None:
    result, _ = grpo(adv_norm=NormConfig(eps=0.0)).compute_advantages(batch_of(5))

    trained = result["advantages"][result["loss_mask"]]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(trained.std()) == pytest.approx(1.0, abs=1e-9)
    assert bool((result["advantages"][~result["loss_mask"]] == 0).all())


def test_ppo_advantages_when_ragged_expected_gae_and_returns(batch_of: BatchOf) -> None:
    batch = batch_of(6)

    result, _ = ppo(discount=0.98).compute_advantages(batch)

    values = batch["values"].tolist()
    bounds = batch.cu_seqlens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        actions = [t for t in range(start, end) if batch["loss_mask"][t]]
        advantage = next_value = 0.0
        for t in reversed(actions):
            reward = float(batch["rewards"][row]) if t == actions[-1] else 0.0
            advantage = reward + 0.98 * next_value - values[t] + 0.98 * 0.95 * advantage
            next_value = values[t]
            assert float(result["advantages"][t]) == pytest.approx(advantage, abs=1e-9)
            assert float(result["returns"][t]) == pytest.approx(advantage + values[t], abs=1e-9)


@pytest.mark.parametrize("algorithm", [grpo(), ppo()])
def test_advantages_when_batch_is_empty_expected_empty(batch_of: BatchOf, algorithm: Algorithm) -> None:
    result, stats = algorithm.compute_advantages(batch_of().select([]))

    assert result["advantages"].shape == (0,)
    assert stats == {}


def test_advantages_when_nothing_is_trained_expected_finite_statistics(batch_of: BatchOf) -> None:
    batch = batch_of().select([0])

    result, stats = grpo().compute_advantages(batch)

    assert bool((result["advantages"] == 0).all())
    assert all(math.isfinite(value) for value in stats.values())


# ------------------------------------------------------------------------------------------------------------ loss

CONFIGS: list[dict[str, Any]] = [
    {},
    {"eps_clip": 0.1, "eps_clip_higher": 0.3, "c_clip": 2.0, "loss_agg": "seq_mean"},
    {"kl_ctl": 0.2, "kl_estimator": "k3", "entropy_coef": 0.05},
    {"kl_ctl": 0.2, "kl_estimator": "k2", "loss_agg": "seq_sum_const", "loss_agg_const": 16.0},
    {"use_decoupled_loss": True, "behave_imp_weight_cap": 1.2},
    {"use_decoupled_loss": True, "kl_ctl": 0.1, "entropy_coef": 0.01, "loss_agg": "seq_mean", "c_clip": 3.0},
]


def current_policy(batch: PackedBatch, seed: int = 0) -> TokenOutput:
    g = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)
    entropy = torch.rand(batch.num_tokens, generator=g, dtype=torch.float64)
    return TokenOutput((batch["logprobs"] + noise).requires_grad_(), entropy.requires_grad_())


def reference_loss(config: PPOActorConfig, output: TokenOutput, batch: PackedBatch) -> float:
    loss = 0.0
    entropy = output.entropy
    assert entropy is not None
    bounds = batch.cu_seqlens.tolist()
    upper = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    for start, end in itertools.pairwise(bounds):
        actions = [t for t in range(start, end) if batch["loss_mask"][t]]
        for t in actions:
            new, behave, prox, ref, a = (
                float(x[t])
                for x in (
                    output.logprobs.detach(),
                    *(batch[n] for n in ("logprobs", "prox_logprobs", "ref_logprobs", "advantages")),
                )
            )
            ratio = math.exp(new - (prox if config.use_decoupled_loss else behave))
            objective = min(ratio * a, min(max(ratio, 1 - config.eps_clip), 1 + upper) * a)
            if config.c_clip is not None and a < 0:
                objective = max(objective, config.c_clip * a)
            if config.use_decoupled_loss:
                weight = math.exp(prox - behave)
                capped = config.behave_imp_weight_cap is not None and weight > config.behave_imp_weight_cap
                objective *= 0.0 if capped else weight
            d = new - ref
            kl = d * d / 2 if config.kl_estimator == "k2" else math.exp(-d) - 1 + d
            token = -objective + config.kl_ctl * kl - config.entropy_coef * float(entropy[t].detach())
            loss += (
                token
                / {"token_mean": 1, "seq_mean": len(actions), "seq_sum_const": config.loss_agg_const}[config.loss_agg]
            )
    return loss


@pytest.mark.parametrize("fields", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_when_ragged_expected_formula(batch_of: BatchOf, fields: dict[str, Any], seed: int) -> None:
    batch, algorithm = batch_of(seed), grpo(**fields)
    output = current_policy(batch, seed)

    result = algorithm.loss(output, batch)

    assert float(result.loss.detach()) == pytest.approx(reference_loss(algorithm.config, output, batch), rel=1e-6)
    count = float(batch["loss_mask"].sum())
    assert all(float(n) == count for _, n in result.stats.values())
    assert not any(total.requires_grad for total, _ in result.stats.values())


@pytest.mark.parametrize("fields", CONFIGS)
def test_loss_gradient_expected_finite_differences(batch_of: BatchOf, fields: dict[str, Any]) -> None:
    batch, algorithm = batch_of(1, num_seqs=5), grpo(**fields)
    output = current_policy(batch)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return algorithm.loss(TokenOutput(logprobs, entropy), batch).loss

    assert torch.autograd.gradcheck(loss, (output.logprobs.detach().requires_grad_(), output.entropy))


@pytest.mark.parametrize("fields", CONFIGS)
def test_loss_gradient_when_split_over_microbatches_and_ranks_expected_the_same(
    batch_of: BatchOf, fields: dict[str, Any]
) -> None:
    batch, algorithm = batch_of(2, num_seqs=8), grpo(**fields)
    output = current_policy(batch)
    batch = batch.with_tokens(new=output.logprobs.detach(), ent=output.entropy.detach())

    def run(parts: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
        """The gradient of sum(loss) / sum(weight), per token of the whole batch, and the reduced statistics."""
        gradient = torch.zeros(batch.num_tokens, dtype=torch.float64)
        numbered = batch.with_tokens(at=torch.arange(batch.num_tokens))
        sums: dict[str, list[float]] = {}
        weight = 0.0
        for part in parts:
            shard = numbered.select(part)
            logprobs = shard["new"].clone().requires_grad_()
            result = algorithm.loss(TokenOutput(logprobs, shard["ent"]), shard)
            result.loss.backward()
            gradient[shard["at"]] = logprobs.grad
            weight += float(algorithm.loss_weight(shard))
            for name, (total, count) in result.stats.items():
                sums.setdefault(name, [0.0, 0.0])
                sums[name][0] += float(total)
                sums[name][1] += float(count)
        return gradient / weight, {name: total / count for name, (total, count) in sums.items()}

    whole_gradient, whole_stats = run([list(range(8))])
    split_gradient, split_stats = run([[3, 1], [], [7, 0, 2], [4], [5, 6]])

    torch.testing.assert_close(split_gradient, whole_gradient, rtol=1e-9, atol=1e-12)
    assert split_stats == pytest.approx(whole_stats, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(7)), which=st.integers(0, len(CONFIGS) - 1))
def test_loss_when_sequences_are_reordered_expected_the_same(order: list[int], which: int) -> None:
    g = torch.Generator().manual_seed(which)
    length = torch.randint(1, 9, (7,), generator=g)
    total = int(length.sum())
    tokens = {n: torch.randn(total, generator=g).double() for n in ("logprobs", "prox_logprobs", "ref_logprobs", "new")}
    batch = PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)]).int(),
        {"input_ids": torch.arange(total), "loss_mask": torch.rand(total, generator=g) > 0.3, **tokens},
        {"rewards": torch.randn(7, generator=g).double(), "group_ids": torch.tensor([0, 1, 0, 1, 2, 2, 2])},
    )
    algorithm = grpo(**CONFIGS[which])

    def run(b: PackedBatch) -> tuple[float, float]:
        b, _ = algorithm.compute_advantages(b)
        output = TokenOutput(b["new"], torch.ones_like(b["new"]))
        return float(algorithm.loss(output, b).loss), float(algorithm.loss_weight(b))

    straight = run(batch)

    assert run(batch.select(order)) == pytest.approx(straight, rel=1e-6, abs=1e-9)
    halves = concat([batch.select(order[:3]), batch.select(order[3:])])
    assert run(halves) == pytest.approx(straight, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("fields", CONFIGS)
def test_loss_when_batch_is_empty_expected_zero_with_a_gradient(batch_of: BatchOf, fields: dict[str, Any]) -> None:
    batch, algorithm = batch_of().select([]), grpo(**fields)
    output = current_policy(batch)

    result = algorithm.loss(output, batch)
    result.loss.backward()

    assert float(result.loss.detach()) == 0.0
    assert output.logprobs.grad is not None
    assert float(algorithm.loss_weight(batch)) == 0.0
    assert all(float(total) == 0 and float(count) == 0 for total, count in result.stats.values())


def test_loss_when_untrained_tokens_hold_garbage_expected_clean_gradient(batch_of: BatchOf) -> None:
    batch, algorithm = batch_of(3), grpo(**CONFIGS[-1])
    output = current_policy(batch)
    clean = algorithm.loss(output, batch).loss
    garbage = {
        name: torch.where(batch["loss_mask"], batch[name], value)
        for name, value in (("logprobs", torch.inf), ("prox_logprobs", -torch.inf), ("ref_logprobs", torch.nan))
    }

    loss = algorithm.loss(output, batch.with_tokens(**garbage)).loss
    loss.backward()

    assert float(loss.detach()) == float(clean.detach())
    assert output.logprobs.grad is not None and bool(output.logprobs.grad.isfinite().all())


def test_loss_when_advantages_are_zero_expected_no_gradient_where_the_algorithm_says_so(batch_of: BatchOf) -> None:
    batch = batch_of(1).with_tokens(advantages=torch.zeros_like(batch_of(1)["advantages"]))
    for fields in CONFIGS:
        algorithm, output = grpo(**fields), current_policy(batch)

        algorithm.loss(output, batch).loss.backward()

        assert output.logprobs.grad is not None and output.entropy is not None
        entropy_gradient = output.entropy.grad
        moved = bool((output.logprobs.grad != 0).any()) or (
            entropy_gradient is not None and bool((entropy_gradient != 0).any())
        )
        assert moved == (not algorithm.zero_advantage_is_zero_gradient)


def test_loss_stats_expected_what_a_practitioner_reads(batch_of: BatchOf) -> None:
    batch = batch_of(2)
    output = current_policy(batch)
    algorithm = grpo(use_decoupled_loss=True, behave_imp_weight_cap=1.2, kl_ctl=0.1, entropy_coef=0.01, c_clip=1.5)

    stats = {name: float(total / count) for name, (total, count) in algorithm.loss(output, batch).stats.items()}

    mask = batch["loss_mask"]
    new, behave, prox, ref = (
        x.detach()[mask] for x in (output.logprobs, batch["logprobs"], batch["prox_logprobs"], batch["ref_logprobs"])
    )
    weight = (prox - behave).exp()
    assert stats["ratio"] == pytest.approx(float((new - prox).exp().mean()))
    assert stats["approx_kl"] == pytest.approx(float(((new - behave).exp() - 1 - (new - behave)).mean()))
    assert stats["ref_kl"] == pytest.approx(float(((ref - new).exp() - 1 - (ref - new)).mean()))
    assert stats["behave_weight"] == pytest.approx(float(torch.where(weight > 1.2, 0.0, weight).mean()))
    assert stats["behave_dropped_fraction"] == pytest.approx(float((weight > 1.2).double().mean()))
    assert stats["entropy"] == pytest.approx(float(output.entropy.detach()[mask].mean()))
    assert stats["advantage"] == pytest.approx(float(batch["advantages"][mask].mean()))
    assert 0 < stats["clip_fraction"] < 1


def test_loss_weight_when_rows_carry_weights_expected_their_sum(batch_of: BatchOf) -> None:
    batch = batch_of(1)

    assert float(grpo().loss_weight(batch)) == float(batch["loss_mask"].sum())
    weighted = batch.with_rows(loss_weights=torch.full((batch.num_seqs,), 2.0))
    assert float(grpo().loss_weight(weighted)) == 2.0 * batch.num_seqs


def test_loss_when_entropy_is_missing_expected_error(batch_of: BatchOf) -> None:
    batch = batch_of()

    with pytest.raises(ValueError, match="run the engine with_entropy"):
        grpo(entropy_coef=0.1).loss(TokenOutput(batch["logprobs"]), batch)


# ------------------------------------------------------------------------------------------------- needs and checks


def test_needs_expected_from_the_configuration() -> None:
    plain = grpo(report_entropy=False)
    assert not (plain.needs_entropy or plain.needs_ref_logprobs or plain.needs_prox_logprobs or plain.needs_values)
    assert plain.zero_advantage_is_zero_gradient
    assert grpo().needs_entropy and ppo().needs_entropy
    assert grpo(entropy_coef=0.1, report_entropy=False).needs_entropy
    assert grpo(kl_ctl=0.1).needs_ref_logprobs
    assert grpo(use_decoupled_loss=True).needs_prox_logprobs
    assert grpo(importance=ImportanceConfig()).needs_prox_logprobs
    assert not grpo(use_decoupled_loss=True, prox_logp="loglinear").needs_prox_logprobs
    assert not grpo(use_decoupled_loss=True, prox_logp="rollout").needs_prox_logprobs
    assert not grpo(kl_ctl=0.1).zero_advantage_is_zero_gradient
    assert grpo(kl_ctl=0.1, kl_in_reward=True).zero_advantage_is_zero_gradient
    assert ppo().needs_values


GOOD: dict[str, Any] = {"group_size": 4, "has_ref": False, "has_critic": False}


@pytest.mark.parametrize(
    ("algorithm", "given", "key", "message"),
    [
        (grpo(), {"group_size": 1}, "gconfig.n_samples", "deviation of the group"),
        (
            grpo(reward_norm=NormConfig(mean_level="group", std_level=None)),
            {"group_size": 1},
            "gconfig.n_samples",
            "mean of the group",
        ),
        (
            grpo(reward_norm=NormConfig(mean_level="group", std_level=None, mean_leave1out=True)),
            {"group_size": 1},
            "gconfig.n_samples",
            "mean of the other samples",
        ),
        (grpo(kl_ctl=0.1), {}, "ref", "actor.kl_ctl is 0.1"),
        (grpo(gae_lambda=0.9), {}, "actor.gae_lambda", "grpo has no critic"),
        (grpo(), {"has_critic": True}, "critic", "grpo uses no critic"),
        (grpo(kl_in_reward=True), {}, "actor.kl_in_reward", "actor.kl_ctl is 0"),
        (grpo(kl_ctl=0.1, kl_estimator="k1"), {"has_ref": True}, "actor.kl_estimator", "Use k2 or k3"),
        (grpo(loss_agg="seq_sum_const"), {}, "actor.loss_agg_const", r"gconfig\.max_new_tokens"),
        (grpo(behave_imp_weight_cap=2.0), {}, "actor.behave_imp_weight_cap", "use_decoupled_loss"),
        (
            grpo(use_decoupled_loss=True, behave_imp_weight_cap=2.0, importance=ImportanceConfig()),
            {},
            "actor.behave_imp_weight_cap",
            r"mode: mask, upper: 2}",
        ),
        (grpo(prox_logp="loglinear"), {}, "actor.prox_logp", "use_decoupled_loss: true"),
        (grpo(prox_logp="rollout", importance=ImportanceConfig()), {}, "actor.prox_logp", "always 1"),
        (
            grpo(importance=ImportanceConfig(lower=2.0, upper=2.0)),
            {},
            "actor.importance.lower",
            r"not below actor\.importance\.upper",
        ),
        (
            grpo(importance=ImportanceConfig(sequence_ratio="product")),
            {},
            "actor.importance.sequence_ratio",
            "Set the level to sequence",
        ),
        (ppo(), {}, "critic", "value model"),
        (ppo(kl_ctl=0.1), {"has_critic": True}, "ref", "reference model"),
    ],
)
def test_check_when_configuration_cannot_work_expected_key_and_reason(
    algorithm: Algorithm, given: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        algorithm.check(**{**GOOD, **given})

    assert caught.value.key == key


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        (grpo(), {}),
        (grpo(reward_norm=NormConfig()), {"group_size": 1}),
        (grpo(reward_norm=None), {"group_size": 1}),
        (grpo(kl_ctl=0.1), {"has_ref": True}),
        (grpo(kl_ctl=0.1, kl_in_reward=True, kl_estimator="k1"), {"has_ref": True}),
        (ppo(), {"has_critic": True, "group_size": 1}),
    ],
)
def test_check_when_configuration_works_expected_silence(algorithm: Algorithm, given: dict[str, Any]) -> None:
    algorithm.check(**{**GOOD, **given})


def test_presets_expected_without_torch() -> None:
    code = (
        "import sys; from areal_core.algorithms.grpo import GRPO; from areal_core.algorithms.ppo import PPO; "
        "assert GRPO.presets and PPO.presets; assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------------------- sft


def test_sft_loss_expected_sum_of_negative_logprobs(batch_of: BatchOf) -> None:
    batch = batch_of(2)
    logprobs = batch["logprobs"].clone().requires_grad_()

    result = sft_loss(TokenOutput(logprobs), batch)
    result.loss.backward()

    expected = -sum(x for x, m in zip(batch["logprobs"].tolist(), batch["loss_mask"].tolist(), strict=True) if m)
    assert float(result.loss.detach()) == pytest.approx(expected)
    torch.testing.assert_close(logprobs.grad, -batch["loss_mask"].double(), rtol=0, atol=0)
    total, count = result.stats["nll"]
    assert float(total) == pytest.approx(expected)
    assert float(count) == float(sft_loss_weight(batch)) == int(batch["loss_mask"].sum())


def test_sft_loss_when_batch_is_empty_expected_zero(batch_of: BatchOf) -> None:
    batch = batch_of().select([])

    result = sft_loss(TokenOutput(batch["logprobs"].requires_grad_()), batch)
    result.loss.backward()

    assert float(result.loss.detach()) == 0.0
    assert float(sft_loss_weight(batch)) == 0.0
