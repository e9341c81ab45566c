"""`areal report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_core.cli import console


def register(app: typer.Typer) -> None:
    @app.command(
        "report",
        short_help="Write report.html of a run: curves and rollouts.",
        epilog="Example: areal report runs/quickstart --open",
    )
    def report(
        run: Annotated[str, typer.Argument(help="Run directory, or the name of a run below --root.", metavar="RUN")],
        root: Annotated[Path, typer.Option(help="Folder of the runs (run.root).", metavar="DIR")] = Path("runs"),
        open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
        max_mb: Annotated[float, typer.Option(help="Most megabytes of the page.", min=0.1)] = 3.0,
        groups: Annotated[int, typer.Option(help="Most prompts per step and split.", min=1)] = 4,
    ) -> None:
        """Write report.html of a run: curves and rollouts on one page that needs no network.

        Works on a run that is still going on; a run that ends writes it by itself.
        """
        from areal_core.runs.listing import resolve_run
        from areal_core.runs.report import build_report

        path = build_report(resolve_run(run, root), max_bytes=int(max_mb * 1e6), groups_per_step=groups)
        console.stdout(str(path))
        if open_:
            import webbrowser

            if not webbrowser.open(path.absolute().as_uri()):
                console.warning(f"no browser could be started. Open {path} yourself.")
