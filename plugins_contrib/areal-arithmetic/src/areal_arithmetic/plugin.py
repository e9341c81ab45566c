"""Hook implementations of areal-arithmetic. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core import Registration, hookimpl

if TYPE_CHECKING:
    import typer

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_datasets() -> list[Registration]:
    return [
        Registration(
            name="arithmetic",
            target="areal_arithmetic.dataset:get_arithmetic_dataset",
            config="areal_arithmetic.config:ArithmeticConfig",
            description="Templated one- and two-step word problems, made on the fly",
        )
    ]


@hookimpl
def areal_rewards() -> list[Registration]:
    return [
        Registration(
            name="arithmetic",
            target="areal_arithmetic.reward:arithmetic_reward_fn",
            description="1 if the number after #### is the answer, else 0",
        )
    ]


@hookimpl
def areal_commands(app: typer.Typer) -> None:
    from areal_arithmetic import commands

    app.add_typer(commands.app, name="arithmetic")
