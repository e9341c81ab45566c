"""`areal config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_core.cli import console

_CONFIG = typer.Argument(help="YAML file of the run.", metavar="CONFIG")
_OVERRIDES = typer.Argument(help="Values that replace the file's.", metavar="[KEY=VALUE]...")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at a configuration, check it, or print its schema.", no_args_is_help=True)

    @group.command(
        "show",
        short_help="Print the whole configuration, as it is resolved.",
        epilog="Example: areal config show run.yaml actor.optimizer.lr=1e-5",
    )
    def show(
        config: Annotated[Path, _CONFIG],
        overrides: Annotated[list[str] | None, _OVERRIDES] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
    ) -> None:
        """Print the whole configuration: the file, the overrides and every default, references resolved."""
        from areal_core.api.load import load_run_config
        from areal_core.config import dump_yaml, to_plain

        plain = to_plain(load_run_config(config, overrides or []))
        if as_json:
            console.print_json(plain)
        else:
            console.stdout(dump_yaml(plain).rstrip())

    @group.command(
        "check",
        short_help="Check a configuration without starting anything.",
        epilog="Example: areal config check run.yaml rollout.backend=local",
    )
    def check(
        config: Annotated[Path, _CONFIG],
        overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    ) -> None:
        """Check a configuration without starting anything: keys, types, bounds, plugins, and what goes together.

        What is named by an import path, package.module:attribute, is imported. Exits 0 if all is well, and 2 after
        listing every problem with its file and line.
        """
        from areal_core.api.load import error_places, load_run_config
        from areal_core.config.selections import check_import_paths, selected_plugins
        from areal_core.plugins import get_plugin_manager
        from areal_core.trainer.checks import check_config

        loaded = load_run_config(config, overrides or [])
        with error_places(config, overrides or []):
            check_import_paths(loaded)
            check_config(loaded, loaded.actor.parsed_backend.parallel.world_size, get_plugin_manager())
        used = ", ".join(f"{key}: {entry.full_name}" for key, entry in selected_plugins(loaded))
        console.stdout(f"{config}: ok (trainer: {loaded.trainer}; {used})")

    @group.command(
        "schema",
        short_help="Print the JSON Schema of a configuration.",
        epilog="Example: areal config schema --trainer rl > areal.schema.json",
    )
    def schema(
        trainer: Annotated[
            str | None, typer.Option(help="Only this trainer's configuration, e.g. rl or sft.", metavar="NAME")
        ] = None,
    ) -> None:
        """Print the JSON Schema (draft 2020-12) of a configuration, with the sections of installed plugins.

        An editor with a YAML language server completes and checks a file that begins with
        `# yaml-language-server: $schema=areal.schema.json`.
        """
        from areal_core.api.load import TRAINER_CONFIGS
        from areal_core.config.schema import json_schema
        from areal_core.errors import BadInputError, did_you_mean

        if trainer is not None and trainer not in TRAINER_CONFIGS:
            known = ", ".join(TRAINER_CONFIGS)
            raise BadInputError(
                f"--trainer: unknown trainer {trainer!r}. Known: {known}.{did_you_mean(trainer, TRAINER_CONFIGS)}"
            )
        chosen = TRAINER_CONFIGS if trainer is None else {trainer: TRAINER_CONFIGS[trainer]}
        console.print_json(json_schema(chosen))

    app.add_typer(group, name="config")
