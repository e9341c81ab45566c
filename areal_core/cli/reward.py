"""`areal reward`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_core.cli import console

if TYPE_CHECKING:
    from areal_core.api.configs import RewardConfig
    from areal_core.api.reward_api import AsyncRewardWrapper, RewardError

_EPILOG = """
Examples:

  areal reward try gsm8k --completion 'So it is #### 42' --answer '#### 42'

  areal reward try run.yaml rewards.format.weight=0.5 --completion 'So it is #### 42' --answer '#### 42'
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Try rewards.", no_args_is_help=True)
    # Typer shows a command of a group without a callback as the group itself.
    group.callback()(lambda: None)

    @group.command("try", short_help="Score one completion with a reward.", epilog=_EPILOG)
    def try_(
        name: Annotated[
            str,
            typer.Argument(
                help="Registered reward, package.module:function, or the YAML file of a run: its reward or rewards.",
                metavar="NAME",
            ),
        ],
        completion: Annotated[str, typer.Option(help="Text to score; - reads it from standard input.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Values that replace the file's.", metavar="[KEY=VALUE]...")
        ] = None,
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
        timeout: Annotated[
            float | None, typer.Option(help="Seconds (reward.timeout); default: 15.", min=0.001, show_default=False)
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Score one completion with a reward, in a process of its own as in training.

        With the YAML file of a run all its rewards score it, and their weighted sum is what training would see. Exits 0
        with a number, 1 if a reward raises, hangs or returns no finite number, 2 if there is no such reward.
        """
        columns = _columns(data or [])
        if answer is not None:
            columns["answer"] = answer
        if completion == "-":
            import sys

            completion = sys.stdin.read()
        rewards, of_run = _rewards(name, overrides or [], option or [], timeout)
        results = _score(rewards, prompt, completion, columns)
        result = _summary(name, results) if of_run else results[""]
        if as_json:
            console.print_json(result)
        else:
            _print(results)
            if result["ok"] and of_run:
                console.stdout(f"total: {result['value']:g}")
            elif result["error"] and of_run:
                console.error(f"total: {result['error']['message']}")
        if not result["ok"]:
            raise typer.Exit(1)

    app.add_typer(group, name="reward")


def _print(results: dict[str, dict[str, Any]]) -> None:
    for label, result in results.items():
        begin = f"{label}: " if label else ""
        if result["ok"]:
            start = ", its start included" if result["runs_in"] == "process" else ""
            where = f"{result['seconds']:.3f} s in a {result['runs_in']}{start}"
            console.stdout(f"{begin}{result['value']:g}{_weight(result)}  ({where})")
        else:
            console.error(f"{begin}{result['error']['message']} (kind: {result['error']['kind']})")


def _weight(result: dict[str, Any]) -> str:
    return "" if result.get("weight", 1.0) == 1.0 else f" * {result['weight']:g}"


def _summary(name: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The weighted sum, as ``CombinedReward`` makes it, but with every error in sight."""
    from areal_core.api.reward_api import RewardError
    from areal_core.rollout.rewards import checked_total

    summary: dict[str, Any] = {"config": name, "ok": False, "value": None, "error": None, "rewards": results}
    if all(result["ok"] for result in results.values()):
        try:
            total = checked_total(sum(result["weight"] * result["value"] for result in results.values()))
            summary.update(ok=True, value=total)
        except RewardError as error:
            summary["error"] = _error(error)
    return summary


def _error(error: RewardError) -> dict[str, str]:
    return {"kind": error.kind, "message": str(error)}


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


def _rewards(
    name: str, overrides: list[str], options: list[str], timeout: float | None
) -> tuple[dict[str, tuple[AsyncRewardWrapper, RewardConfig]], bool]:
    """The rewards to try by label, with their sections; whether ``name`` is the file of a run."""
    from pathlib import Path

    from areal_core.errors import BadInputError
    from areal_core.plugins import get_plugin_manager
    from areal_core.rollout.rewards import build_reward

    manager = get_plugin_manager()
    if Path(name).suffix not in (".yaml", ".yml"):
        from areal_core.api.configs import RewardConfig
        from areal_core.cli.sections import plugin_section

        if overrides:
            raise BadInputError(f"{overrides[0]!r}: only the YAML file of a run can be overridden; use --option K=V.")
        values = {"name": name, "timeout": 15.0 if timeout is None else timeout}
        config = plugin_section(RewardConfig, values, name, options, manager)
        return {"": (build_reward(config, manager), config)}, False
    from areal_core.api.configs import RLConfig
    from areal_core.api.distill_config import DistillConfig
    from areal_core.api.load import load_run_config

    if options or timeout is not None:
        raise BadInputError(f"--option and --timeout: {name} holds them; write KEY=VALUE, e.g. reward.timeout=5.")
    run = load_run_config(Path(name), overrides)
    if not isinstance(run, RLConfig | DistillConfig):
        raise BadInputError(f"{name}: only `trainer: rl` and `trainer: distill` have rewards, not {run.trainer!r}.")
    sections = run.reward_sections
    if not sections:
        raise BadInputError(f"{name}: neither `reward` nor `rewards` is given, so there is none to try.")
    return {k.rpartition(".")[2]: (build_reward(s, manager, key=k), s) for k, s in sections.items()}, True


def _score(
    rewards: dict[str, tuple[AsyncRewardWrapper, RewardConfig]], prompt: str, completion: str, columns: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    import asyncio
    import time

    from areal_core.api.reward_api import RewardError

    async def call(label: str, reward: AsyncRewardWrapper, config: RewardConfig) -> dict[str, Any]:
        start = time.perf_counter()
        found: dict[str, Any] = {"reward": config.name, "ok": False, "value": None, "error": None}
        if label:
            found["weight"] = config.weight
        try:
            found["value"] = await reward(prompt, completion, None, None, **columns)
            found["ok"] = True
        except RewardError as error:
            found["error"] = _error(error)
        return {**found, "seconds": time.perf_counter() - start, "runs_in": reward.runs_in}

    async def call_all() -> dict[str, dict[str, Any]]:
        results = await asyncio.gather(*(call(label, *pair) for label, pair in rewards.items()))
        return dict(zip(rewards, results, strict=True))

    try:
        return asyncio.run(call_all())
    finally:
        for reward, _ in rewards.values():
            reward.destroy()
