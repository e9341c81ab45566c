"""JSON Schema and the Markdown reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.load import TRAINER_CONFIGS, load_run_config
from areal_core.config.plain import to_plain
from areal_core.config.reference import render_markdown
from areal_core.config.schema import json_schema
from areal_core.plugins import PluginManager

RUN = {
    "trainer": "rl",
    "actor": {"path": "m", "backend": "fake:d1", "optimizer": {"lr": 1e-4}},
    "train_dataset": {"name": "rows"},
    "reward": {"name": "free"},
    "algorithm": {"name": "tuned"},
}


@pytest.fixture
def schema(manager: PluginManager) -> dict[str, Any]:
    return json_schema(TRAINER_CONFIGS, manager)


def errors(schema: dict[str, Any], tree: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    return ["/".join(map(str, error.absolute_path)) for error in validator.iter_errors(tree)]


def test_json_schema_when_checked_is_valid_and_deterministic(schema: dict[str, Any], manager: PluginManager) -> None:
    assert json.dumps(schema) == json.dumps(json_schema(TRAINER_CONFIGS, manager))
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(schema)


def test_json_schema_when_given_a_resolved_run_accepts_it(
    schema: dict[str, Any], manager: PluginManager, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    plain = to_plain(load_run_config(path, ["trackers=[{name: tensorboard}]", "ref={path: m, backend: bare}"], manager))

    assert errors(schema, RUN) == []
    assert errors(schema, plain) == []
    assert errors(json_schema({"rl": TRAINER_CONFIGS["rl"]}, manager), plain) == []


def change(key: str, value: Any) -> dict[str, Any]:
    tree = json.loads(json.dumps(RUN))
    section = tree
    *parents, last = key.split("/")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    return tree


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sede", 1),
        ("seed", -1),
        ("seed", "x"),
        ("seed", 1.5),
        ("actor/optimizer/type", "adam"),
        ("actor/optimizer/lrr", 1),
        ("actor/temperature", 1.0),
        ("actor/plugin_options", {}),
        ("actor/eps_clip", 1),
        ("actor/fake/shards", 0),
        ("actor/fake/other", 1),
        ("reward/exact", {}),
        ("rewards", {"a b": {"name": "free"}}),
        ("rewards", {"a": {"name": "free", "weigth": 1}}),
        ("rewards", {"a": {"weight": 1}}),
        ("trackers", [{}]),
        ("trainer", "rll"),
    ],
)
def test_json_schema_when_run_is_wrong_rejects_it(schema: dict[str, Any], key: str, value: Any) -> None:
    assert errors(schema, change(key, value)) != []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "${oc.decode:${oc.env:SEED}}"),
        ("actor/optimizer", None),
        ("actor/fake", {"shards": 2}),
        ("ref", "${actor}"),
        ("rewards", {"a": {"name": "free", "weight": -1}, "b": "${reward}"}),
        ("total_train_steps", None),
    ],
)
def test_json_schema_when_run_uses_null_or_a_reference_accepts_it(schema: dict[str, Any], key: str, value: Any) -> None:
    assert errors(schema, change(key, value)) == []


def test_json_schema_when_read_describes_each_key(schema: dict[str, Any]) -> None:
    rate = schema["$defs"]["OptimizerConfig"]["properties"]["lr"]

    assert rate["description"] == "Peak learning rate."
    assert rate["default"] == 1e-5
    assert rate["anyOf"][0] == {"type": "number", "minimum": 0}
    assert schema["$defs"]["RLConfig"]["required"][0] == "trainer"
    assert schema["$defs"]["RLConfig"]["additionalProperties"] is False


def test_render_markdown_when_called_lists_every_public_key(manager: PluginManager) -> None:
    page = render_markdown(manager=manager, distributions=["areal-config-test"])

    assert "| `lr` | a number, >= 0 | `1.0e-05` | Peak learning rate. |" in page
    assert "#### `actor.fake`: options of fake (areal-config-test)" in page
    assert "| `shards` | an integer, >= 1 | `1` | Shards. |" in page
    assert "a mapping of [RewardConfig](#rewardconfig)s | `{}` |" in page
    assert "Used by `reward`, `rewards.LABEL`." in page
    assert "plugin_options" not in page
    assert page == render_markdown(manager=manager, distributions=["areal-config-test"])


def test_render_markdown_when_a_plugin_is_third_party_leaves_it_out(manager: PluginManager) -> None:
    assert "areal-config-test" not in render_markdown(manager=manager)
