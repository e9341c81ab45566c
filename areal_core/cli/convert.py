"""`areal convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  areal convert runs/quickstart/grpo model-out

  areal convert runs/big/checkpoints/step-000100 model-out --role critic

  areal convert path/to/model checkpoint-out --to dcp
"""


class _Format(StrEnum):
    hf = "hf"
    dcp = "dcp"


def register(app: typer.Typer) -> None:
    @app.command("convert", short_help="Convert between checkpoints and Hugging Face folders.", epilog=EXAMPLES)
    def convert(
        source: Annotated[
            Path, typer.Argument(help="Run, checkpoint, engine's folder in it, or Hugging Face folder.", metavar="SRC")
        ],
        target: Annotated[Path, typer.Argument(help="New folder.", metavar="DST")],
        to: Annotated[_Format | None, typer.Option(help="Format to write; default: the other one.")] = None,
        role: Annotated[str, typer.Option(help="Which model of a checkpoint.", metavar="NAME")] = "actor",
        model: Annotated[
            Path | None,
            typer.Option(
                help="Hugging Face folder of the same model, for a checkpoint outside its run.", metavar="DIR"
            ),
        ] = None,
        engine: Annotated[
            str | None,
            typer.Option(help="Train engine of the checkpoint; default: the run's, or fsdp.", metavar="NAME"),
        ] = None,
    ) -> None:
        """Convert between a training checkpoint (dcp) and a Hugging Face folder (hf).

        A run stands for its newest checkpoint. Adapters are merged. A checkpoint made from a Hugging Face folder holds
        weights alone, no optimizer state.
        """
        from areal_core.cli import console
        from areal_core.plugins.manager import get_plugin_manager
        from areal_core.trainer.convert import convert as run_conversion

        done = run_conversion(
            source, target, get_plugin_manager(), to=to.value if to else None, role=role, model=model, engine=engine
        )
        console.stdout(f"{done.path} ({done.format}) -> {target}")
