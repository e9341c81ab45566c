"""YAML with the place of every key, and ``key=value`` overrides on top of it.

YAML is read with the safe tags only, and with the scalars that people expect: ``1e-4`` is a number, ``12:30`` and
``2026-01-31`` are text. A key that stands twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import yaml

from areal_core.config.problems import KeyPath, Position, Problem, raise_problems
from areal_core.errors import BadInputError, ConfigError

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
_KEY_PART = re.compile(r"(?P<name>[A-Za-z0-9_][\w@-]*)(?P<indices>(?:\[\d+\])*)")


class _Scalars:
    """Implicit scalar types shared by reading and writing, so that what is written reads back the same."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    @classmethod
    def define(cls, name: str, pattern: str, first: Iterable[str]) -> None:
        for character in first:
            cls.yaml_implicit_resolvers.setdefault(character, []).append(
                (f"{_TAG}{name}", re.compile(rf"(?:{pattern})\Z"))
            )


_Scalars.define("null", "~|null|Null|NULL|", ["~", "n", "N", ""])
_Scalars.define("bool", "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO")
_Scalars.define("int", "[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)", "-+0123456789")
_Scalars.define(
    "float",
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+0123456789.",
)
_Scalars.define("merge", "<<", "<")


class _Loader(_Scalars, yaml.SafeLoader):
    pass


class _Dumper(_Scalars, yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@attrs.define
class Document:
    """A tree of plain data and the place of each key in it."""

    tree: dict[str, Any] = attrs.field(factory=dict)
    positions: dict[KeyPath, Position | str] = attrs.field(factory=dict)


def read_document(path: Path) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: with file and line: a missing or unreadable file, text that is not UTF-8 or not YAML, a key that
            stands twice, a tag other than the plain ones.
    """
    file = str(path)
    if path.is_dir():
        raise ConfigError("is a folder; give a YAML file", where=file)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("there is no such file" + _similar_file(path), where=file) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=file) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8 text; save it as UTF-8", where=f"{file}:{line}") from None
    return parse_document(text, file)


def parse_document(text: str, file: str) -> Document:
    """Parse YAML text; ``file`` is its name in messages. Raises as :func:`read_document`."""
    builder = _Builder(text, file)
    tree = builder.build()
    if tree is None:
        raise ConfigError("is empty; write at least `trainer:` and its required keys", where=file)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"the top level must be a mapping of keys such as `trainer: rl`, not a {_shape(tree)}", where=f"{file}:1"
        )
    return Document(tree, builder.positions)


class _Builder:
    """Turns YAML nodes into plain data, and remembers where each key stood."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.positions: dict[KeyPath, Position | str] = {(): file}
        self.problems: list[Problem] = []
        self.open_nodes: list[yaml.Node] = []

    def build(self) -> Any:
        try:
            self.loader = _Loader(self.text)
            node = self.loader.get_single_node()
            if node is None:
                return None
            tree = self.value(node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{self.file}:{mark.line + 1}" if mark else self.file
            raise ConfigError(f"is not valid YAML: {_yaml_message(error)}", where=place) from None
        except (yaml.YAMLError, RecursionError) as error:
            message = str(error).splitlines()[0] if str(error) else "nested too deep"
            raise ConfigError(f"is not valid YAML: {message}", where=self.file) from None
        finally:
            if hasattr(self, "loader"):
                self.loader.dispose()
        raise_problems(self.problems, self.positions)
        return tree

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if node in self.open_nodes:
            raise yaml.constructor.ConstructorError(None, None, "an anchor contains itself", node.start_mark)
        self.open_nodes.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
                return [self.item(child, (*path, index)) for index, child in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
                return self.scalar(node)
            tag = node.tag.replace(_TAG, "!!")
            raise yaml.constructor.ConstructorError(None, None, f"the tag {tag} is not supported", node.start_mark)
        finally:
            self.open_nodes.pop()

    def scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self.loader.construct_object(node)
        except ValueError:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} is not a valid {kind}", node.start_mark
            ) from None

    def item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.place(node, path)
        return self.value(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            # The text as it stands: `on` and `1` are keys like any other here, whatever they are as values.
            key = key_node.value
            child = (*path, key)
            if key in own:
                first = self.positions[child]
                self.place(key_node, child)
                self.problems.append(Problem(child, f"stands twice; first on line {getattr(first, 'line', '?')}"))
                raise_problems(self.problems, self.positions)
            self.place(key_node, child)
            own[key] = self.value(value_node, child)
        inherited: dict[str, Any] = {}
        for other in reversed(merged):
            value = self.value(other, (*path, "<<"))
            if not isinstance(value, dict):
                raise yaml.constructor.ConstructorError(None, None, "`<<` merges mappings only", other.start_mark)
            inherited.update(value)
            self.rebase((*path, "<<"), path, keep=set(own))
        return {**inherited, **own}

    def rebase(self, old: KeyPath, new: KeyPath, keep: set[str]) -> None:
        for place in [p for p in self.positions if p[: len(old)] == old and len(p) > len(old)]:
            position = self.positions.pop(place)
            if place[len(old)] not in keep:
                self.positions[(*new, *place[len(old) :])] = position

    def place(self, node: yaml.Node, path: KeyPath) -> None:
        mark = node.start_mark
        self.positions[path] = Position(self.file, mark.line + 1, mark.column + 1)


def parse_value(text: str) -> Any:
    """One YAML value, as an override holds it.

    Raises:
        BadInputError: if it is not valid YAML.
    """
    try:
        return _Builder(text, "value").build()
    except ConfigError as error:
        raise BadInputError(error.message) from None


def split_key(text: str) -> KeyPath | None:
    """``trackers[0].name`` as its parts; None when it is not a key."""
    parts: list[str | int] = []
    for piece in text.split("."):
        match = _KEY_PART.fullmatch(piece)
        if match is None:
            return None
        parts.append(match["name"])
        parts += [int(index) for index in re.findall(r"\d+", match["indices"])]
    return tuple(parts)


def apply_override(document: Document, override: str) -> None:
    """Set one ``a.b.c=value`` in place; ``value`` is YAML, so lists and mappings can be given too.

    Raises:
        ConfigError: if it has no ``=``, or its key or value cannot be read, or the key goes through a plain value.
    """
    source = f"override {override!r}"
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError("an override is written key=value, e.g. actor.optimizer.lr=1e-4", where=source)
    path = split_key(key.strip())
    if path is None:
        raise ConfigError(
            f"{key.strip()!r} is not a key. Write the names with dots between, e.g. actor.optimizer.lr=1e-4",
            where=source,
        )
    try:
        value = parse_value(text)
    except BadInputError as error:
        raise ConfigError(f"the value {error}. Put quotes around text with special signs", where=source) from None
    set_value(document, path, value, source)


def set_value(document: Document, path: KeyPath, value: Any, source: str) -> None:
    """Set one key in place, making the sections on the way; ``source`` is its place in messages."""
    container: Any = document.tree
    for depth, part in enumerate(path):
        here = path[: depth + 1]
        if isinstance(part, int):
            if not isinstance(container, list) or part > len(container):
                length = f"has {len(container)} items" if isinstance(container, list) else "is not a list"
                raise ConfigError(f"there is no item {part}; it {length}", key=key_text_of(path[:depth]), where=source)
            if part == len(container):
                container.append(None)
        elif not isinstance(container, dict):
            raise ConfigError(
                f"is {container!r:.60}, not a section, so {key_text_of(path)} cannot be set",
                key=key_text_of(path[:depth]),
                where=source,
            )
        document.positions.setdefault(here, source)
        if depth == len(path) - 1:
            for place in [p for p in document.positions if p[: len(here)] == here]:
                del document.positions[place]
            document.positions[here] = source
            container[part] = value
            return
        following = container[part] if isinstance(part, int) else container.get(part)
        if following is None:
            following = [] if isinstance(path[depth + 1], int) else {}
            container[part] = following
        container = following


def key_text_of(path: KeyPath) -> str:
    from areal_core.config.problems import key_text

    return key_text(path)


def merge(lower: Document, upper: Document) -> Document:
    """Two documents as one: sections merge key by key, everything else of ``upper`` replaces that of ``lower``."""
    positions = dict(lower.positions)
    tree = _merge(lower.tree, upper.tree, (), positions)
    positions.update(upper.positions)
    return Document(tree, positions)


def merge_trees(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """:func:`merge` for the trees alone."""
    return _merge(lower, upper, (), {})


def _merge(
    lower: dict[str, Any], upper: dict[str, Any], path: KeyPath, positions: dict[KeyPath, Position | str]
) -> dict[str, Any]:
    result = dict(lower)
    for key, value in upper.items():
        here = (*path, key)
        old = lower.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            result[key] = _merge(old, value, here, positions)
            continue
        for place in [p for p in positions if p[: len(here)] == here]:
            del positions[place]
        result[key] = value
    return result


def dump_yaml(tree: Any) -> str:
    """Plain data as YAML that :func:`parse_document` reads back the same; keys keep their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def _yaml_message(error: yaml.MarkedYAMLError) -> str:
    message = error.problem or error.context or "it cannot be read"
    if "\\t" in message:
        message += "; indent with blanks, not tabs"
    elif "mapping values are not allowed" in message:
        message += "; check the indentation, and quote text that contains ': '"
    return message


def _similar_file(path: Path) -> str:
    from areal_core.errors import did_you_mean

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f"; the folder {str(path.parent)!r} does not exist either" if not path.parent.exists() else ""
    suggestion = did_you_mean(path.name, names)
    return f".{suggestion}" if suggestion else ""


def _shape(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"
