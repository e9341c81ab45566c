"""One training of a tiny model, on any mesh: what the mesh tests compare; also imported by their worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import fsdp_cases as cases
import torch

from areal_core.api.configs import LoRAConfig
from areal_core.trainer.world import ShardRouter, World
from areal_fsdp.config import FSDPConfig
from areal_fsdp.export import full, hf_parameters

LR = 1.0
CLIP = 0.1
STEPS = 2


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
        return Case(self.arch, "fsdp:d1", tuple(f for f in self.flags if f in ("critic", "lora", "entropy")))


def parts_of(case: Case, dp_size: int) -> list[list[int]]:
    """Which of the 12 sequences of the batch each data-parallel rank gets."""
    everything = list(range(12))
    if dp_size == 1:
        return [everything]
    if dp_size == 2:
        return [everything, []] if "empty" in case.flags else [[0, 3, 5, 8], [1, 2, 4, 6, 7, 9, 10, 11]]
    return [[0, 3, 5, 8], [], [1, 2, 4, 6, 7, 9], [10, 11]]


def make(case: Case, folder: Path, **fields: Any) -> Any:
    options = FSDPConfig(
        sequence_parallel="nosp" not in case.flags,
        replicate=2 if "hsdp" in case.flags else 1,
        logits_chunk_tokens=32,
        cpu_offload="offload" in case.flags,
        share_prompts="unshared" not in case.flags,
    )
    lora = LoRAConfig(rank=4, alpha=8.0, target_modules=["all-linear"]) if "lora" in case.flags else None
    return cases.make_engine(
        folder,
        backend=case.backend,
        optimizer=cases.sgd(lr=LR, gradient_clipping=CLIP),
        options=options,
        max_tokens=100,
        role="critic" if "critic" in case.flags else "actor",
        gradient_checkpointing="recompute" in case.flags,
        lora=lora,
        attn_impl="sdpa" if "sdpa" in case.flags else "auto",
        **fields,
    )


def train(case: Case, folder: Path, world: World) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Log-probs before, then two clipped SGD steps: numbers, and on rank 0 every clipped gradient and parameter.

    The batch is scattered from rank 0 as the trainer does it.
    """
    engine = make(case, folder)
    router = ShardRouter(world, engine)
    parts = parts_of(case, engine.data_parallel_world_size)
    loss_fn = cases.value_loss if "critic" in case.flags else cases.policy_loss
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        named = engine.model.named_parameters() if "lora" in case.flags else hf_parameters(engine.model).items()
        gradients.update({n: full(p.grad).clone() for n, p in named if getattr(p, "grad", None) is not None})

    engine.optimizer.register_step_pre_hook(keep_gradients)
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        batch = cases.ragged_batch(step) if world.is_main else None
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
