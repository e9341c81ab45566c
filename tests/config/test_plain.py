"""Configurations to plain data and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_core.api.configs import (
    AlgorithmConfig,
    DatasetConfig,
    LoRAConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    RewardConfig,
    RLConfig,
    RunConfig,
    TrackerConfig,
)
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.api.load import run_config_from_plain
from areal_core.config.document import dump_yaml, parse_document
from areal_core.config.fields import LABEL
from areal_core.config.plain import escape, has_reference, to_plain, unescape
from areal_core.plugins import PluginManager

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["${a.b}", "\\${x}", "\\\\${", "$${", "1e-4", "null", "yes", "???", "12:30", "a: b", "\\", "x\ny", "\ttab", "#"]
)
names = texts.filter(lambda text: Path(text).parts and not {"..", "/"} & set(Path(text).parts))
floats = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-8, 1e6)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def configs(draw: st.DrawFn) -> RLConfig:
    temperature = draw(st.floats(0.1, 5))
    return RLConfig(
        seed=draw(st.integers(0, 2**40)),
        total_train_steps=draw(optional(st.integers(1, 10**6))),
        run=RunConfig(name=draw(names), root=Path(draw(texts))),
        trackers=draw(st.lists(st.builds(TrackerConfig, name=st.just("tensorboard")), max_size=2)),
        actor=PPOActorConfig(
            path=draw(texts),
            backend="bare:d1",
            optimizer=draw(optional(st.builds(OptimizerConfig, lr=positive, type=st.sampled_from(["adamw", "sgd"])))),
            lora=draw(optional(st.builds(LoRAConfig, rank=st.integers(1, 9), target_modules=st.lists(texts)))),
            reward_norm=draw(optional(st.builds(NormConfig, mean_level=st.sampled_from([None, "batch", "group"])))),
            adv_norm=draw(optional(st.builds(NormConfig, std_level=st.sampled_from([None, "batch", "group"])))),
            reward_bias=draw(floats),
            temperature=temperature,
        ),
        train_dataset=DatasetConfig(name="rows", path=draw(optional(texts)), shuffle=draw(st.booleans())),
        **draw(
            st.builds(RewardConfig, name=st.just("some.module:reward"), timeout=positive).map(lambda r: {"reward": r})
            | st.dictionaries(
                st.from_regex(LABEL, fullmatch=True),
                st.builds(RewardConfig, name=st.just("some.module:reward"), weight=floats),
                min_size=1,
                max_size=3,
            ).map(lambda rewards: {"rewards": rewards})
        ),
        gconfig=GenerationHyperparameters(temperature=temperature, stop=draw(st.lists(texts, max_size=3))),
        algorithm=AlgorithmConfig(name="tuned"),
    )


@given(config=configs())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_to_plain_when_loaded_again_gives_an_equal_config(config: RLConfig, manager: PluginManager) -> None:
    plain = to_plain(config)

    loaded = run_config_from_plain(plain, manager)
    reread = run_config_from_plain(parse_document(dump_yaml(plain), "config.yaml").tree, manager)

    assert loaded == config
    assert reread == config
    assert to_plain(reread) == plain


def test_to_plain_when_plugins_have_options_puts_them_under_their_names(manager: PluginManager) -> None:
    options = manager.options_class("areal_train_engines", "fake")
    assert options is not None
    reward = manager.options_class("areal_rewards", "exact")
    assert reward is not None
    config = RLConfig(
        actor=PPOActorConfig(path="m", backend="fake:d1", plugin_options={"fake": options(shards=4)}),
        train_dataset=DatasetConfig(name="rows"),
        reward=RewardConfig(name="exact", plugin_options={"exact": reward(answer="4", weights={"a": 0.5})}),
        algorithm=AlgorithmConfig(name="tuned"),
    )

    plain = to_plain(config)

    assert plain["actor"]["fake"] == {"shards": 4, "flavour": "plain"}
    assert plain["reward"]["exact"] == {"answer": "4", "weights": {"a": 0.5}}
    assert "plugin_options" not in plain["actor"] and "temperature" not in plain["actor"]
    assert run_config_from_plain(plain, manager) == config


def test_to_plain_when_config_has_paths_gives_text(manager: PluginManager) -> None:
    plain = to_plain(RunConfig(root=Path("a") / "b"))

    assert plain == {"name": "run", "root": "a/b"}


@given(text=st.text(st.sampled_from("\\${}a"), max_size=10))
def test_escape_when_undone_gives_the_text_and_leaves_no_reference(text: str) -> None:
    assert unescape(escape(text)) == text
    assert not has_reference(escape(text))


@pytest.mark.parametrize(
    ("text", "expected"), [("${a}", True), ("\\${a}", False), ("\\\\${a}", True), ("x$y", False), ("\\${a} ${b}", True)]
)
def test_has_reference_when_backslashes_precede_counts_them(text: str, expected: bool) -> None:
    assert has_reference(text) is expected


def test_to_plain_when_called_does_not_change_the_config() -> None:
    config = GenerationHyperparameters(stop=["a"])
    before = attrs.evolve(config)

    to_plain(config)["stop"].append("b")

    assert config == before
