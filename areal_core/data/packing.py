"""Packing: trajectories and examples laid end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal_core.api.batch import PackedBatch
from areal_core.api.io_struct import Trajectory
from areal_core.api.supports import join

if TYPE_CHECKING:
    import torch


def pack_trajectories(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Lay trajectories end to end.

    Returns:
        A batch with the tokens ``input_ids`` (int64), ``loss_mask`` (bool), ``logprobs`` (fp32), ``versions`` (int32)
        and, if any trajectory has them, ``token_rewards`` (fp32, 0 for the others) and ``supports`` (int32 ``[T, K]``,
        -1 for the others); and the rows ``rewards`` (fp32),
        ``group_ids`` (int64, numbered by first appearance; a trajectory without a group is a group of its own),
        ``prompt_lens`` (int32) and, if any trajectory has named rewards, ``reward_terms`` (fp32 ``[B, K]``, unweighted,
        see :func:`reward_labels`; NaN where a trajectory lacks one). If any trajectory has images, also their
        ``multi_modal_input``, not copied. An empty list gives an empty batch with the same keys and types.
    """
    tokens: dict[str, torch.Tensor] = {
        "input_ids": _joined([t.input_ids for t in trajectories], np.int64),
        "loss_mask": _joined([t.loss_mask for t in trajectories], np.bool_),
        "logprobs": _joined([t.logprobs for t in trajectories], np.float32),
        "versions": _joined([t.versions for t in trajectories], np.int32),
    }
    if any(t.token_rewards is not None for t in trajectories):
        tokens["token_rewards"] = _joined(
            [np.zeros(len(t), np.float32) if t.token_rewards is None else t.token_rewards for t in trajectories],
            np.float32,
        )
    supports = join([(t.supports, len(t)) for t in trajectories])
    if supports is not None:
        tokens["supports"] = _tensor(supports)
    rows = {
        "rewards": _tensor(np.array([t.reward for t in trajectories], np.float32)),
        "group_ids": _tensor(_group_numbers([t.group_id for t in trajectories])),
        "prompt_lens": _tensor(np.array([t.prompt_len for t in trajectories], np.int32)),
    }
    labels = reward_labels(trajectories)
    if labels:
        terms = [[t.rewards.get(label, np.nan) for label in labels] for t in trajectories]
        rows["reward_terms"] = _tensor(np.array(terms, np.float32))
    images = None
    if any(t.multi_modal_input for t in trajectories):
        images = [t.multi_modal_input for t in trajectories]
    return PackedBatch(_cu_seqlens(len(t) for t in trajectories), tokens, rows, images)


def reward_labels(trajectories: Sequence[Trajectory]) -> list[str]:
    """The names of the columns of ``reward_terms``.

    Of the first trajectory that has named rewards, in its order (which is that of the configuration); then those that
    only later ones have.
    """
    return list(dict.fromkeys(label for t in trajectories for label in t.rewards))


def pack_examples(examples: Sequence[Mapping[str, Any]]) -> PackedBatch:
    """Lay supervised examples end to end.

    Args:
        examples: mappings with ``input_ids`` and ``loss_mask`` of equal length (lists or arrays).

    Returns:
        A batch with the tokens ``input_ids`` (int64) and ``loss_mask`` (bool) and no rows.

    Raises:
        ValueError: if the two lengths of an example differ.
    """
    for index, example in enumerate(examples):
        ids, mask = len(example["input_ids"]), len(example["loss_mask"])
        if ids != mask:
            raise ValueError(f"example {index}: input_ids has {ids} entries, but loss_mask has {mask}")
    tokens = {
        "input_ids": _joined([np.asarray(e["input_ids"], np.int64) for e in examples], np.int64),
        "loss_mask": _joined([np.asarray(e["loss_mask"], np.bool_) for e in examples], np.bool_),
    }
    return PackedBatch(_cu_seqlens(len(e["input_ids"]) for e in examples), tokens)


def concat(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Batches one after another. Rows such as ``group_ids`` are kept as they are, not renumbered.

    Raises:
        ValueError: if there is no batch, or the batches differ in the names of their tensors.
    """
    import torch

    if not batches:
        raise ValueError("concat needs at least one batch")
    first = batches[0]
    for index, batch in enumerate(batches):
        for kind, names, expected in (("tokens", batch.tokens, first.tokens), ("rows", batch.rows, first.rows)):
            if names.keys() != expected.keys():
                raise ValueError(f"batch {index} has the {kind} {sorted(names)}, but batch 0 has {sorted(expected)}")
    seqlens = torch.cat([batch.seqlens for batch in batches])
    cu_seqlens = torch.cat([first.cu_seqlens[:1], seqlens.cumsum(0, dtype=first.cu_seqlens.dtype)])
    return PackedBatch(
        cu_seqlens,
        {name: torch.cat([batch.tokens[name] for batch in batches]) for name in first.tokens},
        {name: torch.cat([batch.rows[name] for batch in batches]) for name in first.rows},
        _joined_images(batches),
    )


def _joined_images(batches: Sequence[PackedBatch]) -> list[Mapping[str, torch.Tensor]] | None:
    if all(batch.multi_modal_input is None for batch in batches):
        return None
    return [images for batch in batches for images in batch.multi_modal_input or [{}] * batch.num_seqs]


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> torch.Tensor:
    # The empty array in front gives the type when there is nothing to join; concatenating always makes a new array.
    return _tensor(np.concatenate([np.zeros(0, dtype), *arrays]))


def _cu_seqlens(lengths: Iterable[int]) -> torch.Tensor:
    return _tensor(np.cumsum([0, *lengths]).astype(np.int32))


def _group_numbers(group_ids: Sequence[str]) -> npt.NDArray[np.int64]:
    numbers: dict[Any, int] = {}
    keys: list[Any] = [group_id or index for index, group_id in enumerate(group_ids)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
