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
from areal_fsdp import comm, loading, lora, storage, weight_update
from areal_fsdp.background import BackgroundSave
from areal_fsdp.batch_run import BatchRun, autocast, forward_batch, hidden_batch
from areal_fsdp.config import FSDPConfig
from areal_fsdp.convert import convert
from areal_fsdp.grad_norm import clip_gradients, grad_norm
from areal_fsdp.layout import RowPart
from areal_fsdp.materialize import fill, make_buffers
from areal_fsdp.mesh import Mesh, build_mesh, check_strategy
from areal_fsdp.offload import Placement
from areal_fsdp.optim import Schedule, SkipGuard, build_optimizer
from areal_fsdp.parallel import broadcast_weights, build_scorer, check_parallel, decoder_layers, shard_model
from areal_fsdp.quantization import check_quantization, quantize_weights, use_float8
from areal_fsdp.recompute import enable_recomputation
from areal_fsdp.save_process import SaveProcess
from areal_fsdp.scorer import Scorer
from areal_fsdp.tensor_parallel import check_heads
from areal_fsdp.weight_source import FileSource, ModelSource, NeedsWholeModel, WeightSource

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
        mesh, config = self.mesh, self.config
        self._check_dtypes(role)
        check_quantization(config, self.options, mesh, key=role)
        self.role = role
        self.is_critic = role in ("critic", "reward")
        # Of 8-bit weights every rank holds all.
        streamed = mesh.world is not None and config.quantization is None
        error: Exception | None = None
        try:
            self.folder = loading.resolve_folder(config.path, key=f"{role}.path")
            # What is drawn for a model without memory is lost: the draws of the weights must be those of one process.
            with torch.random.fork_rng(devices=[], enabled=streamed):
                model = self.build_model(self.folder, from_scratch=config.init_from_scratch, meta=streamed)
                check_parallel(model, mesh, config, self.options, key=role)
                if self.options.disable_dropout:
                    loading.disable_dropout(model)
                if config.lora is not None:
                    self.peft = lora.add_lora(model, config.lora)
            source = self._open_weights(model) if streamed and mesh.rank == 0 else None
        except BadInputError as caught:
            error = caught
        comm.raise_together(error, mesh.world, self.device)
        if config.optimizer is None:
            model.requires_grad_(False)
        if config.recomputation != "none":
            enable_recomputation(
                model, config.recomputation, selection=self.options.recompute, every=self.options.recompute_every
            )
        if self.options.float8 != "none":
            use_float8(model, self.options.float8)
        if streamed:
            make_buffers(model, self.device)
        else:
            model.to(self.device)
            if mesh.world is not None:
                broadcast_weights(model, mesh.world)
        if config.quantization is not None:
            quantize_weights(model.to(self.compute_dtype), config.quantization)
        self._scorer = build_scorer(model, mesh, config, self.options, is_critic=self.is_critic)
        if streamed and mesh.world is not None:
            shard_model(self._scorer, mesh, self.compute_dtype, self.options)
            storage_device = torch.device("cpu") if self.options.cpu_offload else self.device
            fill(model, source, mesh.world, self.device, storage=storage_device)
            del source
        if config.optimizer is not None:
            self.optimizer = build_optimizer(model, config.optimizer)
            self.schedule = Schedule(self.optimizer, config.optimizer, ft_spec)
            self._skips = SkipGuard(config.optimizer.max_skipped)
        if not self._scorer.is_packed and mesh.rank == 0:
            logger.warning(
                "%s runs on padded batches: packed attention is off for it (attention %s)",
                type(model).__name__,
                model.config._attn_implementation,
            )
        self.train(False)

    def _check_dtypes(self, role: str) -> None:
        config = self.config
        if config.dtype != config.param_dtype and config.param_dtype != "float32":
            raise BadInputError(
                f"{role}.dtype: computing in {config.dtype} with parameters in {config.param_dtype} is not supported. "
                "Set param_dtype to float32, or both to the same type."
            )
        if config.dtype == "float16" and config.optimizer is not None:
            raise BadInputError(
                f"{role}.dtype: training in float16 needs loss scaling, which is not there. Use bfloat16."
            )
        self.compute_dtype = loading.DTYPES[config.dtype]

    def _open_weights(self, model: nn.Module) -> WeightSource:
        """On rank 0: what fills ``model``, which is on the meta device."""
        from_scratch, with_lora = self.config.init_from_scratch, self.config.lora is not None
        if not from_scratch and not with_lora:
            try:
                return FileSource(self.folder, model)
            except NeedsWholeModel:
                pass
        # What is drawn at random must be drawn as one process draws it: by a model that is whole.
        whole = self.build_model(self.folder, from_scratch=from_scratch)
        if self.config.lora is not None:
            lora.add_lora(whole, self.config.lora)
        return ModelSource(whole)

    def build_model(self, folder: Path, *, from_scratch: bool, meta: bool = False) -> nn.Module:
        """The whole model of a folder on the CPU (or the meta device), as this engine's role and options want it."""
        config = self.config
        hf_config = loading.load_hf_config(folder, trust_remote_code=config.trust_remote_code)
        check_heads(hf_config, tensor=self.mesh.tp_size, context=self.mesh.cp_size, key=f"{self.role}.backend")
        return loading.build_model(
            folder,
            hf_config=hf_config,
            is_critic=self.is_critic,
            from_scratch=from_scratch,
            param_dtype=loading.DTYPES[config.param_dtype],
            attn_impl=config.attn_impl,
            trust_remote_code=config.trust_remote_code,
            meta=meta,
        )

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
