"""The critic-free algorithms as wholes: presets as loaded, advantages and losses written out, invariances, checks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import NormConfig, RLConfig
from areal_core.api.load import load_run_config
from areal_core.data.packing import concat
from areal_core.errors import ConfigError
from areal_core.plugins.manager import get_plugin_manager
from areal_core.trainer.loading import build_algorithm

BatchOf = Callable[..., PackedBatch]
NAMES = ["drgrpo", "dapo", "reinforce", "rloo", "reinforce_pp", "gspo", "cispo", "sapo"]
RUN = """\
trainer: rl
actor: {path: model, optimizer: {lr: 1e-6}}
gconfig: {n_samples: 4, max_new_tokens: 16}
train_dataset: {name: "unused.module:function", batch_size: 4}
reward: {name: "unused.module:function"}
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CriticFree]:
    """An algorithm as `areal train` builds it, from a file and overrides, so that presets and options take part."""
    path: Path = tmp_path_factory.mktemp("family") / "run.yaml"
    path.write_text(RUN)
    cache: dict[tuple[str, ...], CriticFree] = {}

    def build(name: str, *overrides: str) -> CriticFree:
        key = (name, *overrides)
        if key not in cache:
            config = load_run_config(path, [f"algorithm.name={name}", *overrides], get_plugin_manager())
            assert isinstance(config, RLConfig)
            algorithm = build_algorithm(config, get_plugin_manager())
            assert isinstance(algorithm, CriticFree)
            cache[key] = algorithm
        return cache[key]

    return build


Load = Callable[..., CriticFree]


# --------------------------------------------------------------------------------------------------------- presets


GROUP = NormConfig(mean_level="group", std_level="group")
CENTRED = NormConfig(mean_level="group", std_level=None)
LEFT_OUT = NormConfig(mean_level="group", mean_leave1out=True, std_level=None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("drgrpo", {"reward_norm": CENTRED, "loss_agg": "seq_sum_const", "loss_agg_const": 16.0}),
        ("dapo", {"reward_norm": GROUP, "eps_clip": 0.2, "eps_clip_higher": 0.28, "loss_agg": "token_mean"}),
        ("reinforce", {"reward_norm": None, "loss_agg": "seq_sum_const", "loss_agg_const": 1.0}),
        ("rloo", {"reward_norm": LEFT_OUT, "loss_agg": "seq_sum_const", "loss_agg_const": 1.0}),
        ("reinforce_pp", {"reward_norm": None, "adv_norm": NormConfig(), "eps_clip": 0.2}),
        ("gspo", {"reward_norm": GROUP, "eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_agg": "seq_mean"}),
        ("cispo", {"reward_norm": GROUP, "loss_agg": "token_mean"}),
        ("sapo", {"reward_norm": GROUP, "loss_agg": "seq_mean"}),
    ],
)
def test_presets_when_loaded_expected_the_papers_defaults_and_a_valid_run(
    load: Load, name: str, expected: dict[str, Any]
) -> None:
    algorithm = load(name)

    algorithm.check(group_size=4, has_ref=False, has_critic=False)

    assert {key: getattr(algorithm.config, key) for key in expected} == expected
    assert algorithm.config.kl_ctl == 0.0


def test_presets_expected_without_torch() -> None:
    code = "import sys\n" + "".join(
        f"import areal_core.algorithms.{module}\n"
        for module in ("drgrpo", "dapo", "reinforce", "gspo", "cispo", "sapo")
    )

    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------------ advantages


def expected_row_advantages(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    """One number per sequence; all but REINFORCE++, whose statistics are over tokens."""
    result = []
    for row, reward in enumerate(rewards):
        peers = [i for i, g in enumerate(groups) if g == groups[row]]
        values = [rewards[i] for i in peers]
        mean = sum(values) / len(values)
        if name == "reinforce":
            result.append(reward)
        elif len(set(values)) == 1:
            result.append(0.0)
        elif name == "drgrpo":
            result.append(reward - mean)
        elif name == "rloo":
            others = [rewards[i] for i in peers if i != row]
            result.append(reward - sum(others) / len(others))
        else:
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            result.append((reward - mean) / (std + 1e-5))
    return result


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce_pp"])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_when_ragged_groups_expected_equation(load: Load, batch_of: BatchOf, name: str, seed: int) -> None:
    batch = batch_of(seed, num_seqs=12)

    result, _ = load(name).compute_advantages(batch)

    rows = expected_row_advantages(name, batch["rewards"].tolist(), batch["group_ids"].tolist())
    for row, advantages, mask in zip(rows, result.sequences("advantages"), result.sequences("loss_mask"), strict=True):
        assert advantages.tolist() == pytest.approx([row if m else 0.0 for m in mask.tolist()], abs=1e-9)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_pp_advantages_expected_kl_to_go_normalised_over_the_batch(
    load: Load, batch_of: BatchOf, kl: float, seed: int
) -> None:
    batch = batch_of(seed)
    del batch.tokens["prox_logprobs"]
    overrides = ["actor.kl_ctl=0.3", "actor.kl_in_reward=true", "ref={path: model}"] if kl else []

    result, _ = load("reinforce_pp", *overrides).compute_advantages(batch)

    raw: dict[int, float] = {}
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        to_go = float(batch["rewards"][row])
        for t in reversed(range(start, end)):
            if batch["loss_mask"][t]:
                to_go -= kl * float(batch["logprobs"][t] - batch["ref_logprobs"][t])
                raw[t] = to_go
    mean = sum(raw.values()) / len(raw)
    std = math.sqrt(sum((v - mean) ** 2 for v in raw.values()) / (len(raw) - 1))
    expected = [(raw[t] - mean) / (std + 1e-5) if t in raw else 0.0 for t in range(batch.num_tokens)]
    assert result["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_when_rewards_are_equal_or_groups_of_one_expected_zero(
    load: Load, batch_of: BatchOf, name: str
) -> None:
    batch = batch_of(1)
    equal = batch.with_rows(rewards=torch.full_like(batch["rewards"], 0.1))
    alone = batch.with_rows(group_ids=torch.arange(batch.num_seqs))

    from_equal, stats = load(name).compute_advantages(equal)
    from_alone, _ = load(name).compute_advantages(alone)

    if name == "reinforce":  # has no baseline
        assert bool((from_equal["advantages"][batch["loss_mask"]] == equal["rewards"][0]).all())
    else:
        assert bool((from_equal["advantages"] == 0).all())
    if name not in ("reinforce", "reinforce_pp"):
        assert bool((from_alone["advantages"] == 0).all())
    assert stats["group_zero_variance"] == 1.0


def test_dapo_advantages_when_overlong_expected_penalty_before_normalisation(load: Load, batch_of: BatchOf) -> None:
    batch = batch_of(2, num_seqs=12)
    options = ("algorithm.dapo.overlong_max_length=8", "algorithm.dapo.overlong_cache_length=6")

    result, stats = load("dapo", *options, "algorithm.dapo.overlong_penalty=0.5").compute_advantages(batch)

    lengths = [int(mask.sum()) for mask in batch.sequences("loss_mask")]
    penalties = [0.5 * min(0.0, max(-1.0, (8 - 6 - n) / 6)) for n in lengths]
    assert len(set(penalties)) > 2
    punished = [r + p for r, p in zip(batch["rewards"].tolist(), penalties, strict=True)]
    rows = expected_row_advantages("dapo", punished, batch["group_ids"].tolist())
    for row, advantages, mask in zip(rows, result.sequences("advantages"), result.sequences("loss_mask"), strict=True):
        assert advantages.tolist() == pytest.approx([row if m else 0.0 for m in mask.tolist()], abs=1e-6)
    assert stats["overlong_penalty/mean"] == pytest.approx(sum(penalties) / len(penalties), abs=1e-6)
    torch.testing.assert_close(result["rewards"], batch["rewards"], rtol=0, atol=0)
    assert stats["reward/mean"] == pytest.approx(float(batch["rewards"].mean()))


# ------------------------------------------------------------------------------------------------------------ loss


def current_policy(batch: PackedBatch, scale: float = 0.3, seed: int = 0) -> TokenOutput:
    g = torch.Generator().manual_seed(seed)
    noise = scale * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)
    return TokenOutput((batch["logprobs"] + noise).requires_grad_())


def written_out(name: str, new: torch.Tensor, batch: PackedBatch, extra: dict[str, float]) -> torch.Tensor:
    """The batch's loss over the batch's weight as one differentiable fp64 expression, token by token.

    Scalars of torch and Python branches only, so that autograd of it is the gradient of the formula.
    """
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    kl, entropy = extra.get("kl", 0.0), extra.get("entropy", 0.0)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        actions = [t for t in range(start, end) if batch["loss_mask"][t]]
        n = len(actions)
        if not n:
            continue
        logs = [new[t] - batch["logprobs"][t] for t in actions]
        mean = torch.stack(logs).sum() / n
        summed = torch.zeros((), dtype=torch.float64)
        for t, log in zip(actions, logs, strict=True):
            a = batch["advantages"][t]
            ratio = (mean if name == "gspo" else log).exp()
            if name in ("reinforce", "rloo"):
                token = -a * new[t]
            elif name == "cispo":
                token = -a * min(max(float(ratio.detach()), 0.0), extra.get("cap", 5.0)) * new[t]
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                token = -a * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
            else:
                low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
                low, high = extra.get("low", low), extra.get("high", high)
                near = min(max(float(ratio.detach()), 1 - low), 1 + high)
                token = -ratio * a if float(ratio.detach() * a) <= near * float(a) else -near * a
            d = new[t] - batch["ref_logprobs"][t]
            summed = summed + token + kl * ((-d).exp() - 1 + d) - entropy * 0.5
        mode = {"drgrpo": "const", "gspo": "seq", "sapo": "seq", "reinforce": "sum", "rloo": "sum"}.get(name, "token")
        total = total + summed * {"const": 1 / 16, "seq": 1 / n, "sum": 1.0, "token": 1.0}[mode]
        weight += n if mode == "token" else 1
    return total / weight


CASES: list[tuple[str, tuple[str, ...], dict[str, float], float]] = [
    *((name, (), {}, 0.3) for name in NAMES),
    ("gspo", (), {}, 3e-4),
    ("gspo", ("actor.eps_clip=0.05", "actor.eps_clip_higher=0.1"), {"low": 0.05, "high": 0.1}, 0.3),
    ("cispo", ("algorithm.cispo.max_weight=1.1",), {"cap": 1.1}, 0.3),
    *(
        (
            name,
            ("actor.kl_ctl=0.2", "ref={path: model}", "actor.entropy_coef=0.05"),
            {"kl": 0.2, "entropy": 0.05},
            0.3,
        )
        for name in NAMES
    ),
]


@pytest.mark.parametrize(("name", "overrides", "extra", "scale"), CASES)
@pytest.mark.parametrize("seed", range(2))
def test_loss_when_ragged_expected_formula_and_its_gradient(
    load: Load,
    batch_of: BatchOf,
    name: str,
    overrides: tuple[str, ...],
    extra: dict[str, float],
    scale: float,
    seed: int,
) -> None:
    algorithm = load(name, *overrides)
    batch, _ = algorithm.compute_advantages(batch_of(seed, num_seqs=12))
    new = current_policy(batch, scale, seed).logprobs
    output = TokenOutput(new, torch.full_like(new.detach(), 0.5))

    result = algorithm.loss(output, batch)
    loss = result.loss / algorithm.loss_weight(batch)
    (gradient,) = torch.autograd.grad(loss, new)

    expected = written_out(name, new, batch, extra)
    (expected_gradient,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    assert bool((gradient != 0).any())
    count = float(batch["loss_mask"].sum())
    assert all(float(n) == count and not total.requires_grad for total, n in result.stats.values())


@pytest.mark.parametrize("name", NAMES)
def test_loss_gradient_when_split_over_microbatches_and_ranks_expected_the_same(
    load: Load, batch_of: BatchOf, name: str
) -> None:
    algorithm = load(name)
    batch, _ = algorithm.compute_advantages(batch_of(2, num_seqs=8))
    batch = batch.with_tokens(new=current_policy(batch, 0.05).logprobs.detach(), at=torch.arange(batch.num_tokens))

    def run(parts: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
        """The gradient of sum(loss) / sum(weight), per token of the whole batch, and the reduced statistics."""
        gradient, weight = torch.zeros(batch.num_tokens, dtype=torch.float64), 0.0
        sums: dict[str, list[float]] = {}
        for part in parts:
            shard = batch.select(part)
            logprobs = shard["new"].clone().requires_grad_()
            result = algorithm.loss(TokenOutput(logprobs), shard)
            result.loss.backward()
            gradient[shard["at"]] = logprobs.grad
            weight += float(algorithm.loss_weight(shard))
            for name_, (total, count) in result.stats.items():
                sums.setdefault(name_, [0.0, 0.0])
                sums[name_][0] += float(total)
                sums[name_][1] += float(count)
        return gradient / weight, {name_: total / count for name_, (total, count) in sums.items()}

    whole, whole_stats = run([list(range(8))])
    split, split_stats = run([[3, 1], [], [7, 0, 2], [4], [5, 6]])

    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
    assert split_stats == pytest.approx(whole_stats, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(7)), which=st.integers(0, len(NAMES) - 1))
def test_loss_when_sequences_are_reordered_expected_the_same(load: Load, order: list[int], which: int) -> None:
    g = torch.Generator().manual_seed(which)
    length = torch.randint(1, 9, (7,), generator=g)
    total = int(length.sum())
    tokens = {n: torch.randn(total, generator=g).double() for n in ("logprobs", "ref_logprobs", "new")}
    batch = PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)]).int(),
        {"input_ids": torch.arange(total), "loss_mask": torch.rand(total, generator=g) > 0.3, **tokens},
        {"rewards": torch.randn(7, generator=g).double(), "group_ids": torch.tensor([0, 1, 0, 1, 2, 2, 2])},
    )
    algorithm = load(NAMES[which])

    def run(b: PackedBatch) -> tuple[float, float]:
        b, _ = algorithm.compute_advantages(b)
        return float(algorithm.loss(TokenOutput(b["new"]), b).loss), float(algorithm.loss_weight(b))

    straight = run(batch)

    assert run(batch.select(order)) == pytest.approx(straight, rel=1e-6, abs=1e-9)
    halves = concat([batch.select(order[:3]), batch.select(order[3:])])
    assert run(halves) == pytest.approx(straight, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_loss_when_batch_is_empty_expected_zero_with_a_gradient(load: Load, batch_of: BatchOf, name: str) -> None:
    algorithm = load(name)
    batch, stats = algorithm.compute_advantages(batch_of().select([]))
    output = current_policy(batch)

    result = algorithm.loss(output, batch)
    result.loss.backward()

    assert stats == {}
    assert float(result.loss.detach()) == 0.0
    assert output.logprobs.grad is not None
    assert float(algorithm.loss_weight(batch)) == 0.0
    assert all(float(total) == 0 and float(count) == 0 for total, count in result.stats.values())


@pytest.mark.parametrize("name", NAMES)
def test_loss_when_untrained_tokens_hold_garbage_expected_clean_gradient(
    load: Load, batch_of: BatchOf, name: str
) -> None:
    algorithm = load(name)
    batch, _ = algorithm.compute_advantages(batch_of(3))
    output = current_policy(batch, 1e-4)
    clean = algorithm.loss(output, batch).loss
    mask = batch["loss_mask"]
    garbage = batch.with_tokens(logprobs=torch.where(mask, batch["logprobs"], torch.inf))
    new = torch.where(mask, output.logprobs.detach(), -torch.inf).requires_grad_()

    loss = algorithm.loss(TokenOutput(new), garbage).loss
    loss.backward()

    assert float(loss.detach()) == float(clean.detach())
    assert new.grad is not None and bool(new.grad.isfinite().all()) and bool((new.grad[mask] != 0).any())


@pytest.mark.parametrize("name", NAMES)
def test_loss_when_advantages_are_zero_expected_no_gradient(load: Load, batch_of: BatchOf, name: str) -> None:
    batch = batch_of(1).with_tokens(advantages=torch.zeros_like(batch_of(1)["advantages"]))
    algorithm, output = load(name), current_policy(batch)

    algorithm.loss(output, batch).loss.backward()

    assert algorithm.zero_advantage_is_zero_gradient
    assert output.logprobs.grad is not None and bool((output.logprobs.grad == 0).all())


# ---------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("name", "overrides", "key", "message"),
    [
        ("reinforce", ["actor.ppo_n_minibatches=2"], "actor.ppo_n_minibatches", "reinforce has no ratio to correct"),
        ("rloo", ["actor.ppo_n_minibatches=2"], "actor.ppo_n_minibatches", "rloo has no ratio to correct"),
        ("rloo", ["actor.use_decoupled_loss=true"], "actor.use_decoupled_loss", "rloo has no ratio"),
        ("reinforce", ["actor.c_clip=3"], "actor.c_clip", "clips nothing"),
        ("reinforce", ["actor.eps_clip_higher=0.3"], "actor.eps_clip_higher", "clips nothing"),
        ("gspo", ["actor.use_decoupled_loss=true"], "actor.use_decoupled_loss", "one ratio for a sequence"),
        (
            "gspo",
            ["actor.kl_ctl=0.1", "actor.kl_in_reward=true", "ref={path: model}"],
            "actor.kl_in_reward",
            "one advantage",
        ),
        ("gspo", ["actor.importance={}"], "actor.importance.level", "one ratio for a sequence. Use sequence"),
        ("gspo", ["actor.discount=0.9"], "actor.discount", "is 0.9, but gspo has one advantage"),
        ("cispo", ["actor.use_decoupled_loss=true"], "actor.use_decoupled_loss", "importance weight"),
        ("cispo", ["actor.c_clip=3"], "actor.c_clip", r"algorithm\.cispo\.max_weight"),
        ("cispo", ["actor.eps_clip_higher=0.3"], "actor.eps_clip_higher", r"algorithm\.cispo\.max_weight"),
        (
            "cispo",
            ["algorithm.cispo={min_weight: 1.0, max_weight: 1.0}"],
            "algorithm.cispo.min_weight",
            "not below algorithm.cispo.max_weight",
        ),
        ("sapo", ["actor.use_decoupled_loss=true"], "actor.use_decoupled_loss", "one ratio"),
        ("sapo", ["actor.c_clip=3"], "actor.c_clip", r"algorithm\.sapo\.tau_pos"),
        ("sapo", ["actor.eps_clip_higher=0.3"], "actor.eps_clip_higher", "soft gate"),
        (
            "dapo",
            ["algorithm.dapo.overlong_max_length=20"],
            "algorithm.dapo.overlong_cache_length",
            "is missing, but algorithm.dapo.overlong_max_length is 20",
        ),
        (
            "dapo",
            ["algorithm.dapo.overlong_cache_length=20"],
            "algorithm.dapo.overlong_max_length",
            "needs both",
        ),
        (
            "dapo",
            ["algorithm.dapo={overlong_max_length: 8, overlong_cache_length: 9}"],
            "algorithm.dapo.overlong_cache_length",
            "every completion would be punished",
        ),
        ("drgrpo", ["actor.loss_agg_const=null"], "actor.loss_agg_const", "is missing"),
    ],
)
def test_check_when_configuration_cannot_work_expected_key_and_reason(
    load: Load, name: str, overrides: list[str], key: str, message: str
) -> None:
    algorithm = load(name, *overrides)

    with pytest.raises(ConfigError, match=message) as caught:
        algorithm.check(group_size=4, has_ref="ref={path: model}" in overrides, has_critic=False)

    assert caught.value.key == key


@pytest.mark.parametrize("name", NAMES)
def test_check_when_it_has_a_critic_or_small_lambda_or_no_reference_expected_its_name(load: Load, name: str) -> None:
    given = {"group_size": 4, "has_ref": False, "has_critic": False}

    with pytest.raises(ConfigError, match=f"{name} uses no critic"):
        load(name).check(**{**given, "has_critic": True})
    with pytest.raises(ConfigError, match=f"{name} has no critic"):
        load(name, "actor.gae_lambda=0.9").check(**given)
    with pytest.raises(ConfigError, match="needs a reference model"):
        load(name, "actor.kl_ctl=0.1").check(**given)


@pytest.mark.parametrize("name", NAMES)
def test_check_when_group_of_one_expected_error_unless_the_algorithm_needs_no_group(load: Load, name: str) -> None:
    given = {"group_size": 1, "has_ref": False, "has_critic": False}

    if name in ("reinforce", "reinforce_pp"):
        load(name).check(**given)
    else:
        with pytest.raises(ConfigError, match="every advantage would be 0"):
            load(name).check(**given)


@pytest.mark.parametrize(
    ("name", "override", "key"),
    [
        ("cispo", "algorithm.cispo.max_weight=0.5", "algorithm.cispo.max_weight"),
        ("cispo", "algorithm.cispo.min_weight=1.5", "algorithm.cispo.min_weight"),
        ("sapo", "algorithm.sapo.tau_neg=0", "algorithm.sapo.tau_neg"),
        ("dapo", "algorithm.dapo.overlong_max_length=0", "algorithm.dapo.overlong_max_length"),
        ("dapo", "algorithm.dapo.overlong_penalty=-1", "algorithm.dapo.overlong_penalty"),
        ("sapo", "algorithm.sapo.tau=1", "algorithm.sapo.tau"),
    ],
)
def test_load_when_option_is_out_of_bounds_expected_its_key(load: Load, name: str, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(name, override)
