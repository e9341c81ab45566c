"""A run's configuration: trainers, presets, plugin sections, overrides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_core import ConfigError
from areal_core.api.configs import NormConfig, RLConfig, SFTConfig
from areal_core.api.load import TRAINER_CONFIGS, load_run_config
from areal_core.config.plain import plugin_keywords
from areal_core.config.selections import selected_plugins
from areal_core.plugins import PluginManager

RL = """\
trainer: rl
actor:
  path: model
  backend: fake:d1
  optimizer: {lr: 1e-4}
train_dataset: {name: rows}
reward: {name: free}
algorithm: {name: tuned}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RL)
    return path


def problem(path: Path, manager: PluginManager, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, overrides, manager)
    return str(caught.value)


def test_load_when_rl_gives_rl_config(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, [], manager)

    assert isinstance(config, RLConfig)
    assert config.actor.optimizer is not None and config.actor.optimizer.lr == 1e-4
    assert TRAINER_CONFIGS["rl"] is RLConfig


def test_load_when_sft_gives_sft_config(tmp_path: Path, manager: PluginManager) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("trainer: sft\nactor: {path: m, backend: bare}\ntrain_dataset: {name: rows}\n")

    assert isinstance(load_run_config(path, [], manager), SFTConfig)


@pytest.mark.parametrize(("trainer", "message"), [("stf", "Did you mean 'sft'"), ("3", "unknown trainer 3")])
def test_load_when_trainer_is_unknown_lists_them(
    run_yaml: Path, manager: PluginManager, trainer: str, message: str
) -> None:
    text = problem(run_yaml, manager, f"trainer={trainer}")

    assert text.startswith(f"override 'trainer={trainer}': trainer: unknown trainer") and message in text


def test_load_when_trainer_is_missing_says_what_there_is(run_yaml: Path, manager: PluginManager) -> None:
    run_yaml.write_text(RL.replace("trainer: rl\n", ""))

    assert problem(run_yaml, manager) == f"{run_yaml}: trainer: is required: one of rl, sft, rw, dpo, distill"


def test_load_when_overridden_takes_the_last_override(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, ["seed=3", "seed=4", "gconfig.stop_token_ids=[1,2]"], manager)

    assert isinstance(config, RLConfig)
    assert config.seed == 4
    assert config.gconfig.stop_token_ids == [1, 2]


def test_load_when_override_is_wrong_quotes_it(run_yaml: Path, manager: PluginManager) -> None:
    assert problem(run_yaml, manager, "actor.lr=1") == (
        "override 'actor.lr=1': actor.lr: unknown key. Did you mean 'actor.optimizer.lr'?"
    )


def test_load_when_seed_is_more_than_torch_takes_says_the_bound(run_yaml: Path, manager: PluginManager) -> None:
    assert f"seed: must be <= {2**63 - 1}, got {2**63}" in problem(run_yaml, manager, f"seed={2**63}")


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/tmp/other"])
def test_load_when_run_name_leaves_the_root_says_so(run_yaml: Path, manager: PluginManager, name: str) -> None:
    assert f"run.name: must name a folder below run.root, got '{name}'" in problem(
        run_yaml, manager, f'run.name="{name}"'
    )


def test_load_when_a_section_is_missing_names_the_file_and_not_a_preset(run_yaml: Path, manager: PluginManager) -> None:
    run_yaml.write_text("trainer: rl\ntrain_dataset: {name: rows}\nreward: {name: free}\nalgorithm: {name: tuned}\n")

    assert f"{run_yaml}: actor.path: is required" in problem(run_yaml, manager)


def test_load_when_value_breaks_a_bound_names_file_line_and_key(run_yaml: Path, manager: PluginManager) -> None:
    run_yaml.write_text(RL.replace("lr: 1e-4", "lr: -1"))

    assert problem(run_yaml, manager) == f"{run_yaml}:5: actor.optimizer.lr: must be >= 0, got -1"


def test_load_when_algorithm_has_presets_puts_them_between_defaults_and_file(
    run_yaml: Path, manager: PluginManager
) -> None:
    preset = load_run_config(run_yaml, [], manager)
    overridden = load_run_config(run_yaml, ["actor.eps_clip=0.1", "actor.adv_norm=null"], manager)

    assert isinstance(preset, RLConfig) and isinstance(overridden, RLConfig)
    assert preset.actor.eps_clip == 0.3
    assert preset.actor.adv_norm == NormConfig(std_level=None)
    assert overridden.actor.eps_clip == 0.1
    assert overridden.actor.adv_norm is None


def test_load_when_a_preset_is_wrong_blames_the_algorithm(run_yaml: Path, manager: PluginManager) -> None:
    text = problem(run_yaml, manager, "algorithm.name=wrong")

    assert text.startswith("preset of the algorithm 'wrong': actor.eps_clipp: unknown key. Did you mean")


def test_load_when_plugin_has_a_section_validates_and_keeps_it(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, ["actor.fake.shards=3"], manager)

    assert config.actor.options.shards == 3
    assert config.actor.options.flavour == "plain"
    assert plugin_keywords(config.actor) == {"shards": 3, "flavour": "plain"}


def test_load_when_plugin_has_no_section_makes_its_defaults(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, [], manager)

    assert config.actor.options.shards == 1


def test_load_when_name_has_distribution_finds_the_section_of_the_short_name(
    run_yaml: Path, manager: PluginManager
) -> None:
    backend = "actor.backend=fake@areal-config-test:d2"

    config = load_run_config(run_yaml, [backend, "actor.fake.shards=3"], manager)

    assert config.actor.options.shards == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.fake.shards=0"], "actor.fake.shards: must be >= 1, got 0"),
        (["actor.fake.shard=1"], "actor.fake.shard: unknown key. Did you mean 'actor.fake.shards'?"),
        (["actor.fake=3"], "actor.fake: expected a section with keys such as shards, flavour, got 3 (an integer)"),
        (["actor.bare.x=1"], "actor.bare: this plugin has no options; remove the section"),
        (["actor.fkae.x=1"], "actor.fkae: unknown key. Did you mean 'actor.fake'?"),
        (["actor.plugin_options={}"], "actor.plugin_options: cannot be set; write a plugin's options under"),
        (["actor.temperature=1"], "actor.temperature: is set by the program; remove it"),
        (["reward.name=exact"], "reward.exact.answer: is required (The right answer)"),
        (["reward.name=exact", "reward.exact.answer=1"], "reward.exact.answer: expected text, got 1 (an integer)"),
        (["reward.name=exakt"], "reward.name: unknown reward 'exakt'. Known: exact, free. Did you mean 'exact'?"),
        (["actor.backend=fask:d1"], "actor.backend: unknown train engine 'fask'"),
        (["actor.backend=fake:q1"], "actor.backend: cannot read 'q1' in 'fake:q1'"),
        (["rollout.backend=local:d1d2"], "rollout.backend: 'd' stands twice"),
        (["algorithm.name=grop"], "algorithm.name: unknown algorithm 'grop'"),
        (["trackers[0].nam=tensorboard"], "trackers[0].nam: unknown key. Did you mean 'trackers[0].name'?"),
        (["trackers=[{}]"], "trackers[0].name: is required"),
    ],
)
def test_load_when_a_plugin_or_its_options_are_wrong_says_how(
    run_yaml: Path, manager: PluginManager, overrides: list[str], message: str
) -> None:
    assert message in problem(run_yaml, manager, *overrides)


def test_load_when_selected_plugin_is_unknown_does_not_complain_about_its_section(
    run_yaml: Path, manager: PluginManager
) -> None:
    text = problem(run_yaml, manager, "reward.name=absent", "reward.absent.x=1")

    assert text.startswith("override 'reward.name=absent': reward.name: unknown reward 'absent'")
    assert "reward.absent" not in text.replace("reward.absent.x=1", "")


def test_load_when_selector_is_an_import_path_needs_no_plugin(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, ["reward.name=my.rewards:good"], manager)

    assert isinstance(config, RLConfig)
    assert config.reward.name == "my.rewards:good"
    assert plugin_keywords(config.reward) == {}


@pytest.mark.parametrize(
    ("overrides", "temperature"), [([], 1.0), (["gconfig.temperature=0.7"], 0.7), (["gconfig.greedy=true"], 1.0)]
)
def test_load_when_sampling_is_set_gives_every_model_its_temperature(
    run_yaml: Path, manager: PluginManager, overrides: list[str], temperature: float
) -> None:
    config = load_run_config(run_yaml, [*overrides, "ref={path: m, backend: bare}"], manager)

    assert isinstance(config, RLConfig) and config.ref is not None
    assert config.actor.temperature == config.ref.temperature == temperature


def test_load_when_a_section_refers_to_another_takes_the_written_keys(run_yaml: Path, manager: PluginManager) -> None:
    run_yaml.write_text(RL.replace("tuned", "grpo"))

    config = load_run_config(run_yaml, ["ref=${actor}", "actor.dtype=float32"], manager)

    assert isinstance(config, RLConfig) and config.ref is not None
    assert (config.ref.path, config.ref.dtype) == ("model", "float32")
    assert type(config.ref).__name__ == "TrainEngineConfig"


def test_load_when_path_is_relative_leaves_it_to_the_current_directory(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, ["run.root=out"], manager)

    assert config.run.root == Path("out")


def test_selected_plugins_when_loaded_names_each_selector(run_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(run_yaml, ["trackers=[{name: tensorboard}]"], manager)

    found = {key: entry.name for key, entry in selected_plugins(config, manager)}

    assert found == {
        "trackers[0].name": "tensorboard",
        "actor.backend": "fake",
        "train_dataset.name": "rows",
        "reward.name": "free",
        "rollout.backend": "local",
        "workflow.name": "rlvr",
        "algorithm.name": "tuned",
    }


REWARDS = RL.replace(
    "reward: {name: free}\n",
    """rewards:
  correct: {name: exact, exact: {answer: "4"}}
  format:
    name: my.rewards:format
    weight: -0.5
    on_error: zero
""",
)


@pytest.fixture
def rewards_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.yaml"
    path.write_text(REWARDS)
    return path


def test_load_when_rewards_are_named_gives_each_its_section(rewards_yaml: Path, manager: PluginManager) -> None:
    config = load_run_config(rewards_yaml, ["rewards.format.weight=2", "rewards.length.name=free"], manager)

    assert isinstance(config, RLConfig) and config.reward is None
    assert list(config.reward_sections) == ["rewards.correct", "rewards.format", "rewards.length"]
    assert [section.weight for section in config.rewards.values()] == [1.0, 2.0, 1.0]
    assert plugin_keywords(config.rewards["correct"]) == {"answer": "4", "weights": {}}
    assert (config.rewards["format"].name, config.rewards["format"].on_error) == ("my.rewards:format", "zero")
    assert ("rewards.length.name", "free") in {(k, e.name) for k, e in selected_plugins(config, manager)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards.format.weigth=1"], "rewards.format.weigth: unknown key. Did you mean 'rewards.format.weight'?"),
        (["rewards.correct.exact.anser=1"], "Did you mean 'rewards.correct.exact.answer'?"),
        (["rewards.format.weight=.inf"], "rewards.format.weight: expected a finite number, got inf"),
        (["rewards.format.weight=much"], "rewards.format.weight: expected a number, got 'much' (text)"),
        (["rewards.other.weight=1"], "rewards.other.name: is required"),
        (["rewards.other.name=exakt"], "rewards.other.name: unknown reward 'exakt'"),
        (["rewards.2nd.name=free"], "rewards.2nd: '2nd' cannot be a key here; use letters, digits and _"),
        (["reward.name=free"], "rewards: both `reward` and `rewards` are given. Give one"),
        (["rewards={}"], "reward: is required: `reward: {name: ...}`, or `rewards: {LABEL: {name: ...}, ...}`"),
    ],
)
def test_load_when_named_rewards_are_wrong_says_how(
    rewards_yaml: Path, manager: PluginManager, overrides: list[str], message: str
) -> None:
    assert message in problem(rewards_yaml, manager, *overrides)


def test_load_when_a_named_reward_is_wrong_in_the_file_names_its_line(
    rewards_yaml: Path, manager: PluginManager
) -> None:
    rewards_yaml.write_text(REWARDS.replace("on_error: zero", "on_error: nought"))

    assert problem(rewards_yaml, manager).startswith(f"{rewards_yaml}:12: rewards.format.on_error: must be one of")


def test_load_when_there_is_no_reward_asks_for_one(run_yaml: Path, manager: PluginManager) -> None:
    run_yaml.write_text(RL.replace("reward: {name: free}\n", ""))

    assert problem(run_yaml, manager).startswith(f"{run_yaml}: reward: is required: ")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_load_when_a_number_is_not_finite_rejects_it(run_yaml: Path, manager: PluginManager, value: str) -> None:
    text = problem(run_yaml, manager, f"actor.optimizer.lr={value}")

    assert f"actor.optimizer.lr: expected a finite number, got {value.replace('.', '')}" in text


def test_load_when_called_imports_neither_torch_nor_omegaconf(run_yaml: Path, tmp_path: Path) -> None:
    run_yaml.write_text(
        "trainer: rl\nactor: {path: m, backend: x.y}\ntrain_dataset: {name: 'a.b:c'}\nreward: {name: 'a.b:c'}\n"
        "algorithm: {name: grpo}\nworkflow: {name: multi_turn}\n"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom areal_core import ConfigError\n"
        "from areal_core.api.load import load_run_config\n"
        f"try:\n    load_run_config(Path({str(run_yaml)!r}), [])\nexcept ConfigError as error:\n    print(error)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'omegaconf'} & set(sys.modules)))\n"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "actor.backend: unknown train engine 'x.y'" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"
