"""Workflows: what one episode is."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from areal_core.api.engine_api import InferenceEngine
    from areal_core.api.io_struct import Trajectory

#: What an episode may return. None rejects it. A dict holds the fields of a ``Trajectory`` as lists, arrays or tensors
#: (``input_ids``, ``loss_mask``, ``logprobs``, ``versions``, ``rewards`` or ``reward``), with or without a batch
#: dimension of 1. A list holds several trajectories of one episode.
EpisodeResult = "Trajectory | dict[str, Any] | list[Trajectory | dict[str, Any]] | None"


class RolloutWorkflow(abc.ABC):
    """One episode: turns one row of a dataset into one (or several) scored trajectories.

    The constructor receives by keyword what it has parameters for: ``gconfig`` (GenerationHyperparameters),
    ``tokenizer``, ``processor`` (the transformers processor of a vision-language model, loaded only if asked for),
    ``reward_fn`` (already wrapped: ``await reward_fn(...)``), and the plugin's own options.

    A workflow may have ``export_stats() -> dict[str, float]``: counts since its last call, which become the metrics
    ``rollout/NAME`` (``eval/NAME``) of a batch.
    """

    @abc.abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Trajectory | dict[str, Any] | list[Trajectory | dict[str, Any]] | None:
        """Run one episode. Never blocks: await the engine and the reward, and do no file or network I/O in line.

        Args:
            engine: seeds and tags this episode's requests.
            data: one row of the dataset.

        Returns:
            The trajectory, or None to reject the episode. An exception makes the controller retry it.
        """


@runtime_checkable
class AgentWorkflow(Protocol):
    """A plain object that plays an episode by itself, through an OpenAI-compatible client it is given.

    See ``areal_core.rollout.agents.workflow.AgentRunner`` for the keywords of ``run`` and for what is recorded.
    """

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Any:
        """Play one episode and return its reward: a float, or a dict from completion id to float; None rejects it."""
        ...
