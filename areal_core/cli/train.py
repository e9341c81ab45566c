"""`areal train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  areal train examples/quickstart/grpo.yaml

  areal train run.yaml actor.optimizer.lr=2e-6 gconfig.n_samples=16 --resume auto

  torchrun --nproc-per-node 2 --no-python areal train run.yaml actor.backend=fsdp:d2
"""


def register(app: typer.Typer) -> None:
    @app.command("train", short_help="Train a model, in the way that CONFIG says.", epilog=EXAMPLES)
    def train(
        config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Values that replace the file's.", metavar="KEY=VALUE...")
        ] = None,
        resume: Annotated[
            str,
            typer.Option(help="auto: go on from the newest checkpoint if there is one; must: only then; never."),
        ] = "never",
    ) -> None:
        """Train a model: `trainer: rl`, `sft`, `rw`, `dpo` or `distill`, as CONFIG says.

        Exits 0 when the run finished, 1 when it failed, 2 on bad input, and 128 + n when signal n interrupted it (it
        is saved; `--resume auto` goes on).
        """
        import os
        import sys

        from areal_core.api.load import error_places, load_run_config
        from areal_core.errors import BadInputError
        from areal_core.trainer.run import train as run_training

        if resume not in ("auto", "never", "must"):
            raise BadInputError(f"--resume: must be one of auto, never, must; got {resume!r}")
        with error_places(config, overrides or []):
            result = run_training(load_run_config(config, overrides or []), resume=resume)  # type: ignore[arg-type]
        from areal_core.cli.console import stderr

        # Under torchrun every rank comes here, and one of them speaks.
        is_main = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"
        if result.status == "interrupted":
            if is_main:
                stderr(f"Interrupted; saved. Go on with: areal train {config} ... --resume auto")
            sys.exit(128 + int(result.signum or 0))
        if is_main:
            stderr(f"Finished: {result.path}  (report: {result.path / 'report.html'})")
