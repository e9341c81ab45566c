"""The ``fsdp`` train engine: FSDP2 over any transformers causal LM, on packed batches."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from areal_core.api.alloc import ParallelStrategy
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import TrainEngineConfig
from areal_core.api.engine_api import InferenceEngine, LossFn, LossWeightFn, TrainEngine
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal_core.data.microbatch import split_by_tokens
from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_fsdp import checkpoint, comm, export, loading, lora
from areal_fsdp.config import FSDPConfig
from areal_fsdp.layout import ModelInput, make_model_input
from areal_fsdp.optim import Schedule, build_optimizer
from areal_fsdp.parallel import broadcast_weights, shard_model
from areal_fsdp.scorer import Scorer

logger = getLogger("FSDPEngine")


class FSDPEngine(TrainEngine):
    """Trains one transformers model, in one process or sharded over the ranks of ``fsdp:dN``.

    One process holds a plain module; more shard it with FSDP2. The model sees packed input without padding.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.options: FSDPConfig = config.options or FSDPConfig()
        self._mesh: DeviceMesh | None = None
        self._owns_group = False
        self._device: torch.device | None = None
        self._scorer: Scorer | None = None
        self._peft: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule | None = None
        self._inference: InferenceEngine | None = None
        self._version = 0
        self._steps = 0
        self._offloaded = False
        self._counters: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ set-up

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        strategy = parallel_strategy
        for letter, size in (
            ("t", strategy.tensor),
            ("c", strategy.context),
            ("p", strategy.pipeline),
            ("e", strategy.expert),
        ):
            if size > 1:
                raise BadInputError(
                    f"backend: fsdp:{strategy} asks for {letter}{size}, which the fsdp engine does not implement yet. "
                    "Use data parallelism only, e.g. fsdp:d2."
                )
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_initialized():
            world_size = dist.get_world_size()
        strategy.check_world_size(world_size)
        use_cuda = torch.cuda.is_available()
        if use_cuda:
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")
        if world_size == 1:
            return
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
            self._owns_group = True
        self._mesh = init_device_mesh(self._device.type, (world_size,), mesh_dim_names=("dp_shard",))

    def initialize(self, ft_spec: FinetuneSpec | None = None, *, role: str = "actor") -> None:
        if self._device is None:
            raise RuntimeError("call create_process_group before initialize")
        if role not in ("actor", "ref", "critic", "reward"):
            raise BadInputError(f"role: {role!r} is not one of actor, ref, critic, reward.")
        config = self.config
        self._check_dtypes(role)
        self._is_critic = role in ("critic", "reward")
        error: Exception | None = None
        try:
            self._folder = loading.resolve_folder(config.path, key=f"{role}.path")
            model = self._build_model(self._folder, from_scratch=config.init_from_scratch)
            if self.options.disable_dropout:
                loading.disable_dropout(model)
            if config.lora is not None:
                self._peft = lora.add_lora(model, config.lora)
        except BadInputError as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)
        if config.optimizer is None:
            model.requires_grad_(False)
        if config.gradient_checkpointing:
            loading.enable_recomputation(model)
        model.to(self.device)
        self._scorer = Scorer(
            model,
            is_critic=self._is_critic,
            temperature=config.temperature,
            logits_chunk=self.options.logits_chunk_tokens,
        )
        if self._mesh is not None:
            broadcast_weights(model, self._mesh.get_group())
            shard_model(self._scorer, self._mesh, self._compute_dtype, self.options)
        if config.optimizer is not None:
            self._optimizer = build_optimizer(model.named_parameters(), config.optimizer)
            self._schedule = Schedule(self._optimizer, config.optimizer, ft_spec)
        self._share_prompts = self.options.share_prompts and self._scorer.is_packed
        if not self._scorer.is_packed:
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
        self._compute_dtype = loading.DTYPES[config.dtype]

    def _build_model(self, folder: Path, *, from_scratch: bool) -> nn.Module:
        config = self.config
        hf_config = loading.load_hf_config(folder, trust_remote_code=config.trust_remote_code)
        return loading.build_model(
            folder,
            hf_config=hf_config,
            is_critic=self._is_critic,
            from_scratch=from_scratch,
            param_dtype=loading.DTYPES[config.param_dtype],
            attn_impl=config.attn_impl,
            trust_remote_code=config.trust_remote_code,
        )

    def destroy(self) -> None:
        self._scorer = self._peft = self._optimizer = self._schedule = self._inference = None
        gc.collect()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
        self._mesh = None

    # --------------------------------------------------------------------------------------- training, forward

    def train_batch(
        self, batch: PackedBatch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, with_entropy: bool = False
    ) -> dict[str, float]:
        if self._optimizer is None or self._schedule is None:
            raise BadInputError("optimizer: not set, so this model cannot be trained.")
        scorer = self._ready()
        scorer.train()
        self._optimizer.zero_grad(set_to_none=True)
        run = _BatchRun(self, batch, loss_fn, loss_weight_fn, with_entropy)
        for micro_batch, inputs in run.micro_batches:
            with self._autocast():
                loss = run.loss(micro_batch, inputs)
            if loss.requires_grad:
                loss.backward()
            del loss
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _grad_norm(parameters, self.device)
        clip = self.config.optimizer.gradient_clipping if self.config.optimizer is not None else 0.0
        if clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        # The only point where the host waits for the device.
        result, (grad_norm, total_weight) = run.results(norm)
        skipped = not (math.isfinite(grad_norm) and total_weight > 0 and parameters)
        if skipped:
            if total_weight > 0:
                logger.warning("step skipped: the gradient norm is %s", grad_norm)
            else:
                logger.warning("step skipped: no token has a weight (in RL: every advantage is 0)")
        else:
            self._optimizer.step()
            self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._count(batch, run, update_skipped=float(skipped))
        return {**result, "grad_norm": grad_norm, "lr": self._schedule.lr, "update_skipped": float(skipped)}

    def eval_batch(
        self, batch: PackedBatch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, with_entropy: bool = False
    ) -> dict[str, float]:
        scorer = self._ready()
        scorer.eval()
        with torch.no_grad(), self._autocast():
            run = _BatchRun(self, batch, loss_fn, loss_weight_fn, with_entropy)
            for micro_batch, inputs in run.micro_batches:
                run.loss(micro_batch, inputs)
            result, _ = run.results(torch.zeros((), device=self.device))
        return result

    def forward(self, batch: PackedBatch, *, with_entropy: bool = False) -> TokenOutput:
        scorer = self._ready()
        scorer.eval()
        home = batch.tokens["input_ids"].device
        out = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self.device)
        entropy = torch.zeros_like(out) if with_entropy and not self._is_critic else None
        with torch.no_grad(), self._autocast():
            for indices, micro_batch in self._split(batch.to("cpu")):
                inputs = make_model_input(micro_batch, share_prompts=self._share_prompts).to(self.device)
                values, entropies = scorer(inputs, entropy is not None)
                if inputs.is_dummy:
                    continue
                at = _token_places(batch, indices, self.device)[inputs.token_index]
                out[at] = values[: len(at)]
                if entropy is not None:
                    out_of_mask = entropies[: len(at)]
                    entropy[at] = out_of_mask
        out, entropy = out.to(home), None if entropy is None else entropy.to(home)
        if self._is_critic:
            return TokenOutput(logprobs=torch.zeros_like(out), values=out)
        return TokenOutput(logprobs=out, entropy=entropy)

    def lr_scheduler_step(self) -> None:
        if self._schedule is not None:
            self._schedule.step()

    def _split(self, batch: PackedBatch) -> list[tuple[list[int], PackedBatch]]:
        """Micro-batches of this rank's shard, as many as on every other rank (empty ones at the end)."""
        groups = batch.rows["group_ids"].tolist() if "group_ids" in batch.rows else None
        parts = split_by_tokens(batch.seqlens.tolist(), self.config.mb_spec.max_tokens_per_mb, groups=groups)
        count = comm.max_int(max(1, len(parts)), self.data_parallel_group, self.device)
        parts = [*parts, *([] for _ in range(count - len(parts)))]
        whole = list(range(batch.num_seqs))
        return [(part, batch if part == whole else batch.select(part)) for part in parts]

    def _autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision in one process; FSDP has a policy of its own."""
        if self._mesh is not None or self.config.dtype == self.config.param_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute_dtype)

    def _ready(self) -> Scorer:
        if self._scorer is None:
            raise RuntimeError("call initialize first")
        if self._offloaded:
            raise RuntimeError("the model is offloaded: call onload first")
        return self._scorer

    def _count(self, batch: PackedBatch, run: _BatchRun, **more: float) -> None:
        counts = {
            "train_tokens": float(batch.num_tokens),
            "model_tokens": float(run.model_tokens),
            "train_sequences": float(batch.num_seqs),
            **more,
        }
        for name, value in counts.items():
            self._counters[name] = self._counters.get(name, 0.0) + value

    # --------------------------------------------------------------------------------- weights to an inference engine

    def connect_engine(self, engine: InferenceEngine | None, meta: WeightUpdateMeta) -> None:
        self._check_update_type(meta)
        self._inference = engine

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._check_update_type(meta)
        scorer = self._ready()
        if self._rank == 0 and self._inference is None:
            raise RuntimeError("call connect_engine before update_weights")
        error: Exception | None = None
        if meta.type == "memory":
            tensors = export.hf_tensors(scorer.model)
            try:
                if self._inference is not None:
                    self._inference.update_weights_from_memory(tensors, meta.version)
            except Exception as caught:
                error = caught
            # The other ranks, and this one after an error, must take part in what is left of the gathering.
            for _ in tensors:
                pass
        else:
            if meta.path is None:
                raise BadInputError("weight_update: type disk needs a path.")
            partial = meta.path.with_name(f".{meta.path.name}.partial")
            if self._rank == 0 and partial.exists():
                shutil.rmtree(partial)
            self._save_hf(partial, tokenizer=None)
            try:
                if self._rank == 0:
                    export.replace_folder(partial, meta.path)
                    if self._inference is not None:
                        self._inference.update_weights_from_disk(meta)
            except Exception as caught:
                error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)

    def _check_update_type(self, meta: WeightUpdateMeta) -> None:
        if meta.type not in ("memory", "disk"):
            raise BadInputError(
                f"weight_update.type: the fsdp engine cannot do {meta.type!r} yet. Use 'memory' (an engine in this "
                "process) or 'disk'."
            )

    # -------------------------------------------------------------------------------------------- save and load

    def save(self, meta: SaveLoadMeta) -> None:
        scorer = self._ready()
        if meta.weight_format == "hf":
            self._save_hf(meta.path, tokenizer=meta.tokenizer)
            return
        self._check_save_path(meta.path)
        state = {
            "version": self._version,
            "steps": self._steps,
            "schedule_step": self._schedule.step_index if self._schedule is not None else 0,
        }
        error: Exception | None = None
        try:
            optimizer = self._optimizer if meta.with_optim else None
            checkpoint.save_state(meta.path, scorer.model, optimizer, meta=state, rank=self._rank, device=self.device)
        except Exception as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)

    def load(self, meta: SaveLoadMeta) -> None:
        scorer = self._ready()
        error: Exception | None = None
        state: dict[str, Any] = {}
        new: nn.Module | None = None
        try:
            if meta.weight_format == "hf":
                new = self._build_model(loading.resolve_folder(str(meta.path)), from_scratch=False)
                export.check_fits(scorer.model, new, where=meta.path)
            elif not meta.path.is_dir():
                raise BadInputError(f"{meta.path}: there is no such checkpoint folder.")
        except BadInputError as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)
        if new is not None:
            export.copy_into(scorer.model, new)
            return
        optimizer = self._optimizer if meta.with_optim else None
        try:
            state = checkpoint.load_state(meta.path, scorer.model, optimizer, rank=self._rank, device=self.device)
        except BadInputError as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)
        self._version, self._steps = int(state["version"]), int(state["steps"])
        if self._schedule is not None and meta.with_optim:
            self._schedule.load(int(state["schedule_step"]))

    def save_adapter(self, path: Path) -> None:
        """Write the LoRA adapter alone, in peft's layout. Every rank calls it."""
        scorer = self._ready()
        if self._peft is None:
            raise BadInputError("lora: not set, so there is no adapter to save.")
        self._check_save_path(path)
        trained = {n: export.full(p).cpu() for n, p in self._peft.named_parameters() if p.requires_grad}
        del scorer
        error: Exception | None = None
        try:
            if self._rank == 0:
                lora.write_adapter(self._peft, trained, path)
        except Exception as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)

    def _save_hf(self, path: Path, *, tokenizer: Any) -> None:
        scorer = self._ready()
        self._check_save_path(path)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in export.hf_tensors(scorer.model):
            if self._rank == 0:
                tensors[name] = tensor.cpu()
        error: Exception | None = None
        try:
            if self._rank == 0:
                export.write_hf_folder(
                    scorer.model,
                    tensors,
                    path,
                    tokenizer=tokenizer,
                    max_shard_size=self.options.max_shard_size,
                    source=self._folder,
                )
        except Exception as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)

    def _check_save_path(self, path: Path) -> None:
        error: Exception | None = None
        try:
            if self._rank == 0:
                export.check_empty(path)
        except BadInputError as caught:
            error = caught
        comm.raise_together(error, self.data_parallel_group, self.device)

    # ------------------------------------------------------------------------------------------- state and mesh

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def train(self, mode: bool = True) -> FSDPEngine:
        self._ready().train(mode)
        return self

    @property
    def model(self) -> nn.Module:
        """The transformers model (sharded where there are several ranks)."""
        return self._ready().model

    @property
    def device(self) -> torch.device:
        if self._device is None:
            raise RuntimeError("call create_process_group first")
        return self._device

    @property
    def _rank(self) -> int:
        return self._mesh.get_rank() if self._mesh is not None else 0

    @property
    def data_parallel_rank(self) -> int:
        return self._rank

    @property
    def data_parallel_world_size(self) -> int:
        return self._mesh.size() if self._mesh is not None else 1

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.get_group() if self._mesh is not None else None

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        return None

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The model without its LoRA adapter: the exact reference policy. Nothing to do without one."""
        with self._peft.disable_adapter() if self._peft is not None else nullcontext():
            yield

    def export_stats(self) -> dict[str, float]:
        names = ("train_tokens", "model_tokens", "train_sequences", "update_skipped")
        values = torch.tensor([self._counters.get(n, 0.0) for n in names], dtype=torch.float64, device=self.device)
        stats = dict(zip(names, comm.all_reduce(values, self.data_parallel_group).tolist(), strict=True))
        stats["update_skipped"] /= self.data_parallel_world_size
        self._counters.clear()
        if self.device.type == "cuda":
            stats["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        return stats

    def offload(self) -> None:
        if self.device.type == "cpu" or self._offloaded:
            return
        self._move(torch.device("cpu"))
        self._offloaded = True
        torch.cuda.empty_cache()

    def onload(self) -> None:
        if not self._offloaded:
            return
        self._move(self.device)
        self._offloaded = False

    def _move(self, device: torch.device) -> None:
        if self._scorer is None:
            raise RuntimeError("call initialize first")
        self._scorer.to(device)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[key] = value.to(device)


class _BatchRun:
    """One pass over a batch: its micro-batches, and the sums that are reported at the end."""

    def __init__(
        self,
        engine: FSDPEngine,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        with_entropy: bool,
    ) -> None:
        self.engine, self.loss_fn, self.with_entropy = engine, loss_fn, with_entropy
        self.group, self.device = engine.data_parallel_group, engine.device
        self.model_tokens = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.stats: dict[str, list[torch.Tensor]] = {}
        self.micro_batches: list[tuple[PackedBatch, ModelInput]] = []
        weight = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, micro_batch in engine._split(batch.to("cpu")):
            inputs = make_model_input(micro_batch, share_prompts=engine._share_prompts).to(self.device)
            micro_batch = micro_batch.to(self.device)
            if not inputs.is_dummy:
                weight += loss_weight_fn(micro_batch)
                self.model_tokens += len(inputs.input_ids)
            self.micro_batches.append((micro_batch, inputs))
        self.total_weight = comm.all_reduce(weight, self.group)
        # A total weight of 0 must not make NaNs: the step is skipped.
        self.scale = torch.where(self.total_weight > 0, 1.0 / self.total_weight, 0.0).float()

    def loss(self, micro_batch: PackedBatch, inputs: ModelInput) -> torch.Tensor:
        """The micro-batch's share of the loss of the whole batch; its numbers are added to the sums."""
        scorer = self.engine._ready()
        critic = scorer.is_critic
        values, entropies = scorer(inputs, self.with_entropy and not critic)
        if inputs.is_dummy:
            return values.sum()
        zeros = torch.zeros(micro_batch.num_tokens, dtype=torch.float32, device=self.device)
        out = _scatter(zeros, inputs.token_index, values)
        entropy = None if entropies is None else _scatter(zeros, inputs.token_index, entropies)
        output = TokenOutput(logprobs=zeros, values=out) if critic else TokenOutput(logprobs=out, entropy=entropy)
        with torch.autocast(self.device.type, enabled=False):
            loss_output: LossOutput = self.loss_fn(output, micro_batch)
        self.loss_sum += loss_output.loss.detach()
        for name, (total, count) in loss_output.stats.items():
            sums = self.stats.setdefault(name, [torch.zeros_like(self.loss_sum), torch.zeros_like(self.loss_sum)])
            sums[0] += total.detach()
            sums[1] += count.detach()
        loss = loss_output.loss * self.scale
        # With nothing predicted here the loss hangs on no parameter, but the backward's collectives must still run.
        return loss + values.sum() if len(inputs.rows) == 0 else loss

    def results(self, norm: torch.Tensor) -> tuple[dict[str, float], tuple[float, float]]:
        """Loss and stats over all ranks, then (grad norm, total weight): one transfer to the host."""
        names = sorted({name for part in comm.gather_json(list(self.stats), self.group, self.device) for name in part})
        zero = torch.zeros_like(self.loss_sum)
        sums = [self.stats.get(name, [zero, zero]) for name in names]
        flat = torch.stack([self.loss_sum, *(value for pair in sums for value in pair)])
        comm.all_reduce(flat, self.group)
        host = torch.cat([flat, torch.stack([norm.detach().to(flat), self.total_weight])]).tolist()
        grad_norm, total_weight = host[-2], host[-1]
        result = {"loss": host[0] / total_weight if total_weight > 0 else 0.0}
        for index, name in enumerate(names):
            total, count = host[1 + 2 * index], host[2 + 2 * index]
            result[name] = total / count if count != 0 else 0.0
        return result, (grad_norm, total_weight)


def _scatter(zeros: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return zeros.index_put((index,), values[: len(index)])


def _token_places(batch: PackedBatch, indices: list[int], device: torch.device) -> torch.Tensor:
    """Where the tokens of ``batch.select(indices)`` stand in ``batch``."""
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices]).to(device)


def _grad_norm(parameters: list[nn.Parameter], device: torch.device) -> torch.Tensor:
    if not parameters:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
