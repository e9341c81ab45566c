"""`areal arithmetic init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The quickstart's word problems.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The quickstart's word problems."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    hidden: Annotated[int, typer.Option(min=2, help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of another model.")] = False,
) -> None:
    """Write a tiny model folder: tokenizer and config.json, no weights (train it with actor.init_from_scratch).

    Example: areal arithmetic init runs/quickstart/model
    """
    from areal_arithmetic.model import write_model_folder

    written = write_model_folder(folder, hidden=hidden, layers=layers, heads=heads, overwrite=overwrite)
    typer.echo(f"{folder}: wrote {', '.join(written)}" if written else f"{folder}: nothing to do")
