"""From a packed micro-batch to what the model reads: prompts that a group shares stand in the input once."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from areal_core.api.batch import PackedBatch
from areal_fsdp.attention import AttentionPlan, make_plan

Ints: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen
class RowPart:
    """Which of the model's rows a rank has: part ``index`` of ``parts`` equal ones.

    Attributes:
        multiple: the number of rows is padded to a multiple of it; itself a multiple of ``parts``.
    """

    index: int = 0
    parts: int = 1
    multiple: int = 1


@attrs.frozen(eq=False)
class ModelInput:
    """``N`` model rows for a micro-batch of ``T`` tokens, of which this rank has ``M`` and predicts ``S`` tokens.

    Attributes:
        input_ids, position_ids: int64 ``[M]``; ``M = N`` without context parallelism, and ``N <= T`` without padding.
        plan: which of the ``N`` rows attend to which.
        rows: int64 ``[S]``: which of the ``M`` rows has the hidden state that predicts the token.
        targets: int64 ``[S]``: the predicted token's id.
        token_index: int64 ``[S]``: its place among the micro-batch's ``T`` tokens.
        lengths: rows of each segment of the plan, for engines that must pad.
        num_rows: ``N`` without the padding.
        is_dummy: the micro-batch has no token; one row stands in, for the sake of collectives.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    plan: AttentionPlan
    rows: torch.Tensor
    targets: torch.Tensor
    token_index: torch.Tensor
    lengths: list[int]
    num_rows: int
    is_dummy: bool = False

    def to(self, device: torch.device) -> ModelInput:
        if device.type == "cpu":
            return self
        names = ("input_ids", "position_ids", "rows", "targets", "token_index")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return attrs.evolve(self, plan=self.plan.to(device), **moved)


def make_model_input(batch: PackedBatch, *, share_prompts: bool, part: RowPart = RowPart()) -> ModelInput:
    """Lay out a micro-batch (on the CPU) for the model.

    Sequences of one group (``rows["group_ids"]``) keep one copy of their leading tokens, up to the shortest
    ``prompt_lens`` among them, if these tokens are equal and none of them is trained. The first token of a sequence
    is never predicted.

    Padding is a segment of its own at the end, to which no other attends. A token may be predicted by another rank than
    the one that has it: the one with the row before it.
    """
    input_ids = batch.tokens["input_ids"].numpy()
    if len(input_ids) == 0:
        return _dummy_input(part)
    loss_mask = batch.tokens["loss_mask"].numpy().astype(bool)
    bounds = batch.cu_seqlens.numpy().astype(np.int64)
    shared = _shared_prefixes(batch, input_ids, loss_mask, bounds) if share_prompts else {}

    row_of: Ints = np.empty(len(input_ids), dtype=np.int64)
    pieces: list[Ints] = []  # packed token indices that become model rows, in order
    lengths: list[int] = []
    prefixes: list[tuple[int, int]] = []
    positions: list[Ints] = []
    done: dict[int, int] = {}
    total = 0

    def add(first: int, last: int, offset: int, prefix: tuple[int, int]) -> int:
        nonlocal total
        start = total
        pieces.append(np.arange(first, last))
        positions.append(np.arange(offset, offset + last - first))
        lengths.append(last - first)
        prefixes.append(prefix)
        row_of[first:last] = np.arange(start, start + last - first)
        total += last - first
        return start

    for index in range(len(bounds) - 1):
        first, last = int(bounds[index]), int(bounds[index + 1])
        if first == last:
            continue
        if index not in shared:
            add(first, last, 0, (0, 0))
            continue
        group, length = shared[index]
        if group not in done:
            done[group] = add(first, first + length, 0, (0, 0))
        prefix_row = done[group]
        row_of[first : first + length] = np.arange(prefix_row, prefix_row + length)
        if first + length < last:
            add(first + length, last, length, (prefix_row, length))

    predicted = loss_mask.copy()
    predicted[bounds[:-1][bounds[:-1] < bounds[1:]]] = False
    token_index = np.flatnonzero(predicted)
    num_rows, padding = total, -total % part.multiple
    if padding:
        pieces.append(np.zeros(padding, dtype=np.int64))
        positions.append(np.arange(padding))
        lengths.append(padding)
        prefixes.append((0, 0))
    first, last = _bounds(part, num_rows + padding)
    rows = row_of[token_index - 1]
    mine = (rows >= first) & (rows < last)
    return ModelInput(
        input_ids=torch.from_numpy(input_ids[np.concatenate(pieces)[first:last]]),
        position_ids=torch.from_numpy(np.concatenate(positions)[first:last]),
        plan=make_plan(lengths, prefixes),
        rows=torch.from_numpy(rows[mine] - first),
        targets=torch.from_numpy(input_ids[token_index[mine]]),
        token_index=torch.from_numpy(token_index[mine]),
        lengths=lengths,
        num_rows=num_rows,
    )


def _bounds(part: RowPart, rows: int) -> tuple[int, int]:
    size = rows // part.parts
    return part.index * size, (part.index + 1) * size


def _dummy_input(part: RowPart) -> ModelInput:
    none = torch.zeros(0, dtype=torch.int64)
    first, last = _bounds(part, part.multiple)
    return ModelInput(
        input_ids=torch.zeros(last - first, dtype=torch.int64),
        position_ids=torch.arange(first, last),
        plan=make_plan([part.multiple], [(0, 0)]),
        rows=none,
        targets=none,
        token_index=none,
        lengths=[part.multiple],
        num_rows=0,
        is_dummy=True,
    )


def _shared_prefixes(
    batch: PackedBatch, input_ids: Ints, loss_mask: npt.NDArray[np.bool_], bounds: Ints
) -> dict[int, tuple[int, int]]:
    """``sequence -> (its group, length of the shared prompt)`` for the sequences that can share."""
    if "group_ids" not in batch.rows:
        return {}
    group_ids = batch.rows["group_ids"].numpy()
    if "prompt_lens" in batch.rows:
        prompt_lens = batch.rows["prompt_lens"].numpy().astype(np.int64)
    else:
        prompt_lens = np.array(
            [int(np.argmax(m)) if m.any() else len(m) for m in np.split(loss_mask, bounds[1:-1])], dtype=np.int64
        )
    prompt_lens = np.minimum(prompt_lens, np.diff(bounds))
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        members.setdefault(group, []).append(index)
    shared: dict[int, tuple[int, int]] = {}
    for group, indices in members.items():
        length = int(prompt_lens[indices].min())
        if len(indices) < 2 or length < 1:
            continue
        at = bounds[indices][:, None] + np.arange(length)[None, :]
        prompts = input_ids[at]
        if loss_mask[at].any() or (prompts != prompts[:1]).any():
            continue
        shared.update((index, (group, length)) for index in indices)
    return shared
