"""Episodes a second of the rollout controller when the model costs nothing, and the memory of 100,000 in flight.

    nox -s bench -- orchestrator [--runs 5] [--quick]

The engine answers at once, an episode is one request and a trajectory of 8 tokens, and 1,024 may run at a time. What is
left is the controller's own work: starting and ending episodes, seeds, checks, groups, statistics. Beside it the same
work in a plain asyncio loop without any of that: a task for each episode, a semaphore of 1,024, and gather. Every run
is a process of its own, and the variants take turns. Writes its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import measured_on, table, write_section
from rich.console import Console

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.rollout.controller import RolloutController

CONCURRENT = 1024
EPISODES, QUICK_EPISODES = 20_000, 4_000
IN_FLIGHT, QUICK_IN_FLIGHT = 100_000, 10_000
PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6, 7, 8]
GCONFIG = GenerationHyperparameters(max_new_tokens=len(COMPLETION))
#: What AReaL's executor does on a machine like this, and how much faster this one is meant to be.
PEER, AIM = 7_700, 5
LIMIT_MIB = 2048
console = Console(highlight=False, soft_wrap=True)


class InstantEngine(InferenceEngine):
    """Answers without waiting, or after the loop's next turn, or never before ``released``."""

    def __init__(self, suspend: bool = False, hold: bool = False) -> None:
        self.suspend, self.hold = suspend, hold
        self.waiting = 0
        self.released: asyncio.Event | None = None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if self.suspend:
            await asyncio.sleep(0)
        if self.hold:
            self.released = self.released or asyncio.Event()
            self.waiting += 1
            await self.released.wait()
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=COMPLETION,
            output_logprobs=[-1.0] * len(COMPLETION),
            output_versions=[0] * len(COMPLETION),
        )

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: Any = None) -> None: ...

    def destroy(self) -> None: ...

    def pause_generation(self) -> None: ...

    def continue_generation(self) -> None: ...

    def update_weights_from_disk(self, meta: Any) -> None: ...

    def set_version(self, version: int) -> None: ...

    def get_version(self) -> int:
        return 0


class TrivialWorkflow(RolloutWorkflow):
    """One request, reward 1."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        response = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=GCONFIG))
        return Trajectory.from_response(response, 1.0)


def make_rows(count: int) -> list[dict[str, Any]]:
    return [{"_uid": f"0-{index}"} for index in range(count)]


def make_controller(engine: InferenceEngine, groups: int, group_size: int, limit: int | None) -> RolloutController:
    config = InferenceEngineConfig(max_head_offpolicyness=1, max_concurrent_rollouts=limit)
    return RolloutController(engine, TrivialWorkflow(), config, batch_size=groups, group_size=group_size)


def time_controller(episodes: int, group_size: int, suspend: bool) -> tuple[float, float]:
    """Seconds by the clock and of this process's CPU."""
    rows = make_rows(episodes // group_size)
    with make_controller(InstantEngine(suspend), len(rows), group_size, CONCURRENT) as controller:
        start, cpu = time.perf_counter(), time.process_time()
        result = controller.rollout_batch(rows)
        taken = time.perf_counter() - start, time.process_time() - cpu
    assert result.stats["rollout/accepted"] == len(result.trajectories) == episodes
    return taken


def time_plain_loop(episodes: int, suspend: bool) -> tuple[float, float]:
    """The same episodes in a task each, with a semaphore, and nothing else."""
    engine, workflow, rows = InstantEngine(suspend), TrivialWorkflow(), make_rows(episodes)

    async def play_all() -> list[Trajectory]:
        semaphore = asyncio.Semaphore(CONCURRENT)

        async def play(row: dict[str, Any]) -> Trajectory:
            async with semaphore:
                return await workflow.arun_episode(engine, row)

        return await asyncio.gather(*[asyncio.create_task(play(row)) for row in rows])

    start, cpu = time.perf_counter(), time.process_time()
    trajectories = asyncio.run(play_all())
    assert len(trajectories) == episodes
    return time.perf_counter() - start, time.process_time() - cpu


def time_bare_workflow(episodes: int) -> tuple[float, float]:
    """The workflow alone, awaited one after the other: what the user's and the engine's code costs."""
    engine, workflow, rows = InstantEngine(), TrivialWorkflow(), make_rows(episodes)

    async def play_all() -> list[Trajectory]:
        return [await workflow.arun_episode(engine, row) for row in rows]

    start, cpu = time.perf_counter(), time.process_time()
    assert len(asyncio.run(play_all())) == episodes
    return time.perf_counter() - start, time.process_time() - cpu


def measure_memory(episodes: int) -> dict[str, float]:
    """Peak resident memory in MiB, before and with that many episodes that wait for the engine, and their seconds."""
    before = peak_mib()
    engine = InstantEngine(hold=True)
    group_size = 8
    start = time.perf_counter()
    with make_controller(engine, episodes // group_size, group_size, None) as controller:
        for row in make_rows(episodes // group_size):
            controller.submit(row)
        while engine.waiting < episodes:
            time.sleep(0.01)
        peak, seconds = peak_mib(), time.perf_counter() - start
    return {"before": before, "peak": peak, "seconds": seconds}


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


#: Name on the command line -> (name in the table, what it measures).
VARIANTS: dict[str, tuple[str, Callable[[int], tuple[float, float]]]] = {
    "groups": ("controller, groups of 8", lambda episodes: time_controller(episodes, 8, False)),
    "single": ("controller, groups of 1", lambda episodes: time_controller(episodes, 1, False)),
    "plain": ("plain asyncio loop", lambda episodes: time_plain_loop(episodes, False)),
    "bare": ("workflow alone, one after the other", time_bare_workflow),
    "groups_wait": ("every request waits: controller, groups of 8", lambda n: time_controller(n, 8, True)),
    "plain_wait": ("every request waits: plain asyncio loop", lambda n: time_plain_loop(n, True)),
}


def run_child(*arguments: str) -> Any:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout)


def serve_child(name: str, episodes: int) -> None:
    result: Any = measure_memory(episodes) if name == "memory" else VARIANTS[name][1](episodes)
    sys.stdout.write(json.dumps(result))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each variant (default 5)")
    parser.add_argument("--quick", action="store_true", help="fewer episodes and one run; writes nothing")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "EPISODES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        serve_child(arguments.child[0], int(arguments.child[1]))
        return 0
    runs, episodes = (1, QUICK_EPISODES) if arguments.quick else (arguments.runs, EPISODES)
    seconds: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(runs):
        for name, measured in seconds.items():
            measured.append(run_child(name, str(episodes)))
    in_flight = QUICK_IN_FLIGHT if arguments.quick else IN_FLIGHT
    memory = run_child("memory", str(in_flight))
    markdown = make_section(seconds, episodes, in_flight, memory)
    console.print(markdown)
    if not arguments.quick:
        console.print(f"wrote {write_section('orchestrator', markdown)}")
    return 0


def make_section(seconds: dict[str, list[list[float]]], episodes: int, in_flight: int, memory: dict[str, float]) -> str:
    rates = {name: sorted(episodes / wall for wall, _ in runs) for name, runs in seconds.items()}
    by_cpu = {name: statistics.median(episodes / cpu for _, cpu in runs) for name, runs in seconds.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    rows = []
    for name, (label, _) in VARIANTS.items():
        plain = "plain_wait" if name.endswith("_wait") else "plain"
        rows.append(
            (
                label,
                f"{median[name]:,.0f}",
                f"{rates[name][0]:,.0f} - {rates[name][-1]:,.0f}",
                f"{by_cpu[name]:,.0f}",
                f"{statistics.median(p[0] / o[0] for o, p in zip(seconds[name], seconds[plain], strict=True)):.2f} x",
            )
        )
    head = ("", "Episodes a second", "least and most", "for each second of CPU", "to the plain loop")
    bare = by_cpu["groups"] / by_cpu["bare"]
    paragraphs = (
        "## The rollout controller's own cost",
        (
            f"{episodes:,} trivial episodes (one request, a trajectory of 8 tokens) against an engine that "
            f"answers at once, {CONCURRENT:,} at a time; median of {len(seconds['groups'])} runs, each in a "
            "process of its own, the variants in turn. The plain loop plays the same workflow in a task for each "
            "episode, behind a semaphore, and does nothing else: no seeds, retries, timeouts, groups, checks or "
            "statistics. Where every request waits, the engine gives up the event loop once, as a real one does."
        ),
        table(head, *rows),
        (
            f"AReaL's executor plays about {PEER:,} such episodes a second on a machine like this (the aim is "
            f"{AIM} times that, {PEER * AIM:,}); here: {median['groups'] / PEER:.1f} times in groups of 8, "
            f"{median['single'] / PEER:.1f} times in groups of 1. With {in_flight:,} episodes in flight, each "
            f"waiting for the engine, the process has {memory['peak']:,.0f} MiB at its peak "
            f"({memory['before']:,.0f} MiB before the first; the limit is {LIMIT_MIB:,} MiB). {measured_on()}"
        ),
        (
            f"What bounds it is Python. The workflow alone takes {bare:.0%} of the CPU time of an episode in groups of "
            "8 (request, response, four arrays); the rest is the copy of the request with its seed, the checks of "
            "the trajectory, the books of episode and group, and statistics. An episode that never waits needs no task "
            "of its own: a worker plays one after the other until one suspends it."
        ),
    )
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    sys.exit(main())
