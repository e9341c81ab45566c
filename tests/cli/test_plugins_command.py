"""`areal plugins`."""

from __future__ import annotations

from typing import Any

REWARDS = """
@hookimpl
def areal_rewards():
    return [
        Registration(name="unit", target="os.path:join", description="A unit"),
        Registration(name="heavy", target="os.path:join", requires=("not-there",), extra="all"),
    ]
"""


def test_list_when_all_is_well_shows_the_kernel(areal: Any) -> None:
    outcome = areal("plugins", "list")

    assert outcome.code == 0
    assert any(line.split()[:2] == ["algorithm", "grpo"] for line in outcome.stdout.splitlines())


def test_list_when_plugins_are_broken_shows_them_with_reasons(areal_process: Any, install: Any) -> None:
    install("fake-good", "fake_good", REWARDS)
    install("fake-bad", "fake_bad", "import not_there_at_all\n")

    outcome = areal_process("plugins", "list", AREAL_PLUGINS="fake-good,fake-bad")

    assert outcome.code == 0
    rows = [line.split() for line in outcome.stdout.splitlines()]
    assert ["reward", "unit", "fake-good", "1.0", "ok", "A", "unit"] in rows
    assert ["reward", "heavy", "fake-good", "1.0", "broken"] in rows
    assert ["-", "-", "fake-bad", "1.0", "broken"] in rows
    assert "pip install 'fake-good[all]'" in outcome.stdout
    assert "No module named 'not_there_at_all'" in outcome.stdout


def test_list_when_json_is_asked_gives_every_field(areal_process: Any, install: Any) -> None:
    install("fake-good", "fake_good", REWARDS)

    outcome = areal_process("plugins", "list", "--json", "--registry", "rewards", AREAL_PLUGINS="fake-good")

    (plugin,) = [plugin for plugin in outcome.json["plugins"] if plugin["name"] == "fake_good"]
    assert (plugin["distribution"], plugin["version"], plugin["status"]) == ("fake-good", "1.0", "ok")
    unit, heavy = plugin["registrations"]
    assert (unit["name"], unit["status"], unit["target"]) == ("unit", "ok", "os.path:join")
    assert heavy["status"] == "broken" and heavy["requires"] == ["not-there"]
    assert not any(item["name"] == "core" for item in outcome.json["plugins"]), "it registers no reward"


def test_list_when_registry_is_unknown_exits_with_2(areal: Any) -> None:
    outcome = areal("plugins", "list", "--registry", "reward_s")

    assert outcome.code == 2 and "Did you mean 'rewards'?" in outcome.stderr


def test_list_when_a_variable_names_nothing_installed_says_so(areal_process: Any, install: Any) -> None:
    install("fake-good", "fake_good", REWARDS)

    outcome = areal_process("plugins", "list", AREAL_PLUGINS="fake-godo", AREAL_DISABLE_PLUGINS="core, nothing")

    assert "AREAL_PLUGINS names 'fake-godo', which is not installed. Did you mean 'fake-good'?" in outcome.stdout
    assert "AREAL_DISABLE_PLUGINS names 'nothing', which is not installed." in outcome.stdout
    assert "names 'core'" not in outcome.stdout


def test_show_when_plugin_has_options_lists_them(areal: Any) -> None:
    outcome = areal("plugins", "show", "multi_turn")

    assert outcome.code == 0
    assert "workflow multi_turn:" in outcome.stdout and "OPTION" in outcome.stdout


def test_show_when_json_is_asked_gives_options(areal: Any) -> None:
    outcome = areal("plugins", "show", "multi_turn@areal-core", "--json")

    (registration,) = outcome.json["registrations"]
    assert {"name", "type", "default", "help", "required"} == set(registration["options"][0])


def test_show_when_given_a_distribution_shows_all_of_it(areal: Any) -> None:
    names = {item["name"] for item in areal("plugins", "show", "areal-core", "--json").json["registrations"]}

    assert {"rlvr", "multi_turn", "grpo", "ppo"} <= names


def test_show_when_name_is_unknown_suggests_the_nearest(areal: Any) -> None:
    outcome = areal("plugins", "show", "multiturn")

    assert outcome.code == 2 and "Did you mean 'multi_turn'?" in outcome.stderr
