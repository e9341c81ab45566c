"""From the completions of an episode to trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.rollout.agents.completions import Completion, chosen, returns


def export_individual(completions: Sequence[Completion], discount: float, tokenizer: Any) -> list[Trajectory]:
    """One trajectory for each completion: its prompt is context, its answer is trained, its reward is its return.

    Args:
        completions: of one episode; choices that were not chosen are left out.
        discount: see ``returns``.
    """
    kept = chosen(completions)
    values = returns(kept, discount)
    result = []
    for completion in kept:
        if completion.output_ids:
            trajectory = Trajectory.from_response(
                completion.response,
                values[completion.id],
                rewards=_terms([completion]),
                metadata=_metadata([completion], 0, tokenizer),
            )
            result.append(trajectory)
    return result


def export_concat(completions: Sequence[Completion], discount: float, tokenizer: Any) -> list[Trajectory]:
    """One trajectory for each leaf of the tree of completions: the tokens from the first prompt to the last answer.

    Every sampled token is trained exactly once: what several leaves have in common is trained with the first of them,
    and is context in the others. The scalar reward of a trajectory is the return of the first completion that is
    trained in it, along its own path: ``r_0 + discount * r_1 + discount^2 * r_2 + ...``, so that it can be compared
    within a group as the reward of a single answer can. (A leaf without reward that the agent went on from in another
    chat ends in the return of that chat, see ``returns``.) Credit for each turn by itself: ``export_individual``.

    Args:
        completions: of one episode; choices that were not chosen are left out.
    """
    kept = chosen(completions)
    inside = {completion.id for completion in kept}
    values = returns(kept, discount)
    trained: set[str] = set()
    result = []
    for leaf in kept:
        if any(child.id in inside for child in leaf.children):
            continue
        path = leaf.path()
        first = next(i for i, completion in enumerate(path) if completion.id not in trained)
        trained.update(completion.id for completion in path[first:])
        trajectory = Trajectory.from_turns(
            [completion.response for completion in path],
            _path_return(path[first:], values, discount),
            rewards=_terms(path[first:]),
            metadata=_metadata(path, first, tokenizer),
        )
        _mask_until(trajectory, len(path[first].prompt_ids))
        if trajectory.loss_mask.any():
            result.append(trajectory)
    return result


def _path_return(path: Sequence[Completion], values: Mapping[str, float], discount: float) -> float:
    value = values[path[-1].id]
    for completion in path[-2::-1]:
        value = (completion.reward or 0.0) + discount * value
    return value


def _terms(path: Sequence[Completion]) -> dict[str, float]:
    """The named rewards of the last completion that was given several of them (a ``Score``)."""
    for completion in reversed(path):
        terms: dict[str, float] | None = getattr(completion.reward, "terms", None)
        if terms:
            return dict(terms)
    return {}


def _mask_until(trajectory: Trajectory, length: int) -> None:
    """Make the first ``length`` tokens context: they are trained in another trajectory."""
    trajectory.loss_mask[:length] = np.False_
    trajectory.logprobs[:length] = 0.0
    trajectory.versions[:length] = -1
    if trajectory.supports is not None:
        trajectory.supports[:length] = -1


def _metadata(path: Sequence[Completion], first: int, tokenizer: Any) -> dict[str, Any]:
    """What ``trajectories/`` shows: the first trained completion's prompt, and all that comes after it."""
    start = len(path[first].prompt_ids)
    whole = [*path[-1].prompt_ids, *path[-1].output_ids]
    return {
        "prompt": tokenizer.decode(whole[:start], skip_special_tokens=False),
        "completion": tokenizer.decode(whole[start:], skip_special_tokens=False),
        "completion_ids": [completion.id for completion in path[first:]],
        "turn_rewards": [None if c.reward is None else float(c.reward) for c in path[first:]],
    }
