"""What the kernel itself registers, through the same hooks as any plugin."""

from __future__ import annotations

from areal_core.hookspecs import hookimpl
from areal_core.registration import API_VERSION, Registration

AREAL_API_VERSION = API_VERSION


@hookimpl
def areal_workflows() -> list[Registration]:
    return [
        Registration(
            name="rlvr",
            target="areal_core.rollout.workflows.rlvr:RLVRWorkflow",
            description="One completion per episode, scored by a verifiable reward",
        ),
        Registration(
            name="multi_turn",
            target="areal_core.rollout.workflows.multi_turn:MultiTurnWorkflow",
            config="areal_core.rollout.workflows.multi_turn:MultiTurnConfig",
            description="Tries again after a wrong answer; token ids are never re-encoded",
        ),
    ]


@hookimpl
def areal_algorithms() -> list[Registration]:
    return [
        Registration(
            name="grpo",
            target="areal_core.algorithms.grpo:GRPO",
            description="Group-normalised rewards, clipped ratio (DeepSeekMath, arXiv:2402.03300)",
        ),
        Registration(
            name="ppo",
            target="areal_core.algorithms.ppo:PPO",
            description="Critic, GAE and clipped ratio (arXiv:1707.06347)",
        ),
    ]


@hookimpl
def areal_trackers() -> list[Registration]:
    return [
        Registration(
            name="tensorboard",
            target="areal_core.runs.tensorboard:TensorBoardTracker",
            requires=("tensorboard",),
            extra="tensorboard",
            description="Scalars for TensorBoard, under RUN/tensorboard",
        ),
    ]
