"""Training on the samples of one prompt, whose tokens are computed once, against every sequence for itself.

    nox -s bench -- tree_training [--runs 5] [--quick] [--samples 16] [--prompt 512] [--answer 64] [--layers 3]

Forward and backward pass of the fsdp engine over one group, with `share_prompts` on and off, in one process and in
turns. The model is a tenth of SmolLM2-135M in depth and vocabulary, so that decoder and head keep their shares of the
work, with random weights in fp32. Loss and gradient norm of both ways must agree. Writes its section of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from report import measured_on, table, write_section
from rich.console import Console

if TYPE_CHECKING:
    from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
    from areal_fsdp.engine import FSDPEngine

AIM = 3.0
#: Of SmolLM2-135M, which has 30 layers and a vocabulary of 49,152.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, WORDS_PER_LAYER = 576, 1536, 9, 3, 49_152 // 30
WAYS = {True: "prompt computed once", False: "every sequence for itself"}
console = Console(highlight=False, soft_wrap=True)


@attrs.frozen
class Pass:
    """One forward and backward pass."""

    seconds: float
    loss: float
    grad_norm: float
    rows: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="passes of each way (default 5)")
    parser.add_argument("--quick", action="store_true", help="one pass on a small model; writes no page")
    parser.add_argument("--samples", type=int, default=16, help="sequences of the group")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers; the vocabulary grows with them")
    arguments = parser.parse_args()
    runs, layers = (1, 1) if arguments.quick else (arguments.runs, arguments.layers)
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as scratch:
        engine = make_engine(Path(scratch), layers, arguments.prompt + arguments.answer)
        batch = make_batch(engine, arguments.samples, arguments.prompt, arguments.answer)
        passes = measure(engine, batch, runs)
        engine.destroy()
    difference = norm_difference(passes)
    if difference > 1e-5 or abs(passes[True][0].loss - passes[False][0].loss) > 1e-5:
        console.print(f"the two ways differ: {passes[True][0]} and {passes[False][0]}")
        return 1
    console.print(f"{ratio(passes):.2f} times as fast (aim {AIM:g}); the gradient norms differ by {difference:.0e}")
    if not arguments.quick:
        shape = (arguments.samples, arguments.prompt, arguments.answer, layers)
        console.print(f"wrote {write_section('tree_training', report(passes, shape))}")
    return 0


def make_engine(folder: Path, layers: int, length: int) -> FSDPEngine:
    """An engine on a random model; its steps change nothing, so that every pass computes the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from areal_core.api.configs import OptimizerConfig, TrainEngineConfig
    from areal_fsdp.engine import FSDPEngine

    config = LlamaConfig(
        vocab_size=layers * WORDS_PER_LAYER,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    optimizer = OptimizerConfig(type="sgd", lr=0.0, weight_decay=0.0)
    settings = TrainEngineConfig(path=str(folder), backend="fsdp", dtype="float32", optimizer=optimizer)
    engine = FSDPEngine(settings)
    engine.create_process_group(settings.parsed_backend.parallel)
    engine.initialize()
    return engine


def make_batch(engine: FSDPEngine, samples: int, prompt: int, answer: int) -> PackedBatch:
    """One group of random tokens."""
    import torch

    from areal_core.api.batch import PackedBatch

    length, vocabulary = prompt + answer, engine.model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (samples, length), generator=generator)
    ids[:, :prompt] = ids[0, :prompt]
    return PackedBatch(
        torch.arange(0, samples * length + 1, length, dtype=torch.int32),
        {
            "input_ids": ids.flatten(),
            "loss_mask": (torch.arange(length) >= prompt).repeat(samples),
            "advantages": torch.randn(samples, generator=generator).repeat_interleave(length),
        },
        {
            "group_ids": torch.zeros(samples, dtype=torch.int64),
            "prompt_lens": torch.full((samples,), prompt, dtype=torch.int32),
        },
    )


def policy_gradient(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    from areal_core.api.batch import LossOutput

    return LossOutput(-(output.logprobs * batch["advantages"] * batch["loss_mask"]).sum())


def measure(engine: FSDPEngine, batch: PackedBatch, runs: int) -> dict[bool, list[Pass]]:
    """``runs`` passes of each way in turns, after one of each that does not count."""
    passes: dict[bool, list[Pass]] = {True: [], False: []}
    for run in range(runs + 1):
        # Each way is first every second time.
        for shared in (True, False) if run % 2 else (False, True):
            engine.options.share_prompts = shared
            start = time.perf_counter()
            result = engine.train_batch(batch, policy_gradient, lambda b: b["loss_mask"].sum())
            seconds = time.perf_counter() - start
            rows = int(engine.export_stats()["model_tokens"])
            if run:
                passes[shared].append(Pass(seconds, result["loss"], result["grad_norm"], rows))
            console.print(f"{WAYS[shared]}: {seconds:.2f} s{'' if run else ' (to warm up)'}")
    return passes


def ratio(passes: dict[bool, list[Pass]]) -> float:
    """Median seconds of the one over those of the other."""
    return median(passes[False]) / median(passes[True])


def norm_difference(passes: dict[bool, list[Pass]]) -> float:
    """Of the gradient norms, in relation to their size."""
    return abs(passes[True][0].grad_norm / passes[False][0].grad_norm - 1)


def median(passes: list[Pass]) -> float:
    return statistics.median(one.seconds for one in passes)


def report(passes: dict[bool, list[Pass]], shape: tuple[int, int, int, int]) -> str:
    samples, prompt, answer, layers = shape
    rows = []
    for shared, label in WAYS.items():
        seconds = [one.seconds for one in passes[shared]]
        rows.append(
            (
                label,
                f"{passes[shared][0].rows:,}",
                f"{median(passes[shared]):.2f}",
                f"{min(seconds):.2f} - {max(seconds):.2f}",
                f"{samples * answer / median(passes[shared]):,.0f}",
            )
        )
    pairs = [other.seconds / one.seconds for one, other in zip(passes[True], passes[False], strict=True)]
    return f"""\
## Training on the samples of a prompt

Forward and backward pass of the `fsdp` engine over one group: {samples} samples with a common prompt of {prompt} \
tokens and answers of {answer}. The model has {layers} of the 30 layers of SmolLM2-135M, an equal share of its \
vocabulary ({layers * WORDS_PER_LAYER:,}) and random weights in fp32. Both ways in one process, in turns; median of \
{len(pairs)} passes.

{
        table(
            ("", "tokens through the model", "seconds", "least and most", "answer tokens a second"),
            *rows,
        )
    }

{ratio(passes):.2f} times as fast (aim: {AIM:g} times); pass by pass {min(pairs):.2f} to {max(pairs):.2f} times. The \
gradient norms differ by {norm_difference(passes):.0e} of their size; tests compare every gradient. \
{measured_on("torch", "transformers")}

The prompt stands once among the rows of the model, every answer attends to it and to itself, and the head computes \
answers only, in both ways. That is `actor.fsdp.share_prompts`, which is on; a GRPO run has it wherever the samples of \
a prompt meet in a micro-batch.
"""


if __name__ == "__main__":
    sys.exit(main())
