"""Every registered algorithm: the invariances, with its defaults and with the options of the family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_core.algorithms import conformance
from areal_core.algorithms.grpo import GRPO
from areal_core.api.algorithm_api import Algorithm
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import PPOActorConfig, RLConfig
from areal_core.api.load import load_run_config
from areal_core.plugins.manager import get_plugin_manager
from areal_core.trainer.loading import build_algorithm

NAMES = sorted(entry.registration.name for entry in get_plugin_manager().registrations("areal_algorithms"))
RUN = """\
trainer: rl
actor: {path: model, optimizer: {lr: 1e-6}}
gconfig: {n_samples: 4, max_new_tokens: 16}
train_dataset: {name: "unused.module:function", batch_size: 4}
reward: {name: "unused.module:function"}
"""
REF = "ref={path: model}"
VARIANTS: dict[str, list[str]] = {
    "defaults": [],
    "kl_and_entropy": [REF, "actor.kl_ctl=0.1", "actor.entropy_coef=0.05"],
    "seq_mean": ["actor.loss_agg=seq_mean"],
    "token_clamp": [
        "actor.loss_agg=token_mean",
        "actor.importance={level: token, mode: clamp, lower: 0.8, upper: 1.2}",
    ],
    "sequence_mask": ["actor.importance={level: sequence, mode: mask, lower: 0.9, upper: 1.1}"],
    "product": ["actor.importance={level: sequence, sequence_ratio: product, upper: 1.5}"],
    "loglinear": ["actor.importance={level: sequence, upper: 1.1}", "actor.prox_logp=loglinear"],
}
# What an algorithm refuses, with a message, is not a variant of it.
REFUSED = {("gspo", "token_clamp"), ("m2po", "loglinear")}
CASES = [(name, variant) for name in NAMES for variant in VARIANTS if (name, variant) not in REFUSED]

Load = Callable[[str, str], Algorithm]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    path: Path = tmp_path_factory.mktemp("registry") / "run.yaml"
    path.write_text(RUN)
    cache: dict[tuple[str, str], Algorithm] = {}

    def build(name: str, variant: str) -> Algorithm:
        if (name, variant) not in cache:
            critic = ["critic={path: model, optimizer: {lr: 1e-6}}"] if name == "ppo" else []
            overrides = [f"algorithm.name={name}", *VARIANTS[variant], *critic]
            config = load_run_config(path, overrides, get_plugin_manager())
            assert isinstance(config, RLConfig)
            algorithm = build_algorithm(config, get_plugin_manager())
            algorithm.check(group_size=4, has_ref=REF in overrides, has_critic=bool(critic))
            cache[name, variant] = algorithm
        return cache[name, variant]

    return build


def test_registry_expected_the_whole_family() -> None:
    family = {"cispo", "dapo", "drgrpo", "gdpo", "grpo", "gspo", "liteppo", "m2po", "ppo"}

    assert family | {"reinforce", "reinforce_pp", "rloo", "sapo"} <= set(NAMES)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_algorithm_when_split_reordered_or_silent_expected_the_same(load: Load, name: str, variant: str) -> None:
    conformance.check_algorithm(load(name, variant), seeds=[0, 1] if variant == "defaults" else [2])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    seed=st.integers(0, 1000),
    order=st.permutations(range(9)),
    owners=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=9, max_size=9),
)
def test_loss_when_sharded_at_random_expected_the_same(
    load: Load, name: str, variant: str, seed: int, order: list[int], owners: list[tuple[int, int]]
) -> None:
    assume((name, variant) not in REFUSED)
    algorithm, batch = load(name, variant), conformance.random_batch(seed)
    shards = [[[i for i in order if owners[i] == (rank, part)] for part in range(3)] for rank in range(3)]

    conformance.check_shards(algorithm, conformance.prepared(algorithm, batch), shards)
    conformance.check_order(algorithm, batch, order)


# ---------------------------------------------------------------------------------- the checks themselves can fail


class Wrong(GRPO):
    def __init__(self, kind: str) -> None:
        super().__init__(PPOActorConfig(path="unused"))
        self.kind = kind

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        batch, stats = super().compute_advantages(batch)
        if self.kind == "order" and batch.num_seqs:
            first = batch["advantages"].clone()
            first[: int(batch.seqlens[0])] += batch["loss_mask"][: int(batch.seqlens[0])].double()
            batch = batch.with_tokens(advantages=first)
        return batch, stats

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        result = super().loss(output, batch)
        extra = {
            "mean": -result.loss + result.loss / batch["loss_mask"].sum().clamp(min=1),
            "silent": torch.where(batch["loss_mask"], output.logprobs, 0.0).square().sum(),
            "untrained": output.logprobs.sum(),
            "order": torch.zeros(()),
        }[self.kind]
        return LossOutput(result.loss + extra, result.stats, result.maxima)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "split over ranks and micro-batches changes"),
        ("order", "order of the sequences changes"),
        ("silent", "zero_advantage_is_zero_gradient is true"),
        ("untrained", "an untrained token has a gradient|zero_advantage_is_zero_gradient"),
    ],
)
def test_check_algorithm_when_something_does_not_hold_expected_assertion(kind: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        conformance.check_algorithm(Wrong(kind))
