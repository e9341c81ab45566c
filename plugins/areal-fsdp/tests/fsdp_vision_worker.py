"""Runs under torchrun: a step on images of which some ranks have none; rank 0 writes the results.

Usage: fsdp_vision_worker.py MODELS_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsdp_cases as cases
import fsdp_vision_cases as vision
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_core.api.io_struct import SaveLoadMeta

SPLITS = {"texts": [[0, 1, 2, 5, 7], [3, 4, 6]], "empty": [list(range(8)), []], "both": [[0, 3, 6, 7], [1, 2, 4, 5]]}


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for arch in vision.ARCHITECTURES:
        engine = cases.make_engine(models / arch, backend="fsdp:d2", optimizer=cases.sgd(), max_tokens=60)
        for split, parts in SPLITS.items():
            batch = vision.make_batch().select(parts[dist.get_rank()])
            logprobs = engine.forward(batch).logprobs
            result, gradients = cases.step_difference(engine, batch)
            engine.load(SaveLoadMeta(path=models / arch))  # back to the start, for the next split
            if dist.get_rank() == 0:
                tensors = {"logprobs": logprobs, **gradients}
                save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"{arch}-{split}.safetensors")
                (out / f"{arch}-{split}.json").write_text(json.dumps(result), encoding="utf-8")
        engine.save(SaveLoadMeta(path=out / arch))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
