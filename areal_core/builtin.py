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
        Registration(
            name="vision_rlvr",
            target="areal_core.rollout.workflows.vision_rlvr:VisionRLVRWorkflow",
            requires=("pillow",),
            extra="vision",
            description="One completion per episode about images, scored by a verifiable reward",
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
        Registration(
            name="drgrpo",
            target="areal_core.algorithms.drgrpo:DrGRPO",
            description="GRPO without division by deviation and length (arXiv:2503.20783)",
        ),
        Registration(
            name="dapo",
            target="areal_core.algorithms.dapo:DAPO",
            config="areal_core.algorithms.dapo:DAPOConfig",
            description="Clip-higher, dynamic sampling, token mean, overlong penalty (arXiv:2503.14476)",
        ),
        Registration(
            name="reinforce",
            target="areal_core.algorithms.reinforce:Reinforce",
            description="Reward times log-prob (Williams 1992)",
        ),
        Registration(
            name="rloo",
            target="areal_core.algorithms.reinforce:RLOO",
            description="REINFORCE with a leave-one-out baseline (arXiv:2402.14740)",
        ),
        Registration(
            name="reinforce_pp",
            target="areal_core.algorithms.reinforce:ReinforcePP",
            description="REINFORCE++: advantages normalised over the batch (arXiv:2501.03262)",
        ),
        Registration(
            name="gspo",
            target="areal_core.algorithms.gspo:GSPO",
            description="Clipped ratio of whole sequences (arXiv:2507.18071)",
        ),
        Registration(
            name="cispo",
            target="areal_core.algorithms.cispo:CISPO",
            config="areal_core.algorithms.cispo:CISPOConfig",
            description="Clipped importance weight times log-prob (MiniMax-M1, arXiv:2506.13585)",
        ),
        Registration(
            name="sapo",
            target="areal_core.algorithms.sapo:SAPO",
            config="areal_core.algorithms.sapo:SAPOConfig",
            description="Soft gate on the ratio instead of a clip (arXiv:2511.20347)",
        ),
        Registration(
            name="m2po",
            target="areal_core.algorithms.m2po:M2PO",
            config="areal_core.algorithms.m2po:M2POConfig",
            description="Bounded second moment of the log-ratio, for stale samples (arXiv:2510.01161)",
        ),
        Registration(
            name="liteppo",
            target="areal_core.algorithms.liteppo:LitePPO",
            description="Mean of the group, deviation of the batch, token mean (arXiv:2508.08221)",
        ),
        Registration(
            name="gdpo",
            target="areal_core.algorithms.gdpo:GDPO",
            description="Several rewards, each normalised for itself (arXiv:2601.05242)",
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
