"""Loading the configuration of a run.

Layers, each over the one before: the class defaults, the presets of the algorithm, the YAML file, the overrides.
Relative paths in a configuration stay relative to the current directory, not to the file.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_core.api.alloc import parse_backend
from areal_core.api.configs import AlgorithmConfig, RLConfig, SFTConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.api.preference_configs import DPOConfig, RWConfig
from areal_core.config import classes
from areal_core.config.compose import build, resolve, with_defaults
from areal_core.config.document import Document, apply_override, merge, read_document, set_value, split_key
from areal_core.config.problems import ConfigErrors, Problem, raise_problems, where
from areal_core.errors import BadInputError, ConfigError, PluginError, did_you_mean
from areal_core.plugins import PluginManager, get_plugin_manager

RunConfigType = RLConfig | SFTConfig | RWConfig | DPOConfig | DistillConfig

#: The configuration class of each ``trainer:``.
TRAINER_CONFIGS: dict[str, type] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
    "distill": DistillConfig,
}

_BACKENDS = ("actor", "ref", "critic", "teacher", "rollout")


def load_run_config(path: Path, overrides: Sequence[str] = (), manager: PluginManager | None = None) -> RunConfigType:
    """The configuration of a run, validated as a whole; nothing heavy is imported.

    Args:
        path: the YAML file.
        overrides: ``a.b.c=value``, later ones win; the value is YAML.
        manager: the plugins to look names up in; those that are installed by default.

    Raises:
        ConfigError: with every problem found in it, each with its key and file and line.
    """
    document = read_document(Path(path))
    for override in overrides:
        apply_override(document, override)
    return _load(document, manager or get_plugin_manager())


def run_config_from_plain(tree: Mapping[str, Any], manager: PluginManager | None = None) -> RunConfigType:
    """The configuration that ``to_plain`` gave. Raises as :func:`load_run_config`."""
    return _load(Document(dict(tree)), manager or get_plugin_manager())


@contextlib.contextmanager
def error_places(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Within it, a ConfigError about a key gets the file and line, or the override, that set the key.

    For checks that come after loading, such as those across several keys.
    """
    try:
        yield
    except ConfigError as error:
        problems = []
        for single in error.errors if isinstance(error, ConfigErrors) else (error,):
            key = split_key(single.key) if single.key is not None and single.where is None else None
            if key is None:
                raise
            problems.append(Problem(key, single.message))
        document = read_document(Path(path))
        for override in overrides:
            apply_override(document, override)
        try:
            raise_problems(problems, document.positions)
        except ConfigError as placed:
            raise placed from error


def _load(document: Document, manager: PluginManager) -> RunConfigType:
    cls = _trainer_class(document)
    given = document.tree
    document = merge(_presets(cls, document, manager), document)
    config: RunConfigType = build(cls, document, manager, given=given)
    _check_sections(config, document)
    _set_internal(config)
    return config


def _trainer_class(document: Document) -> type:
    choices = ", ".join(TRAINER_CONFIGS)
    name = document.tree.get("trainer")
    if name is None:
        raise ConfigError(f"is required: one of {choices}", key="trainer", where=where((), document.positions))
    cls = TRAINER_CONFIGS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ConfigError(
            f"unknown trainer {name!r}. Known: {choices}.{did_you_mean(str(name), TRAINER_CONFIGS)}",
            key="trainer",
            where=where(("trainer",), document.positions),
        )
    return cls


def _presets(cls: type, document: Document, manager: PluginManager) -> Document:
    """What the selected algorithm sets by default."""
    result = Document()
    if "algorithm" not in classes.fields_of(cls):
        return result
    section = document.tree.get("algorithm")
    default = typing.cast(str, classes.default_of(classes.fields_of(AlgorithmConfig)["name"]))
    name = section.get("name", default) if isinstance(section, dict) else default
    if isinstance(name, str) and "${" in name:
        tree, problems = resolve(document.tree, with_defaults(cls, document.tree))
        raise_problems(problems, document.positions)
        name = tree["algorithm"]["name"]
    if not isinstance(name, str):
        return result  # Structuring reports it.
    try:
        algorithm = manager.load("areal_algorithms", name)
    except PluginError as error:
        path = ("algorithm", "name")
        raise ConfigError(str(error), key="algorithm.name", where=where(path, document.positions)) from error
    for key, value in algorithm.presets.items():
        path_of_key = split_key(key)
        if path_of_key is None:
            raise ConfigError(f"the algorithm {name!r} presets {key!r}, which is not a key")
        set_value(result, path_of_key, value, f"preset of the algorithm {name!r}")
        # What the file leaves out of a section is not the preset's mistake.
        for length in range(1, len(path_of_key)):
            result.positions.pop(path_of_key[:length], None)
    return result


def _check_sections(config: RunConfigType, document: Document) -> None:
    """What the classes of single sections cannot see."""
    problems = []
    if isinstance(config, RLConfig | DistillConfig):
        try:
            _ = config.reward_sections
        except ConfigError as error:
            problems.append(Problem((str(error.key),), error.message))
    for role in _BACKENDS:
        section = getattr(config, role, None)
        if section is None:
            continue
        try:
            parse_backend(section.backend)
        except BadInputError as error:
            message = str(error).removeprefix("backend: ")
            problems.append(Problem((role, "backend"), message))
    raise_problems(problems, document.positions)


def _set_internal(config: RunConfigType) -> None:
    if isinstance(config, RLConfig):
        # One definition of a token's log-prob for sampler, policy and reference.
        for model in (config.actor, config.ref, config.critic):
            if model is not None:
                model.temperature = config.gconfig.effective_temperature
    if isinstance(config, DistillConfig):
        for model in (config.actor, config.teacher):
            model.temperature = config.gconfig.effective_temperature
