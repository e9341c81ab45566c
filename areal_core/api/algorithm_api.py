"""Algorithms: from scored trajectories to a loss."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput

if TYPE_CHECKING:
    import torch

    from areal_core.api.configs import PPOActorConfig


class Algorithm(abc.ABC):
    """One policy-gradient algorithm, as a small composition of the pure functions in ``areal_core.algorithms``.

    Constructed as ``Algorithm(config: PPOActorConfig, **options)``. Pure: no process group, no state between steps.
    ``compute_advantages`` sees the *whole* batch of a step, so group and batch statistics need no communication.
    """

    #: Defaults of configuration keys that belong to this algorithm, as dotted keys, e.g.
    #: ``{"actor.adv_norm.std_level": None}``. They sit between the class defaults and the user's file.
    presets: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: PPOActorConfig, **options: Any) -> None:
        self.config = config

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:  # noqa: B027 - optional
        """Reject a configuration that cannot work, before anything is loaded.

        Raises:
            ConfigError: with the key and what would be right.
        """

    @property
    def needs_entropy(self) -> bool:
        """Whether ``loss`` reads ``output.entropy``."""
        return False

    @property
    def needs_ref_logprobs(self) -> bool:
        return False

    @property
    def needs_values(self) -> bool:
        return False

    @property
    def needs_prox_logprobs(self) -> bool:
        """Whether the proximal policy's log-probs must be recomputed by a forward pass before the first update."""
        return False

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        """Whether a sequence whose advantages are all 0 adds nothing to the gradient, so that it needs no forward."""
        return False

    @property
    def filters_groups(self) -> bool:
        """Whether ``accepts_group`` may refuse: other prompts are then sampled in place of the groups it refuses."""
        return False

    def accepts_group(self, rewards: Sequence[float]) -> bool:
        """Whether a complete group may enter a batch; called in the rollout's thread, without torch.

        Args:
            rewards: of the group's accepted samples.
        """
        return True

    @property
    def max_sampled_batches(self) -> int:
        """Bound on dynamic sampling: at most so many batches' worth of groups are sampled for one step."""
        return 10

    @abc.abstractmethod
    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """Add ``advantages`` fp32 ``[T]`` (and ``returns`` for a critic) to the batch; also statistics to report."""

    @abc.abstractmethod
    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        """The policy loss of one micro-batch, summed."""

    def row_weights(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 ``[B]``: what each sequence counts for in the loss's denominator; its trained tokens by default.

        A sequence without a gradient may be left out of the forward pass, but still counts: the trainer computes
        these weights on the whole batch and hands them on as ``rows["loss_weights"]``.
        """
        import torch

        counts = torch.zeros(batch.num_tokens + 1, dtype=torch.float32, device=batch.cu_seqlens.device)
        counts[1:] = batch["loss_mask"].cumsum(0)
        return counts[batch.cu_seqlens.long()].diff()

    def loss_weight(self, batch: PackedBatch) -> torch.Tensor:
        """What a micro-batch counts for: the sum of its rows' ``loss_weights``."""
        weights = batch.rows.get("loss_weights")
        return (self.row_weights(batch) if weights is None else weights).sum()
