"""Hook implementations of areal-gsm8k. Imports nothing heavy."""

from __future__ import annotations

from areal_core import Registration, hookimpl

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_datasets() -> list[Registration]:
    return [
        Registration(
            name="gsm8k",
            target="areal_gsm8k.dataset:get_gsm8k_dataset",
            config="areal_gsm8k.config:GSM8KConfig",
            description="Grade-school math word problems, from the hub, a folder or a jsonl file",
        )
    ]


@hookimpl
def areal_rewards() -> list[Registration]:
    return [
        Registration(
            name="gsm8k",
            target="areal_gsm8k.reward:gsm8k_reward_fn",
            config="areal_gsm8k.config:GSM8KRewardConfig",
            description="1 if the final answer equals the reference, else 0",
        )
    ]
