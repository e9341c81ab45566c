"""Supports: which tokens a sampler that truncates (top-k, top-p, min-p) had kept when it drew a token.

Row ``i`` of a support matrix, int32 ``[L, K]``, holds the ids that were kept when token ``i`` was drawn, the drawn one
among them, and -1 in the places left over. A row of -1 alone says that nothing was left out: the token was drawn from
the whole vocabulary, or not drawn at all. ``K`` is the longest row there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Supports: TypeAlias = npt.NDArray[np.int32]

#: The most tokens that a sampler may keep where training is to renormalise over them: a bound on ``gconfig.top_k``.
MAX_SUPPORT = 1024


def from_rows(rows: Sequence[npt.NDArray[np.int32]]) -> Supports:
    """Int32 ``[L, K]`` of ``L`` rows of any lengths."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return from_ragged(counts, np.concatenate([np.zeros(0, np.int32), *rows]))


def from_ragged(counts: npt.NDArray[np.integer[Any]], ids: npt.NDArray[np.int32]) -> Supports:
    """The inverse of ``to_ragged``."""
    width = int(counts.max(initial=1))
    supports: Supports = np.full((len(counts), width), -1, np.int32)
    supports[np.arange(width) < counts[:, None]] = ids
    return supports


def to_ragged(supports: Supports) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Ids kept for each token ``[L]``, and these ids one row after another."""
    kept = supports >= 0
    return kept.sum(axis=1), supports[kept]


def join(parts: Sequence[tuple[Supports | None, int]]) -> Supports | None:
    """Matrices one after another.

    Args:
        parts: each with its number of tokens; None is that many tokens without a support.

    Returns:
        None if no part has a matrix.

    Raises:
        ValueError: if a matrix has another number of rows.
    """
    given = [matrix for matrix, _ in parts if matrix is not None]
    if not given:
        return None
    width = max(1, *(matrix.shape[1] for matrix in given))
    joined = np.full((sum(size for _, size in parts), width), -1, np.int32)
    start = 0
    for matrix, size in parts:
        if matrix is not None:
            if len(matrix) != size:
                raise ValueError(f"supports have {len(matrix)} rows for {size} tokens")
            joined[start : start + size, : matrix.shape[1]] = matrix
        start += size
    return joined


def first_outside(supports: Supports, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> int | None:
    """The first token where ``mask`` that has a support and is not in it; None if there is none."""
    has = (supports >= 0).any(axis=1) & mask
    wrong = np.flatnonzero(has & ~(supports == ids[:, None]).any(axis=1))
    return int(wrong[0]) if len(wrong) else None
