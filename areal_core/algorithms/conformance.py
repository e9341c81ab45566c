"""What every algorithm must hold, as checks that its tests can call; see ``docs/plugins/algorithm.md``.

from areal_core.algorithms.conformance import check_algorithm

def test_my_algorithm():
    check_algorithm(MyAlgorithm(PPOActorConfig(path="unused")))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from areal_core.api.algorithm_api import Algorithm
from areal_core.api.batch import PackedBatch, TokenOutput

#: Ranks, each with its micro-batches, each the indices of its sequences.
Shards = Sequence[Sequence[Sequence[int]]]


@attrs.frozen(eq=False)
class Reduced:
    """What an engine makes of a batch in parts.

    Attributes:
        loss: sum of the losses over the sum of the weights.
        gradient: of ``loss`` with respect to the log-prob of each token of the whole batch, ``[T]``.
        entropy_gradient: likewise, of the entropy.
        stats: quotients, and maxima as ``{name}_max``.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    entropy_gradient: torch.Tensor
    stats: dict[str, float]


def random_batch(seed: int = 0, num_seqs: int = 9, max_len: int = 12) -> PackedBatch:
    """A ragged batch in fp64 with all that an algorithm may ask for: several turns, groups of different sizes, stale
    tokens, several rewards, and a sequence that trains nothing. Two groups have no variance.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, max_len + 1, (num_seqs,), generator=g)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) > 0.35
    starts = lengths.cumsum(0) - lengths
    mask[starts] = False
    if num_seqs:
        mask[: int(lengths[0])] = False

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=g, dtype=torch.float64)

    def trained(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0.0)

    logprobs = trained(-noise(1.0).abs())
    prox = trained(logprobs + noise(0.2))
    groups = torch.arange(num_seqs) % max(2, num_seqs // 3)
    rewards = torch.randint(0, 3, (num_seqs,), generator=g).double()
    rewards[groups == 0] = 1.0
    terms = torch.stack([rewards, torch.rand(num_seqs, generator=g, dtype=torch.float64)], 1)
    terms[groups == 0] = 1.0
    return PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.randint(0, 99, (total,), generator=g),
            "loss_mask": mask,
            "logprobs": logprobs,
            "prox_logprobs": prox,
            "ref_logprobs": trained(logprobs + noise(0.4)),
            "values": noise(1.0),
            "versions": torch.where(mask, torch.randint(3, 6, (total,), generator=g), -1).int(),
            "new": trained(prox + noise(0.1)),
            "entropies": trained(noise(1.0).abs()),
            "at": torch.arange(total),
        },
        {
            "rewards": rewards,
            "group_ids": 7 * groups + 3,
            "prompt_lens": torch.ones(num_seqs, dtype=torch.int32),
            "trainer_version": torch.full((num_seqs,), 5, dtype=torch.int32),
            "reward_terms": terms,
            "reward_weights": torch.tensor([1.0, -0.5], dtype=torch.float64).expand(num_seqs, 2).contiguous(),
        },
    )


def prepared(algorithm: Algorithm, batch: PackedBatch) -> PackedBatch:
    """The batch as the trainer hands it on: with advantages and ``loss_weights``."""
    batch, _ = algorithm.compute_advantages(batch)
    return batch.with_rows(loss_weights=algorithm.row_weights(batch))


def reduced(algorithm: Algorithm, batch: PackedBatch, shards: Shards) -> Reduced:
    """Loss, gradient and statistics of a prepared batch, computed part by part and put together as an engine does."""
    zeros = torch.zeros(batch.num_tokens, dtype=torch.float64)
    gradient, entropy_gradient, loss, weight = zeros.clone(), zeros.clone(), zeros.sum(), zeros.sum()
    sums: dict[str, list[float]] = {}
    maxima: dict[str, float] = {}
    # Positions within this batch, whatever "at" says of another.
    batch = batch.with_tokens(at=torch.arange(batch.num_tokens))
    for micro_batch in (batch.select(part) for rank in shards for part in rank):
        logprobs = micro_batch["new"].clone().requires_grad_()
        entropies = micro_batch["entropies"].clone().requires_grad_()
        output = TokenOutput(logprobs, entropies if algorithm.needs_entropy else None)
        result = algorithm.loss(output, micro_batch)
        found = torch.autograd.grad(result.loss, [logprobs, entropies], allow_unused=True)
        for whole, part in zip((gradient, entropy_gradient), found, strict=True):
            if part is not None:
                whole[micro_batch["at"]] += part
        loss = loss + result.loss.detach()
        weight = weight + algorithm.loss_weight(micro_batch)
        for name, (total, count) in result.stats.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + float(total), entry[1] + float(count)
        for name, value in result.maxima.items():
            maxima[name] = max(float(value), maxima.get(name, -torch.inf))
    stats = {name: total / count for name, (total, count) in sums.items() if count}
    stats |= {f"{name}_max": value for name, value in maxima.items()}
    weight = weight.clamp(min=1e-300)
    return Reduced(loss / weight, gradient / weight, entropy_gradient / weight, stats)


def check_shards(algorithm: Algorithm, batch: PackedBatch, shards: Shards) -> None:
    """The split over ranks and micro-batches changes neither loss nor gradient nor statistics."""
    whole = reduced(algorithm, batch, [[list(range(batch.num_seqs))]])
    _assert_same(reduced(algorithm, batch, shards), whole, "split over ranks and micro-batches")


def check_order(algorithm: Algorithm, batch: PackedBatch, order: Sequence[int]) -> None:
    """The order of the sequences changes nothing but the order of the gradient. ``batch`` is not prepared yet."""
    everything = [[list(range(batch.num_seqs))]]
    straight = reduced(algorithm, prepared(algorithm, batch), everything)
    moved = batch.select(order)
    back = torch.argsort(moved["at"])
    found = reduced(algorithm, prepared(algorithm, moved), everything)
    found = attrs.evolve(found, gradient=found.gradient[back], entropy_gradient=found.entropy_gradient[back])
    _assert_same(found, straight, "order of the sequences")


def check_zero_advantages(algorithm: Algorithm, batch: PackedBatch) -> None:
    """A claim of ``zero_advantage_is_zero_gradient`` is true: sequences without an advantage have no gradient."""
    if not algorithm.zero_advantage_is_zero_gradient:
        return
    batch = prepared(algorithm, batch)
    silent = batch.with_tokens(advantages=torch.zeros_like(batch["advantages"]))
    rows = torch.arange(batch.num_seqs).repeat_interleave(batch.seqlens.long())
    half = batch.with_tokens(advantages=torch.where(rows % 2 == 0, 0.0, batch["advantages"]))
    for given, where in ((silent, rows >= 0), (half, rows % 2 == 0)):
        result = reduced(algorithm, given, [[list(range(batch.num_seqs))]])
        for gradient in (result.gradient, result.entropy_gradient):
            if bool((gradient[where] != 0).any()):
                raise AssertionError(
                    f"{type(algorithm).__name__}.zero_advantage_is_zero_gradient is true, but a sequence whose "
                    "advantages are all 0 has a gradient"
                )


def check_untrained(algorithm: Algorithm, batch: PackedBatch) -> None:
    """Tokens that are not trained have no gradient, and a batch without sequences has a loss of 0."""
    batch = prepared(algorithm, batch)
    result = reduced(algorithm, batch, [[list(range(batch.num_seqs))]])
    if not bool(result.loss.isfinite()) or bool((result.gradient[~batch["loss_mask"]] != 0).any()):
        raise AssertionError(f"{type(algorithm).__name__}: an untrained token has a gradient, or the loss is no number")
    empty = prepared(algorithm, batch.select([]))
    if float(reduced(algorithm, empty, [[[]]]).loss) != 0:
        raise AssertionError(f"{type(algorithm).__name__}: the loss of an empty batch is not 0")


def check_algorithm(algorithm: Algorithm, *, seeds: Iterable[int] = range(3)) -> None:
    """All checks of this module, on a few random batches.

    Raises:
        AssertionError: saying what does not hold.
    """
    for seed in seeds:
        batch = random_batch(seed)
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(batch.num_seqs, generator=g).tolist()
        check_order(algorithm, batch, order)
        check_zero_advantages(algorithm, batch)
        check_untrained(algorithm, batch)
        cut = batch.num_seqs // 2
        shards = [[order[:2], order[2:cut], []], [order[cut:]], [[]]]
        check_shards(algorithm, prepared(algorithm, batch), shards)


def _assert_same(found: Reduced, expected: Reduced, what: str) -> None:
    for name in ("loss", "gradient", "entropy_gradient"):
        torch.testing.assert_close(
            getattr(found, name),
            getattr(expected, name),
            rtol=1e-6,
            atol=1e-9,
            msg=lambda text, name=name: f"the {what} changes the {name}: {text}",
        )
    if found.stats.keys() != expected.stats.keys():
        raise AssertionError(f"the {what} changes which statistics there are")
    for name, value in expected.stats.items():
        if abs(found.stats[name] - value) > 1e-6 * max(1.0, abs(value)):
            raise AssertionError(f"the {what} changes {name}: {found.stats[name]} instead of {value}")
