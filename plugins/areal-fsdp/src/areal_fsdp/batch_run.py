"""A pass over a batch: its micro-batches through the model and the loss, and the sums over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.engine_api import LogitsFn, LossFn, LossWeightFn
from areal_core.data.microbatch import split_by_tokens
from areal_fsdp import comm
from areal_fsdp.exchange import reduce_from_group
from areal_fsdp.layout import ModelInput, make_model_input
from areal_fsdp.vision import read_images, share_specimens

if TYPE_CHECKING:
    from areal_fsdp.engine import FSDPEngine


def autocast(engine: FSDPEngine) -> AbstractContextManager[Any]:
    """Mixed precision in one process; FSDP has a policy of its own, and 8-bit weights compute in their input's type."""
    quantized = engine.config.quantization is not None
    if quantized or engine.mesh.world is not None or engine.config.dtype == engine.config.param_dtype:
        return nullcontext()
    return torch.autocast(engine.device.type, dtype=engine.compute_dtype)


def split(engine: FSDPEngine, batch: PackedBatch) -> list[tuple[list[int], PackedBatch]]:
    """Micro-batches of this rank's shard, as many as on every other rank (empty ones at the end)."""
    # The loss of a pair needs both sides at once; samples of a prompt only share work.
    is_pairs = "pair_ids" in batch.rows
    key = "pair_ids" if is_pairs else "group_ids"
    groups = batch.rows[key].tolist() if key in batch.rows else None
    budget = engine.config.mb_spec.max_tokens_per_mb
    parts = split_by_tokens(batch.seqlens.tolist(), budget, groups=groups, whole_groups=is_pairs)
    count = comm.max_int(max(1, len(parts)), engine.mesh.world, engine.device)
    parts = [*parts, *([] for _ in range(count - len(parts)))]
    whole = list(range(batch.num_seqs))
    return [(part, batch if part == whole else batch.select(part)) for part in parts]


def model_inputs(engine: FSDPEngine, micro_batches: Sequence[PackedBatch]) -> Iterator[ModelInput]:
    """What the model reads of each micro-batch (on the CPU), on the engine's device."""
    scorer = engine.ready()
    share = engine.options.share_prompts and scorer.is_packed
    visions = [read_images(scorer.model, micro_batch) for micro_batch in micro_batches]
    if scorer.reads_images:
        visions = share_specimens(list(zip(micro_batches, visions, strict=True)), engine.mesh.world, engine.device)
    for micro_batch, vision in zip(micro_batches, visions, strict=True):
        yield make_model_input(micro_batch, share_prompts=share, part=engine.row_part, vision=vision).to(engine.device)


def all_tokens(
    engine: FSDPEngine, micro_batch: PackedBatch, inputs: ModelInput, values: torch.Tensor | None
) -> torch.Tensor | None:
    """fp32 ``[T]``: the values of predicted tokens at their places, from all context-parallel ranks; 0 elsewhere."""
    if values is None:
        return None
    zeros = torch.zeros(micro_batch.num_tokens, dtype=torch.float32, device=engine.device)
    out = zeros.index_put((inputs.token_index,), values[: len(inputs.token_index)])
    return out if engine.mesh.cp_group is None else reduce_from_group(out, engine.mesh.cp_group)


class BatchRun:
    """One pass over a batch: its micro-batches, and the sums that are reported at the end.

    Attributes:
        model_tokens: rows that the model computed on this rank.
    """

    def __init__(
        self,
        engine: FSDPEngine,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        with_entropy: bool,
        logits_fn: LogitsFn | None = None,
    ) -> None:
        self.engine, self.loss_fn, self.with_entropy, self.logits_fn = engine, loss_fn, with_entropy, logits_fn
        self.group, self.device = engine.mesh.dp_group, engine.device
        self.model_tokens = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.stats: dict[str, list[torch.Tensor]] = {}
        self.maxima: dict[str, torch.Tensor] = {}
        self.micro_batches: list[tuple[PackedBatch, ModelInput]] = []
        weight = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = [micro_batch for _, micro_batch in split(engine, batch.to("cpu"))]
        for micro_batch, inputs in zip(parts, model_inputs(engine, parts), strict=True):
            # The loss does not read them, and they are the largest part of a batch.
            micro_batch = micro_batch.without("supports").to(self.device)
            if not inputs.is_dummy:
                weight += loss_weight_fn(micro_batch)
                self.model_tokens += inputs.num_rows
            self.micro_batches.append((micro_batch, inputs))
        self.total_weight = comm.all_reduce(weight, self.group)
        # A total weight of 0 must not make NaNs: the step is skipped.
        self.scale = torch.where(self.total_weight > 0, 1.0 / self.total_weight, 0.0).float()

    def backward(self) -> None:
        """Add the gradient of the whole batch's loss to the parameters."""
        for micro_batch, inputs in self.micro_batches:
            with autocast(self.engine):
                loss = self._loss(micro_batch, inputs)
            if loss.requires_grad:
                loss.backward()

    def evaluate(self) -> None:
        with torch.no_grad(), autocast(self.engine):
            for micro_batch, inputs in self.micro_batches:
                self._loss(micro_batch, inputs)

    def _loss(self, micro_batch: PackedBatch, inputs: ModelInput) -> torch.Tensor:
        """The micro-batch's share of the loss of the whole batch; its numbers are added to the sums."""
        scorer = self.engine.ready()
        critic = scorer.is_critic
        chunk_fn = None
        if self.logits_fn is not None and not inputs.is_dummy:
            chunk_fn = functools.partial(self.logits_fn, micro_batch)
        values, extra = scorer(inputs, self.with_entropy and not critic, logits_fn=chunk_fn)
        if inputs.is_dummy:
            return values.sum()
        out = all_tokens(self.engine, micro_batch, inputs, values)
        more = all_tokens(self.engine, micro_batch, inputs, extra)
        assert out is not None
        if critic:
            output = TokenOutput(logprobs=torch.zeros_like(out), values=out)
        elif self.logits_fn is not None:
            output = TokenOutput(logprobs=out, of_logits=torch.zeros_like(out) if more is None else more)
        else:
            output = TokenOutput(logprobs=out, entropy=more)
        with torch.autocast(self.device.type, enabled=False):
            loss_output: LossOutput = self.loss_fn(output, micro_batch)
        self.loss_sum += loss_output.loss.detach()
        for name, (total, count) in loss_output.stats.items():
            sums = self.stats.setdefault(name, [torch.zeros_like(self.loss_sum), torch.zeros_like(self.loss_sum)])
            sums[0] += total.detach()
            sums[1] += count.detach()
        for name, value in loss_output.maxima.items():
            value = value.detach().to(self.loss_sum)
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)
        loss = loss_output.loss * self.scale
        # With nothing predicted here the loss hangs on no parameter, but the backward's collectives must still run.
        return loss + values.sum() if len(inputs.rows) == 0 else loss

    def results(self, norm: torch.Tensor) -> tuple[dict[str, float], tuple[float, float]]:
        """Loss and stats over all ranks, then (grad norm, total weight): one transfer to the host."""
        # A rank without a micro-batch has no names of its own.
        held = comm.gather_json([list(self.stats), list(self.maxima)], self.group, self.device)
        names, max_names = (sorted({name for part in held for name in part[kind]}) for kind in (0, 1))
        zero = torch.zeros_like(self.loss_sum)
        sums = [self.stats.get(name, [zero, zero]) for name in names]
        flat = torch.stack([self.loss_sum, *(value for pair in sums for value in pair)])
        comm.all_reduce(flat, self.group)
        greatest = torch.stack([zero, *(self.maxima.get(name, zero - torch.inf) for name in max_names)])
        if max_names:
            comm.all_reduce(greatest, self.group, dist.ReduceOp.MAX)
        host = torch.cat([flat, torch.stack([norm.detach().to(flat), self.total_weight]), greatest[1:]]).tolist()
        host, host_maxima = host[: len(flat) + 2], host[len(flat) + 2 :]
        grad_norm, total_weight = host[-2], host[-1]
        result = {"loss": host[0] / total_weight if total_weight > 0 else 0.0}
        for index, name in enumerate(names):
            total, count = host[1 + 2 * index], host[2 + 2 * index]
            result[name] = total / count if count != 0 else 0.0
        result.update({f"{n}_max": value for n, value in zip(max_names, host_maxima, strict=True) if value > -math.inf})
        return result, (grad_norm, total_weight)


@torch.no_grad()
def forward_batch(engine: FSDPEngine, batch: PackedBatch, *, with_entropy: bool) -> TokenOutput:
    """Log-probs (critics: values) of every token of this rank's shard."""
    scorer = engine.ready()
    home = batch.tokens["input_ids"].device
    out = torch.zeros(batch.num_tokens, dtype=torch.float32, device=engine.device)
    entropy = torch.zeros_like(out) if with_entropy and not engine.is_critic else None
    with autocast(engine):
        parts = split(engine, batch.to("cpu"))
        micro_batches = [micro_batch for _, micro_batch in parts]
        for (indices, micro_batch), inputs in zip(parts, model_inputs(engine, micro_batches), strict=True):
            values, entropies = scorer(inputs, entropy is not None)
            if inputs.is_dummy:
                continue
            at = _token_places(batch, indices, engine.device)
            out[at] = all_tokens(engine, micro_batch, inputs, values)
            if entropy is not None:
                entropy[at] = all_tokens(engine, micro_batch, inputs, entropies)
    out, entropy = out.to(home), None if entropy is None else entropy.to(home)
    if engine.is_critic:
        return TokenOutput(logprobs=torch.zeros_like(out), values=out)
    return TokenOutput(logprobs=out, entropy=entropy)


@torch.no_grad()
def hidden_batch(engine: FSDPEngine, batch: PackedBatch) -> torch.Tensor:
    """``[T, H]``: of each predicted token of this rank's shard, the state that predicts it; 0 for the others."""
    scorer = engine.ready()
    out: torch.Tensor | None = None
    with autocast(engine):
        parts = split(engine, batch.to("cpu"))
        micro_batches = [micro_batch for _, micro_batch in parts]
        for (indices, _), inputs in zip(parts, model_inputs(engine, micro_batches), strict=True):
            hidden, _ = scorer(inputs, hidden_only=True)
            if out is None:
                out = hidden.new_zeros(batch.num_tokens, hidden.shape[-1])
            if not inputs.is_dummy:
                at = _token_places(batch, indices, engine.device)[inputs.token_index]
                out[at] = hidden[: len(at)]
    assert out is not None, "there is always a micro-batch"
    if engine.mesh.cp_group is not None:  # each of its ranks has the states of its own rows
        dist.all_reduce(out, group=engine.mesh.cp_group)
    return out


def _token_places(batch: PackedBatch, indices: list[int], device: torch.device) -> torch.Tensor:
    """Where the tokens of ``batch.select(indices)`` stand in ``batch``."""
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices]).to(device)
