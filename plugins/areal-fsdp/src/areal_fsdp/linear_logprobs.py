"""Log-probs and entropy of a linear head, of which no more logits exist at one time than asked for.

The vocabulary is cut into blocks. Forward keeps a running maximum and running sums over them (as online softmax does,
Milakov and Gimelshein 2018, arXiv:1805.02867); backward computes each block's logits once more and turns them into
their gradient in place. So each row of the head's gradient is written once, by one product of matrices over all tokens:
chunks of tokens would add up that large matrix again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

#: Of each logit for itself, ``[S, B]`` to ``[S, B]``: a soft cap, a scale.
After = Callable[[torch.Tensor], torch.Tensor]
#: Logits that exist at one time unless a number of tokens is asked for: 64 MiB.
LOGITS_AT_ONCE = 2**24
#: On a CPU the entries of a block are worked on in parts that its caches hold.
CACHED_ENTRIES = 2**18


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    entries: int,
    after: After | None = None,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log_softmax(after(hidden @ weight.T) / temperature)[targets]``, and the entropy in nats.

    Products are in the type that autocast asks for, else in the weight's; all else is fp32 (with fp64 weights fp64).

    Args:
        hidden: ``[S, H]``.
        weight: ``[V, H]``, or with ``group`` this rank's rows, from token id ``start`` on.
        targets: int64 ``[S]``.
        entries: logits that exist at one time; at least those of one token id.
        after: must not hold parameters.
        group: ranks that have the other rows of the weight. Two small all-reduces forward, none backward; the
            gradient of ``hidden`` is this rank's part of a sum.

    Returns:
        fp32 ``[S]`` each (fp64 of fp64 products).
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        logprobs, entropy = _LinearLogprobs.apply(
            hidden.to(dtype), weight.to(dtype), targets, temperature, with_entropy, entries, after, start, group
        )
    return logprobs, entropy if with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    """With ``p = softmax(z)``: ``d logp_y / d z_j = [j = y] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        entries: int,
        after: After | None,
        start: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Finite, so that differences of two of them are no NaN.
        dtype = _work_dtype(weight)
        largest = torch.full_like(hidden[:, 0], torch.finfo(dtype).min, dtype=dtype)
        # sum_j e^(z_j - largest), sum_j e^(z_j - largest) (z_j - largest), z_y
        total, weighted, target = torch.zeros(3, len(hidden), dtype=dtype, device=hidden.device)
        for first, rows, product in _blocks(hidden, weight, entries):
            logits = (product if after is None else after(product)).to(dtype)
            if temperature != 1.0:
                logits = logits.div_(temperature)
            mine, local = _within(targets, start + first, len(rows))
            target += torch.where(mine, logits.gather(-1, local[:, None])[:, 0], 0.0)
            for at, part in _cached_parts(logits):
                highest = torch.maximum(largest[at], part.amax(-1))
                part -= highest[:, None]
                probs = part.exp() if with_entropy else part.exp_()
                _rebase(largest[at], highest, total[at], weighted[at])
                total[at] += probs.sum(-1)
                if with_entropy:
                    weighted[at] += probs.mul_(part).sum(-1)
        if group is not None:
            highest = largest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            _rebase(largest, highest, total, weighted)
            sums = torch.stack([total, weighted, target])
            dist.all_reduce(sums, group=group)
            total, weighted, target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, targets, largest + log_total, entropy)
        ctx.options = temperature, entries, after, start
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return target - largest - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        temperature, entries, after, start = ctx.options
        nothing = torch.zeros_like(log_norm)
        of_logprobs = nothing if grad_logprobs is None else grad_logprobs / temperature
        of_entropy = None if grad_entropy is None else grad_entropy / temperature
        constant = of_logprobs if of_entropy is None else of_logprobs + of_entropy * entropy
        grad_hidden = torch.zeros_like(hidden, dtype=_work_dtype(weight)) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for first, rows, product in _blocks(hidden, weight, entries):
            if after is None:
                logits = product.to(_work_dtype(weight))
            else:
                product.requires_grad_()
                with torch.enable_grad():
                    final = after(product)
                logits = final.detach().to(_work_dtype(weight), copy=True)
            if temperature != 1.0:
                logits.div_(temperature)
            for at, part in _cached_parts(logits):
                part -= log_norm[at, None]
                if of_entropy is None:
                    part.exp_().mul_(-constant[at, None])
                else:
                    probs = part.exp()
                    part.mul_(-of_entropy[at, None]).sub_(constant[at, None]).mul_(probs)
            mine, local = _within(targets, start + first, len(rows))
            logits.scatter_add_(-1, local[:, None], (of_logprobs * mine)[:, None])
            gradient = logits.to(weight.dtype)
            if after is not None:
                (gradient,) = torch.autograd.grad(final, product, logits.to(final.dtype))
            if grad_hidden is not None and grad_hidden.dtype == rows.dtype:
                grad_hidden.addmm_(gradient, rows)
            elif grad_hidden is not None:
                grad_hidden += gradient @ rows
            if grad_weight is not None:
                torch.mm(gradient.T, hidden, out=grad_weight[first : first + len(rows)])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *(None for _ in range(7))


def _blocks(
    hidden: torch.Tensor, weight: torch.Tensor, entries: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Row of the weight, rows from there on ``[B, H]``, their product ``[S, B]``, which the next step overwrites."""
    width = min(max(1, entries // max(1, len(hidden))), max(1, len(weight)))
    dtype = _work_dtype(weight)
    # One buffer: memory that is returned and taken again has to be cleared by the system every time.
    buffer = torch.empty(len(hidden) * width, dtype=dtype, device=hidden.device) if dtype == weight.dtype else None
    for first in range(0, len(weight), width):
        rows = weight[first : first + width]
        if buffer is not None:
            product = buffer[: len(hidden) * len(rows)].view(len(hidden), len(rows))
            yield first, rows, torch.mm(hidden, rows.T, out=product)
        else:
            yield first, rows, torch.mm(hidden, rows.T)


def _work_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _cached_parts(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Views of consecutive rows: all of them, but on a CPU few enough for its caches."""
    count = len(logits)
    step = max(1, CACHED_ENTRIES // logits.shape[-1]) if logits.device.type == "cpu" else max(1, count)
    for first in range(0, count, step):
        at = slice(first, min(first + step, count))
        yield at, logits[at]


def _within(targets: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are among ``count`` ids from ``first`` on, and their places there (0 for the others)."""
    mine = (targets >= first) & (targets < first + count)
    return mine, torch.where(mine, targets - first, 0)


def _rebase(largest: torch.Tensor, highest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor) -> None:
    """Turn sums that are relative to ``largest`` into ones relative to ``highest``, which is no less, in place."""
    change = largest - highest
    shrink = change.exp()
    weighted.addcmul_(change, total).mul_(shrink)
    total.mul_(shrink)
    largest.copy_(highest)
