"""Sampling, vectorised over a batch, and the random numbers it uses.

**Random numbers.** Each token takes one uniform number, a function of (seed of the request, position of the token in
its sequence) alone: two rounds of the splitmix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants of Stafford's mix 13), the top 53 bits as a double. What else is in the batch, the
order of requests and the device do not enter. It is a hash for simulation, not for cryptography.

**Sampling** inverts the cumulative distribution in vocabulary order, in fp64. Truncation is HF's order: top-k, then
top-p of what is left, then min-p; tokens that tie exactly with the last one kept are kept too.

**Supports.** A row may ask for the ids it kept: these are at most ``top_k``, since of tokens that tie with the last one
those with the lowest ids stay. Its log-prob is that over the kept ids: ``log p(x) - log sum of p over them``.
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
        supports: int64 ``[R]``, the rows that give their supports; each has a ``top_k``.
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
    supports: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Nothing but temperature, or greedy."""
        others = (self.top_k, self.top_p, self.min_p, self.penalties, self.banned, self.supports)
        return all(other is None for other in others)


def sample(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row.

    Args:
        logits: ``[B, V]``.
        params: of the same rows.

    Returns:
        tokens int64 ``[B]``, and their log-probs fp32 ``[B]``: of log_softmax(logits / T) over the whole vocabulary,
        before penalties, bans and truncation (rows that give supports: over these).
    """
    tokens, logprobs, complete, _ = sample_from_candidates(logits, params)
    if complete is not None and not bool(complete):
        tokens, logprobs, _, _ = sample_from_candidates(logits, params, candidates=None)
    return tokens, logprobs


def sample_from_candidates(
    logits: torch.Tensor, params: SamplingParams, candidates: int | None = _NUCLEUS_CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As ``sample``, without waiting for the device: top-p looks at the ``candidates`` likeliest tokens only.

    Returns:
        tokens, log-probs, and bool ``[]``: False where a nucleus is wider than the candidates, so that the tokens
        must be sampled again with ``candidates=None`` (None: nothing can be wrong); and the ids that the rows
        ``params.supports`` kept, int64 ``[R, K]`` in ascending order, filled up with -1.
    """
    scaled = logits.float()
    if params.temperature is not None:
        scaled = scaled / params.temperature[:, None]
    logp = torch.log_softmax(scaled, dim=-1)
    target = logp
    complete = kept = None
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
            weights, complete, ranked = _truncate(weights, params, candidates)
            if params.supports is not None and ranked is not None:
                weights, kept = _bounded(weights, params, ranked)
        chosen = _inverse_cdf(weights, params.uniforms)
        if params.greedy is not None:
            chosen = torch.where(params.greedy, target.argmax(dim=-1), chosen)
    logprobs = logp.gather(1, chosen[:, None])[:, 0]
    if params.supports is not None and kept is not None:
        rows = params.supports
        over = torch.where(kept >= 0, logp[rows[:, None], kept.clamp(min=0)], -torch.inf)
        logprobs = logprobs.index_copy(0, rows, logprobs[rows] - over.logsumexp(-1))
    return chosen, logprobs, complete, kept


def _bounded(weights: torch.Tensor, params: SamplingParams, ranked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated weights ``[B, V]`` with at most ``top_k`` above 0 in the rows that give supports, and their ids.

    Args:
        ranked: int64 ``[B, K]``: ids of the largest weights before truncation, at least ``top_k`` of them.
    """
    rows, top_k = params.supports, params.top_k
    assert rows is not None and top_k is not None
    vocab, everyone = weights.shape[1], len(rows) == len(weights)
    part, limit = (weights, top_k) if everyone else (weights[rows], top_k[rows])
    # A look at another device would wait for it.
    if part.device.type != "cpu" or bool((torch.count_nonzero(part, dim=-1) > limit).any()):
        # Cut by rank alone, a tie would be cut at random, and as what else is in the batch has it.
        floor = torch.where(part > 0, part, torch.inf).amin(dim=-1, keepdim=True)
        tied = part == floor
        above = ((part > 0) & ~tied).sum(dim=-1, keepdim=True)
        part = torch.where(tied & (tied.cumsum(dim=-1, dtype=torch.int32) > limit[:, None] - above), 0.0, part)
        ids = part.topk(ranked.shape[1], dim=-1).indices
    else:
        ids = ranked[rows]
    ids = torch.where(part.gather(1, ids) > 0, ids, vocab).sort(dim=-1).values
    return (part if everyone else weights.index_copy(0, rows, part)), torch.where(ids < vocab, ids, -1)


def _truncate(
    weights: torch.Tensor, params: SamplingParams, candidates: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Set the weights that top-k, top-p and min-p drop to 0; ``[B, V]``, not necessarily normalised.

    Returns:
        the weights; whether the candidates were enough; with top-k the ids int64 ``[B, K]`` of the largest weights.
    """
    batch, vocab = weights.shape
    floor = torch.zeros(batch, dtype=weights.dtype, device=weights.device)
    complete = ranked = None
    if params.top_k is not None:
        active = (params.top_k > 0) & (params.top_k < vocab)
        k = torch.where(active, params.top_k, 1)
        most = params.max_top_k if params.max_top_k is not None else max(1, int(params.top_k.max()))
        best, ranked = weights.topk(min(vocab, most), dim=-1)
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
    return torch.where(weights >= floor[:, None], weights, 0.0), complete, ranked


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
