"""YAML with places, and overrides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from areal_core import ConfigError
from areal_core.config.document import (
    Document,
    apply_override,
    dump_yaml,
    merge,
    parse_document,
    parse_value,
    read_document,
    split_key,
)
from areal_core.config.problems import Position


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e-3", -2.5e-3),
        (".5", 0.5),
        ("3", 3),
        ("1_000", 1000),
        ("0x10", 16),
        ("true", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("fsdp:d4", "fsdp:d4"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'1'", "1"),
        ("[1, a]", [1, "a"]),
        ("{a: 1e-3}", {"a": 1e-3}),
    ],
)
def test_parse_value_when_given_yaml_gives_what_people_expect(text: str, value: Any) -> None:
    parsed = parse_value(text)

    assert parsed == value and type(parsed) is type(value)


def test_parse_value_when_not_finite_reads_floats() -> None:
    assert parse_value(".inf") == math.inf
    assert math.isnan(parse_value(".nan"))


def test_parse_document_when_nested_keeps_the_place_of_every_key() -> None:
    document = parse_document("a: 1\nb:\n  c: [x, y]\n  d: {e: 2}\n", "f.yaml")

    assert document.tree == {"a": 1, "b": {"c": ["x", "y"], "d": {"e": 2}}}
    assert document.positions == {
        (): "f.yaml",
        ("a",): Position("f.yaml", 1, 1),
        ("b",): Position("f.yaml", 2, 1),
        ("b", "c"): Position("f.yaml", 3, 3),
        ("b", "c", 0): Position("f.yaml", 3, 7),
        ("b", "c", 1): Position("f.yaml", 3, 10),
        ("b", "d"): Position("f.yaml", 4, 3),
        ("b", "d", "e"): Position("f.yaml", 4, 7),
    }


def test_parse_document_when_merge_key_is_used_merges_below_own_keys() -> None:
    text = "base: &base {x: 1, y: 2}\nuse:\n  <<: *base\n  y: 3\n"

    document = parse_document(text, "f.yaml")

    assert document.tree["use"] == {"x": 1, "y": 3}
    assert document.positions["use", "x"] == Position("f.yaml", 1, 14)
    assert document.positions["use", "y"] == Position("f.yaml", 4, 3)


def test_parse_document_when_key_looks_like_another_type_keeps_its_text() -> None:
    assert parse_document("on: 1\n2: x\n", "f.yaml").tree == {"on": 1, "2": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: stands twice; first on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: a.b: stands twice"),
        ("a: [1\nb: 2\n", "f.yaml:2: is not valid YAML"),
        ("a:\n\tb: 1\n", "f.yaml:2: is not valid YAML: found character '\\t'"),
        ("a: b: c\n", "f.yaml:1: is not valid YAML: mapping values are not allowed"),
        ("- 1\n- 2\n", "f.yaml:1: the top level must be a mapping"),
        ("just text", "f.yaml:1: the top level must be a mapping"),
        ("", "f.yaml: is empty"),
        ("# nothing\n", "f.yaml: is empty"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: is not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", "f.yaml:1: is not valid YAML: the tag"),
        ("a: !custom 1\n", "f.yaml:1: is not valid YAML: the tag !custom"),
        ("? [1, 2]\n: x\n", "f.yaml:1: is not valid YAML: a key must be plain text"),
        ("a: &a [*a]\n", "f.yaml:1: is not valid YAML: an anchor contains itself"),
        ("a: *b\n", "f.yaml:1: is not valid YAML: found undefined alias"),
        ("a: !!int x\n", "f.yaml:1: is not valid YAML: 'x' is not a valid int"),
        ("a: \x00\n", "f.yaml: is not valid YAML"),
    ],
)
def test_parse_document_when_malformed_names_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml")

    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


def test_read_document_when_file_is_missing_suggests_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("a: 1\n")

    with pytest.raises(ConfigError, match=r"no such file\. Did you mean 'grpo.yaml'\?"):
        read_document(tmp_path / "grop.yaml")
    with pytest.raises(ConfigError, match=r"the folder .* does not exist either"):
        read_document(tmp_path / "nowhere" / "x.yaml")


def test_read_document_when_given_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read_document(tmp_path)


def test_read_document_when_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: caf\xe9\n")

    with pytest.raises(ConfigError, match=r"latin\.yaml:2: is not UTF-8"):
        read_document(path)


def test_read_document_when_file_has_a_byte_order_mark_ignores_it(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes("a: 1\n".encode("utf-8-sig"))

    assert read_document(path).tree == {"a": 1}


@pytest.mark.parametrize(
    ("override", "tree"),
    [
        ("a.b=2", {"a": {"b": 2, "c": [1, 2]}}),
        ("a.b=[1, x]", {"a": {"b": [1, "x"], "c": [1, 2]}}),
        ("a.c[0]=5", {"a": {"b": 1, "c": [5, 2]}}),
        ("a.c[2]=5", {"a": {"b": 1, "c": [1, 2, 5]}}),
        ("a.d.e=1e-4", {"a": {"b": 1, "c": [1, 2], "d": {"e": 1e-4}}}),
        ("x=a=b", {"a": {"b": 1, "c": [1, 2]}, "x": "a=b"}),
        ("l[0].name=t", {"a": {"b": 1, "c": [1, 2]}, "l": [{"name": "t"}]}),
        ("a=null", {"a": None}),
    ],
)
def test_apply_override_when_valid_sets_the_value(override: str, tree: dict[str, Any]) -> None:
    document = parse_document("a: {b: 1, c: [1, 2]}\n", "f.yaml")

    apply_override(document, override)

    assert document.tree == tree
    key = split_key(override.partition("=")[0])
    assert key is not None and document.positions[key] == f"override {override!r}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "override 'a.b': an override is written key=value"),
        ("=1", "override '=1': '' is not a key"),
        ("+a.b=1", "override '+a.b=1': '+a.b' is not a key"),
        ("~a.b=1", "'~a.b' is not a key"),
        ("a..b=1", "'a..b' is not a key"),
        ("a.b.c=1", "override 'a.b.c=1': a.b: is 1, not a section"),
        ("a.c[7]=1", "override 'a.c[7]=1': a.c: there is no item 7; it has 2 items"),
        ("a.b[0]=1", "override 'a.b[0]=1': a.b: there is no item 0; it is not a list"),
        ("a.b=[1", "override 'a.b=[1': the value is not valid YAML"),
        ("a.b={x: 1, x: 2}", "stands twice"),
    ],
)
def test_apply_override_when_wrong_quotes_it(override: str, message: str) -> None:
    document = parse_document("a: {b: 1, c: [1, 2]}\n", "f.yaml")

    with pytest.raises(ConfigError) as caught:
        apply_override(document, override)

    assert message in str(caught.value)


def test_merge_when_sections_overlap_keeps_both_places() -> None:
    lower = Document({"a": {"x": 1, "y": 2}}, {("a", "x"): "low", ("a", "y"): "low"})
    upper = Document({"a": {"y": [3]}}, {("a", "y"): "high"})

    merged = merge(lower, upper)

    assert merged.tree == {"a": {"x": 1, "y": [3]}}
    assert merged.positions == {("a", "x"): "low", ("a", "y"): "high"}
    assert lower.tree == {"a": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    "text", ["1e-4", "12:30", "yes", "0x1", "null", "", " x ", "a: b", "1_0", "é", "- a", "'", "<<"]
)
def test_dump_yaml_when_text_looks_like_something_else_reads_back_as_text(text: str) -> None:
    tree = {"key": text, "list": [text, 1e-4, 1e22, None, True]}

    assert parse_document(dump_yaml(tree), "f.yaml").tree == tree
