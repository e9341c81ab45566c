"""The quickstart's RL step against TRL's GRPOTrainer, and the cold start of `areal --help`.

    nox -s bench [-- --runs 5 --steps 40 --seed 0]

Both sides start from the same SFT checkpoint and use the same prompts, reward and hyper-parameters, on this CPU, each
in a process of its own, taking turns. A side's time is the median step of a run without evaluation; the table shows the
median over the runs. Writes its sections of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from report import PAGE, ROOT, measured_on, write_section
from report import table as markdown_table
from rich.console import Console
from rich.table import Table

QUICKSTART = ROOT / "examples" / "quickstart"
TRL_SIDE = Path(__file__).with_name("trl_grpo.py")
# The first steps pay for allocations and lazy initialisation on both sides.
WARMUP_STEPS = 5
HELP_LIMIT_MS = 200
HEAVY = ("torch", "transformers", "datasets")
console = Console(highlight=False, soft_wrap=True)


@attrs.frozen
class RunResult:
    """One run of one side: seconds of each step, mean reward of each step, held-out accuracy at the end."""

    step_seconds: Sequence[float]
    rewards: Sequence[float]
    accuracy: float

    @property
    def median_step(self) -> float:
        return statistics.median(self.step_seconds[WARMUP_STEPS:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="RL steps of a run (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the SFT run and of the first RL run")
    parser.add_argument("--help-runs", type=int, default=10, help="cold starts of `areal --help` (default 10)")
    parser.add_argument("--quick", action="store_true", help="one short run, to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.steps, arguments.help_runs = 1, WARMUP_STEPS + 3, 3
    start_ms, imported = measure_help(arguments.help_runs)
    console.print(f"areal --help: {start_ms:.0f} ms; imports of {', '.join(HEAVY)}: {', '.join(imported) or 'none'}")
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as scratch:
        root = Path(scratch)
        model = prepare_checkpoint(root, arguments.seed)
        ours: list[RunResult] = []
        theirs: list[RunResult] = []
        for number in range(arguments.runs):
            seed = arguments.seed + number
            for name, side, measure in (("ours", ours, run_ours), ("TRL", theirs, run_trl)):
                result = measure(root, model, seed, arguments.steps)
                side.append(result)
                console.print(
                    f"run {number + 1}, {name}: {result.median_step:.3f} s a step, held-out {result.accuracy:.3f}"
                )
    report(ours, theirs, arguments, start_ms, imported)
    return 0


def prepare_checkpoint(root: Path, seed: int) -> Path:
    """The quickstart's SFT model, trained once for both sides."""
    areal("arithmetic", "init", str(root / "model"))
    areal("train", str(QUICKSTART / "sft.yaml"), f"run.root={root}", f"seed={seed}", "run.name=sft")
    return root / "sft" / "weights" / "final"


def run_ours(root: Path, model: Path, seed: int, steps: int) -> RunResult:
    name = f"ours-{seed}"
    areal(
        "train",
        str(QUICKSTART / "grpo.yaml"),
        f"run.root={root}",
        f"run.name={name}",
        f"seed={seed}",
        f"total_train_steps={steps}",
        f"actor.path={model}",
        "evaluation.at_start=false",
        "evaluation.freq_steps=null",
        "checkpoint.freq_steps=null",
    )
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    return RunResult(
        step_seconds=[line["time/step_s"] for line in lines],
        rewards=[line["rollout/reward"] for line in lines],
        accuracy=lines[-1]["eval/reward"],
    )


def run_trl(root: Path, model: Path, seed: int, steps: int) -> RunResult:
    output = root / f"trl-{seed}.json"
    command = [sys.executable, str(TRL_SIDE), str(model), str(output), "--seed", str(seed), "--steps", str(steps)]
    call(command)
    return RunResult(**json.loads(output.read_text()))


def measure_help(runs: int) -> tuple[float, list[str]]:
    """Median wall milliseconds of `areal --help` in a new process, and which heavy modules it imports."""
    command = [str(Path(sys.executable).with_name("areal")), "--help"]
    call(command)  # fills the page cache and writes bytecode
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call(command)
        times.append(1000 * (time.perf_counter() - started))
    code = (
        "import sys; from areal_core.cli.main import run; run(['--help']);"
        f"print('\\nHEAVY', *(set({HEAVY!r}) & set(sys.modules)))"
    )
    output = call([sys.executable, "-c", code])
    return statistics.median(times), sorted(output.rsplit("HEAVY", 1)[1].split())


def areal(*arguments: str) -> None:
    call([sys.executable, "-m", "areal_core.cli.main", *arguments])


def call(command: Sequence[str]) -> str:
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise SystemExit(
            f"{command} exited with {result.returncode}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
    return result.stdout


def report(
    ours: Sequence[RunResult],
    theirs: Sequence[RunResult],
    arguments: argparse.Namespace,
    start_ms: float,
    imported: Sequence[str],
) -> None:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    def late_reward(result: RunResult) -> float:
        return statistics.mean(result.rewards[-10:])

    step = [median([r.median_step for r in side]) for side in (ours, theirs)]
    ratios = [b.median_step / a.median_step for a, b in zip(ours, theirs, strict=True)]
    accuracy = [median([r.accuracy for r in side]) for side in (ours, theirs)]
    reward = [median([late_reward(r) for r in side]) for side in (ours, theirs)]
    rows = [
        ("Seconds a step", f"{step[0]:.3f}", f"{step[1]:.3f}", f"{step[1] / step[0]:.2f} x faster"),
        ("... least and most of the runs", span(ours), span(theirs), f"{min(ratios):.2f} to {max(ratios):.2f} x"),
        ("Reward, mean of the last 10 steps", f"{reward[0]:.3f}", f"{reward[1]:.3f}", f"{reward[0] - reward[1]:+.3f}"),
        ("Held-out accuracy", f"{accuracy[0]:.3f}", f"{accuracy[1]:.3f}", f"{accuracy[0] - accuracy[1]:+.3f}"),
    ]
    trl = f"TRL {importlib.metadata.version('trl')}"
    table = Table(title=f"GRPO step of the quickstart, median of {len(ours)} runs")
    for column in ("", "areal", trl, "difference"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    write_page(rows, trl, arguments, start_ms, imported)
    console.print(f"Wrote {PAGE.relative_to(ROOT)}")


def span(side: Sequence[RunResult]) -> str:
    return f"{min(r.median_step for r in side):.3f} - {max(r.median_step for r in side):.3f}"


def write_page(
    rows: Sequence[tuple[str, ...]], trl: str, arguments: argparse.Namespace, start_ms: float, imported: Sequence[str]
) -> None:
    step = [
        "## The quickstart's RL step",
        f"GRPO of the quickstart's model (32 prompts x 8 samples, at most 28 new tokens, fp32), {arguments.runs} runs "
        f"of {arguments.steps} steps with different seeds, from one SFT checkpoint. Both sides have the same prompts, "
        "reward and hyper-parameters (`benchmarks/trl_grpo.py` and `examples/quickstart/grpo.yaml`); they take turns, "
        f"each in a process of its own. A run's time is its median step after the first {WARMUP_STEPS}, without "
        f"evaluation; the table has the median of the runs. {measured_on('torch', 'transformers', 'trl')}",
        markdown_table(("", "areal", trl, "difference"), *rows),
        "Main reasons for the difference: generation computes the prompt of a group once, batches are packed without "
        "padding, and sequences whose advantage is zero are left out of the training forward pass. A model this small "
        "shows overheads more than arithmetic: expect other ratios for large models.",
    ]
    write_section("quickstart_vs_trl", "\n\n".join(step))
    start = [
        "## Start of the command line",
        f"`areal --help`: {start_ms:.0f} ms, median of {arguments.help_runs} processes (aim: at most {HELP_LIMIT_MS} "
        f"ms). Of {', '.join(HEAVY)} it imports {', '.join(imported) or 'none'}. {measured_on()}",
    ]
    write_section("cli_start", "\n\n".join(start))


if __name__ == "__main__":
    sys.exit(main())
