"""`areal eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  areal eval examples/quickstart/grpo.yaml --weights runs/quickstart/grpo/weights/final

  areal eval run.yaml valid_dataset.limit=100 eval_gconfig.temperature=0.7 --json
"""


def register(app: typer.Typer) -> None:
    @app.command("eval", short_help="Score a model on the held-out split.", epilog=EXAMPLES)
    def evaluate(
        config: Annotated[Path, typer.Argument(help="YAML file of a run.", metavar="CONFIG")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Values that replace the file's.", metavar="KEY=VALUE...")
        ] = None,
        weights: Annotated[
            Path | None, typer.Option(help="Folder of the model to score; default: actor.path.", metavar="DIR")
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Score a model on the held-out split: reward, lengths and truncation of what it writes.

        With the trainers sft, rw and dpo: loss, accuracy and margin on the held-out rows. In one process, whatever the
        mesh of the run.
        """
        from areal_core.api.load import error_places, load_run_config
        from areal_core.errors import BadInputError
        from areal_core.plugins.manager import get_plugin_manager
        from areal_core.trainer.evaluate import evaluate as run_evaluation

        if weights is not None and not (weights / "config.json").is_file():
            raise BadInputError(f"--weights: no model at {weights} (a folder with config.json and safetensors).")
        from areal_core.cli.console import print_json, print_table, stderr
        from areal_core.trainer.signals import Interrupted

        try:
            with error_places(config, overrides or []):
                metrics = run_evaluation(
                    load_run_config(config, overrides or []),
                    get_plugin_manager(),
                    weights=None if weights is None else str(weights),
                )
        except Interrupted as interrupted:
            stderr("Interrupted.")
            raise SystemExit(128 + interrupted.signum) from None

        if json:
            print_json(metrics)
        else:
            rows = [(name, f"{value:.4g}") for name, value in sorted(metrics.items())]
            print_table(("metric", "value"), rows, title=f"{weights or config.name}")
