"""Between a training checkpoint and a Hugging Face folder: finds what is meant, and lets the engine convert it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from areal_core.api.configs import TrainEngineConfig
from areal_core.errors import BadInputError
from areal_core.runs.files import atomic_dir
from areal_core.runs.listing import read_config
from areal_core.runs.run_dir import list_checkpoints

if TYPE_CHECKING:
    from areal_core.plugins.manager import PluginManager

Format = Literal["hf", "dcp"]


@attrs.frozen
class Source:
    """What a path stands for.

    Attributes:
        path: the folder that holds the weights.
        format: of the weights in it.
        run: the run it belongs to, if it lies in one.
    """

    path: Path
    format: Format
    run: Path | None = None


def find_source(path: Path, role: str = "actor") -> Source:
    """The weights at ``path``: a Hugging Face folder, a run, one of its checkpoints, or an engine's folder in that.

    Raises:
        BadInputError: if it is none of these.
    """
    if not path.is_dir():
        raise BadInputError(f"{path}: there is no such folder.")
    if (path / "config.json").is_file():
        return Source(path, "hf")
    if (path / ".metadata").is_file():
        run = path.absolute().parents[2] if len(path.absolute().parents) > 2 else None
        return Source(path, "dcp", run if run is not None and (run / "config.yaml").is_file() else None)
    if (path / "trainer.json").is_file():
        engines = sorted(folder.name for folder in path.iterdir() if (folder / ".metadata").is_file())
        if role not in engines:
            raise BadInputError(
                f"{path}: holds no {role!r}; it has {', '.join(engines) or 'nothing'}. Choose with --role."
            )
        return find_source(path / role)
    if (path / "checkpoints").is_dir():
        checkpoints = list_checkpoints(path)
        if not checkpoints:
            raise BadInputError(f"{path}: this run has no checkpoint yet.")
        return find_source(checkpoints[-1][1], role)
    raise BadInputError(
        f"{path}: holds neither a model in Hugging Face layout (config.json) nor a checkpoint (.metadata). "
        "Give a model folder, a run, a checkpoint of it, or the folder of an engine in that."
    )


def convert(
    path: Path,
    target: Path,
    manager: PluginManager,
    *,
    to: Format | None = None,
    role: str = "actor",
    model: Path | None = None,
    engine: str | None = None,
) -> Source:
    """Write the weights at ``path`` into the new folder ``target`` in the other format.

    Args:
        to: the format to write; None for the other one.
        role: which model of a checkpoint.
        model: a Hugging Face folder of the same architecture, for a checkpoint that does not lie in its run.
        engine: the train engine whose checkpoints these are; None for the run's, or ``fsdp``.

    Returns:
        what was converted.

    Raises:
        BadInputError: if it cannot be; ``target`` is not there then.
    """
    source = find_source(path, role)
    to = to or ("dcp" if source.format == "hf" else "hf")
    if to == source.format:
        raise BadInputError(f"--to: {source.path} is in the format {to} already.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInputError(f"{target}: exists already. Give a new folder.")
    if source.format == "hf":
        config = TrainEngineConfig(path=str(source.path))
    elif model is not None:
        config = TrainEngineConfig(path=str(model))
    else:
        config = _config_of_run(source, role, manager)
    name = engine or (config.parsed_backend.name if source.run is not None and model is None else "fsdp")
    engine_class = manager.load("areal_train_engines", name, key="--engine" if engine else "backend")
    with atomic_dir(target, overwrite=True) as folder:
        engine_class.convert(source.path, folder, to=to, config=config, role=_engine_role(source, role))
    return source


def _engine_role(source: Source, role: str) -> str:
    """The role that the engine knows: the actor of a reward model's run has a scalar head."""
    is_reward = source.run is not None and read_config(source.run).get("trainer") == "rw"
    return "reward" if is_reward and role == "actor" else role


def _config_of_run(source: Source, role: str, manager: PluginManager) -> TrainEngineConfig:
    from areal_core.api.load import load_run_config

    if source.run is None:
        raise BadInputError(
            f"{source.path}: lies in no run, so its architecture is not known. Give a Hugging Face folder of the same "
            "model with --model."
        )
    config = getattr(load_run_config(source.run / "config.yaml", [], manager), role, None)
    if not isinstance(config, TrainEngineConfig):
        raise BadInputError(f"--role: {source.run / 'config.yaml'} has no section {role!r}.")
    return config
