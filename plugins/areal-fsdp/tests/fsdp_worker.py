"""Runs under torchrun: the cases of test_fsdp_distributed.py, each on this rank's shard; rank 0 writes the results.

Usage: fsdp_worker.py MODELS_FOLDER OUTPUT_FOLDER CASE...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_core.api.batch import PackedBatch
from areal_core.api.configs import LoRAConfig, OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal_core.errors import ArealError

SPLITS = {"uneven": [[0, 3, 5, 8], [1, 2, 4, 6, 7, 9, 10, 11]], "empty": [list(range(12)), []]}


def shard(batch: PackedBatch, split: str) -> PackedBatch:
    if dist.get_world_size() == 1:
        return batch
    return batch.select(SPLITS[split][dist.get_rank()])


def run_case(name: str, models: Path, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    kind, arch, split = name.split("-")
    backend = f"fsdp:d{dist.get_world_size()}"
    batch = shard(cases.ragged_batch(), split)
    if kind == "grad":
        engine = cases.make_engine(models / arch, backend=backend, optimizer=cases.sgd(), max_tokens=30)
        result, tensors = cases.step_difference(engine, batch)
        result.update(
            {f"eval_{k}": v for k, v in engine.eval_batch(batch, cases.policy_loss, cases.token_weight).items()}
        )
        return result, tensors
    if kind == "critic":
        engine = cases.make_engine(models / arch, backend=backend, optimizer=cases.sgd(lr=0.1), role="critic")
        result = engine.train_batch(batch, cases.value_loss, cases.token_weight)
        return result, cases.parameters_of(engine)
    if kind in ("adamw", "lora"):
        lora = LoRAConfig(rank=4, target_modules=["all-linear"]) if kind == "lora" else None
        optimizer = OptimizerConfig(lr=1e-3, gradient_clipping=0.5, warmup_steps=2)
        engine = cases.make_engine(
            models / arch, backend=backend, optimizer=optimizer, max_tokens=40, lora=lora, gradient_checkpointing=True
        )
        result = {}
        for step in range(2):
            more = engine.train_batch(shard(cases.ragged_batch(step), split), cases.policy_loss, cases.token_weight)
            result.update({f"{k}_{step}": v for k, v in more.items()})
            engine.lr_scheduler_step()
        return result, cases.parameters_of(engine)
    if kind == "scratch":
        # Other seeds on every rank: the weights must be rank 0's.
        engine = cases.make_engine(
            models / arch, backend=backend, init_from_scratch=True, optimizer=cases.sgd(), seed=7 + dist.get_rank()
        )
        return {}, cases.parameters_of(engine)
    if kind == "export":
        engine = cases.make_engine(models / arch, backend=backend)
        engine.save(SaveLoadMeta(path=out / "export"))

        class Receiver:
            def update_weights_from_memory(self, tensors: Any, version: int) -> None:
                self.tensors = {k: v.clone() for k, v in tensors}

        receiver = Receiver() if dist.get_rank() == 0 else None
        engine.connect_engine(receiver, WeightUpdateMeta())
        engine.update_weights(WeightUpdateMeta(version=1))
        return {}, receiver.tensors if receiver is not None else {}
    if kind == "failing":
        return failing_update(models / arch, backend)
    if kind == "resume":
        return resume(models / arch, backend, split, out)
    if kind == "badload":
        engine = cases.make_engine(models / arch, backend=backend)
        try:
            engine.load(SaveLoadMeta(path=out / "nowhere", weight_format="dcp"))
        except ArealError as error:
            return {"error": str(error)}, {}
        return {"error": ""}, {}
    raise ValueError(name)


def failing_update(folder: Path, backend: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The engine on rank 0 breaks after the first tensor: no rank may hang, every rank must raise."""

    class Broken:
        def update_weights_from_memory(self, tensors: Any, version: int) -> None:
            next(iter(tensors))
            raise OSError("disk on fire")

    engine = cases.make_engine(folder, backend=backend)
    engine.connect_engine(Broken() if dist.get_rank() == 0 else None, WeightUpdateMeta())
    raised = "nothing"
    try:
        engine.update_weights(WeightUpdateMeta())
    except (OSError, ArealError) as error:
        raised = str(error)
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, raised)
    return {"messages": messages}, {}


def resume(folder: Path, backend: str, split: str, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Four steps straight, and two, save, load into a new engine, two."""
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=1)
    optimizer = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", warmup_steps=2)

    def build() -> Any:
        return cases.make_engine(folder, backend=backend, optimizer=optimizer, ft_spec=spec)

    def steps(engine: Any, first: int, last: int) -> float:
        for step in range(first, last):
            batch = shard(cases.ragged_batch(step), split)
            loss = engine.train_batch(batch, cases.policy_loss, cases.token_weight)["loss"]
            engine.lr_scheduler_step()
        return loss

    engine = build()
    steps(engine, 0, 2)
    engine.set_version(2)
    meta = SaveLoadMeta(path=out / "dcp", weight_format="dcp", with_optim=True)
    engine.save(meta)
    draw = torch.rand(())
    loss = steps(engine, 2, 4)
    straight = cases.parameters_of(engine)
    again = build()
    again.load(meta)
    same_draw = bool(torch.rand(()) == draw)
    loss_again = steps(again, 2, 4)
    resumed = cases.parameters_of(again)
    equal = all(torch.equal(straight[name], resumed[name]) for name in straight)
    return {"equal": equal and loss == loss_again and same_draw, "version": again.get_version()}, straight


def main() -> None:
    models, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        (result, tensors) = run_case(name, models, out)
        if dist.get_rank() == 0:
            save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"{name}.safetensors")
            (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
