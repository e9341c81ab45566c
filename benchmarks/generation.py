"""Tokens a second of the embedded engine against `transformers.generate`.

    nox -s bench -- generation [--runs 5] [--quick] [--model NAME=FOLDER ...]

64 requests with ragged prompts (16 to 256 tokens) and ragged answers (16 to 256), sampled at temperature 1 in fp32, of
the quickstart's model and of SmolLM2-135M. The engine takes them all at once and also returns log-probs;
`transformers.generate` takes them in padded batches, each of which runs to its longest answer. Its batch size and order
are tried first, and the fastest way is the one compared. Only tokens that were asked for count. Every run is a process
of its own, and the sides take turns. Writes its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from report import ROOT, measured_on, table, write_section
from rich.console import Console

REQUESTS, SHORTEST, LONGEST = 64, 16, 256
PREPARE_SMOLLM2 = ROOT / "examples" / "gsm8k" / "prepare_smollm2.py"
#: Aim and least ratio of tokens a second, by model.
AIMS = {"quickstart": (8.0, 4.0), "smollm2": (3.0, 1.8)}
#: Models below this many bytes of weights run on one thread on both sides: a second one slows both down.
ONE_THREAD_BYTES = 40_000_000
console = Console(highlight=False, soft_wrap=True)

Job = tuple[list[int], int]


@attrs.frozen
class Way:
    """How `transformers.generate` is called: rows of a batch, the order of the requests, and the kind of cache."""

    batch: int
    order: str = "given"
    cache: str = "dynamic"

    def __str__(self) -> str:
        order = {"given": "", "prompt": ", sorted by prompt length", "answer": ", sorted by answer length"}[self.order]
        return f"batches of {self.batch}{order}{', static cache' if self.cache == 'static' else ''}"


WAYS = (Way(64), Way(16), Way(16, "prompt"), Way(8, "prompt"), Way(64, cache="static"))
QUICK_WAYS = (Way(64), Way(16, "prompt"))
#: Not a choice that a user has where a model ends its answers itself; measured to be open about it.
ORACLE = Way(16, "answer")


@attrs.frozen
class Measurement:
    """One run: tokens that were asked for, wall seconds, and CPU seconds of all threads."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--quick", action="store_true", help="one run, 16 requests, few ways; writes no page")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER", help="models to measure")
    parser.add_argument("--side", choices=("engine", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        sys.stdout.write("\nRESULT " + json.dumps(attrs.asdict(run_side(arguments.side, **arguments.job))) + "\n")
        return 0
    sections = []
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as scratch:
        for name, folder in find_models(arguments.model, Path(scratch)).items():
            if isinstance(folder, str):
                console.print(f"{name}: left out: {folder}")
                sections.append((name, f"left out: {folder}"))
            else:
                sections.append(
                    (name, compare(name, folder, 1 if arguments.quick else arguments.runs, arguments.quick))
                )
    if not arguments.quick:
        console.print(f"wrote {write_section('generation', report(sections, arguments.runs))}")
    return 0


def find_models(given: Sequence[str], scratch: Path) -> dict[str, Path | str]:
    """Folder of each model, or why there is none."""
    if given:
        return {name: Path(folder) for name, folder in (item.split("=", 1) for item in given)}
    return {"quickstart": make_quickstart(scratch / "quickstart"), "smollm2": make_smollm2(scratch / "smollm2")}


def make_quickstart(folder: Path) -> Path:
    """The quickstart's model with random weights, and a context that holds prompt and answer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_arithmetic.model import write_model_folder

    write_model_folder(folder)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 2 * LONGEST
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_smollm2(folder: Path) -> Path | str:
    result = subprocess.run([sys.executable, str(PREPARE_SMOLLM2), str(folder)], capture_output=True, text=True)
    return folder if result.returncode == 0 else (result.stderr or result.stdout).strip().splitlines()[-1]


@attrs.frozen
class Comparison:
    threads: int
    requests: int
    way: Way
    tried: dict[str, float]
    oracle: float
    engine: list[Measurement]
    transformers: list[Measurement]

    @property
    def ratios(self) -> list[float]:
        return [ours.rate / theirs.rate for ours, theirs in zip(self.engine, self.transformers, strict=True)]


def compare(name: str, folder: Path, runs: int, quick: bool) -> Comparison:
    threads = 1 if weight_bytes(folder) < ONE_THREAD_BYTES else (os.cpu_count() or 1)
    requests = REQUESTS // 4 if quick else REQUESTS
    job: dict[str, Any] = {"folder": str(folder), "threads": threads, "requests": requests}
    tried: dict[Way, float] = {}
    for way in (*(QUICK_WAYS if quick else WAYS), ORACLE):
        tried[way] = call("transformers", **job, way=attrs.asdict(way)).rate
        console.print(f"{name}: transformers, {way}: {tried[way]:.0f} tokens/s")
    oracle = tried.pop(ORACLE)
    best = max(tried, key=lambda way: tried[way])
    ours: list[Measurement] = []
    theirs: list[Measurement] = []
    for number in range(runs):
        ours.append(call("engine", **job))
        theirs.append(call("transformers", **job, way=attrs.asdict(best)))
        console.print(
            f"{name}: run {number + 1}: engine {ours[-1].rate:.0f} tokens/s, transformers {theirs[-1].rate:.0f}; "
            f"{ours[-1].rate / theirs[-1].rate:.2f} x (CPU time {theirs[-1].cpu_seconds / ours[-1].cpu_seconds:.2f} x)"
        )
    return Comparison(threads, requests, best, {str(way): rate for way, rate in tried.items()}, oracle, ours, theirs)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def call(side: str, **job: Any) -> Measurement:
    """One side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--job", json.dumps(job)]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise SystemExit(f"the side {side} failed with {job}:\n{result.stderr}")
    return Measurement(**json.loads(result.stdout.rsplit("RESULT ", 1)[1]))


# ------------------------------------------------------------------------------------------- inside a run's process


def make_jobs(vocab: int, count: int) -> list[Job]:
    """(prompt, tokens to generate) of each request; the same on both sides."""
    rng = random.Random(0)
    return [
        ([rng.randrange(3, vocab) for _ in range(rng.randint(SHORTEST, LONGEST))], rng.randint(SHORTEST, LONGEST))
        for _ in range(count)
    ]


def run_side(side: str, folder: str, threads: int, requests: int, way: dict[str, Any] | None = None) -> Measurement:
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(threads)
    jobs = make_jobs(AutoConfig.from_pretrained(folder).vocab_size, requests)
    warm_up = [(prompt[:16], 4) for prompt, _ in jobs[:8]]
    if side == "engine":
        return run_engine(folder, threads, jobs, warm_up)
    assert way is not None
    return run_transformers(folder, jobs, warm_up, Way(**way))


def measure(jobs: Sequence[Job], started: float, cpu_started: float) -> Measurement:
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Measurement(sum(count for _, count in jobs), seconds, cpu_seconds)


def run_engine(folder: str, threads: int, jobs: list[Job], warm_up: list[Job]) -> Measurement:
    from areal_core.api.configs import InferenceEngineConfig
    from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
    from areal_local.config import LocalConfig
    from areal_local.engine import LocalEngine

    engine = LocalEngine(
        InferenceEngineConfig(dtype="float32", plugin_options={"local": LocalConfig(num_threads=threads)})
    )
    engine.initialize(folder)

    async def generate(some: list[Job]) -> None:
        answers = await asyncio.gather(
            *[
                engine.agenerate(
                    ModelRequest(
                        input_ids=prompt,
                        gconfig=GenerationHyperparameters(max_new_tokens=count, ignore_eos=True, seed=seed),
                    )
                )
                for seed, (prompt, count) in enumerate(some)
            ]
        )
        assert [answer.output_len for answer in answers] == [count for _, count in some]

    asyncio.run(generate(warm_up))
    started, cpu_started = time.perf_counter(), time.process_time()
    asyncio.run(generate(jobs))
    result = measure(jobs, started, cpu_started)
    engine.destroy()
    return result


def run_transformers(folder: str, jobs: list[Job], warm_up: list[Job], way: Way) -> Measurement:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"cache_implementation": "static"} if way.cache == "static" else {}

    def generate(some: list[Job]) -> None:
        if way.order != "given":
            some = sorted(some, key=lambda job: len(job[0]) if way.order == "prompt" else job[1])
        for first in range(0, len(some), way.batch):
            batch = some[first : first + way.batch]
            width, longest = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=longest,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=0,
                    **options,
                )
            assert output.shape == (len(batch), width + longest)

    generate(warm_up)
    started, cpu_started = time.perf_counter(), time.process_time()
    generate(jobs)
    return measure(jobs, started, cpu_started)


# ------------------------------------------------------------------------------------------- report


def report(sections: Sequence[tuple[str, Comparison | str]], runs: int) -> str:
    lines = [
        "## Generation",
        "",
        f"The embedded engine against `transformers.generate`: {REQUESTS} requests, prompts of {SHORTEST} to {LONGEST} "
        f"tokens and answers of {SHORTEST} to {LONGEST}, sampled at temperature 1, fp32; {runs} runs, each a process "
        "of its own, the sides taking turns; medians. Only tokens that were asked for count. The engine also returns "
        "log-probs. `transformers.generate` gets padded batches in the fastest of the ways tried. "
        + measured_on("torch", "transformers"),
        "",
    ]
    rows, notes = [], []
    for name, found in sections:
        if isinstance(found, str):
            notes.append(f"{name}: {found}")
            continue
        ratios = sorted(found.ratios)
        aim, least = AIMS.get(name, (0.0, 0.0))
        ours, theirs = (statistics.median(run.rate for run in side) for side in (found.engine, found.transformers))
        cpu = statistics.median(
            b.cpu_seconds / a.cpu_seconds for a, b in zip(found.engine, found.transformers, strict=True)
        )
        rows.append(
            (
                name,
                str(found.threads),
                f"{ours:.0f}",
                f"{theirs:.0f}",
                f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                f"{cpu:.2f} x",
                f"{aim:g} x (at least {least:g} x)",
            )
        )
        tried = "; ".join(f"{way}: {rate:.0f}" for way, rate in found.tried.items())
        notes.append(
            f"{name}: `transformers.generate` ran with {found.way}. Tokens a second of the ways tried once: {tried}. "
            f"Sorted by the length of the answers, which nobody knows where a model stops by itself, in batches of "
            f"{ORACLE.batch}: {found.oracle:.0f}."
        )
    header = ("model", "threads", "engine, tokens/s", "transformers, tokens/s", "ratio", "ratio of CPU time", "aim")
    return "\n".join([*lines, table(header, *rows), "", *[f"- {note}" for note in notes]])


if __name__ == "__main__":
    sys.exit(main())
