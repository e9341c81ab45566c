"""One training of a tiny model, on any mesh: what the mesh tests compare; also imported by their worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import fsdp_cases as cases
import torch
from broadcast_receiver import BroadcastReceiver

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import LoRAConfig, OptimizerConfig
from areal_core.api.engine_api import LossFn
from areal_core.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal_core.trainer.world import ShardRouter, World
from areal_fsdp.comm import gather_json
from areal_fsdp.config import FSDPConfig
from areal_fsdp.export import full, hf_parameters

LR = 0.5
CLIP = 1.0
STEPS = 2


#: Their steps are no multiple of the gradient; a large eps keeps Adam from magnifying what is rounding alone.
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, gradient_clipping=CLIP),
    "muon": OptimizerConfig(type="muon", lr=1e-2, eps=1e-3, weight_decay=0.1, gradient_clipping=CLIP),
}


@attrs.frozen
class Case:
    """A model, a mesh and what is special; written ``arch/backend[/flag...]``."""

    arch: str
    backend: str
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Case:
        arch, backend, *flags = text.split("/")
        return cls(arch, backend, tuple(flags))

    def __str__(self) -> str:
        return "/".join((self.arch, self.backend, *self.flags))

    @property
    def file(self) -> str:
        return str(self).replace("/", "_").replace(":", "-")

    @property
    def alone(self) -> Case:
        """The same in one process."""
        return Case(
            self.arch,
            "fsdp:d1",
            tuple(f for f in self.flags if f in ("critic", "lora", "head", "entropy", "bf16", "supports", *OPTIMIZERS)),
        )


def parts_of(case: Case, dp_size: int) -> list[list[int]]:
    """Which of the 12 sequences of the batch each data-parallel rank gets."""
    everything = list(range(12))
    if dp_size == 1:
        return [everything]
    if dp_size == 2:
        return [everything, []] if "empty" in case.flags else [[0, 3, 5, 8], [1, 2, 4, 6, 7, 9, 10, 11]]
    return [[0, 3, 5, 8], [], [1, 2, 4, 6, 7, 9], [10, 11]]


def loss_of(case: Case) -> LossFn:
    """Large enough that gradients are clipped."""
    plain = cases.value_loss if "critic" in case.flags else cases.policy_loss

    def loss_fn(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        result = plain(output, batch)
        entropy = 0.0 if output.entropy is None else (output.entropy * batch["loss_mask"]).sum()
        return LossOutput(30 * (result.loss + entropy), result.stats)

    return loss_fn


def make(case: Case, folder: Path, optimizer: OptimizerConfig | None = None) -> Any:
    options = FSDPConfig(
        sequence_parallel="nosp" not in case.flags,
        replicate=2 if "hsdp" in case.flags else 1,
        logits_chunk_tokens=32,
        cpu_offload="offload" in case.flags,
        wrap_layers=["Qwen3Attention", "Qwen3MLP"] if "wrap" in case.flags else [],
        reshard_after_forward="wrap" not in case.flags,
        reduce_dtype="bfloat16" if "reduce16" in case.flags else "float32",
        recompute="ops" if "ops" in case.flags else "layers",
        share_prompts="unshared" not in case.flags,
    )
    saved = ["lm_head"] if "head" in case.flags else []
    lora = LoRAConfig(rank=4, alpha=8.0, target_modules=["all-linear"], modules_to_save=saved)
    return cases.make_engine(
        folder,
        backend=case.backend,
        optimizer=optimizer or cases.sgd(lr=LR, gradient_clipping=CLIP),
        options=options,
        max_tokens=100,
        role="critic" if "critic" in case.flags else "actor",
        gradient_checkpointing={"recompute": "full", "ops": "selective"}.get(
            case.flags[-1] if case.flags else "", "none"
        ),
        lora=lora if "lora" in case.flags else None,
        attn_impl="sdpa" if "sdpa" in case.flags else "auto",
        dtype="bfloat16" if "bf16" in case.flags else "float32",
    )


def train(case: Case, folder: Path, world: World) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Log-probs before, then two clipped SGD steps: numbers, and on rank 0 every clipped gradient and parameter.

    The batch is scattered from rank 0 as the trainer does it.
    """
    engine = make(case, folder, next((OPTIMIZERS[flag] for flag in case.flags if flag in OPTIMIZERS), None))
    router = ShardRouter(world, engine)
    parts = parts_of(case, engine.data_parallel_world_size)
    loss_fn = loss_of(case)
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        named = engine.model.named_parameters() if "lora" in case.flags else hf_parameters(engine.model).items()
        gradients.update({n: full(p.grad).clone() for n, p in named if getattr(p, "grad", None) is not None})

    engine.optimizer.register_step_pre_hook(keep_gradients)
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        batch = cases.ragged_batch(step) if world.is_main else None
        if batch is not None and "supports" in case.flags:
            batch = cases.with_supports(batch, seed=step)
        shard = router.scatter(batch, parts)
        if step == 0:
            output = engine.forward(shard, with_entropy=True)
            values = output.values if "critic" in case.flags else output.logprobs
            gathered = router.gather(values, batch, parts)
            entropy = None if output.entropy is None else router.gather(output.entropy, batch, parts)
            if world.is_main:
                tensors["output"] = gathered
                if entropy is not None:
                    tensors["entropy"] = entropy
            numbers |= {f"eval_{k}": v for k, v in engine.eval_batch(shard, loss_fn, cases.token_weight).items()}
        result = engine.train_batch(shard, loss_fn, cases.token_weight, with_entropy="entropy" in case.flags)
        numbers |= {f"{name}_{step}": value for name, value in result.items()}
        tensors |= {f"gradient{step}.{name}": value for name, value in gradients.items()}
    tensors |= {f"parameter.{name}": value for name, value in cases.parameters_of(engine).items()}
    engine.destroy()
    return numbers, tensors


def vocab_inputs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits ``[9, size]``, some of them large, targets ``[9]``, and weights ``[2, 9]`` of log-probs and entropies."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(9, size, generator=generator) * 5
    logits[0] += 300  # its exponential is not finite
    return logits, torch.randint(0, size, (9,), generator=generator), torch.randn(2, 9, generator=generator)


def vocab_supports(size: int, targets: torch.Tensor) -> torch.Tensor:
    """Int32 ``[9, K]``: the target and up to four others, wherever they are."""
    generator = torch.Generator().manual_seed(size)
    rows = [torch.randperm(size, generator=generator)[:row].tolist() for row in (0, 1, 2, 3, 4, 0, 2, 4, 4)]
    kept = [sorted({target, *row}) for target, row in zip(targets.tolist(), rows, strict=True)]
    return torch.tensor([[*row, *[-1] * (5 - len(row))] for row in kept], dtype=torch.int32)


def broken(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """A step in which the last rank alone has a loss that is not a number, then a good one."""
    engine = make(case, folder)
    router = ShardRouter(world, engine)
    parts = parts_of(case, engine.data_parallel_world_size)
    shard = router.scatter(cases.ragged_batch() if world.is_main else None, parts)
    before = cases.parameters_of(engine)

    def loss_fn(output: Any, batch: Any) -> LossOutput:
        result = cases.policy_loss(output, batch)
        return LossOutput(result.loss * float("nan"), {}) if world.rank == world.size - 1 else result

    bad = engine.train_batch(shard, loss_fn, cases.token_weight)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in cases.parameters_of(engine).items())
    good = engine.train_batch(shard, cases.policy_loss, cases.token_weight)
    mine = [bad["update_skipped"], float(unchanged), good["update_skipped"]]
    return {"ranks": gather_json(mine, engine.mesh.world, engine.device)}


def tiny_batch(mask: list[list[int]], *, shared: int = 0) -> PackedBatch:
    """Sequences with these loss masks; with ``shared`` they are one group whose prompt has that many equal tokens."""
    lengths, flat = [len(part) for part in mask], [value for part in mask for value in part]
    ids = torch.full((len(flat),), 7) if shared else 3 + torch.arange(len(flat)) * 5 % (cases.VOCAB - 3)
    return PackedBatch(
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        {
            "input_ids": ids,
            "loss_mask": torch.tensor(flat, dtype=torch.bool),
            "advantages": torch.linspace(-1, 1.5, len(flat)),
        },
        {
            "group_ids": torch.zeros(len(mask), dtype=torch.int64) if shared else torch.arange(len(mask)),
            "prompt_lens": torch.full((len(mask),), shared, dtype=torch.int32),
        },
    )


#: Fewer rows than ranks, nothing to predict, nothing at all, nothing but a shared prompt.
TINY = {
    "one token": tiny_batch([[1]]),
    "one untrained token": tiny_batch([[0]]),
    "two tokens": tiny_batch([[1, 1]]),
    "only single tokens": tiny_batch([[1], [1], [1]]),
    "untrained": tiny_batch([[0] * 5, [0] * 3]),
    "nothing": tiny_batch([[1] * 5]).select([]),
    "no token in some": tiny_batch([[], [0, 1, 1], []]),
    "some are the prompt": tiny_batch([[0] * 3, [0] * 3, [0, 0, 0, 1, 1]], shared=3),
    "all are the prompt": tiny_batch([[0] * 4, [0] * 4], shared=4),
}


def tiny(case: Case, folder: Path, world: World) -> dict[str, float]:
    """What an engine says of batches that are hardly there, all of them on the first data-parallel rank."""
    engine = make(case, folder)
    router = ShardRouter(world, engine)
    loss_fn = loss_of(case)
    numbers: dict[str, float] = {}
    for name, batch in TINY.items():
        parts = [list(range(batch.num_seqs)), *([] for _ in range(engine.data_parallel_world_size - 1))]
        shard = router.scatter(batch if world.is_main else None, parts)
        output = engine.forward(shard)
        values = output.values if "critic" in case.flags else output.logprobs
        numbers[f"{name}: output"] = float(values.sum())
        evaluated = engine.eval_batch(shard, loss_fn, cases.token_weight, with_entropy=True)
        numbers[f"{name}: eval"] = evaluated["loss"]
        result = engine.train_batch(shard, loss_fn, cases.token_weight, with_entropy=True)
        numbers |= {f"{name}: {key}": result[key] for key in ("loss", "grad_norm", "update_skipped")}
    return numbers


def momentum() -> OptimizerConfig:
    """An optimizer with a state, whose steps do not magnify rounding as Adam's first ones do."""
    return OptimizerConfig(type="sgd", momentum=0.9, lr=0.5, weight_decay=0.0, gradient_clipping=0.0)


OTHER_MESH = {"fsdp:d2t2": "fsdp:t2c2", "fsdp:t2c2": "fsdp:d4", "fsdp:d4": "fsdp:d2c2"}


def store(case: Case, models: Path, world: World, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Every way weights leave and enter an engine, in ``out``; on rank 0 the parameters at the end.

    A step, then ``hf`` and, in the background, ``dcp`` are saved, and another step. A second engine that starts from
    other weights loads the ``dcp`` and takes that step too, and a third one on another mesh.
    """
    folder = models / case.arch
    engine = make(case, folder, momentum())
    router = ShardRouter(world, engine)
    parts = parts_of(case, engine.data_parallel_world_size)

    def step(which: Any, seed: int) -> float:
        shard = router.scatter(cases.ragged_batch(seed) if world.is_main else None, parts)
        return which.train_batch(shard, cases.policy_loss, cases.token_weight)["loss"]

    step(engine, 0)
    engine.set_version(7)
    dcp = SaveLoadMeta(path=out / f"{case.file}-dcp", weight_format="dcp", with_optim=True, background=True)
    saved = cases.parameters_of(engine)
    engine.save(SaveLoadMeta(path=out / f"{case.file}-hf"))
    facts: dict[str, Any] = {}

    class Receiver(BroadcastReceiver):
        def update_weights_from_memory(self, tensors: Any, version: int) -> None:
            self.in_memory = {name: tensor.clone() for name, tensor in tensors}

        def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
            self.files = sorted(path.name for path in meta.path.iterdir())

    receiver: Any = Receiver(workers=2) if world.is_main else None
    engine.connect_engine(receiver, WeightUpdateMeta())
    engine.update_weights(WeightUpdateMeta(version=8))
    engine.update_weights(WeightUpdateMeta(type="disk", path=out / f"{case.file}-update", version=8))
    engine.update_weights(WeightUpdateMeta(type="distributed", chunk_mb=1, version=8))
    if world.is_main:
        facts["names"] = sorted(receiver.in_memory)
        facts["sent"] = all(
            torch.equal(tensors[name], tensor)
            for name, tensor in saved.items()
            for tensors in (receiver.in_memory, *receiver.tensors)
        )
        facts["files"] = receiver.files
    engine.save(dcp)
    loss = step(engine, 1)
    straight = cases.parameters_of(engine)
    engine.finish_saving()

    other = make(case, models / f"{case.arch}-other", momentum())
    other.load(dcp)
    facts["version"] = other.get_version()
    facts["resumed"] = step(other, 1) == loss and all(
        torch.equal(tensor, straight[name]) for name, tensor in cases.parameters_of(other).items()
    )
    # As many ranks on another mesh go on, too.
    moved = make(
        attrs.evolve(case, backend=OTHER_MESH[case.backend], flags=()), models / f"{case.arch}-other", momentum()
    )
    moved.load(dcp)
    moved_router = ShardRouter(world, moved)
    batch = moved_router.scatter(
        cases.ragged_batch(1) if world.is_main else None, parts_of(case, moved.data_parallel_world_size)
    )
    moved.train_batch(batch, cases.policy_loss, cases.token_weight)
    facts["moved"] = max(
        float((tensor - straight[name]).abs().max()) for name, tensor in cases.parameters_of(moved).items()
    )
    other.load(SaveLoadMeta(path=folder))
    facts["loaded"] = cases.parameters_of(other)["model.norm.weight"].sum().item()
    other.load(SaveLoadMeta(path=out / f"{case.file}-hf"))
    facts["reloaded"] = all(torch.equal(tensor, saved[name]) for name, tensor in cases.parameters_of(other).items())
    return facts, {**{f"saved.{n}": t for n, t in saved.items()}, **{f"straight.{n}": t for n, t in straight.items()}}
