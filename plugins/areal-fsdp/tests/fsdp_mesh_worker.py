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


def main() -> None:
    models, out, texts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    world = World.from_environment()
    for text in texts:
        case = mesh_cases.Case.parse(text)
        try:
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
