"""From a document to a configuration object: defaults, ``${...}`` references, structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from areal_core.config import classes
from areal_core.config.document import Document, merge_trees
from areal_core.config.plain import has_reference, plain_value, unescape
from areal_core.config.problems import KeyPath, Problem, raise_problems
from areal_core.config.structure import StructureError, Structurer
from areal_core.config.suggest import suggestion
from areal_core.plugins import PluginManager, get_plugin_manager

T = TypeVar("T")


def build(
    cls: type[T],
    document: Document,
    manager: PluginManager | None = None,
    *,
    given: dict[str, Any] | None = None,
) -> T:
    """The configuration that a document describes.

    Keys that it does not set have the class's defaults; a section that the class fills by default is merged with what
    the document says of it. References ``${a.b}``, ``${oc.env:VAR}`` are OmegaConf's, and see the defaults too.

    Args:
        cls: the configuration class.
        document: what is set.
        manager: the plugins to look names up in.
        given: the part of ``document`` that the user wrote, if not all of it; see :func:`resolve`.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    manager = manager or get_plugin_manager()
    tree, problems = resolve(given or document.tree, with_defaults(cls, document.tree))
    raise_problems(problems, document.positions)
    try:
        result: T = Structurer(manager).structure(tree, cls)
        return result
    except StructureError as error:
        problems = [_completed(problem, cls, manager) for problem in error.problems]
    raise_problems(sorted(problems, key=lambda problem: _order(problem, document)), document.positions)
    raise AssertionError("a structure error without a problem")


def from_plain(cls: type[T], tree: Mapping[str, Any], manager: PluginManager | None = None) -> T:
    """The inverse of :func:`areal_core.config.plain.to_plain`. Raises as :func:`build`."""
    return build(cls, Document(dict(tree)), manager)


def _completed(problem: Problem, cls: type, manager: PluginManager) -> Problem:
    if problem.kind != "unknown":
        return problem
    return Problem(problem.path, f"{problem.message} {suggestion(cls, problem.path, manager)}".rstrip())


def _order(problem: Problem, document: Document) -> tuple[int, int]:
    for length in range(len(problem.path), 0, -1):
        position = document.positions.get(problem.path[:length])
        if position is not None:
            return (1, 0) if isinstance(position, str) else (0, position.line)
    return (-1, 0)


def with_defaults(cls: type, tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the defaults of ``cls`` below it, so that references and merges see them."""
    result: dict[str, Any] = {}
    for name, field in classes.public_fields(cls).items():
        default = plain_value(classes.default_of(field)) if classes.has_default(field) else None
        if name not in tree:
            if classes.has_default(field):
                result[name] = default
            continue
        value = tree[name]
        section, item = classes.section_class(field.type), classes.item_section_class(field.type)
        if section is not None and isinstance(value, dict):
            value = with_defaults(section, merge_trees(default, value) if isinstance(default, dict) else value)
        elif item is not None and classes.is_mapping(field.type) and isinstance(value, dict):
            value = {key: with_defaults(item, part) if isinstance(part, dict) else part for key, part in value.items()}
        elif item is not None and not classes.is_mapping(field.type) and isinstance(value, list):
            value = [with_defaults(item, part) if isinstance(part, dict) else part for part in value]
        result[name] = value
    return {**result, **{key: value for key, value in tree.items() if key not in result}}


def resolve(given: dict[str, Any], tree: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """``tree`` with its references replaced, and what could not be.

    Args:
        given: what the user wrote. A reference is looked up here first: one to a whole section, such as
            ``ref: ${actor}``, brings the keys that were written there, and not the defaults of that section's class.
        tree: the same with defaults.
    """
    texts = [(path, text) for path, text in _texts(tree, ()) if "${" in text]
    if not texts:
        return tree, []
    result = _copy(tree)
    problems: list[Problem] = []
    references = []
    for path, text in texts:
        if has_reference(text):
            references.append((path, text))
        else:
            _put(result, path, unescape(text))
    if references:
        _resolve_references([given, tree], references, result, problems)
    return result, problems


def _resolve_references(
    trees: list[dict[str, Any]], references: list[tuple[KeyPath, str]], result: dict[str, Any], problems: list[Problem]
) -> None:
    # Slow to import, and most files hold no reference.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    readable = []
    for path, text in references:
        try:
            OmegaConf.create({"value": text})
            readable.append((path, text))
        except OmegaConfBaseException as error:
            problems.append(Problem(path, f"the reference in {text!r} cannot be read: {_first_line(error)}"))
    if problems:
        return
    configs = [OmegaConf.create(tree) for tree in trees]
    for path, text in readable:
        failure: BaseException | None = None
        for config in configs:
            try:
                node: Any = config
                for part in path:
                    node = node[part]
                _put(result, path, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
                break
            except (OmegaConfBaseException, RecursionError) as error:
                failure = error
        else:
            assert failure is not None
            problems.append(Problem(path, f"the reference in {text!r} cannot be resolved: {_first_line(failure)}"))


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it refers to itself"
    return next(iter(str(error).splitlines()), type(error).__name__)


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _put(tree: Any, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = value
