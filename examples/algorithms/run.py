"""Train algorithms on the quickstart's task, and write down how their reward moved.

    python examples/algorithms/run.py grpo gspo [--steps 30] [--sft FOLDER] [--out FOLDER]
    python examples/algorithms/run.py --all

For each algorithm: FOLDER/NAME.csv (step, reward, held-out accuracy) and FOLDER/NAME.svg. Runs are under
runs/algorithms, or the next free folder; nothing of an earlier run is touched.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAMES = sorted(path.stem for path in HERE.glob("*.yaml"))
WINDOW = 5
WIDTH, HEIGHT, MARGIN = 480, 200, 36
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--all", action="store_true", help="every algorithm")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sft", type=Path, default=Path("runs/quickstart/sft-0/weights/final"), help="model to start from"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms/curves"), help="folder of the curves")
    parser.add_argument("--require-rise", type=float, metavar="R", help="exit with 1 if a reward rises by less than R")
    arguments = parser.parse_args()
    names = NAMES if arguments.all else arguments.names
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "give names, or --all")
    if not (arguments.sft / "config.json").is_file():
        parser.error(
            f"no model in {arguments.sft}: make it by `areal arithmetic init runs/quickstart/model` and "
            "`areal train examples/quickstart/sft.yaml`, or give another with --sft"
        )
    root = next_free(Path("runs/algorithms").resolve() / "run")
    rises = {name: one(name, root, arguments) for name in names}
    low = [name for name, rise in rises.items() if rise < (arguments.require_rise or 0.0)]
    if low and arguments.require_rise is not None:
        console.print(f"[red]The reward rose by less than {arguments.require_rise}: {', '.join(low)}[/red]")
        return 1
    return 0


def one(name: str, root: Path, arguments: argparse.Namespace) -> float:
    """Train ``name``, write its curve, and return how much the reward rose."""
    overrides = [
        f"run.root={root}",
        f"run.name={name}",
        f"seed={arguments.seed}",
        f"actor.path={arguments.sft.resolve()}",
        f"total_train_steps={arguments.steps}",
    ]
    command = [sys.executable, "-m", "areal_core.cli.main", "train", str(HERE / f"{name}.yaml"), *overrides]
    root.mkdir(parents=True, exist_ok=True)
    console.print(f"[dim]$ areal train examples/algorithms/{name}.yaml ...[/dim]")
    log = root / f"{name}.log"
    # The second reward of gdpo is found by its import path, from the repository's root.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT, check=False).returncode
    if code != 0:
        console.print("\n".join(log.read_text().splitlines()[-15:]))
        raise SystemExit(f"{name} exited with {code}; its output is in {log}")
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    points = [
        (int(line["step"]), line.get("rollout/reward_unfiltered", line["rollout/reward"]))
        for line in lines
        if "rollout/reward" in line
    ]
    held_out = {int(line["step"]): line["eval/reward"] for line in lines if "eval/reward" in line}
    write(arguments.out, name, points, held_out)
    window = max(1, min(WINDOW, len(points) // 2))
    first, last = (sum(r for _, r in part) / window for part in (points[:window], points[-window:]))
    seconds = sorted(line["time/step_s"] for line in lines if "time/step_s" in line)
    console.print(
        f"  reward {first:.3f} (first {window} steps) -> {last:.3f} (last {window}), "
        f"held-out {held_out[min(held_out)]:.3f} -> {held_out[max(held_out)]:.3f}, "
        f"{seconds[len(seconds) // 2]:.1f} s a step"
    )
    return last - first


def write(folder: Path, name: str, points: Sequence[tuple[int, float]], held_out: dict[int, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rewards = dict(points)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "reward", "held_out"])
        for step in sorted({*rewards, *held_out}):
            writer.writerow([step, rewards.get(step, ""), held_out.get(step, "")])
    (folder / f"{name}.svg").write_text(svg(name, points, sorted(held_out.items())))


def svg(name: str, points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> str:
    """A line of the reward, and a dot for each evaluation."""
    values = [value for _, value in (*points, *held_out)]
    low, high = min(0.0, *values), max(1.0, *values)
    end = max(step for step, _ in (*points, *held_out)) or 1

    def place(step: int, value: float) -> str:
        x = MARGIN + step / end * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    dots = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="#d55e00"/>'.format(*place(*point).split(",")) for point in held_out
    )
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="#888"/>\n'
        f'<text x="{MARGIN}" y="20">{name}: reward (line), held-out accuracy (dots)</text>\n'
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:g}</text>\n'
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">{low:g}</text>\n'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">step {end}</text>\n'
        f'<polyline points="{" ".join(place(*point) for point in points)}" fill="none" stroke="#0072b2" '
        f'stroke-width="2"/>\n{dots}\n</svg>\n'
    )


def next_free(folder: Path) -> Path:
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


if __name__ == "__main__":
    sys.exit(main())
