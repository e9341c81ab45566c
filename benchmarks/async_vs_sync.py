"""Seconds a training step takes with and without asynchronous rollouts, for answers whose lengths have a long tail.

    nox -s bench -- async_vs_sync [--runs 5] [--quick]

The controller is the real one. The engine and the train step are models of time alone, see `LatencyModel`; seconds are
scaled down by `SCALE`, so that a run takes seconds instead of an hour. Writes its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
from report import measured_on, table, write_section
from rich.console import Console

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.rollout.controller import RolloutController

AIM = 2.5
#: Seconds of the model that pass in one second of the benchmark.
SCALE = 500.0
console = Console(highlight=False, soft_wrap=True)


@attrs.frozen
class LatencyModel:
    """The times of a training run with long answers, in seconds.

    An answer has a log-normal number of tokens, cut off at ``max_tokens``. Each of the ``slots`` requests that the
    engine holds at a time gets ``tokens_per_second``, however many there are: below saturation, a step of a batched
    decoder takes as long as reading the weights. Further requests wait in the order of their arrival. A train step
    takes ``train_seconds``, and then ``update_seconds`` to hand over the weights, while the engine stands still.
    """

    prompts: int = 32
    samples: int = 8
    median_tokens: int = 2_000
    sigma: float = 0.7
    max_tokens: int = 16_384
    tokens_per_second: int = 50
    slots: int = 128
    train_seconds: float = 60.0
    update_seconds: float = 5.0

    def draw_tokens(self, rng: random.Random) -> int:
        return max(1, min(self.max_tokens, round(self.median_tokens * rng.lognormvariate(0.0, self.sigma))))

    def on_all_devices(self) -> LatencyModel:
        """Both halves of the devices do one thing after the other: twice the requests, half the time of a step."""
        return attrs.evolve(self, slots=2 * self.slots, train_seconds=self.train_seconds / 2)


class ModelledEngine(InferenceEngine):
    """Answers each request after the time that its tokens would take."""

    def __init__(self, model: LatencyModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.version = 0
        self.busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stalled = 0.0
        self._paused_at: float | None = None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        # By the request's seed: each mode plays the same prompts, and gets the same lengths for them.
        tokens = self.model.draw_tokens(random.Random(f"{self.seed}/{request.gconfig.seed}"))
        if self.busy >= self.model.slots:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self.busy += 1
        start = self.version
        left = tokens / self.model.tokens_per_second / SCALE
        while left > 0:
            stalled = self._stalled_so_far()
            await asyncio.sleep(left)
            left = self._stalled_so_far() - stalled
        self._free_slot()
        # One token stands for each version that wrote a part of the answer.
        versions = list(range(start, self.version + 1))
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=versions,
            output_logprobs=[-1.0] * len(versions),
            output_versions=versions,
            metadata={"tokens": tokens},
        )

    def _free_slot(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.busy -= 1

    def _stalled_so_far(self) -> float:
        running = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        return self._stalled + running

    def pause_generation(self) -> None:
        self._paused_at = time.monotonic()

    def continue_generation(self) -> None:
        if self._paused_at is not None:
            self._stalled += time.monotonic() - self._paused_at
        self._paused_at = None

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: Any = None) -> None: ...

    def destroy(self) -> None: ...

    def update_weights_from_disk(self, meta: Any) -> None: ...

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version


class OneAnswer(RolloutWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        request = ModelRequest(input_ids=[1], gconfig=GenerationHyperparameters(max_new_tokens=16_384))
        response = await engine.agenerate(request)
        return Trajectory.from_response(response, 1.0, metadata=response.metadata)


class Rows:
    """Endless prompts, the same in every mode."""

    def __init__(self, count: int) -> None:
        self.count, self.batches = count, 0

    def next_batch(self) -> list[dict[str, Any]]:
        self.batches += 1
        return [{"_uid": f"{self.batches}-{index}"} for index in range(self.count)]


@attrs.frozen
class Measured:
    """Of one run: seconds of a step in the model's time, tokens that it trained on, its groups that were dropped as
    stale, and the age of its trajectories in versions."""

    step_seconds: float
    step_tokens: float
    stale_groups: float
    lag_mean: float
    lag_max: float

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds


def measure(model: LatencyModel, bound: int, steps: int, warmup: int, seed: int) -> Measured:
    """A training run as the trainer makes it: a batch, a train step, new weights."""
    engine, rows = ModelledEngine(model, seed), Rows(model.prompts)
    config = InferenceEngineConfig(max_head_offpolicyness=bound)
    tokens: list[float] = []
    stats: list[dict[str, float]] = []
    with RolloutController(
        engine, OneAnswer(), config, batch_size=model.prompts, group_size=model.samples, seed=seed
    ) as controller:
        start = 0.0
        for step in range(steps + warmup):
            if step == warmup:
                start = time.monotonic()
            result = controller.prepare_batch(rows)
            assert result.stats["rollout/version_lag_max"] <= bound
            time.sleep(model.train_seconds / SCALE)
            engine.pause_generation()
            time.sleep(model.update_seconds / SCALE)
            engine.set_version(step + 1)
            controller.set_version(step + 1)
            engine.continue_generation()
            if step >= warmup:
                tokens.append(sum(trajectory.metadata["tokens"] for trajectory in result.trajectories))
                stats.append(result.stats)
        seconds = (time.monotonic() - start) * SCALE / steps
    return Measured(
        step_seconds=seconds,
        step_tokens=statistics.fmean(tokens),
        stale_groups=statistics.fmean(each["rollout/stale_groups"] for each in stats),
        lag_mean=statistics.fmean(each["rollout/version_lag_mean"] for each in stats),
        lag_max=max(each["rollout/version_lag_max"] for each in stats),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode, with different seeds (default 3)")
    parser.add_argument("--quick", action="store_true", help="one short run of each mode; writes nothing")
    arguments = parser.parse_args(argv)
    runs, steps, warmup = (1, 3, 3) if arguments.quick else (arguments.runs, 5, 5)
    model = LatencyModel()
    modes = {
        "synchronous": (model, 0),
        "synchronous, all devices in turn": (model.on_all_devices(), 0),
        **{f"max_head_offpolicyness {bound}": (model, bound) for bound in (1, 2, 4)},
    }
    measured: dict[str, list[Measured]] = {name: [] for name in modes}
    for seed in range(runs):
        for name, (its_model, bound) in modes.items():
            measured[name].append(measure(its_model, bound, steps, warmup, seed))
            console.print(f"run {seed + 1}, {name}: {measured[name][-1].step_seconds:.0f} s a step")
    markdown = make_section(model, measured, steps, warmup)
    console.print(markdown)
    if not arguments.quick:
        console.print(f"wrote {write_section('async_vs_sync', markdown)}")
    return 0


def make_section(model: LatencyModel, measured: dict[str, list[Measured]], steps: int, warmup: int) -> str:
    def ratios(name: str, base: str) -> list[float]:
        pairs = zip(measured[name], measured[base], strict=True)
        return [run.tokens_per_second / other.tokens_per_second for run, other in pairs]

    rows = []
    for name, runs in measured.items():
        to_sync = ratios(name, "synchronous")
        rows.append(
            (
                name,
                f"{statistics.median(run.step_seconds for run in runs):.0f}",
                f"{statistics.median(run.tokens_per_second for run in runs):,.0f}",
                f"{statistics.median(to_sync):.2f} x ({min(to_sync):.2f} - {max(to_sync):.2f})",
                f"{statistics.fmean(run.lag_mean for run in runs):.1f} / {max(run.lag_max for run in runs):.0f}",
                f"{statistics.fmean(run.stale_groups for run in runs):.1f}",
            )
        )
    head = (
        "",
        "Seconds a step",
        "trained tokens / s",
        "to synchronous",
        "age in versions, mean / most",
        "stale groups a step",
    )
    best = statistics.median(ratios("max_head_offpolicyness 4", "synchronous"))
    colocated = statistics.median(ratios("max_head_offpolicyness 4", "synchronous, all devices in turn"))
    paragraphs = (
        ("## Asynchronous against synchronous rollouts"),
        (
            "The real rollout controller, with models of time in place of the engine and of the trainer. "
            f"{model.prompts} prompts x {model.samples} samples a step; an answer has a log-normal number of "
            f"tokens (median {model.median_tokens:,}, sigma {model.sigma}, at most {model.max_tokens:,}), and the "
            f"engine gives each of {model.slots} requests at a time {model.tokens_per_second} tokens a second; a "
            f"train step takes {model.train_seconds:.0f} s, and {model.update_seconds:.0f} s more in which the "
            f"engine stands still for the new weights. Times are the model's ({SCALE:.0f} of its seconds pass in "
            f"one). {steps} steps after {warmup} of warm-up, median of {len(measured['synchronous'])} runs (least "
            "and most) with different lengths; all modes draw lengths from the same distribution."
        ),
        table(head, *rows),
        (
            f"At staleness 4 the run trains on {best:.2f} times as many tokens a second (aim: {AIM} times). A "
            "synchronous step waits for its longest answer while most of the engine is idle, and then the engine "
            "waits for the trainer; asynchronous, the slots are always full, and the step takes what the busier "
            "of the two takes. The model does not make that easy: a batch is twice what the engine holds, so "
            "that a synchronous step begins with a full engine, too; stale groups are dropped, and their tokens "
            f"not counted; and the controller's own time counts {SCALE:.0f}-fold. It leaves out that a request is "
            "somewhat slower in a full engine, which asynchronous rollouts would feel more. The second row is a "
            "synchronous run that owns the trainer's devices as well and uses all of them in turn (twice the "
            f"requests, half the train step): against it the ratio is {colocated:.2f}. What the answers' age does "
            f"to learning is not measured here. {measured_on()}"
        ),
    )
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    sys.exit(main())
