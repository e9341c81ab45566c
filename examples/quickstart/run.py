"""The quickstart: make a tiny model, SFT, GRPO, and a table of what came of it.

    python examples/quickstart/run.py [--seed N] [--root FOLDER] [--require ACCURACY]

Everything it does are three commands of `areal`, which it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
BAR_WIDTH = 40
SFT_STEPS_PER_LINE = 60
console = Console(highlight=False, soft_wrap=True)


class StageFailed(Exception):
    """A command did not end well; the message says where its output is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default 0)")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: runs/quickstart, or the next free one)")
    parser.add_argument("--require", type=float, default=0.0, help="exit with 1 if the final accuracy is lower")
    arguments = parser.parse_args()
    root: Path = arguments.root or next_free(Path("runs/quickstart"))
    try:
        return quickstart(root, arguments.seed, arguments.require)
    except StageFailed as error:
        console.print(f"[red]{error}[/red]")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def next_free(folder: Path) -> Path:
    """``folder``, or ``folder-2``, ``folder-3``, ...: nothing of an earlier run is touched."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def quickstart(root: Path, seed: int, require: float) -> int:
    sft, grpo = root / f"sft-{seed}", root / f"grpo-{seed}"
    logs = root / "output"
    logs.mkdir(parents=True, exist_ok=True)
    overrides = [f"seed={seed}", f"run.root={root}"]
    started = time.monotonic()

    console.print("[bold]1. A model folder: tokenizer and shape, no weights[/bold]")
    run(["arithmetic", "init", str(root / "model")], logs / "init.log")

    console.print("\n[bold]2. SFT on demonstrations of mixed quality[/bold]")
    sft_started = time.monotonic()
    for line in follow(["train", str(HERE / "sft.yaml"), *overrides], logs / "sft.log", sft / "metrics.jsonl"):
        show_sft(line)
    sft_seconds = time.monotonic() - sft_started

    console.print("\n[bold]3. GRPO: reward 1 for the right number after ####[/bold]")
    rl_started = time.monotonic()
    held_out: dict[int, float] = {}
    for line in follow(["train", str(HERE / "grpo.yaml"), *overrides], logs / "grpo.log", grpo / "metrics.jsonl"):
        show_rl(line)
        if "eval/reward" in line:
            held_out[int(line["step"])] = line["eval/reward"]
    rl_seconds = time.monotonic() - rl_started

    if not held_out:
        raise StageFailed(f"{grpo / 'metrics.jsonl'} holds no evaluation")
    before, after = held_out[min(held_out)], held_out[max(held_out)]
    show_result(sft, grpo, (before, after), (sft_seconds, rl_seconds, time.monotonic() - started))
    if after < require:
        console.print(f"[red]Held-out accuracy {after:.3f} is below the required {require:.3f}.[/red]")
        return 1
    return 0


def run(command: list[str], log: Path) -> None:
    for _ in follow(command, log, None):
        pass


def follow(command: list[str], log: Path, metrics: Path | None) -> Iterator[Mapping[str, float]]:
    """Run ``areal COMMAND`` with its output in ``log``; yield each line of ``metrics`` as it appears."""
    console.print(f"[dim]$ areal {shlex.join(command)}[/dim]")
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_core.cli.main", *command], stdout=output, stderr=output, env=environment
        )
        try:
            position = 0
            while True:
                ended = process.poll() is not None  # before reading, so that the last lines are not missed
                if metrics is not None:
                    lines, position = read_lines(metrics, position)
                    yield from lines
                if ended:
                    break
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise StageFailed(f"`areal {shlex.join(command)}` exited with {process.returncode}. The end of {log}:\n{tail}")


def read_lines(path: Path, position: int) -> tuple[list[Mapping[str, float]], int]:
    """The whole lines of a JSON Lines file after ``position``, and where the next begins."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], position + len(whole)


def show_sft(line: Mapping[str, float]) -> None:
    step = int(line["step"])
    if step == 1 or step % SFT_STEPS_PER_LINE == 0:
        console.print(f"  step {step:3d}   loss {line['train/loss']:.3f}")


def show_rl(line: Mapping[str, float]) -> None:
    text = f"  step {int(line['step']):3d}   "
    if "rollout/reward" in line:
        reward = line["rollout/reward"]
        text += f"reward {reward:.2f} [cyan]{'█' * round(reward * BAR_WIDTH):{BAR_WIDTH}}[/cyan]"
    else:
        text += " " * (len("reward 0.00 ") + BAR_WIDTH)
    if "eval/reward" in line:
        text += f"  held-out [bold]{line['eval/reward']:.3f}[/bold]"
    console.print(text.rstrip())


def show_result(sft: Path, grpo: Path, accuracy: tuple[float, float], seconds: tuple[float, float, float]) -> None:
    table = Table(title="300 questions with numbers that were never trained on")
    table.add_column("Stage")
    table.add_column("Held-out accuracy", justify="right")
    table.add_column("Time", justify="right")
    table.add_column("Run")
    table.add_row("after SFT", f"{accuracy[0]:.3f}", f"{seconds[0]:.0f} s", str(sft))
    table.add_row("after GRPO", f"[bold]{accuracy[1]:.3f}[/bold]", f"{seconds[1]:.0f} s", str(grpo))
    table.add_section()
    table.add_row("all", "", f"{seconds[2]:.0f} s", str(grpo / "report.html"))
    console.print()
    Console(highlight=False, width=max(console.width, 100)).print(table)
    console.print(f"Report with curves and rollouts: {grpo / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
