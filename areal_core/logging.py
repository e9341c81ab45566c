"""Loggers: PascalCase names, one colour per kind of component, the rank in a distributed run."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

_ROOT = "areal"

#: Colour of each kind of component, as an ANSI code.
_COLORS = {
    "infrastructure": "34",  # blue
    "orchestration": "37",  # white
    "rl": "35",  # purple
    "data": "32",  # green
    "compute": "36",  # cyan
}
_WARNING, _ERROR = "33", "31"

#: A word of a PascalCase name -> kind of component. The last known word of a name decides, so that a
#: ``RewardPool`` is infrastructure, and a ``DataLoader`` data.
_WORDS = {
    "infrastructure": "Launcher Server Client Pool Process Plugin Plugins Manager Run Runs Directory Checkpoint Config "
    "Cli Doctor Scheduler Signals Recovery",
    "orchestration": "Trainer Train Controller Rollout Workflow Episode Progress Eval Evaluation Evaluator Areal",
    "rl": "Algorithm Algorithms Loss Reward Rewards Advantage Agent Grpo Ppo GRPO PPO",
    "data": "Data Dataset Datasets Loader Packing Stats Metrics Tracker Trackers Tensorboard Board Report Trajectories "
    "Trajectory Tokenizer Comm",
    "compute": "Engine Model Models Kernel Optimizer Sampler Weights Generation Cuda",
}
_KIND_OF_WORD = {word: kind for kind, words in _WORDS.items() for word in words.split()}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


def getLogger(name: str) -> logging.Logger:
    """The logger of one component, e.g. ``getLogger("FSDPEngine")``."""
    return logging.getLogger(f"{_ROOT}.{name}")


def component_kind(name: str) -> str:
    """``infrastructure``, ``orchestration``, ``rl``, ``data`` or ``compute``: what a logger's component belongs to."""
    for word in reversed(_WORD.findall(name)):
        if word in _KIND_OF_WORD:
            return _KIND_OF_WORD[word]
    return "orchestration"


class _Formatter(logging.Formatter):
    """``12:03:55 [FSDPEngine Rank 1] WARNING message``; the level only from WARNING on, except in files."""

    def __init__(self, *, rank: int, world_size: int, color: bool, full: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S" if full else "%H:%M:%S")
        self.suffix = f" Rank {rank}" if world_size > 1 else ""
        self.color, self.full = color, full

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix(f"{_ROOT}.")
        prefix = f"[{name}{self.suffix}]"
        level = f"{record.levelname} " if self.full or record.levelno >= logging.WARNING else ""
        message = record.getMessage()
        if self.color:
            if record.levelno >= logging.WARNING:
                code = _ERROR if record.levelno >= logging.ERROR else _WARNING
                level = f"\x1b[{code}m{level}\x1b[0m"
            else:
                code = _COLORS[component_kind(name)]
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        text = f"{self.formatTime(record, self.datefmt)} {prefix} {level}{message}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            text = f"{text}\n{self.formatStack(record.stack_info)}"
        return text


class _TerminalHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is now: a progress bar replaces it so that lines appear above the bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the terminal handler always writes to sys.stderr")


def _shown_on_terminal(record: logging.LogRecord) -> bool:
    return not getattr(record, "file_only", False)


def use_color(color: bool | None = None) -> bool:
    """Whether to colour stderr: as asked, else only on a terminal and without ``NO_COLOR``."""
    if color is not None:
        return color
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stderr.isatty()


def setup_logging(
    level: int | str = logging.INFO,
    log_file: Path | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    color: bool | None = None,
) -> None:
    """Send the framework's log records to stderr, and to a file. A second call replaces what the first one set up.

    A record logged with ``extra={"file_only": True}`` goes to the file alone.

    Args:
        level: least level shown, e.g. ``"INFO"``. On ranks above 0 the terminal shows WARNING and above; the file has
            everything from ``level`` on.
        log_file: appended to; its folder is made if missing.
        rank, world_size: of this process; None: torchrun's ``RANK`` and ``WORLD_SIZE``, else 0 and 1.
        color: None: only on a terminal, and not with ``NO_COLOR`` set.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if isinstance(level, str):
        level = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger(_ROOT)
    for handler in list(root.handlers):
        if getattr(handler, "areal_owned", False):
            root.removeHandler(handler)
            handler.close()
    terminal = _TerminalHandler()
    terminal.setLevel(level if rank == 0 else max(level, logging.WARNING))
    terminal.setFormatter(_Formatter(rank=rank, world_size=world_size, color=use_color(color), full=False))
    terminal.addFilter(_shown_on_terminal)
    handlers: list[logging.Handler] = [terminal]
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_file, encoding="utf-8")
        file.setLevel(level)
        file.setFormatter(_Formatter(rank=rank, world_size=world_size, color=False, full=True))
        handlers.append(file)
    for handler in handlers:
        handler.areal_owned = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(level)
