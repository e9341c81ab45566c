"""The ``fsdp`` train engine: FSDP2 over any transformers causal LM, on packed batches."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal_core.api.alloc import ParallelStrategy
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import TrainEngineConfig
from areal_core.api.engine_api import InferenceEngine, LogitsFn, LossFn, LossWeightFn, TrainEngine
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal_core.api.weight_sender import WeightSender
from areal_core.errors import ArealError, BadInputError, section
from areal_core.logging import getLogger
from areal_fsdp import comm, storage, weight_update
from areal_fsdp.assembly import assemble, is_critic
from areal_fsdp.background import BackgroundSave
from areal_fsdp.batch_run import BatchRun, autocast, forward_batch, hidden_batch
from areal_fsdp.config import FSDPConfig
from areal_fsdp.convert import convert
from areal_fsdp.grad_norm import clip_gradients, grad_norm
from areal_fsdp.layout import RowPart
from areal_fsdp.mesh import Mesh, build_mesh, check_strategy
from areal_fsdp.offload import Placement
from areal_fsdp.optim import Schedule, SkipGuard, build_optimizer
from areal_fsdp.parallel import decoder_layers
from areal_fsdp.save_process import SaveProcess
from areal_fsdp.scorer import Scorer

logger = getLogger("FSDPEngine")


class FSDPEngine(TrainEngine):
    """Trains one transformers model, in one process or over the ranks of ``fsdp:dXtYcZ``.

    One process holds a plain module; more shard it with FSDP2. The model sees packed input without padding.

    Attributes:
        mesh: set by ``create_process_group``.
        scorer, peft, optimizer, schedule, folder: set by ``initialize``; ``peft`` and ``optimizer`` may stay None.
        steps: optimizer steps so far.
    """

    takes_supports: ClassVar[bool] = True

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.options: FSDPConfig = config.options or FSDPConfig()
        self._mesh: Mesh | None = None
        self._owns_group = False
        self._scorer: Scorer | None = None
        self.peft: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Schedule | None = None
        self.inference: InferenceEngine | None = None
        self.weight_sender: WeightSender | None = None
        self.folder = Path()
        self.version = 0
        self.steps = 0
        self.role = "actor"
        self.is_critic = False
        self.background_save: BackgroundSave | None = None
        self.background_group: dist.ProcessGroup | None = None
        self.save_process: SaveProcess | None = None
        self._counters: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ set-up

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        strategy = parallel_strategy
        check_strategy(strategy, self.options.replicate)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_initialized():
            world_size = dist.get_world_size()
        strategy.check_world_size(world_size)
        use_cuda = torch.cuda.is_available()
        if use_cuda:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        if world_size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
            self._owns_group = True
        self._mesh = build_mesh(strategy, self.options.replicate, device)
        self._placement = Placement(device, is_fixed=self.options.cpu_offload)

    def initialize(self, ft_spec: FinetuneSpec | None = None, *, role: str = "actor") -> None:
        if role not in ("actor", "ref", "critic", "reward"):
            raise BadInputError(f"role: {role!r} is not one of actor, ref, critic, reward.")
        with section(role):
            self._build(ft_spec, role)

    def _build(self, ft_spec: FinetuneSpec | None, role: str) -> None:
        self.role, self.is_critic = role, is_critic(role)
        built = assemble(self.config, self.options, self.mesh, role)
        self.folder, self._scorer, self.peft = built.folder, built.scorer, built.peft
        self.compute_dtype = built.compute_dtype
        if self.config.optimizer is not None:
            self.optimizer = build_optimizer(built.scorer.model, self.config.optimizer)
            self.schedule = Schedule(self.optimizer, self.config.optimizer, ft_spec)
            self._skips = SkipGuard(self.config.optimizer.max_skipped)
        self.train(False)

    def destroy(self) -> None:
        if self.background_save is not None:
            # It uses the process group; what it failed to write has been, or will be, reported by the trainer.
            with suppress(ArealError):
                self.background_save.wait()
            self.background_save = None
        if self.weight_sender is not None:
            self.weight_sender.close()
        self._scorer = self.peft = self.optimizer = self.schedule = self.inference = self.weight_sender = None
        gc.collect()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
        self._mesh = self.save_process = None

    # --------------------------------------------------------------------------------------- training, forward

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
        logits_fn: LogitsFn | None = None,
    ) -> dict[str, float]:
        if self.optimizer is None or self.schedule is None or self.config.optimizer is None:
            raise BadInputError("optimizer: not set, so this model cannot be trained.")
        self.ready().train()
        self.optimizer.zero_grad(set_to_none=True)
        run = self._batch_run(batch, loss_fn, loss_weight_fn, with_entropy, logits_fn)
        run.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = grad_norm(parameters, self.mesh)
        clip_gradients(parameters, norm, self.config.optimizer.gradient_clipping)
        # The only point where the host waits for the device.
        result, (norm_value, total_weight) = run.results(norm)
        skipped = not (math.isfinite(norm_value) and total_weight > 0 and parameters)
        if not skipped:
            self.optimizer.step()
            self.steps += 1
        elif self.mesh.rank == 0:
            no_weight = "no token has a weight (in RL: every advantage is 0)"
            reason = f"the gradient norm is {norm_value}" if total_weight > 0 else no_weight
            logger.warning("step skipped: %s", reason)
        self.optimizer.zero_grad(set_to_none=True)
        self._count(batch, run, update_skipped=float(skipped))
        if total_weight > 0:
            self._skips.count(norm_value)
        return {**result, "grad_norm": norm_value, "lr": self.schedule.lr, "update_skipped": float(skipped)}

    def eval_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
        logits_fn: LogitsFn | None = None,
    ) -> dict[str, float]:
        self.ready().eval()
        run = self._batch_run(batch, loss_fn, loss_weight_fn, with_entropy, logits_fn)
        run.evaluate()
        result, _ = run.results(torch.zeros((), device=self.device))
        return result

    def forward(self, batch: PackedBatch, *, with_entropy: bool = False) -> TokenOutput:
        self.ready().eval()
        return forward_batch(self, batch, with_entropy=with_entropy)

    def _batch_run(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        with_entropy: bool,
        logits_fn: LogitsFn | None,
    ) -> BatchRun:
        if logits_fn is not None:
            self._check_has_logits()
            if with_entropy:
                raise ValueError("with_entropy: not together with logits_fn")
        return BatchRun(self, batch, loss_fn, loss_weight_fn, with_entropy, logits_fn)

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        self._check_has_logits()
        self.ready().eval()
        return hidden_batch(self, batch)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scorer = self.built() if self._placement.place == "logits" else self.ready()
        if isinstance(scorer, FSDPModule):
            # The head belongs to the root, which stays gathered after its forward; then this does nothing.
            scorer.unshard()
        with autocast(self):
            return scorer.logits(hidden.to(self.compute_dtype)).float() / scorer.temperature

    def _check_has_logits(self) -> None:
        if self.is_critic:
            raise BadInputError(f"{self.role}: a scalar head has no logits.")

    def lr_scheduler_step(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def ready(self) -> Scorer:
        """The module that computes log-probs.

        Raises:
            RuntimeError: before ``initialize`` and while offloaded.
        """
        scorer = self.built()
        if self._placement.place != "device":
            raise RuntimeError("the model is offloaded: call onload first")
        return scorer

    def built(self) -> Scorer:
        """The same module, on the device or not."""
        if self._scorer is None:
            raise RuntimeError("call initialize first")
        return self._scorer

    def _count(self, batch: PackedBatch, run: BatchRun, **more: float) -> None:
        counts = {
            "train_tokens": float(batch.num_tokens),
            "model_tokens": float(run.model_tokens),
            "train_sequences": float(batch.num_seqs),
            **more,
        }
        for name, value in counts.items():
            self._counters[name] = self._counters.get(name, 0.0) + value

    # ------------------------------------------------------------------------- weights to an engine and to files

    def connect_engine(self, engine: InferenceEngine | None, meta: WeightUpdateMeta) -> None:
        weight_update.check_type(meta, self, engine)
        self.inference = engine

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        weight_update.update_weights(self, meta)

    def save(self, meta: SaveLoadMeta) -> None:
        storage.save(self, meta)

    @property
    def is_saving(self) -> bool:
        return self.background_save is not None and not self.background_save.done

    def finish_saving(self) -> None:
        storage.finish_saving(self)

    @classmethod
    def convert(cls, source: Path, target: Path, *, to: str, config: TrainEngineConfig, role: str) -> None:
        convert(source, target, to=to, config=config, role=role)

    def load(self, meta: SaveLoadMeta) -> None:
        storage.load(self, meta)

    def save_adapter(self, path: Path) -> None:
        """Write the LoRA adapter alone, in peft's layout. Every rank calls it."""
        storage.save_adapter(self, path)

    # ------------------------------------------------------------------------------------------- state and mesh

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version

    def train(self, mode: bool = True) -> FSDPEngine:
        self.ready().train(mode)
        return self

    @property
    def model(self) -> nn.Module:
        """The transformers model (sharded where there are several ranks)."""
        return self.ready().model

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("call create_process_group first")
        return self._mesh

    @property
    def row_part(self) -> RowPart:
        """Which rows of a micro-batch this rank computes."""
        mesh = self.mesh
        split = self.options.sequence_parallel and mesh.tp_size > 1
        return RowPart(mesh.cp_rank, mesh.cp_size, mesh.cp_size * (mesh.tp_size if split else 1))

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def data_parallel_rank(self) -> int:
        return self.mesh.dp_rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.mesh.dp_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh.dp_group

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh.model_group

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The model without its LoRA adapter: the exact reference policy. Nothing to do without one."""
        with self.peft.disable_adapter() if self.peft is not None else nullcontext():
            yield

    def export_stats(self) -> dict[str, float]:
        names = ("train_tokens", "model_tokens", "train_sequences", "update_skipped")
        values = torch.tensor([self._counters.get(n, 0.0) for n in names], dtype=torch.float64, device=self.device)
        stats = dict(zip(names, comm.all_reduce(values, self.mesh.dp_group).tolist(), strict=True))
        stats["update_skipped"] /= self.mesh.dp_size
        self._counters.clear()
        if self.device.type == "cuda":
            stats["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        return stats

    def offload(self, *, keep_logits: bool = False) -> None:
        scorer = self.built()
        layers = decoder_layers(scorer.model, self.options.wrap_layers)
        self._placement.offload(scorer, layers, self.optimizer, keep_logits=keep_logits)

    def onload(self) -> None:
        self._placement.onload(self.built(), self.optimizer)
