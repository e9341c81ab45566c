"""Log-probs and entropy over the tokens that a truncating sampler had kept: see ``areal_core.api.supports``."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from areal_fsdp.exchange import reduce_from_group


@attrs.frozen(eq=False)
class TokenSupports:
    """The supports of ``S`` predicted tokens.

    Attributes:
        ids: int32 ``[S, K]``, filled up with -1; every row holds the token itself.
        full: bool ``[S]``, where nothing was left out; None where that is nowhere.
    """

    ids: torch.Tensor
    full: torch.Tensor | None

    @classmethod
    def of(cls, supports: npt.NDArray[np.int32], targets: npt.NDArray[np.int64]) -> TokenSupports:
        """From rows of a batch's ``supports`` (on the CPU) and the tokens they belong to."""
        supports = supports.copy()
        full = (supports < 0).all(axis=1)
        supports[full, :1] = targets[full, None]
        return cls(torch.from_numpy(supports), torch.from_numpy(full) if full.any() else None)

    def to(self, device: torch.device) -> TokenSupports:
        full = None if self.full is None else self.full.to(device, non_blocking=True)
        return TokenSupports(self.ids.to(device, non_blocking=True), full)

    def split(self, size: int) -> list[TokenSupports]:
        ids = self.ids.split(size)
        full = [None] * len(ids) if self.full is None else list(self.full.split(size))
        return [TokenSupports(*part) for part in zip(ids, full, strict=True)]


def support_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    supports: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log_softmax(logits[S] / temperature)`` of the target over its support ``S``, and the entropy in nats.

    The support is a constant: no gradient says what the sampler should have kept. With ``group`` each rank has a part
    of the vocabulary; two small all-reduces forward, none backward.

    Args:
        logits: ``[N, V]``, or with ``group`` ``[N, V_local]``: from id ``start`` on; ``V_local`` may be 0.
        targets: int64 ``[N]``.
        supports: int32 ``[N, K]``, filled up with -1; every row holds its target.

    Returns:
        fp32 ``[N]`` each (fp64 of fp64 logits).
    """
    size = logits.shape[-1]
    local = supports.long() - start
    mine = (supports >= 0) & (local >= 0) & (local < size)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if size:
        picked = logits.gather(-1, torch.where(mine, local, 0)).to(dtype) / temperature
    else:  # nothing here, but the backward of the head must run
        picked = logits.to(dtype).sum(-1, keepdim=True).expand(supports.shape)
    picked = torch.where(mine, picked, -torch.inf)
    largest = picked.detach().amax(-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = picked - largest[:, None]
    share = shifted.exp()
    sums = [share.sum(-1), torch.where(mine & (supports == targets[:, None]), shifted, 0.0).sum(-1)]
    if with_entropy:
        sums.append((share * torch.where(mine, shifted, 0.0)).sum(-1))
    reduced = torch.stack(sums)
    if group is not None:
        reduced = reduce_from_group(reduced, group)
    log_total = reduced[0].log()
    entropy = log_total - reduced[2] / reduced[0] if with_entropy else None
    return reduced[1] - log_total, entropy
