"""From a packed micro-batch to what the model reads: prompts that a group shares stand in the input once."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from areal_core.api.batch import PackedBatch
from areal_fsdp.attention import AttentionPlan, make_plan
from areal_fsdp.support import TokenSupports
from areal_fsdp.vision import Images, VisionBatch, VisionInput, join_images

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
            Positions are ``[3, M]`` (time, height, width) where the model has such and there are images.
        plan: which of the ``N`` rows attend to which.
        rows: int64 ``[S]``: which of the ``M`` rows has the hidden state that predicts the token.
        targets: int64 ``[S]``: the predicted token's id.
        token_index: int64 ``[S]``: its place among the micro-batch's ``T`` tokens.
        lengths: rows of each segment of the plan, for engines that must pad.
        num_rows: ``N`` without the padding.
        is_dummy: the micro-batch has no token; one row stands in, for the sake of collectives.
        vision: the images among the rows, if there are any.
        supports: of the ``S`` tokens, if the batch has any.
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
    vision: VisionInput | None = None
    supports: TokenSupports | None = None

    def to(self, device: torch.device) -> ModelInput:
        if device.type == "cpu":
            return self
        names = ("input_ids", "position_ids", "rows", "targets", "token_index")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        vision = None if self.vision is None else self.vision.to(device)
        supports = None if self.supports is None else self.supports.to(device)
        return attrs.evolve(self, plan=self.plan.to(device), vision=vision, supports=supports, **moved)


def make_model_input(
    batch: PackedBatch, *, share_prompts: bool, part: RowPart = RowPart(), vision: VisionBatch | None = None
) -> ModelInput:
    """Lay out a micro-batch (on the CPU) for the model.

    Sequences of one group (``rows["group_ids"]``) keep one copy of their leading tokens, up to the shortest
    ``prompt_lens`` among them, if these tokens are equal and none of them is trained. The first token of a sequence
    is never predicted. A prompt with images is shared if the images are equal too, and none comes after it.

    Padding is a segment of its own at the end, to which no other attends. A token may be predicted by another rank than
    the one that has it: the one with the row before it.
    """
    input_ids = batch.tokens["input_ids"].numpy()
    if len(input_ids) == 0:
        return _dummy_input(part, vision)
    loss_mask = batch.tokens["loss_mask"].numpy().astype(bool)
    bounds = batch.cu_seqlens.numpy().astype(np.int64)
    shared = _shared_prefixes(batch, input_ids, loss_mask, bounds, vision) if share_prompts else {}

    row_of: Ints = np.empty(len(input_ids), dtype=np.int64)
    pieces: list[Ints] = []  # packed token indices that become model rows, in order
    lengths: list[int] = []
    prefixes: list[tuple[int, int]] = []
    positions: list[Ints] = []
    done: dict[int, int] = {}
    images: list[Images] = []
    total = 0

    def add(first: int, last: int, offset: int, prefix: tuple[int, int]) -> int:
        nonlocal total
        start = total
        pieces.append(np.arange(first, last))
        if vision is not None and vision.positions is not None:
            positions.append(vision.positions[:, first:last])
        else:
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
        if vision is not None and (index not in shared or shared[index][0] not in done):
            images.append(vision.images[index])
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
    tokens = np.concatenate(pieces)
    ids, places = input_ids[tokens], np.concatenate(positions, -1)
    seen = None
    if vision is not None:
        # Engines whose ranks have parts of the rows refuse images: see parallel.check_parallel.
        ids, places, seen = _with_images(ids, places, vision.types[tokens], images, vision.specimen)
        lengths += [len(ids) - total] if len(ids) > total else []
        prefixes += [(0, 0)] * (len(lengths) - len(prefixes))
        last = len(ids)
    rows = row_of[token_index - 1]
    mine = (rows >= first) & (rows < last)
    token_index = token_index[mine]
    targets = input_ids[token_index]
    supports = batch.tokens.get("supports")
    return ModelInput(
        input_ids=torch.from_numpy(ids[first:last]),
        position_ids=torch.from_numpy(places[..., first:last]),
        plan=make_plan(lengths, prefixes),
        rows=torch.from_numpy(rows[mine] - first),
        targets=torch.from_numpy(targets),
        token_index=torch.from_numpy(token_index),
        lengths=lengths,
        num_rows=num_rows,
        vision=seen,
        supports=None if supports is None else TokenSupports.of(supports.numpy()[token_index], targets),
    )


def _with_images(
    ids: Ints, positions: Ints, types: Ints, images: list[Images], specimen: tuple[list[int], Images] | None
) -> tuple[Ints, Ints, VisionInput]:
    """Rows with the images among them; those of the specimen come last."""
    if specimen is not None:
        tokens, tensors = specimen
        ids = np.concatenate([ids, np.array(tokens, np.int64)])
        steps = np.broadcast_to(np.arange(len(tokens)), (*positions.shape[:-1], len(tokens)))
        positions = np.concatenate([positions, steps], -1)
        types = np.concatenate([types, np.ones(len(tokens), np.int64)])
        images = [*images, tensors]
    return ids, positions, VisionInput(join_images(images), torch.from_numpy(types))


def _bounds(part: RowPart, rows: int) -> tuple[int, int]:
    size = rows // part.parts
    return part.index * size, (part.index + 1) * size


def _dummy_input(part: RowPart, vision: VisionBatch | None) -> ModelInput:
    none = torch.zeros(0, dtype=torch.int64)
    first, last = _bounds(part, part.multiple)
    ids, positions = np.zeros(last - first, np.int64), np.arange(first, last)
    lengths = [part.multiple]
    seen = None
    if vision is not None:
        ids, positions, seen = _with_images(ids, positions, np.zeros(len(ids), np.int64), [], vision.specimen)
        lengths.append(len(ids) - part.multiple)
    return ModelInput(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        plan=make_plan(lengths, [(0, 0)] * len(lengths)),
        rows=none,
        targets=none,
        token_index=none,
        lengths=lengths,
        num_rows=0,
        is_dummy=True,
        vision=seen,
    )


def _shared_prefixes(
    batch: PackedBatch,
    input_ids: Ints,
    loss_mask: npt.NDArray[np.bool_],
    bounds: Ints,
    vision: VisionBatch | None,
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
        if vision is not None and not _same_images(vision, bounds, indices, length):
            continue
        shared.update((index, (group, length)) for index in indices)
    return shared


def _same_images(vision: VisionBatch, bounds: Ints, indices: list[int], length: int) -> bool:
    """Whether sequences have the same images, all of them in their first ``length`` tokens."""
    if any(vision.types[bounds[i] + length : bounds[i + 1]].any() for i in indices):
        return False
    first = vision.images[indices[0]]
    return all(_equal(vision.images[i], first) for i in indices[1:])


def _equal(one: Images, other: Images) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
