"""Builds the parts of a run from their sections of the configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from areal_core.api.configs import DType
from areal_core.api.dataset_api import DatasetKind
from areal_core.config.plain import plugin_keywords
from areal_core.errors import BadInputError, section

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.api.algorithm_api import Algorithm
    from areal_core.api.configs import DatasetConfig, InferenceEngineConfig, RLConfig, TrainEngineConfig
    from areal_core.api.engine_api import InferenceEngine, TrainEngine
    from areal_core.plugins.manager import PluginManager


def load_tokenizer(path: str, *, trust_remote_code: bool = False, key: str = "tokenizer_path") -> Any:
    """The tokenizer of a Hugging Face folder or hub id.

    Raises:
        BadInputError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        with _quiet_about_types():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInputError(f"{key}: no tokenizer at {path!r} ({reason})") from error


@contextmanager
def _quiet_about_types() -> Iterator[None]:
    """Without the warning that transformers does not know the type of a model: its tokenizer does not depend on it."""
    logger = logging.getLogger("transformers.configuration_utils")

    def matters(record: logging.LogRecord) -> bool:
        return "to instantiate a model of type ``" not in record.getMessage()

    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


def load_dataset(
    config: DatasetConfig, kind: DatasetKind, tokenizer: Any, manager: PluginManager, *, key: str
) -> Sequence[dict[str, Any]]:
    """The rows of one split, at most ``config.limit``.

    Raises:
        BadInputError: if the split is empty, or what the plugin found wrong.
    """
    factory = manager.load("areal_datasets", config.name, key=f"{key}.name")
    rows = factory(
        config.path,
        config.split,
        kind=kind,
        tokenizer=tokenizer,
        max_length=config.max_length,
        **plugin_keywords(config),
    )
    if len(rows) == 0:
        limits = f" after dropping rows of more than {config.max_length} tokens" if config.max_length else ""
        raise BadInputError(
            f"{key}: dataset {config.name!r} has no rows in split {config.split!r} of {config.path or 'its default'}"
            f"{limits}."
        )
    if config.limit is not None and config.limit < len(rows):
        return [rows[i] for i in range(config.limit)]
    return rows  # type: ignore[no-any-return]


def build_train_engine(config: TrainEngineConfig, manager: PluginManager, *, key: str) -> TrainEngine:
    """An engine that has joined its process group; nothing is loaded yet."""
    backend = config.parsed_backend
    engine: TrainEngine = manager.load("areal_train_engines", backend.name, key=f"{key}.backend")(config)
    with section(key):
        engine.create_process_group(backend.parallel)
    return engine


def build_inference_engine(
    config: InferenceEngineConfig, dtype: DType, manager: PluginManager, *, log_dir: Path | None = None
) -> InferenceEngine:
    """An engine without a model yet. ``dtype`` is the actor's, for a rollout section that states none."""
    config = attrs.evolve(config, dtype=config.dtype or dtype, log_dir=log_dir)
    engine: InferenceEngine = manager.load(
        "areal_inference_engines", config.parsed_backend.name, key="rollout.backend"
    )(config)
    return engine


def build_algorithm(config: RLConfig, manager: PluginManager) -> Algorithm:
    algorithm: Algorithm = manager.load("areal_algorithms", config.algorithm.name, key="algorithm.name")(
        config.actor, **plugin_keywords(config.algorithm)
    )
    return algorithm
