"""Log-probs and entropy where each rank has the logits of a part of the vocabulary, and all of their logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_fsdp.exchange import gather_rows


def vocab_range(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """First token id of a rank's part, and the one after its last: parts of ``ceil(V / ranks)``, the last ones less."""
    step = -(-vocab_size // ranks)
    return min(rank * step, vocab_size), min((rank + 1) * step, vocab_size)


class _VocabParallelLogprobs(torch.autograd.Function):
    """With ``p = softmax(logits)``: ``d logp_y / d z_j = [j = y] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: dist.ProcessGroup, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = logits.shape[-1]
        largest = logits.amax(-1) if size else logits.new_full(logits.shape[:1], -torch.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        probs = shifted.exp()
        mine = (targets >= start) & (targets < start + size)
        local = torch.where(mine, targets - start, 0)
        target = shifted.gather(-1, local[:, None])[:, 0] * mine if size else torch.zeros_like(largest)
        sums = [probs.sum(-1), torch.where(mine, target, 0.0)]
        if with_entropy:
            sums.append((probs * shifted).sum(-1))
        reduced = torch.stack(sums)
        dist.all_reduce(reduced, group=group)
        log_total = reduced[0].log()
        probs.div_(reduced[0][:, None])
        entropy = log_total - reduced[2] / reduced[0] if with_entropy else torch.zeros_like(log_total)
        if with_entropy:
            ctx.save_for_backward(probs, local, mine, shifted.sub_(log_total[:, None]), entropy)
        else:
            ctx.save_for_backward(probs, local, mine)
            ctx.mark_non_differentiable(entropy)
        ctx.with_entropy = with_entropy
        return reduced[1] - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs, local, mine, *more = ctx.saved_tensors
        grad = probs * -grads[0][:, None]
        if grad.shape[-1]:
            grad.scatter_add_(-1, local[:, None], (grads[0] * mine)[:, None])
        if ctx.with_entropy:
            logp, entropy = more
            grad -= grads[1][:, None] * probs * (logp + entropy[:, None])
        return grad, None, None, None, None


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    start: int,
    group: dist.ProcessGroup,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log_softmax(logits / temperature)[targets]`` over the whole vocabulary, and the entropy in nats.

    Two small all-reduces over ``group`` forward, none backward. The results are equal on all ranks of the group, which
    must go on with equal computations.

    Args:
        logits: ``[S, V_local]``: this rank's part of the vocabulary, from id ``start`` on; ``V_local`` may be 0.
        targets: int64 ``[S]``, equal on all ranks.

    Returns:
        fp32 ``[S]`` each.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, start, group, with_entropy)
    return logprobs, entropy if with_entropy else None


def whole_vocabulary(logits: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' logits, for what needs them at once; log-probs do not.

    Args:
        logits: ``[S, V_local]``: this rank's part, as ``vocab_range`` cuts it; ``S`` is equal on all ranks.
        size: ``V``.

    Returns:
        ``[S, V]``, equal on all ranks, which must go on with equal computations.
    """
    longest = vocab_range(size, 0, dist.get_world_size(group))[1]
    padded = F.pad(logits.T, (0, 0, 0, longest - logits.shape[-1]))
    return gather_rows(padded, group, partial=False)[:size].T
