"""Runs on several ranks: loading, optimizers and saving on shards. Rank 0 writes what test_fsdp_sharded_state.py reads.

Usage: fsdp_state_worker.py MODELS_FOLDER OUTPUT_FOLDER CASE...
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_core.api.configs import LoRAConfig
from areal_core.api.io_struct import SaveLoadMeta
from areal_core.errors import ArealError
from areal_fsdp import export, hf_folder
from areal_fsdp.config import FSDPConfig


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def host_memory(kind: str) -> int:
    """Bytes of host memory of this process: ``VmRSS`` now, or ``VmHWM`` at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def run_case(name: str, models: Path, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    kind, _, arch = name.partition("-")
    arch, _, layout = arch.partition("@")
    backend = f"fsdp:{layout or f'd{dist.get_world_size()}'}"
    if kind in ("load", "critic", "adapter"):
        fields: dict[str, Any] = {"role": "critic"} if kind == "critic" else {}
        if kind == "adapter":
            fields = {"lora": LoRAConfig(rank=4), "optimizer": cases.sgd()}
        engine = cases.make_engine(models / arch, backend=backend, **fields)
        output = engine.forward(cases.ragged_batch().select([0, 1, 2]))
        values = output.values if kind == "critic" else output.logprobs
        tensors = {"values": values, **{f"weight.{k}": v for k, v in cases.parameters_of(engine).items()}}
        if kind == "adapter":
            from areal_fsdp.export import full

            trained = [(n, p) for n, p in engine.model.named_parameters() if p.requires_grad]
            tensors |= {f"lora.{n}": full(p) for n, p in trained}
            engine.save_adapter(out / "adapter")
        return {}, tensors
    if kind == "reload":
        # Other weights first, so that those of the folder must arrive.
        engine = cases.make_engine(models / arch, backend=backend, optimizer=cases.sgd(), init_from_scratch=True)
        engine.load(SaveLoadMeta(path=models / arch))
        return {}, cases.parameters_of(engine)
    if kind == "bad":
        try:
            cases.make_engine(models / arch, backend=backend)
        except ArealError as error:
            return {"messages": everyone(f"{type(error).__name__}: {error}")}, {}
        return {"messages": everyone("nothing")}, {}
    if kind == "optimizer":
        return optimizer_steps(models, arch, backend)
    if kind == "background":
        return background(models / arch, backend, out)
    if kind == "export":
        return export_in_files(models / arch, backend, out)
    if kind == "memory":
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = host_memory("VmRSS")
        engine = cases.make_engine(models / arch, backend=backend)
        total = sum(p.numel() * 4 for p in engine.model.parameters())
        return {"bytes": total, "peaks": everyone(host_memory("VmHWM") - before)}, {}
    raise ValueError(name)


def optimizer_steps(models: Path, kind: str, backend: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Two steps, the second from a checkpoint's state of its own: what sharded states hold must be right too."""
    engine = cases.optimizer_engine(models, kind, backend)
    parts = [[0, 3, 5, 8], [1, 2, 4, 6, 7, 9, 10, 11]]
    for seed in range(2):
        batch = cases.ragged_batch(seed)
        if dist.get_world_size() > 1:
            batch = batch.select(parts[dist.get_rank()])
        engine.train_batch(batch, cases.policy_loss, cases.token_weight)
    return {}, cases.parameters_of(engine)


def export_in_files(folder: Path, backend: str, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Save in files of 20 KB, and count what every rank holds meanwhile; then onto a disk that gets full."""
    engine = cases.make_engine(folder, backend=backend, options=FSDPConfig(max_shard_size="20KB"))
    live, plain = cases.LiveBytes(), export.full
    export.full = lambda value: live.add(plain(value))
    engine.save(SaveLoadMeta(path=out / "export"))
    peaks = everyone([live.peak, live.largest, live.now])
    export.full = plain

    save_file = safetensors.torch.save_file

    def save_first_alone(tensors: Any, path: Path, **keywords: Any) -> None:
        if "00001" not in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, **keywords)

    safetensors.torch.save_file = save_first_alone
    try:
        engine.save(SaveLoadMeta(path=out / "export-full"))
    except ArealError as error:
        message = str(error)
    else:
        message = "nothing"
    safetensors.torch.save_file = save_file
    # The ranks are still in step.
    return {"peaks": peaks, "messages": everyone(message)}, cases.parameters_of(engine)


def background(folder: Path, backend: str, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train on while a checkpoint is written, then load it and go on again; then a disk that is full for rank 1."""
    engine = cases.make_engine(folder, backend=backend, optimizer=cases.sgd(lr=0.1, momentum=0.9))
    batch = cases.ragged_batch().select([dist.get_rank(), 4 + dist.get_rank()])

    def train(steps: int) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            engine.train_batch(batch, cases.policy_loss, cases.token_weight)
        return cases.parameters_of(engine)

    expected = train(1)
    meta = SaveLoadMeta(path=out / "background", weight_format="dcp", with_optim=True, background=True)
    engine.save(meta)
    straight = train(2)
    moved = any(not torch.equal(expected[k], v) for k, v in straight.items())
    engine.finish_saving()
    engine.load(meta)
    equal = all(torch.equal(expected[k], v) for k, v in cases.parameters_of(engine).items())
    resumed = all(torch.equal(straight[k], v) for k, v in train(2).items())

    full = SaveLoadMeta(path=out / "full", weight_format="dcp", with_optim=True, background=True)
    if dist.get_rank() == 0:
        full.path.mkdir()
        (full.path / "__1_0.distcp").symlink_to("/dev/full")
    dist.barrier()
    check_empty = hf_folder.check_empty
    hf_folder.check_empty = lambda path: None
    engine.save(full)
    hf_folder.check_empty = check_empty
    train(1)
    try:
        engine.finish_saving()
    except ArealError as error:
        message = str(error)
    else:
        message = "nothing"
    return {
        "equal": equal,
        "moved": moved,
        "resumed": resumed,
        "saving": engine.is_saving,
        "messages": everyone(message),
    }, expected


def main() -> None:
    models, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        result, tensors = run_case(name, models, out)
        if dist.get_rank() == 0:
            save_file({k: v.detach().contiguous().clone() for k, v in tensors.items()}, out / f"{name}.safetensors")
            (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
