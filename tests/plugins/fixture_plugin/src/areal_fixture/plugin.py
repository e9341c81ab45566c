"""Hook implementations of areal-fixture. Imports nothing heavy."""

from __future__ import annotations

from areal_core import Registration, hookimpl

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_rewards() -> list[Registration]:
    return [
        Registration(
            name="count",
            target="areal_fixture.reward:count_reward_fn",
            config="areal_fixture.options:CountOptions",
            description="How many of the wanted characters a completion has",
        )
    ]


@hookimpl
def areal_datasets() -> list[Registration]:
    return [
        Registration(
            name="digits",
            target="areal_fixture.dataset:get_digits_dataset",
            config="areal_fixture.options:DigitsOptions",
            description="Asks for one digit after the other",
        )
    ]


@hookimpl
def areal_workflows() -> list[Registration]:
    return [
        Registration(
            name="hinted",
            target="areal_fixture.workflow:HintedWorkflow",
            config="areal_fixture.options:HintedOptions",
            description="Puts a hint below the question, and asks once",
        )
    ]
