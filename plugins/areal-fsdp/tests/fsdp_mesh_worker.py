"""Runs under torchrun: cases of test_fsdp_mesh.py, one after another; rank 0 writes the results.

Usage: fsdp_mesh_worker.py MODELS_FOLDER OUTPUT_FOLDER CASE...
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import fsdp_mesh_cases as mesh_cases
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_core.trainer.world import World
from areal_fsdp.support import support_logprobs
from areal_fsdp.vocab_parallel import vocab_parallel_logprobs, vocab_range


def vocab_case(text: str, out: Path) -> None:
    """Log-probs, entropy and gradient of this rank's part of some random logits, also over supports; ``vocab/SIZE``."""
    size, rank = int(text.split("/")[1]), dist.get_rank()
    logits, targets, weights = mesh_cases.vocab_inputs(size)
    start, end = vocab_range(size, rank, dist.get_world_size())
    local = logits[:, start:end].clone().requires_grad_()
    assert dist.group.WORLD is not None
    logprobs, entropy = vocab_parallel_logprobs(
        local, targets, start=start, group=dist.group.WORLD, temperature=1.7, with_entropy=True
    )
    plain, none = vocab_parallel_logprobs(
        local, targets, start=start, group=dist.group.WORLD, temperature=1.7, with_entropy=False
    )
    assert none is None and torch.equal(plain, logprobs) and entropy is not None
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    assert local.grad is not None
    tensors = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradient": local.grad}
    again = logits[:, start:end].clone().requires_grad_()
    logprobs, entropy = support_logprobs(
        again,
        targets,
        mesh_cases.vocab_supports(size, targets),
        temperature=1.7,
        with_entropy=True,
        start=start,
        group=dist.group.WORLD,
    )
    assert entropy is not None
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    assert again.grad is not None
    kept = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradient": again.grad}
    tensors |= {f"kept_{name}": value for name, value in kept.items()}
    save_file(tensors, out / f"vocab{size}-rank{rank}.safetensors")


def main() -> None:
    models, out, texts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    world = World.from_environment()
    for text in texts:
        if text.startswith("vocab/"):
            vocab_case(text, out)
            continue
        case = mesh_cases.Case.parse(text)
        try:
            if "store" in case.flags:
                numbers, tensors = mesh_cases.store(case, models, world, out)
            elif "tiny" in case.flags:
                numbers, tensors = mesh_cases.tiny(case, models / case.arch, world), {}
            elif "nan" in case.flags:
                numbers, tensors = mesh_cases.broken(case, models / case.arch, world), {}
            else:
                numbers, tensors = mesh_cases.train(case, models / case.arch, world)
        except Exception:
            traceback.print_exc()
            print(f"above: {text}", flush=True)  # noqa: T201
            raise
        if world.is_main:
            save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"{case.file}.safetensors")
            (out / f"{case.file}.json").write_text(json.dumps(numbers), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
