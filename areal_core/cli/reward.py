"""`areal reward`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from areal_core.cli import console

_EPILOG = "Example: areal reward try gsm8k --completion 'So it is #### 42' --answer '#### 42'"


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Try rewards.", no_args_is_help=True)
    # Typer shows a command of a group without a callback as the group itself.
    group.callback()(lambda: None)

    @group.command("try", epilog=_EPILOG)
    def try_(
        name: Annotated[str, typer.Argument(help="Registered reward, or package.module:function.", metavar="NAME")],
        completion: Annotated[str, typer.Option(help="Text to score; - reads it from standard input.")],
        answer: Annotated[str | None, typer.Option(help="The column `answer` of the row.")] = None,
        prompt: Annotated[str, typer.Option(help="The prompt's text.")] = "",
        data: Annotated[
            list[str] | None,
            typer.Option(help="Another column: k=text, or k:=value in JSON. Repeatable.", metavar="K=V"),
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(help="An option of the reward, as under reward.NAME. Repeatable.", metavar="K=V"),
        ] = None,
        timeout: Annotated[float, typer.Option(help="Seconds (reward.timeout).", min=0.001)] = 15.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Score one completion with a reward, in a process of its own as in training.

        Exits 0 with a number, 1 if the reward raises, hangs or returns no finite number, 2 if there is no such reward.
        """
        columns = _columns(data or [])
        if answer is not None:
            columns["answer"] = answer
        if completion == "-":
            import sys

            completion = sys.stdin.read()
        result = _score(name, prompt, completion, columns, option or [], timeout)
        if as_json:
            console.print_json(result)
        elif result["ok"]:
            start = ", its start included" if result["runs_in"] == "process" else ""
            console.stdout(f"{result['value']:g}  ({result['seconds']:.3f} s in a {result['runs_in']}{start})")
        else:
            console.error(f"{result['error']['message']} (kind: {result['error']['kind']})")
        if not result["ok"]:
            raise typer.Exit(1)

    app.add_typer(group, name="reward")


def _columns(pairs: list[str]) -> dict[str, Any]:
    import json

    from areal_core.errors import BadInputError

    columns: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        is_json = key.endswith(":")
        key = key.removesuffix(":")
        if not equals or not key.isidentifier():
            raise BadInputError(f"--data: {pair!r} is not a column. Write name=text, or name:=value in JSON.")
        if is_json:
            try:
                columns[key] = json.loads(value)
            except ValueError as error:
                raise BadInputError(f"--data: the value of {key!r} is not JSON: {error}. Text is {key}=...") from error
        else:
            columns[key] = value
    return columns


def _score(
    name: str, prompt: str, completion: str, columns: dict[str, Any], options: list[str], timeout: float
) -> dict[str, Any]:
    import asyncio
    import time

    from areal_core.api.configs import RewardConfig
    from areal_core.api.reward_api import RewardError
    from areal_core.cli.sections import plugin_section
    from areal_core.plugins import get_plugin_manager
    from areal_core.rollout.rewards import build_reward

    manager = get_plugin_manager()
    config = plugin_section(RewardConfig, {"name": name, "timeout": timeout}, name, options, manager)
    reward = build_reward(config, manager)

    async def call() -> dict[str, Any]:
        start = time.perf_counter()
        found: dict[str, Any] = {"reward": name, "ok": False, "value": None, "error": None}
        try:
            found["value"] = await reward(prompt, completion, None, None, **columns)
            found["ok"] = True
        except RewardError as error:
            found["error"] = {"kind": error.kind, "message": str(error)}
        return {**found, "seconds": time.perf_counter() - start, "runs_in": reward.runs_in}

    try:
        return asyncio.run(call())
    finally:
        reward.destroy()
