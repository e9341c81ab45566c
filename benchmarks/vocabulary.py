"""Log-probs and entropy over a large vocabulary in blocks, against the whole matrix of fp32 logits.

    nox -s bench -- vocabulary [--runs 3] [--quick] [--tokens 4096] [--vocab 151936] [--hidden 896] [--threads 2]

Forward and backward pass of the head (a linear layer) and of its log-probs, with gradients to the hidden states and to
the head; once with the entropy and once without. The sizes are those of Qwen2.5-0.5B. Each way runs in a process of its
own, in turns; its peak is the highest resident set above that before the pass. Both must give the same gradients.
Writes its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import measured_on, table, write_section
from rich.console import Console

MEMORY_LIMIT, TIME_LIMIT, TIME_AIM = 0.1, 1.35, 1.1
WAYS = ("whole", "blocks")
LABELS = {"whole": "whole matrix of logits", "blocks": "blocks of the vocabulary"}
KINDS = {"entropy": "log-probs and entropy", "logprobs": "log-probs"}
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes of each way and kind (default 3)")
    parser.add_argument("--quick", action="store_true", help="one run, 256 tokens; writes no page")
    parser.add_argument("--tokens", type=int, default=4096, help="the whole matrix of logits needs 3 MB a token")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        sys.stdout.write(json.dumps(one(*arguments.one, arguments)))
        return 0
    if arguments.quick:
        arguments.runs, arguments.tokens = 1, 256
    results = measure(arguments)
    failed = False
    for kind, label in KINDS.items():
        difference = most_different(results, kind)
        memory, seconds, cpu = (ratio(results, kind, field) for field in ("peak", "seconds", "cpu"))
        console.print(
            f"{label}: {memory:.3f} of the memory (at most {MEMORY_LIMIT}), {seconds:.2f} of the time and {cpu:.2f} of "
            f"the CPU's (at most {TIME_LIMIT}, aim {TIME_AIM}); gradients differ by {difference:.0e}"
        )
        failed = failed or difference > 1e-4
    if failed:
        console.print("[red]the two ways differ[/red]")
        return 1
    if not arguments.quick:
        console.print(f"wrote {write_section('vocabulary', report(results, arguments))}")
    return 0


def measure(arguments: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    results: dict[tuple[str, str], list[dict[str, Any]]] = {(way, kind): [] for kind in KINDS for way in WAYS}
    for run in range(arguments.runs):
        for kind in KINDS:
            for way in WAYS if run % 2 == 0 else reversed(WAYS):
                command = [sys.executable, __file__, "--one", way, kind]
                for name in ("tokens", "vocab", "hidden", "threads"):
                    command += [f"--{name}", str(getattr(arguments, name))]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise SystemExit(f"{LABELS[way]} exited with {done.returncode}: {done.stderr[-2000:]}")
                result = json.loads(done.stdout)
                results[way, kind].append(result)
                label = f"{KINDS[kind]}, {LABELS[way]}"
                console.print(f"{label}: {result['seconds']:.2f} s, {result['peak'] / 1e6:,.0f} MB")
    return results


def one(way: str, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One pass in this process: its seconds, peak in bytes, and numbers that must not depend on the way."""
    import torch

    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator).requires_grad_()
    weight = torch.randn(arguments.vocab, arguments.hidden, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(arguments.vocab, (arguments.tokens,), generator=generator)
    scales = torch.randn(2, arguments.tokens, generator=generator)
    few = 8  # starts the threads and the library of matrix products
    step(way, kind, hidden[:few], weight[:512], targets[:few] % 512, scales[:, :few])
    hidden.grad = weight.grad = None

    before = memory("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    loss = step(way, kind, hidden, weight, targets, scales)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = memory("VmHWM") - before

    assert hidden.grad is not None and weight.grad is not None
    picked = [hidden.grad[::37, ::11].flatten(), weight.grad[::4001, ::13].flatten()]
    checks = [hidden.grad.norm(), weight.grad.norm(), *picked[0][:200], *picked[1][:200]]
    gradients = 4 * (hidden.numel() + weight.numel())
    return {
        "seconds": seconds,
        "cpu": cpu,
        "peak": peak,
        "work": peak - gradients,
        "load": os.getloadavg()[0],
        "loss": loss,
        "checks": [float(value) for value in checks],
    }


def step(way: str, kind: str, hidden: Any, weight: Any, targets: Any, scales: Any) -> float:
    from areal_fsdp.linear_logprobs import LOGITS_AT_ONCE, linear_logprobs
    from areal_fsdp.scorer import token_logprobs

    with_entropy = kind == "entropy"
    if way == "whole":
        logprobs, entropy = token_logprobs(hidden @ weight.T, targets, 1.0, with_entropy)
    else:
        logprobs, entropy = linear_logprobs(
            hidden, weight, targets, temperature=1.0, with_entropy=with_entropy, entries=LOGITS_AT_ONCE
        )
    loss = (logprobs * scales[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * scales[1]).sum()
    loss.backward()
    return float(loss.detach())


def memory(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this benchmark reads /proc/self/status, which this system does not have")


def median(results: dict[tuple[str, str], list[dict[str, Any]]], way: str, kind: str, field: str) -> float:
    return statistics.median(result[field] for result in results[way, kind])


def ratio(results: dict[tuple[str, str], list[dict[str, Any]]], kind: str, field: str) -> float:
    return median(results, "blocks", kind, field) / median(results, "whole", kind, field)


def most_different(results: dict[tuple[str, str], list[dict[str, Any]]], kind: str) -> float:
    """Largest difference between the ways' numbers, in relation to the larger of 1 and their size."""
    pairs = zip(results["whole", kind][0]["checks"], results["blocks", kind][0]["checks"], strict=True)
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def busy(results: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """A sentence for the reader if others were at work: seconds then say little, and seconds of the CPU more."""
    load = max(result["load"] for runs in results.values() for result in runs)
    if load < 1.5 * (os.cpu_count() or 1):
        return ""
    return f" Others used the machine meanwhile (load up to {load:.0f}): the CPU's seconds say more than the clock's."


def report(results: dict[tuple[str, str], list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    rows, ratios = [], []
    matrix = 4 * arguments.tokens * arguments.vocab
    for kind, label in KINDS.items():
        for way in WAYS:
            seconds = [result["seconds"] for result in results[way, kind]]
            rows.append(
                (
                    f"{label}, {LABELS[way]}",
                    f"{statistics.median(seconds):.2f}",
                    f"{min(seconds):.2f} - {max(seconds):.2f}",
                    f"{median(results, way, kind, 'cpu'):.2f}",
                    f"{median(results, way, kind, 'peak') / 1e6:,.0f}",
                    f"{median(results, way, kind, 'work') / 1e6:,.0f}",
                )
            )
        ratios.append(
            f"{label}: {ratio(results, kind, 'peak'):.3f} of the memory ({ratio(results, kind, 'work'):.3f} without "
            f"gradients), {ratio(results, kind, 'seconds'):.2f} of the time and "
            f"{ratio(results, kind, 'cpu'):.2f} of the CPU's"
        )
    return f"""\
## Log-probs over a large vocabulary

Forward and backward pass of a head with {arguments.vocab:,} entries and a width of {arguments.hidden} (those of \
Qwen2.5-0.5B) on {arguments.tokens:,} tokens, fp32, {arguments.threads} threads. Each way in a process of its own, in \
turns; median of {arguments.runs}. Memory is the highest resident set above that before the pass; \
*without gradients* leaves out those of head and hidden states, which every way returns. One matrix of logits is \
{matrix / 1e6:,.0f} MB.

{table(("", "seconds", "least and most", "CPU seconds", "peak MB", "without gradients"), *rows)}

{"; ".join(ratios)}. Limits: {MEMORY_LIMIT} and {TIME_LIMIT} (aim {TIME_AIM}). The gradients of both ways are equal. \
{measured_on("torch")}{busy(results)}

The products of matrices are four instead of three, as logits are computed twice; what is saved is memory traffic. So \
wider models come nearer to 1.33. No more than 64 MiB of logits exist at one time; `actor.fsdp.logits_chunk_tokens` \
sets another amount.
"""


if __name__ == "__main__":
    sys.exit(main())
