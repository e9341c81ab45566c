"""Every extension point of the framework, on one page.

A plugin is a module named by an entry point in the group ``areal``::

    # pyproject.toml
    [project.entry-points.areal]
    my-plugin = "my_package.plugin"

    # my_package/plugin.py: imports nothing heavy
    from areal_core import Registration, hookimpl

    AREAL_API_VERSION = "1.0"

    @hookimpl
    def areal_rewards():
        return [Registration(name="mine", target="my_package.rewards:mine_reward_fn", description="...")]

A *registry* hook returns a list of :class:`~areal_core.registration.Registration`. A *lifecycle* hook observes a run;
what it raises is logged and counted, and never stops training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from areal_core.registration import Registration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import typer

    from areal_core.api.io_struct import Trajectory, WeightUpdateMeta
    from areal_core.api.run_api import RunInfo

PROJECT_NAME = "areal"
ENTRY_POINT_GROUP = "areal"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

# ---------------------------------------------------------------------------------------------------- registries


@hookspec
def areal_train_engines() -> list[Registration]:  # type: ignore[empty-body]
    """Train engines: a :class:`areal_core.api.engine_api.TrainEngine`, constructed as ``Engine(config)``.

    Selected by ``actor.backend`` (and ``ref``, ``critic``); options under e.g. ``actor.fsdp``.
    """


@hookspec
def areal_inference_engines() -> list[Registration]:  # type: ignore[empty-body]
    """Inference engines: an :class:`areal_core.api.engine_api.InferenceEngine`, constructed as ``Engine(config)``.

    Selected by ``rollout.backend``; options under e.g. ``rollout.local``.
    """


@hookspec
def areal_workflows() -> list[Registration]:  # type: ignore[empty-body]
    """Workflows: a :class:`areal_core.api.workflow_api.RolloutWorkflow`, or an agent with ``async def run(data)``.

    Constructed with the keyword arguments it accepts of ``gconfig``, ``tokenizer``, ``processor`` (of a vision-language
    model), ``reward_fn``, and its options.
    Selected by ``workflow.name``; options under e.g. ``workflow.multi_turn``.
    """


@hookspec
def areal_rewards() -> list[Registration]:  # type: ignore[empty-body]
    """Rewards: ``xxx_reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float``, sync or async.

    Selected by ``reward.name``, or ``rewards.LABEL.name`` for several; options under e.g. ``reward.gsm8k`` arrive as
    keyword arguments.
    """


@hookspec
def areal_datasets() -> list[Registration]:  # type: ignore[empty-body]
    """Datasets: an :class:`areal_core.api.dataset_api.DatasetFactory`.

    Selected by ``train_dataset.name``; options under e.g. ``train_dataset.gsm8k`` arrive as keyword arguments.
    """


@hookspec
def areal_model_specs() -> list[Registration]:  # type: ignore[empty-body]
    """Model specs: a :class:`areal_core.api.model_api.ModelSpec` instance, named by its Hugging Face ``model_type``."""


@hookspec
def areal_algorithms() -> list[Registration]:  # type: ignore[empty-body]
    """Algorithms: an :class:`areal_core.api.algorithm_api.Algorithm`, selected by ``algorithm.name``."""


@hookspec
def areal_launchers() -> list[Registration]:  # type: ignore[empty-body]
    """Launchers: start a job's processes, selected by ``areal launch --launcher NAME``."""


@hookspec
def areal_trackers() -> list[Registration]:  # type: ignore[empty-body]
    """Trackers: an :class:`areal_core.api.tracker_api.Tracker`, named in ``trackers``."""


@hookspec
def areal_commands(app: typer.Typer) -> None:
    """Add commands to the ``areal`` command line. Import heavy modules inside the commands, not here."""


# ----------------------------------------------------------------------------------------------------- lifecycle


@hookspec
def areal_run_configured(run: RunInfo) -> None:
    """The configuration is resolved and the run directory exists; nothing is loaded yet. Called on global rank 0."""


@hookspec
def areal_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """One training step ended. ``step`` counts from 1. ``metrics`` is the line that goes to ``metrics.jsonl``."""


@hookspec
def areal_trajectory_finished(run: RunInfo, trajectory: Trajectory | None, outcome: str) -> None:
    """One episode ended with ``outcome``: ``accepted``, ``rejected``, ``failed`` or ``cancelled``."""


@hookspec
def areal_weights_updated(run: RunInfo, version: int, meta: WeightUpdateMeta) -> None:
    """The inference engine answers with weights of ``version`` from now on."""


@hookspec
def areal_checkpoint_saved(run: RunInfo, step: int, path: Path) -> None:
    """A checkpoint is complete on disk at ``path``."""


@hookspec
def areal_run_finished(run: RunInfo, status: str, error: BaseException | None) -> None:
    """The run ended; ``status`` is ``finished``, ``interrupted`` or ``failed``."""
