"""The command line: ``areal``.

Starting it must stay cheap, so nothing here, and no command module at its top level, imports more than typer.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_core.cli import console

if TYPE_CHECKING:
    from areal_core.plugins import PluginManager

#: Modules of this package with ``register(app)``, in the order of the help.
_COMMAND_MODULES = ("train", "eval", "data", "reward", "runs", "report", "convert", "config", "plugins", "doctor")

_COMPLETION_VARIABLE = "_AREAL_COMPLETE"

_EPILOG = "Example: areal train run.yaml actor.optimizer.lr=1e-5"

# typer does not export these two in every version, but its BadParameter always derives from them.
_UsageError: Any = typer.BadParameter.__bases__[0]
_ClickException: Any = _UsageError.__bases__[0]


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are printed on stderr."""
    arguments, debug = _take_debug(list(arguments))
    try:
        command = build_command(arguments)
        if _COMPLETION_VARIABLE in os.environ:
            command.main(args=arguments, prog_name="areal")
        # Not command.main(): which interrupts and errors it turns into what differs between versions of typer.
        with command.make_context("areal", arguments or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        console.error(str(stop.code))
        return 1
    except BrokenPipeError:
        # The reader has seen enough, as in `areal config show run.yaml | head`; do not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, debug)


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """``--debug`` counts wherever it stands before a ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _report(error: BaseException, debug: bool) -> int:
    """Print an error the way its kind deserves; returns the exit code."""
    from areal_core.errors import ArealError

    if isinstance(error, (KeyboardInterrupt, EOFError, typer.Abort)):
        if debug and isinstance(error, KeyboardInterrupt):
            _print_traceback(error)
        console.error("interrupted")
        return 130
    if isinstance(error, _UsageError):
        console.error(_usage_text(error))
        return 2
    if isinstance(error, _ClickException):
        console.error(error.format_message())
        return int(getattr(error, "exit_code", 1))
    if debug:
        _print_traceback(error)
    rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if rank is not None:
        _tell_launcher(error)
    if isinstance(error, ArealError):
        console.error(str(error))
        return error.exit_code
    name = type(error).__name__ if rank is None else f"rank {rank}: {type(error).__name__}"
    text = str(error).strip()
    hint = "" if debug else "\nRun with --debug for the traceback."
    console.error(f"{name}: {text}{hint}" if text else f"{name}{hint}")
    return 1


def _tell_launcher(error: BaseException) -> None:
    """Leave the error where torchrun looks for it, so that its summary shows that of the rank that failed first."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    try:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        from areal_core.errors import ArealError

        if not isinstance(error, ArealError):
            get_error_handler().record_exception(error)
            return
        try:
            # Its message says it all: torchrun's summary need not trace it for every rank.
            raise error.with_traceback(None) from None
        except ArealError:
            get_error_handler().record_exception(error)
    except Exception as failure:  # the error itself is what must be told
        console.warning(f"cannot leave the error to torchrun: {failure}")


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def _usage_text(error: Any) -> str:
    path = error.ctx.command_path if getattr(error, "ctx", None) else "areal"
    return f"{error.format_message()}\nTry '{path} --help'."


def build_app() -> typer.Typer:
    """The application with the kernel's own commands."""
    app = typer.Typer(
        name="areal",
        help="Reinforcement-learning post-training for language models.",
        epilog=_EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # typer's help through rich imports a Markdown parser and more, as slow as everything else together.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in _COMMAND_MODULES:
        module = f"{__package__}.{name}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from areal_core import API_VERSION, __version__

        console.stdout(f"areal-core {__version__} (plugin API {API_VERSION})")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Holds the global options; ``run`` has taken ``--debug`` out of the line before they are read."""


def build_command(arguments: Sequence[str]) -> Any:
    """The whole command tree; plugins' commands are added when ``arguments`` could need them."""
    command: Any = typer.main.get_command(build_app())
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name in command.commands or "--version" in arguments[:1]:
        return command
    from areal_core.plugins.discovery import plugins_that_mention

    # Loading every plugin takes longer than showing the help, and few bring commands.
    candidates = plugins_that_mention("areal_commands")
    asked: set[str] = set()
    if candidates:
        from areal_core.plugins import PluginManager

        asked = add_plugin_commands(command, PluginManager(candidates))
    if name is not None and name not in command.commands:
        from areal_core.plugins import get_plugin_manager

        add_plugin_commands(command, get_plugin_manager(), asked)
    return command


def add_plugin_commands(command: Any, manager: PluginManager, but: Collection[str] = ()) -> set[str]:
    """Add what plugins bring through ``areal_commands``. One that fails costs a warning, and its own commands.

    Args:
        but: plugins that are not asked.

    Returns:
        those that were.
    """
    asked: set[str] = set()
    for plugin, add in manager.implementations("areal_commands"):
        if plugin in but:
            continue
        asked.add(plugin)
        try:
            # An application of its own: a hook that fails half-way leaves nothing behind.
            app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
            add(app=app)
            group = typer.main.get_group(app)
        except Exception as error:
            console.warning(f"the commands of plugin {plugin} are left out: {type(error).__name__}: {error}")
            continue
        for name, subcommand in group.commands.items():
            if name in command.commands:
                console.warning(f"plugin {plugin} has a command {name!r}, which exists already; it is left out")
            else:
                command.add_command(subcommand, name)
    return asked


if __name__ == "__main__":
    main()
