"""`areal runs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_core.cli import console

if TYPE_CHECKING:
    from areal_core.runs.listing import RunSummary

_ROOT = typer.Option(help="Folder of the runs (run.root).", metavar="DIR")
_JSON = typer.Option("--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at runs: what there is, and how one stands.", no_args_is_help=True)

    @group.command("list", epilog="Example: areal runs list --root runs")
    def list_(root: Annotated[Path, _ROOT] = Path("runs"), as_json: Annotated[bool, _JSON] = False) -> None:
        """List the runs below a folder, the newest last."""
        from areal_core.runs.listing import find_runs, summarize

        runs = [summarize(path) for path in find_runs(root)]
        if as_json:
            console.print_json([run.to_plain() for run in runs])
        elif not runs:
            console.stderr(f"{root} holds no runs.")
        else:
            console.print_table(
                ("RUN", "STATUS", "TRAINER", "STEP", "LAST", "BEST", "UPDATED"), [_row(run, root) for run in runs]
            )

    @group.command(
        "show",
        short_help="Show one run: status, last metrics, best result.",
        epilog="Example: areal runs show runs/quickstart",
    )
    def show(
        run: Annotated[str, typer.Argument(help="Run directory, or the name of a run below --root.", metavar="RUN")],
        root: Annotated[Path, _ROOT] = Path("runs"),
        as_json: Annotated[bool, _JSON] = False,
    ) -> None:
        """Show one run: status, last metrics, best result, and where things are."""
        from areal_core.runs.listing import resolve_run, summarize

        summary = summarize(resolve_run(run, root))
        if as_json:
            console.print_json(summary.to_plain())
        else:
            _print_run(summary)

    app.add_typer(group, name="runs")


def _row(run: RunSummary, root: Path) -> tuple[str, ...]:
    from areal_core.runs.headline import format_number, headline

    head = headline(run.last)
    last = "  ".join(f"{label} {format_number(head[label])}" for label in ("reward", "eval", "loss") if label in head)
    best = f"{format_number(run.best[2])} at {run.best[1]}" if run.best else ""
    name = str(run.path.relative_to(root))
    return (name, run.status, run.trainer, str(run.step), last, best, _time(run.updated))


def _time(seconds: float | None) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def _print_run(run: RunSummary) -> None:
    from areal_core.runs.headline import format_number

    facts: dict[str, Any] = {
        "status": run.status,
        "problem": run.problem,
        "error": run.error,
        "trainer": run.trainer,
        "step": run.step,
        "best": f"{run.best[0]} {format_number(run.best[2])} at step {run.best[1]}" if run.best else None,
        "started": _time(run.started),
        "updated": _time(run.updated),
        "path": run.path,
        "checkpoints": ", ".join(f"step {step}" for step in run.checkpoints),
        "weights": ", ".join(str(run.path / "weights" / name) for name in run.weights),
        "report": run.path / "report.html" if (run.path / "report.html").exists() else None,
    }
    console.stdout(run.name)
    for label, value in facts.items():
        if value not in (None, ""):
            console.stdout(f"  {label + ':':<13}{value}")
    metrics = [
        (name, format_number(value))
        for name, value in run.last.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    ]
    if metrics:
        console.stdout()
        console.print_table(("METRIC", f"STEP {run.step}"), metrics)
