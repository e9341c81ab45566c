"""Names to implementations, and every way in which a plugin can be broken."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from areal_core import PluginError, hookspecs
from areal_core.plugins import PluginManager, discovery
from areal_core.plugins.inspection import HOOK_NAMES, REGISTRIES

HEADER = """
from areal_core import Registration, hookimpl
AREAL_API_VERSION = "1.0"
"""


def reward_plugin(name: str, target: str = "os.path:join", **fields: object) -> str:
    """Source of a plugin that registers one reward."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in {"name": name, "target": target, **fields}.items())
    return f"{HEADER}\n@hookimpl\ndef areal_rewards():\n    return [Registration({arguments})]\n"


Load = Callable[..., PluginManager]


def plugin_named(manager: PluginManager, name: str):
    return next(plugin for plugin in manager.plugins if plugin.name == name)


def test_get_when_registered_returns_registration(load: Load) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", description="A unit")))

    registration = manager.get("areal_rewards", "unit")

    assert registration.description == "A unit"
    assert manager.load("areal_rewards", "unit") is importlib.import_module("os.path").join
    assert plugin_named(manager, "fake_one").status == "ok"


def test_registries_when_compared_with_hookspecs_are_complete() -> None:
    lifecycle = {name for name in HOOK_NAMES if name.startswith(("areal_run_", "areal_step_", "areal_trajectory_"))}
    lifecycle |= {"areal_weights_updated", "areal_checkpoint_saved"}

    assert set(REGISTRIES) == HOOK_NAMES - lifecycle - {"areal_commands"}


def test_entry_point_group_when_compared_with_hookspecs_is_the_same() -> None:
    assert discovery.ENTRY_POINT_GROUP == hookspecs.ENTRY_POINT_GROUP


def test_load_when_plugin_is_listed_imports_target_only_on_load(load: Load, site: Path) -> None:
    (site / "fake_target.py").write_text("def reward(**_):\n    return 1.0\n")
    manager = load(("fake-one", "fake_one", reward_plugin("unit", "fake_target:reward")))

    manager.registrations("areal_rewards")
    before = "fake_target" in sys.modules
    target = manager.load("areal_rewards", "unit")

    assert not before
    assert target() == 1.0


BROKEN = {
    "import_error": ("import module_that_is_not_there\n", "No module named 'module_that_is_not_there'"),
    "syntax_error": ("def broken(:\n", "SyntaxError"),
    "exit": ("raise SystemExit('no')\n", "SystemExit: no"),
    "no_version": (reward_plugin("x").replace("AREAL_API_VERSION", "OTHER"), 'Add AREAL_API_VERSION = "1.0"'),
    "version_number": (reward_plugin("x").replace('"1.0"', "1.0"), "write major and minor as text"),
    "newer_minor": (reward_plugin("x").replace("1.0", "1.9"), "pip install --upgrade areal-core"),
    "newer_major": (reward_plugin("x").replace("1.0", "2.0"), "needs kernel API 2.0"),
    "older_major": (reward_plugin("x").replace("1.0", "0.9"), "pip install --upgrade fake-broken"),
    "raises": (HEADER + "@hookimpl\ndef areal_rewards():\n    raise RuntimeError('boom')\n", "RuntimeError: boom"),
    "not_a_list": (HEADER + "@hookimpl\ndef areal_rewards():\n    return 5\n", "list of Registration, not int"),
    "rubbish_item": (HEADER + "@hookimpl\ndef areal_rewards():\n    return ['x']\n", "one item is 'x'"),
    "bad_name": (
        HEADER + "@hookimpl\ndef areal_rewards():\n    return [Registration(name='A b', target='a:b')]\n",
        "ValueError",
    ),
    "unknown_hook": (HEADER + "@hookimpl\ndef areal_reward():\n    return []\n", "Did you mean 'areal_rewards'?"),
    "unmarked_hook": (HEADER + "def areal_rewards():\n    return []\n", "not marked as a hook"),
    "wrong_arguments": (HEADER + "@hookimpl\ndef areal_rewards(app):\n    return []\n", "app"),
    "twice": (
        HEADER
        + "@hookimpl\ndef areal_rewards():\n    return [Registration(name='x', target='a:b') for _ in range(2)]\n",
        "registers the reward 'x' twice",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_plugins_when_one_is_broken_lists_it_and_keeps_the_others(load: Load, source: str, reason: str) -> None:
    manager = load(
        ("fake-broken", "fake_broken", source), ("fake-good", "fake_good", reward_plugin("good", "os.path:join"))
    )

    plugin = plugin_named(manager, "fake_broken")

    assert plugin.status == "broken"
    assert plugin.reason is not None and reason in plugin.reason and "\n" not in plugin.reason
    assert manager.get("areal_rewards", "good").name == "good"
    assert manager.get("areal_algorithms", "grpo").name == "grpo"


def test_get_when_plugin_is_broken_but_name_known_says_why(load: Load) -> None:
    source = reward_plugin("unit") + "\n@hookimpl\ndef areal_datasets():\n    raise RuntimeError('boom')\n"
    manager = load(("fake-broken", "fake_broken", source))

    with pytest.raises(PluginError, match=r"'unit' of fake-broken cannot be used.*areal_datasets failed.*boom"):
        manager.get("areal_rewards", "unit")


def test_get_when_import_failed_mentions_the_broken_plugin(load: Load) -> None:
    manager = load(("areal-unit", "unit_plugin", "import module_that_is_not_there\n"))

    with pytest.raises(PluginError) as caught:
        manager.get("areal_rewards", "unit", "reward.name")

    assert str(caught.value).startswith("reward.name: unknown reward 'unit'")
    assert "areal-unit is broken" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "command"),
    [
        ({"requires": ("not-there>=2",)}, "pip install 'not-there>=2'"),
        ({"requires": ("not-there>=2",), "extra": "fast"}, "pip install 'fake-one[fast]'"),
        ({"requires": ("attrs>=9999",)}, "pip install 'attrs>=9999'"),
    ],
)
def test_get_when_requirement_is_missing_says_what_to_install(
    load: Load, fields: dict[str, object], command: str
) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", **fields)))

    with pytest.raises(PluginError) as caught:
        manager.get("areal_rewards", "unit")

    assert command in str(caught.value)
    assert plugin_named(manager, "fake_one").status == "ok"


@pytest.mark.parametrize("requirement", ["attrs>=22", "not-there; python_version < '3'"])
def test_get_when_requirement_is_met_or_does_not_apply_works(load: Load, requirement: str) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", requires=(requirement,))))

    assert manager.get("areal_rewards", "unit").name == "unit"


def test_get_when_requirement_is_malformed_says_so(load: Load) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", requires=(">>1",))))

    with pytest.raises(PluginError, match="requirement '>>1' cannot be read"):
        manager.get("areal_rewards", "unit")


def test_get_when_two_plugins_share_a_name_asks_for_the_distribution(load: Load) -> None:
    manager = load(
        ("fake-a", "fake_a", reward_plugin("unit", "os.path:join")),
        ("fake-b", "fake_b", reward_plugin("unit", "os.path:split")),
    )

    with pytest.raises(PluginError, match="'unit@fake-a' or 'unit@fake-b'"):
        manager.get("areal_rewards", "unit")
    assert manager.get("areal_rewards", "unit@fake-a").target == "os.path:join"
    assert manager.get("areal_rewards", "unit@Fake_B").target == "os.path:split"
    with pytest.raises(PluginError, match="There is: unit@fake-a, unit@fake-b"):
        manager.get("areal_rewards", "unit@fake-c")


def test_get_when_name_is_unknown_lists_known_and_nearest(load: Load) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("gsm8k")))

    with pytest.raises(PluginError, match=r"unknown reward 'gms8k'. Known: gsm8k. Did you mean 'gsm8k'\?"):
        manager.get("areal_rewards", "gms8k")


def test_get_when_registry_does_not_exist_raises_value_error(load: Load) -> None:
    with pytest.raises(ValueError, match="areal_rewards"):
        load().get("areal_reward", "x")


def test_plugins_when_denied_are_not_imported(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit")))
    monkeypatch.setenv("AREAL_DISABLE_PLUGINS", "other, Fake_One, core")

    plugin = plugin_named(manager, "fake_one")

    assert plugin.status == "disabled"
    assert "fake_one" not in sys.modules
    assert plugin_named(manager, "core").status == "ok"
    with pytest.raises(PluginError, match="fake-one is disabled: disabled by AREAL_DISABLE_PLUGINS"):
        manager.get("areal_rewards", "unit")


def test_plugins_when_allowed_by_entry_point_name_leaves_others_out(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = load(("fake-a", "fake_a", reward_plugin("a")), ("fake-b", "fake_b", reward_plugin("b")))
    monkeypatch.setenv("AREAL_PLUGINS", "fake_b")

    statuses = {plugin.name: plugin.status for plugin in manager.plugins}

    assert (statuses["fake_a"], statuses["fake_b"], statuses["core"]) == ("disabled", "ok", "ok")


def test_plugins_when_listed_stand_in_a_fixed_order(load: Load) -> None:
    manager = load(("fake-b", "fake_b", reward_plugin("b")), ("fake-a", "fake_a", reward_plugin("a")))

    assert [plugin.name for plugin in manager.plugins if plugin.status == "ok"] == ["core", "fake_a", "fake_b"]


def test_discover_when_metadata_is_broken_skips_it(load: Load, site: Path) -> None:
    info = site / "fake_odd-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[areal\nno equals sign\n[areal]\njunk\n")

    manager = load(("fake-one", "fake_one", reward_plugin("unit")))

    assert manager.get("areal_rewards", "unit").name == "unit"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_at_all:f", "there is no module 'nowhere_at_all'"),
        ("os.path:joinn", "Did you mean 'join'"),
        ("os.path:", "is not an import path"),
        ("os path:join", "is not an import path"),
        ("os:sep", "is not a class or function"),
        ("raising_module:f", "importing raising_module failed: ZeroDivisionError: division by zero"),
        ("needs_other:f", "No module named 'not_there_either'"),
    ],
)
def test_load_when_import_path_is_wrong_says_how(load: Load, site: Path, path: str, message: str) -> None:
    (site / "raising_module.py").write_text("1 / 0\n")
    (site / "needs_other.py").write_text("import not_there_either\n")
    manager = load()

    with pytest.raises(PluginError) as caught:
        manager.load("areal_rewards", path, "reward.name")

    assert str(caught.value).startswith(f"reward.name: reward {path!r}")
    assert message in str(caught.value)


def test_load_when_import_path_lies_in_current_directory_finds_it(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_mine_7.py").write_text("def reward(*args):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])

    assert load().load("areal_rewards", "module_of_mine_7:reward")() == 0.5


def test_load_when_target_is_broken_names_the_plugin(load: Load) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", "not_there_at_all:f")))

    with pytest.raises(PluginError, match=r"'unit' of fake-one 1\.0.*pip install --upgrade fake-one"):
        manager.load("areal_rewards", "unit")


def test_load_when_gpu_is_needed_and_absent_says_so(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = load(("fake-one", "fake_one", reward_plugin("unit", device="cuda")))
    monkeypatch.setattr("areal_core.plugins.manager._has_gpu", lambda: False)

    assert manager.get("areal_rewards", "unit").device == "cuda"
    with pytest.raises(PluginError, match="needs a GPU"):
        manager.load("areal_rewards", "unit")


def test_options_class_when_registered_returns_attrs_class(load: Load, site: Path) -> None:
    (site / "fake_options.py").write_text(
        "import attrs\n\n@attrs.define(kw_only=True)\nclass Options:\n    x: int = 1\n\nclass Plain: ...\n"
    )
    manager = load(
        ("fake-one", "fake_one", reward_plugin("unit", config="fake_options:Options")),
        ("fake-two", "fake_two", reward_plugin("plain", config="fake_options:Plain")),
        ("fake-three", "fake_three", reward_plugin("none")),
    )

    options = manager.options_class("areal_rewards", "unit")

    assert options is not None and attrs.has(options)
    assert manager.options_class("areal_rewards", "none") is None
    assert manager.options_class("areal_rewards", "some.module:f") is None
    with pytest.raises(PluginError, match="not an attrs class"):
        manager.options_class("areal_rewards", "plain")


def test_get_when_name_is_a_dotted_path_writes_it_with_a_colon(load: Load) -> None:
    with pytest.raises(PluginError, match=r"An import path has a colon: my_pkg\.workflow:MyWorkflow\."):
        load().get("areal_workflows", "my_pkg.workflow.MyWorkflow")
