"""Train algorithms and trainers on the quickstart's task, and write down how their reward or loss moved.

    python examples/algorithms/run.py grpo gspo [--steps 30] [--sft FOLDER] [--out FOLDER]
    python examples/algorithms/run.py sft rw dpo distill
    python examples/algorithms/run.py --all --require-rise 0.1

For each: FOLDER/NAME.csv (each step, and what was held out) and FOLDER/NAME.svg. Runs are under runs/algorithms, or
the next free folder; nothing of an earlier run is touched. All start from one model, the quickstart's, which is trained
first where it is not there. The teacher of distill is the model that sft makes here, or the quickstart's after GRPO.
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
TRAINERS = ("sft", "rw", "dpo", "distill")
NAMES = (*sorted(path.stem for path in HERE.glob("*.yaml")), *TRAINERS)
QUICKSTART = Path("runs/quickstart")
WINDOW = 5
WIDTH, HEIGHT, MARGIN = 480, 200, 36
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--all", action="store_true", help="every algorithm and trainer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", type=Path, help="model to start from (default: the quickstart's)")
    parser.add_argument("--teacher", type=Path, help="teacher of distill")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms/curves"), help="folder of the curves")
    parser.add_argument(
        "--require-rise",
        type=float,
        metavar="R",
        help="exit with 1 if a reward rises by less than R, or a loss falls by less than this share of itself",
    )
    arguments = parser.parse_args()
    names = NAMES if arguments.all else arguments.names
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "give names, or --all")
    for folder in (arguments.sft, arguments.teacher):
        if folder is not None and not (folder / "config.json").is_file():
            parser.error(f"no model in {folder}")
    root = next_free(arguments.runs.resolve() / "run")
    root.mkdir(parents=True)
    start = (arguments.sft or start_model(root)).resolve()
    gains = {}
    for name in names:
        models = {"actor": start}
        if name == "distill":
            ours, theirs = (folder / "weights" / "final" for folder in (root / "sft", QUICKSTART / "grpo-0"))
            models["teacher"] = (arguments.teacher or (ours if ours.is_dir() else theirs)).resolve()
            if not models["teacher"].is_dir():
                parser.error("distill needs a teacher: name sft before it, or give one with --teacher")
        gains[name] = one(name, root, models, arguments)
    low = [name for name, gain in gains.items() if gain < (arguments.require_rise or 0.0)]
    if low and arguments.require_rise is not None:
        console.print(f"[red]Gained less than {arguments.require_rise}: {', '.join(low)}[/red]")
        return 1
    return 0


def start_model(root: Path) -> Path:
    """The quickstart's model before GRPO; made where it is not there."""
    final = QUICKSTART / "sft-0" / "weights" / "final"
    if not final.is_dir():
        if not (QUICKSTART / "model").is_dir():
            areal(root / "init.log", "arithmetic", "init", str((QUICKSTART / "model").resolve()))
        config = ROOT / "examples" / "quickstart" / "sft.yaml"
        areal(root / "start.log", "train", str(config), f"run.root={QUICKSTART.resolve()}")
    return final


def areal(log: Path, *arguments: str) -> None:
    """Run the command; end with its last lines if it fails."""
    console.print(f"[dim]$ areal {' '.join(os.path.relpath(a, ROOT) if '/' in a else a for a in arguments[:2])}[/dim]")
    # The second reward of gdpo is found by its import path, from the repository's root.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-m", "areal_core.cli.main", *arguments]
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT, check=False).returncode
    if code != 0:
        console.print("\n".join(log.read_text().splitlines()[-15:]))
        raise SystemExit(f"areal {arguments[0]} exited with {code}; its output is in {log}")


def one(name: str, root: Path, models: dict[str, Path], arguments: argparse.Namespace) -> float:
    """Train ``name``, write its curve, and return how much the reward rose, or which share the loss fell by."""
    learns = name in TRAINERS
    config = (ROOT / "examples" / "trainers" if learns else HERE) / f"{name}.yaml"
    areal(
        root / f"{name}.log",
        "train",
        str(config),
        f"run.root={root}",
        f"run.name={name}",
        f"seed={arguments.seed}",
        *(f"{section}.path={path}" for section, path in models.items()),
        f"total_train_steps={arguments.steps}",
    )
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    what = "loss" if learns else "reward"
    keys = ["train/loss"] if learns else ["rollout/reward_unfiltered", "rollout/reward"]
    points = [(int(line["step"]), next(line[key] for key in keys if key in line)) for line in lines if keys[-1] in line]
    held_out = {int(line["step"]): line[f"eval/{what}"] for line in lines if f"eval/{what}" in line}
    write(arguments.out, name, points, held_out, what)
    window = max(1, min(WINDOW, len(points) // 2))
    first, last = (sum(value for _, value in part) / window for part in (points[:window], points[-window:]))
    seconds = sorted(line["time/step_s"] for line in lines if "time/step_s" in line)
    ends = f"held-out {held_out[min(held_out)]:.3f} -> {held_out[max(held_out)]:.3f}, " if held_out else ""
    console.print(
        f"  {what} {first:.3f} (first {window} steps) -> {last:.3f} (last {window}), {ends}"
        f"{seconds[len(seconds) // 2]:.1f} s a step"
    )
    return 1 - last / first if learns else last - first


def write(
    folder: Path, name: str, points: Sequence[tuple[int, float]], held_out: dict[int, float], what: str = "reward"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = dict(points)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", what, "held_out"])
        for step in sorted({*values, *held_out}):
            writer.writerow([step, values.get(step, ""), held_out.get(step, "")])
    (folder / f"{name}.svg").write_text(svg(name, points, sorted(held_out.items()), what))


def svg(name: str, points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]], what: str) -> str:
    """A line of every step, and a dot for each evaluation."""
    values = [value for _, value in (*points, *held_out)]
    low, high = min(0.0, *values), max(1.0, *values) if what == "reward" else max(values)
    end = max(step for step, _ in (*points, *held_out)) or 1
    dotted = "held-out accuracy" if what == "reward" and high <= 1 else f"held-out {what}"

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
        f'<text x="{MARGIN}" y="20">{name}: {what} (line), {dotted} (dots)</text>\n'
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.3g}</text>\n'
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
