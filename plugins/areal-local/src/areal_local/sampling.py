"""Sampling, vectorised over a batch, and the random numbers it uses.

**Random numbers.** Each token takes one uniform number, a function of (seed of the request, position of the token in
its sequence) alone: two rounds of the splitmix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants of Stafford's mix 13), the top 53 bits as a double. What else is in the batch, the
order of requests and the device do not enter. It is a hash for simulation, not for cryptography.

**Sampling** inverts the cumulative distribution in vocabulary order, in fp64. Truncation is HF's order: top-k, then
top-p of what is left, then min-p; tokens that tie exactly with the last one kept are kept too.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 256
_NUCLEUS_CANDIDATES = 1024


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def streams(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The start of the stream of random numbers of each seed, ``[B]``."""
    with np.errstate(over="ignore"):
        return _mix(seeds + _GOLDEN)


def uniform(starts: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), ``[B]``, from the starts of streams ``[B]`` and positions ``[B]``."""
    with np.errstate(over="ignore"):
        bits = _mix(starts + _mix((positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@attrs.define(kw_only=True)
class SamplingParams:
    """Parameters of a batch of ``B`` rows; an optional field is None when no row needs it.

    Attributes:
        uniforms: fp64 ``[B]`` in [0, 1).
        temperature: fp32 ``[B]``, 1 for greedy rows.
        greedy: bool ``[B]``.
        top_k: int64 ``[B]``, 0 for none.
        max_top_k: the largest of ``top_k``, if it is known without asking the device.
        top_p, min_p: fp32 ``[B]``.
        nucleus: int64, the rows with ``top_p`` below 1, if they are known without asking the device.
        penalties: (row, token, amount) of what is subtracted from logits: frequency penalties. Entries add up.
        banned: (row, token) that must not be sampled.
    """

    uniforms: torch.Tensor
    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    all_greedy: bool = False
    top_k: torch.Tensor | None = None
    max_top_k: int | None = None
    top_p: torch.Tensor | None = None
    nucleus: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None


def sample(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row.

    Args:
        logits: ``[B, V]``.
        params: of the same rows.

    Returns:
        tokens int64 ``[B]``, and their log-probs fp32 ``[B]``: of log_softmax(logits / T) over the whole vocabulary,
        before penalties, bans and truncation.
    """
    tokens, logprobs, complete = sample_from_candidates(logits, params)
    if complete is not None and not bool(complete):
        tokens, logprobs, _ = sample_from_candidates(logits, params, candidates=None)
    return tokens, logprobs


def sample_from_candidates(
    logits: torch.Tensor, params: SamplingParams, candidates: int | None = _NUCLEUS_CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``sample``, without waiting for the device: top-p looks at the ``candidates`` likeliest tokens only.

    Returns:
        tokens, log-probs, and bool ``[]``: False where a nucleus is wider than the candidates, so that the tokens
        must be sampled again with ``candidates=None`` (None: nothing can be wrong).
    """
    scaled = logits.float()
    if params.temperature is not None:
        scaled = scaled / params.temperature[:, None]
    logp = torch.log_softmax(scaled, dim=-1)
    target = logp
    complete = None
    if params.penalties is not None:
        rows, tokens, amounts = params.penalties
        if params.temperature is not None:
            amounts = amounts / params.temperature[rows]
        target = target.index_put((rows, tokens), -amounts, accumulate=True)
    if params.banned is not None:
        target = target.index_put(params.banned, torch.tensor(float("-inf"), device=logp.device))
    if params.all_greedy:
        chosen = target.argmax(dim=-1)
    else:
        weights = torch.exp(target if target is logp else target - target.amax(dim=-1, keepdim=True))
        if params.top_k is not None or params.top_p is not None or params.min_p is not None:
            weights, complete = _truncate(weights, params, candidates)
        chosen = _inverse_cdf(weights, params.uniforms)
        if params.greedy is not None:
            chosen = torch.where(params.greedy, target.argmax(dim=-1), chosen)
    return chosen, logp.gather(1, chosen[:, None])[:, 0], complete


def _truncate(
    weights: torch.Tensor, params: SamplingParams, candidates: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Set the weights that top-k, top-p and min-p drop to 0; ``[B, V]``, not necessarily normalised."""
    batch, vocab = weights.shape
    floor = torch.zeros(batch, dtype=weights.dtype, device=weights.device)
    complete = None
    if params.top_k is not None:
        active = (params.top_k > 0) & (params.top_k < vocab)
        k = torch.where(active, params.top_k, 1)
        most = params.max_top_k if params.max_top_k is not None else int(k.max())
        best = weights.topk(min(vocab, most), dim=-1).values
        floor = torch.where(active, best.gather(1, k[:, None] - 1)[:, 0], floor)
    if params.top_p is not None:
        rows = params.nucleus if params.nucleus is not None else (params.top_p < 1).nonzero().flatten()
        part = weights[rows]
        kept = torch.where(part >= floor[rows, None], part, 0.0)
        goal = params.top_p[rows].double() * kept.sum(dim=-1, dtype=torch.float64)
        if candidates is None or candidates >= vocab:
            best = kept.sort(dim=-1, descending=True).values
        else:
            best = kept.topk(candidates, dim=-1).values
        mass = best.cumsum(dim=-1, dtype=torch.float64)
        if best.shape[1] < vocab:
            complete = (mass[:, -1] >= goal).all()
        # The last token kept is the first one at which the mass reaches the goal.
        last = torch.searchsorted(mass, goal[:, None]).clamp_(max=best.shape[1] - 1)
        nucleus = best.gather(1, last)[:, 0]
        floor = floor.index_copy(0, rows, torch.maximum(nucleus, floor[rows]))
    if params.min_p is not None:
        floor = torch.maximum(floor, params.min_p * weights.amax(dim=-1))
    return torch.where(weights >= floor[:, None], weights, 0.0), complete


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index drawn in proportion to ``weights`` ``[B, V]`` by uniform numbers fp64 ``[B]``; int64 ``[B]``.

    Large vocabularies are searched in two levels (a block, then a token in it), which reads the weights once instead
    of writing a cumulative sum of them.
    """
    vocab = weights.shape[1]
    if vocab <= 4 * _BLOCK:
        return _search(weights.double(), uniforms)[0]
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocab))
    grid = weights.view(-1, blocks, _BLOCK)
    block, rest = _search(grid.sum(dim=-1).double(), uniforms)
    inner = grid.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0].double()
    return block * _BLOCK + _search(inner, rest)[0]


def _search(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index drawn, where in [0, 1) of its own share the uniform number fell)."""
    upper = weights.cumsum(dim=-1)
    total = upper[:, -1:]
    # Below the total, so that the index found has a weight above 0.
    goal = torch.minimum(uniforms[:, None] * total, total * (1 - 2.0**-52))
    index = torch.searchsorted(upper, goal, right=True).clamp_(max=weights.shape[1] - 1)
    width = weights.gather(1, index)
    rest = (goal - (upper.gather(1, index) - width)) / width
    return index[:, 0], rest[:, 0].clamp_(0, 1 - 2.0**-53)
