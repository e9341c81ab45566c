"""The packed batch: what travels between rollout, algorithm and train engine.

A batch of ``B`` sequences with ``T`` tokens in all holds 1-D token tensors of length ``T``, cumulative lengths
``cu_seqlens`` (int32 ``[B + 1]``), and one row per sequence for scalars. Nothing is padded. Entry ``i`` of a token
tensor belongs to token ``i``: log-probs, advantages and masks are not shifted against ``input_ids``. Images have any
size: their tensors stay apart, one mapping per sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch


@attrs.define(eq=False)
class PackedBatch:
    """``B`` sequences, ``T`` tokens.

    Attributes:
        cu_seqlens: int32 ``[B + 1]``, from 0 to ``T``. ``B`` may be 0: a rank with an empty shard.
        tokens: per-token tensors ``[T, ...]``. Always ``input_ids`` (int64) and ``loss_mask`` (bool). In RL also
            ``logprobs`` (the sampler's, fp32), ``versions`` (int32), with a sampler that truncates ``supports`` (int32
            ``[T, K]``, see ``areal_core.api.supports``), and what an algorithm adds: ``prox_logprobs``,
            ``ref_logprobs``, ``values``, ``advantages``, ``returns``.
        rows: per-sequence tensors ``[B, ...]``: ``rewards`` (fp32), ``group_ids`` (int64; equal for the samples of
            one prompt), ``pair_ids`` (int64; those with an equal one never part: not over ranks, nor over
            micro-batches), ``prompt_lens`` (int32), ``trainer_version`` (int32; of the weights before the step), ...
            Rewards with names also stand in ``reward_terms`` (fp32 ``[B, K]``): unweighted, the columns in the order of
            the configuration, NaN where a sequence lacks one; the trainer adds their ``reward_weights`` ``[B, K]``.
        multi_modal_input: ``B`` mappings, or None if no sequence has an image: by the model's own names
            (``pixel_values``, ``image_grid_thw``, ...) the tensors of each sequence's images, in the order of their
            placeholder tokens, as its processor makes them; empty for a sequence without. The samples of a prompt share
            one mapping: it is moved and sent once.
    """

    cu_seqlens: torch.Tensor
    tokens: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor] = attrs.field(factory=dict)
    multi_modal_input: list[Mapping[str, torch.Tensor]] | None = None

    def __attrs_post_init__(self) -> None:
        if self.cu_seqlens.ndim != 1 or len(self.cu_seqlens) < 1:
            raise ValueError(f"cu_seqlens must have shape [B + 1], got {tuple(self.cu_seqlens.shape)}")
        for name, value in self.tokens.items():
            if len(value) != self.num_tokens:
                raise ValueError(f"tokens[{name!r}] has {len(value)} entries, but input_ids has {self.num_tokens}")
        for name, value in self.rows.items():
            if len(value) != self.num_seqs:
                raise ValueError(
                    f"rows[{name!r}] has {len(value)} entries, but the batch has {self.num_seqs} sequences"
                )
        if self.multi_modal_input is not None and len(self.multi_modal_input) != self.num_seqs:
            raise ValueError(
                f"multi_modal_input has {len(self.multi_modal_input)} entries, but the batch has {self.num_seqs} "
                "sequences"
            )

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens["input_ids"])

    @property
    def seqlens(self) -> torch.Tensor:
        """int32 ``[B]``."""
        return self.cu_seqlens.diff()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tokens[name] if name in self.tokens else self.rows[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.rows

    def with_tokens(self, **tensors: torch.Tensor) -> PackedBatch:
        """A batch that shares this one's tensors, with token tensors added or replaced."""
        return PackedBatch(self.cu_seqlens, {**self.tokens, **tensors}, dict(self.rows), self.multi_modal_input)

    def with_rows(self, **tensors: torch.Tensor) -> PackedBatch:
        """A batch that shares this one's tensors, with row tensors added or replaced."""
        return PackedBatch(self.cu_seqlens, dict(self.tokens), {**self.rows, **tensors}, self.multi_modal_input)

    def without(self, *names: str) -> PackedBatch:
        """A batch that shares this one's tensors, without some token tensors, if it has them."""
        tokens = {k: v for k, v in self.tokens.items() if k not in names}
        return PackedBatch(self.cu_seqlens, tokens, dict(self.rows), self.multi_modal_input)

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(
            self.cu_seqlens.to(device),
            {k: v.to(device) for k, v in self.tokens.items()},
            {k: v.to(device) for k, v in self.rows.items()},
            self._moved_images(device),
        )

    def _moved_images(self, device: torch.device | str) -> list[Mapping[str, torch.Tensor]] | None:
        if self.multi_modal_input is None:
            return None
        moved = {id(images): {k: v.to(device) for k, v in images.items()} for images in self.multi_modal_input}
        return [moved[id(images)] for images in self.multi_modal_input]

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The sequences at ``indices``, in that order; an empty list gives an empty batch."""
        import torch

        at = torch.as_tensor(indices, dtype=torch.int64, device=self.cu_seqlens.device)
        cu_seqlens = torch.zeros(len(at) + 1, dtype=self.cu_seqlens.dtype, device=at.device)
        lengths = self.seqlens[at]
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        total = int(cu_seqlens[-1])
        # Token j of the result is token j - (start in the result) + (start here).
        shift = (self.cu_seqlens[:-1][at] - cu_seqlens[:-1]).repeat_interleave(lengths, output_size=total)
        token_at = torch.arange(total, device=at.device) + shift
        return PackedBatch(
            cu_seqlens,
            {k: v[token_at] for k, v in self.tokens.items()},
            {k: v[at] for k, v in self.rows.items()},
            None if self.multi_modal_input is None else [self.multi_modal_input[i] for i in at.tolist()],
        )

    def sequences(self, name: str) -> Iterator[torch.Tensor]:
        """The per-sequence slices of one token tensor."""
        bounds = self.cu_seqlens.tolist()
        value = self.tokens[name]
        return (value[start:end] for start, end in itertools.pairwise(bounds))


@attrs.frozen(eq=False)
class TokenOutput:
    """What a model says about each token of a packed batch, aligned with the batch's tokens.

    Attributes:
        logprobs: fp32 ``[T]``: log-prob of token ``i`` (see ``io_struct``) where ``loss_mask[i]``, else 0.
        entropy: fp32 ``[T]`` or None: entropy in nats of the distribution that token ``i`` was drawn from, which is
            that over its support where it has one.
        values: fp32 ``[T]`` or None: a critic's value of the state *before* token ``i``.
        of_logits: fp32 ``[T]`` or None: what a ``logits_fn`` (see ``TrainEngine.train_batch``) gave where
            ``loss_mask[i]``, else 0.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    of_logits: torch.Tensor | None = None


@attrs.frozen(eq=False)
class LossOutput:
    """What a loss function returns for one micro-batch.

    Attributes:
        loss: scalar, a **sum** over the micro-batch. The engine divides by the total weight over all micro-batches
            and ranks, so that no split of a batch changes the gradient.
        stats: ``name -> (sum, count)``, scalar tensors. The engine adds both up over micro-batches and ranks and
            reports the quotient.
        maxima: ``name -> scalar tensor``. The engine reports the greatest over micro-batches and ranks as
            ``{name}_max``; -inf says that there was nothing to look at, and is not reported.
    """

    loss: torch.Tensor
    stats: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)
    maxima: Mapping[str, torch.Tensor] = attrs.field(factory=dict)


def as_stat(values: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sum of values where mask, number of them)`` for ``LossOutput.stats``, detached."""
    weights = mask.to(values.dtype)
    return (values.detach() * weights).sum(), weights.sum()


def as_maximum(values: Any, mask: Any) -> torch.Tensor:
    """The greatest of ``values`` ``[N]`` where ``mask``, for ``LossOutput.maxima``; -inf if there is none. Detached."""
    import torch

    seen = torch.where(mask, values.detach(), -torch.inf)
    return torch.cat([seen, seen.new_full((1,), -torch.inf)]).amax()
