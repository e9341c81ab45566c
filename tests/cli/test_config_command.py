"""`areal config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.load import load_run_config
from areal_core.config.document import parse_document
from areal_core.config.plain import to_plain

ENGINES = """
@hookimpl
def areal_train_engines():
    return [Registration(name="fake", target="os.path:join")]

@hookimpl
def areal_inference_engines():
    return [Registration(name="local", target="os.path:join")]
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""\
trainer: rl
actor:
  path: {model}
  backend: fake:d1
  optimizer: {{lr: 1e-4}}
train_dataset: {{name: "os.path:join"}}
reward: {{name: "os.path:join"}}
gconfig: {{n_samples: 4}}
rollout: {{backend: local}}
"""
    )
    return path


@pytest.fixture
def command(areal_process: Any, install: Any) -> Any:
    install("fake-engines", "fake_engines", ENGINES)
    return lambda *arguments: areal_process("config", *arguments, AREAL_PLUGINS="fake-engines")


def test_show_when_overridden_prints_a_file_that_loads_the_same(command: Any, run_yaml: Path, tmp_path: Path) -> None:
    outcome = command("show", run_yaml, "seed=7", "run.name='1e-4'")

    tree = parse_document(outcome.stdout, "shown.yaml").tree
    again = tmp_path / "again.yaml"
    again.write_text(outcome.stdout)
    assert outcome.code == 0 and outcome.stderr == ""
    assert (tree["seed"], tree["run"]["name"], tree["actor"]["optimizer"]["lr"]) == (7, "1e-4", 1e-4)
    assert command("show", again).stdout == outcome.stdout


def test_show_when_json_is_asked_prints_the_same_data(command: Any, run_yaml: Path) -> None:
    plain = parse_document(command("show", run_yaml).stdout, "shown.yaml").tree

    assert command("show", run_yaml, "--json").json == plain


def test_check_when_all_is_well_says_ok(command: Any, run_yaml: Path) -> None:
    outcome = command("check", run_yaml)

    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith(f"{run_yaml}: ok (trainer: rl; actor.backend: fake@fake-engines")


def test_check_when_keys_are_wrong_lists_them_on_stderr(command: Any, run_yaml: Path) -> None:
    outcome = command("check", run_yaml, "actor.lr=1", "seed=x")

    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.splitlines() == [
        "Error:",
        "  override 'seed=x': seed: expected an integer, got 'x' (text)",
        "  override 'actor.lr=1': actor.lr: unknown key. Did you mean 'actor.optimizer.lr'?",
    ]


def test_check_when_keys_do_not_go_together_names_the_line(command: Any, run_yaml: Path) -> None:
    outcome = command("check", run_yaml, "gconfig.n_samples=3", "actor.ppo_n_minibatches=5")

    assert outcome.code == 2
    assert outcome.stderr.startswith("Error: override 'actor.ppo_n_minibatches=5': actor.ppo_n_minibatches: 5 does not")


def test_check_when_import_paths_lead_nowhere_lists_each_with_its_place(command: Any, run_yaml: Path) -> None:
    outcome = command("check", run_yaml, "reward.name=os.path:jion", "workflow.name=no_such_module:Workflow")

    assert (outcome.code, outcome.stdout) == (2, "")
    first, *lines = outcome.stderr.splitlines()
    assert first == "Error:" and len(lines) == 2
    assert lines[0].startswith("  override 'reward.name=os.path:jion': reward.name: reward 'os.path:jion': os.path (")
    assert lines[0].endswith("has no attribute 'jion'. Did you mean 'join'?")
    assert "workflow.name: workflow 'no_such_module:Workflow': there is no module 'no_such_module'" in lines[1]


def test_check_when_an_import_path_is_wrong_in_the_file_names_the_line(command: Any, run_yaml: Path) -> None:
    run_yaml.write_text(run_yaml.read_text().replace('reward: {name: "os.path:join"}', 'reward: {name: "os.path:no"}'))

    outcome = command("check", run_yaml)

    assert outcome.code == 2 and outcome.stderr.startswith(f"Error: {run_yaml}:7: reward.name: reward 'os.path:no'")


@pytest.fixture
def rewards_yaml(run_yaml: Path) -> Path:
    text = run_yaml.read_text()
    run_yaml.write_text(
        text.replace('reward: {name: "os.path:join"}', 'rewards: {good: {name: "os.path:join", weight: 2}}')
    )
    return run_yaml


def test_show_when_rewards_are_named_prints_their_defaults(command: Any, rewards_yaml: Path) -> None:
    shown = parse_document(command("show", rewards_yaml, "rewards.good.timeout=3").stdout, "shown.yaml").tree

    assert shown["reward"] is None
    assert shown["rewards"]["good"] == {
        "name": "os.path:join",
        "weight": 2.0,
        "timeout": 3.0,
        "max_workers": 1,
        "on_error": "reject",
    }


def test_check_when_rewards_are_named_checks_each(command: Any, rewards_yaml: Path) -> None:
    good = command("check", rewards_yaml)
    bad = command("check", rewards_yaml, "rewards.other.name=os.path:no", "rewards.good.weight=1")
    typo = command("check", rewards_yaml, "rewards.good.weigth=1")
    both = command("check", rewards_yaml, "reward.name=os.path:join")

    assert (good.code, good.stderr) == (0, "")
    assert bad.code == 2 and "rewards.other.name: reward 'os.path:no'" in bad.stderr
    assert typo.code == 2 and "rewards.good.weigth: unknown key. Did you mean 'rewards.good.weight'?" in typo.stderr
    assert both.code == 2 and "both `reward` and `rewards` are given" in both.stderr


@pytest.mark.parametrize("command_name", ["show", "check"])
def test_config_when_file_is_missing_exits_with_2(command: Any, tmp_path: Path, command_name: str) -> None:
    outcome = command(command_name, tmp_path / "none.yaml")

    assert outcome.code == 2 and "none.yaml: there is no such file" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_schema_when_asked_prints_json_schema(command: Any) -> None:
    both, one = command("schema"), command("schema", "--trainer", "sft")

    assert both.json["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert one.json["$ref"] == "#/$defs/SFTConfig" and "RLConfig" not in one.json["$defs"]
    assert both.stdout == command("schema").stdout


def test_schema_when_trainer_is_unknown_exits_with_2(command: Any) -> None:
    outcome = command("schema", "--trainer", "sfft")

    assert outcome.code == 2 and "Did you mean 'sft'?" in outcome.stderr


def test_quickstart_examples_when_present_are_valid() -> None:
    examples = sorted(Path(__file__).parents[2].glob("examples/**/*.yaml"))

    for example in examples:
        config = load_run_config(example, [])
        assert json.dumps(to_plain(config))
