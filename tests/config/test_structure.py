"""Strict structuring, with every problem at once."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from areal_core import ConfigError
from areal_core.config.compose import build
from areal_core.config.document import parse_document
from areal_core.config.fields import option
from areal_core.config.problems import ConfigErrors
from areal_core.plugins import PluginManager


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def _even(instance: Any, attribute: Any, value: int) -> None:
    if value % 2:
        raise ValueError(f"must be even, got {value}")


def _not_above_count(instance: Any, attribute: Any, value: int) -> None:
    if value > instance.count:
        raise ValueError(f"must be at most count = {instance.count}, got {value}")


@attrs.define(kw_only=True)
class Inner:
    size: int = option(4, "Size.", ge=1, validator=_even)
    rate: float = option(0.5, "Rate.", gt=0, lt=1)


@attrs.define(kw_only=True)
class Outer:
    name: str = option(help="Name.")
    count: int = option(3, "Count.")
    least: int = option(0, "At most count.", validator=_not_above_count)
    ratio: float = option(1.0, "Ratio.")
    flag: bool = option(False, "Flag.")
    place: Path = option(Path("here"), "Place.")
    mode: Literal["fast", "slow"] = option("fast", "Mode.")
    maybe_mode: Literal["fast", "slow"] | None = option(None, "Mode or null.")
    colour: Colour = option(Colour.RED, "Colour.")
    inner: Inner = option(factory=Inner, help="Inner.")
    optional: Inner | None = option(None, "Optional.")
    items: list[Inner] = option(factory=list, help="Items.")
    table: dict[str, int] = option(factory=dict, help="Table.")
    pair: tuple[int, str] = option((1, "x"), "Pair.")
    many: tuple[int, ...] = option((), "Many.")
    either: int | list[int] = option(1, "Either.")
    number: int | float = option(1, "Number.")
    anything: Any = option(None, "Anything.")
    wide: float = option(math.inf, "Unbounded, unless given.")
    parts: dict[str, Inner] = option(factory=dict, help="Parts.", labels=True)
    hidden: int = option(7, "Set by the program.", internal=True)


def load(text: str, manager: PluginManager) -> Outer:
    return build(Outer, parse_document(text, "run.yaml"), manager)


def test_build_when_only_required_keys_are_given_has_the_defaults(manager: PluginManager) -> None:
    assert load("name: x\n", manager) == Outer(name="x")


def test_build_when_every_type_is_given_reads_it(manager: PluginManager) -> None:
    text = """
name: x
ratio: 2
place: a/b
mode: slow
maybe_mode: null
colour: blue
inner: {size: 2}
optional: {}
items: [{size: 6}, {}]
table: {a: 1}
pair: [2, y]
many: [1, 2, 3]
either: [1]
number: 2.5
anything: {k: [1]}
"""
    config = load(text, manager)

    assert config == Outer(
        name="x",
        ratio=2.0,
        place=Path("a/b"),
        mode="slow",
        colour=Colour.BLUE,
        inner=Inner(size=2),
        optional=Inner(),
        items=[Inner(size=6), Inner()],
        table={"a": 1},
        pair=(2, "y"),
        many=(1, 2, 3),
        either=[1],
        number=2.5,
        anything={"k": [1]},
    )
    assert type(config.ratio) is float and type(config.many) is tuple


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("count: '3'", "count: expected an integer, got '3' (text)"),
        ("count: 3.0", "count: expected an integer, got 3.0 (a number)"),
        ("count: true", "count: expected an integer, got true"),
        ("count: null", "count: expected an integer, got null"),
        ("count: [1]", "count: expected an integer, got [1] (a list)"),
        ("ratio: '1'", "ratio: expected a number, got '1' (text)"),
        ("ratio: true", "ratio: expected a number, got true"),
        ("ratio: .nan", "ratio: expected a finite number, got nan"),
        ("ratio: .inf", "ratio: expected a finite number, got inf"),
        ("number: -.inf", "number: expected an integer or a number, got -inf (a number)"),
        ("wide: -.inf", "wide: expected a finite number, got -inf"),
        ("flag: 1", "flag: expected true or false, got 1 (an integer)"),
        ("flag: 'true'", "flag: expected true or false, got 'true' (text)"),
        ("place: 3", "place: expected a path, got 3 (an integer)"),
        ("mode: fats", "mode: must be one of 'fast', 'slow', got 'fats' (text). Did you mean 'fast'?"),
        ("mode: null", "mode: must be one of 'fast', 'slow', got null"),
        ("maybe_mode: 1", "maybe_mode: must be one of 'fast', 'slow' or null, got 1 (an integer)"),
        ("colour: green", "colour: expected one of 'red', 'blue', got 'green' (text)"),
        ("inner: 3", "inner: expected a section with keys such as size, rate, got 3 (an integer)"),
        ("inner: null", "inner: expected a section with keys such as size, rate, got null"),
        ("optional: [1]", "optional: expected a section or null, got [1] (a list)"),
        ("inner: {size: 3}", "inner.size: must be even, got 3"),
        ("inner: {size: 0}", "inner.size: must be >= 1, got 0"),
        ("inner: {rate: 1}", "inner.rate: must be < 1, got 1"),
        ("inner: {rate: .nan}", "inner.rate: expected a finite number, got nan"),
        ("optional: {size: x}", "optional.size: expected an integer, got 'x' (text)"),
        ("items: {size: 2}", "items: expected a list of sections, got a section"),
        ("items: [{}, {size: x}]", "items[1].size: expected an integer, got 'x' (text)"),
        ("items: text", "items: expected a list of sections, got 'text' (text)"),
        ("table: {a: x}", "table.a: expected an integer, got 'x' (text)"),
        ("parts: {a: {size: x}}", "parts.a.size: expected an integer, got 'x' (text)"),
        ("parts: {a: {siez: 2}}", "parts.a.siez: unknown key. Did you mean 'parts.a.size'?"),
        ("parts: {size: 2}", "parts.size: expected a section with keys such as size, rate, got 2 (an integer)"),
        ("parts: [{size: 2}]", "parts: expected a mapping of sections, got [{'size': 2}] (a list)"),
        (
            "parts: {a-b: {}}",
            "parts.a-b: 'a-b' cannot be a key here; use letters, digits and _, and begin with no digit",
        ),
        ("table: [1]", "table: expected a mapping, got [1] (a list)"),
        ("pair: [1]", "pair: expected a list of 2 items, got 1"),
        ("pair: [1, 2]", "pair[1]: expected text, got 2 (an integer). Put it in quotes"),
        ("either: x", "either: expected an integer or a list of integers, got 'x' (text)"),
        ("hidden: 1", "hidden: is set by the program; remove it"),
        ("least: 9", "expected"),
        ("cuont: 1", "cuont: unknown key. Did you mean 'count'?"),
        ("size: 1", "size: unknown key. Did you mean 'inner.size'?"),
        ("inner: {flag: true}", "inner.flag: unknown key. Did you mean 'flag'?"),
        ("inner: {rtae: 1}", "inner.rtae: unknown key. Did you mean 'inner.rate'?"),
        ("inner: {zzz: 1}", "inner.zzz: unknown key. Valid keys here: size, rate."),
    ],
)
def test_build_when_a_value_is_wrong_says_where_and_what(line: str, message: str, manager: PluginManager) -> None:
    if line.startswith("least"):
        message = "must be at most count = 3, got 9"

    with pytest.raises(ConfigError) as caught:
        load(f"name: x\n{line}\n", manager)

    place = "run.yaml: " if line.startswith("least") else "run.yaml:2: "
    assert str(caught.value) == place + message
    assert not isinstance(caught.value, ConfigErrors)


def test_build_when_text_is_expected_and_a_number_given_suggests_quotes(manager: PluginManager) -> None:
    with pytest.raises(
        ConfigError, match=r"^run\.yaml:1: name: expected text, got 5 \(an integer\)\. Put it in quotes$"
    ):
        load("name: 5\n", manager)


def test_build_when_a_required_key_is_missing_names_it(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"^run\.yaml: name: is required \(Name\)$") as caught:
        load("count: 1\n", manager)

    assert (caught.value.key, caught.value.where) == ("name", "run.yaml")


def test_build_when_several_are_wrong_lists_all_in_file_order(manager: PluginManager) -> None:
    text = "ratio: x\nname: 1\ninner:\n  rate: 5\n  sise: 1\nitems:\n- {size: x}\n"

    with pytest.raises(ConfigErrors) as caught:
        load(text, manager)

    assert [(error.where, error.key) for error in caught.value.errors] == [
        ("run.yaml:1", "ratio"),
        ("run.yaml:2", "name"),
        ("run.yaml:4", "inner.rate"),
        ("run.yaml:5", "inner.sise"),
        ("run.yaml:7", "items[0].size"),
    ]
    assert len(str(caught.value).splitlines()) == 5


def test_build_when_references_are_used_resolves_them(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_TEST_NAME", "n")
    text = """
name: "${oc.env:AREAL_TEST_NAME}-${count}"
ratio: ${inner.rate}
optional: ${inner}
table: {a: "${count}"}
anything: '\\${literal}'
"""
    config = load(text, manager)

    assert config.name == "n-3", "a default can be referred to"
    assert config.ratio == 0.5
    assert config.optional == Inner()
    assert config.table == {"a": 3}
    assert config.anything == "${literal}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("count: ${nope}", "run.yaml:2: count: the reference in '${nope}' cannot be resolved"),
        ("count: ${oc.env:AREAL_NOT_SET}", "Environment variable 'AREAL_NOT_SET' not found"),
        ("count: ${count}", "run.yaml:2: count: the reference in '${count}' cannot be resolved"),
        ("count: ${co", "run.yaml:2: count: the reference in '${co' cannot be read"),
        ("count: ${name}", "run.yaml:2: count: expected an integer, got 'x' (text)"),
    ],
)
def test_build_when_a_reference_is_wrong_says_where(line: str, message: str, manager: PluginManager) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"name: x\n{line}\n", manager)

    assert message in str(caught.value)


def test_build_when_section_has_a_default_merges_with_it(manager: PluginManager) -> None:
    @attrs.define(kw_only=True)
    class Holder:
        inner: Inner = option(factory=lambda: Inner(size=8, rate=0.25), help="Inner.")

    config = build(Holder, parse_document("inner: {rate: 0.75}\n", "run.yaml"), manager)

    assert config.inner == Inner(size=8, rate=0.75)
