"""`areal doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_core.cli import console


def register(app: typer.Typer) -> None:
    @app.command(
        "doctor",
        short_help="Check this machine, the installation and a run.",
        epilog="Example: areal doctor run.yaml rollout.backend=vllm:d2",
    )
    def doctor(
        config: Annotated[
            Path | None, typer.Argument(help="YAML file of a run: look also at what it needs.", metavar="[CONFIG]")
        ] = None,
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Values that replace the file's.", metavar="[KEY=VALUE]...")
        ] = None,
        root: Annotated[Path, typer.Option(help="Folder of the runs (run.root).", metavar="DIR")] = Path("runs"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Check this machine and installation: Python, PyTorch, GPUs, plugins, disk, tools.

        With CONFIG also what its inference engine needs, such as the servers of rollout.addresses and what they offer.
        Exits 1 if something is broken. A warning (a missing optional package, little disk) does not count as that.
        """
        import attrs

        from areal_core.runs.diagnosis import diagnose

        loaded = None
        if config is not None:
            from areal_core.api.load import load_run_config

            loaded = load_run_config(config, overrides or [])
        checks = diagnose(root, config=loaded)
        broken = [check for check in checks if check.status == "error"]
        if as_json:
            console.print_json({"ok": not broken, "checks": [attrs.asdict(check) for check in checks]})
        else:
            console.print_table(
                ("STATUS", "CHECK", "FOUND"), [(check.status, check.name, check.detail) for check in checks]
            )
            for check in checks:
                if check.fix:
                    console.stdout(f"\n{check.name}: {check.fix}")
            if broken:
                console.error(f"{len(broken)} check{'s' if len(broken) > 1 else ''} failed")
        if broken:
            raise typer.Exit(1)
