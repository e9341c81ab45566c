"""From what a workflow returned to checked trajectories."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.api.supports import first_outside
from areal_core.errors import ArealError

_TOKEN_FIELDS = ("input_ids", "loss_mask", "logprobs", "versions")
_COPIED = ("stop_reason", "n_turns", "latency", "ttft", "metadata", "multi_modal_input")
#: The controller sets the group, whatever a workflow gives.
_IGNORED = ("group_id",)
#: Longer arrays are not multiplied: a BLAS library may wake its threads for it.
_FEW_TOKENS = 8192
_OPTIONAL = ("reward", "rewards", "token_rewards", "supports", "attention_mask", *_COPIED)


class WorkflowResultError(ArealError):
    """A workflow returned something that is not a trajectory."""


def as_trajectories(result: Any, workflow: str) -> list[Trajectory]:
    """The trajectories of one episode; empty when the workflow rejected it (None or an empty list).

    Args:
        result: a ``Trajectory``, a dict of its fields, a list of either, or None. A dict holds ``input_ids``,
            ``loss_mask``, ``logprobs``, ``versions`` and ``reward`` (or ``rewards``), as lists, arrays or tensors of
            shape ``[L]`` or ``[1, L]``. Where ``attention_mask`` is given, tokens it masks are padding and left out.
        workflow: its name, for messages.

    Raises:
        WorkflowResultError: naming the workflow, the field, what it was and what it should be.
    """
    if result is None:
        return []
    if isinstance(result, Trajectory):
        if not is_sound(result):
            _check(result, f"workflow {workflow!r}")
        return [result]
    items = result if isinstance(result, (list, tuple)) else (result,)
    trajectories = []
    for index, item in enumerate(items):
        where = f"workflow {workflow!r}" + (f", trajectory {index}" if len(items) > 1 else "")
        if isinstance(item, Mapping):
            item = _from_dict(item, where)
        elif not isinstance(item, Trajectory):
            raise WorkflowResultError(
                f"{where}: returned a {type(item).__name__}. Return a Trajectory, a dict of its fields, a list of "
                "these, or None to reject the episode."
            )
        _check(item, where)
        trajectories.append(item)
    return trajectories


def check_supports(trajectories: Sequence[Trajectory], workflow: str) -> None:
    """For an episode of which every response had supports: each trajectory has them too.

    Raises:
        WorkflowResultError: if one has none: its log-probs are over the supports, and those of training would be over
            the whole vocabulary.
    """
    for trajectory in trajectories:
        if trajectory.supports is None:
            raise WorkflowResultError(
                f"workflow {workflow!r}: returned no supports, though its samples are truncated and their log-probs "
                "are over what was kept. Use Trajectory.from_response or from_turns, or give supports [L, K]: the rows "
                "of response.output_supports, and -1 for tokens that were not sampled."
            )


def is_sound(trajectory: Trajectory) -> bool:
    """Whether a trajectory passes the checks of ``as_trajectories`` at first sight; False means: look closer."""
    reward, mask, logprobs = trajectory.reward, trajectory.loss_mask, trajectory.logprobs
    return (
        type(reward) is float
        and math.isfinite(reward)
        and not trajectory.rewards
        and trajectory.supports is None
        and 0 < len(mask) <= _FEW_TOKENS
        # The first trained token; 0 if there is none.
        and mask.argmax() > 0
        # A NaN or an infinity anywhere shows in the sum of squares, which is a third of the cost of a sum.
        and math.isfinite(logprobs.dot(logprobs))
    )


def _check(trajectory: Trajectory, where: str) -> None:
    reward = trajectory.reward
    if type(reward) is not float and (
        isinstance(reward, bool) or not isinstance(reward, (int, float, np.integer, np.floating))
    ):
        raise WorkflowResultError(f"{where}: reward is a {type(reward).__name__}; it must be a number")
    if not math.isfinite(reward):
        raise WorkflowResultError(f"{where}: reward is {reward}; it must be finite")
    if type(reward) is not float:
        # A Score that was assigned later, and numpy's and Python's other numbers.
        trajectory.rewards = trajectory.rewards or dict(getattr(reward, "terms", {}))
        trajectory.reward = float(reward)
    for name, value in trajectory.rewards.items():
        number = value if type(value) is float else _number(value, f"rewards[{name!r}]", where)
        if not math.isfinite(number):
            raise WorkflowResultError(f"{where}: rewards[{name!r}] is {value}; it must be finite")
    if not np.count_nonzero(trajectory.loss_mask):
        raise WorkflowResultError(
            f"{where}: loss_mask marks no token of {len(trajectory)}; nothing could be trained. "
            "Return None to reject the episode."
        )
    if trajectory.loss_mask[0]:
        raise WorkflowResultError(f"{where}: loss_mask marks the first token, but nothing before it could predict it")
    # One pass: a NaN or an infinity anywhere shows in the sum.
    if not math.isfinite(np.add.reduce(trajectory.logprobs)):
        raise WorkflowResultError(f"{where}: logprobs holds NaN or infinite values")
    if trajectory.supports is not None:
        at = first_outside(trajectory.supports, trajectory.input_ids, trajectory.loss_mask)
        if at is not None:
            raise WorkflowResultError(
                f"{where}: supports[{at}] does not hold the token {trajectory.input_ids[at]} that was sampled there. A "
                "row holds the ids that sampling had kept, or -1 alone."
            )


def _from_dict(item: Mapping[str, Any], where: str) -> Trajectory:
    missing = [name for name in _TOKEN_FIELDS if name not in item]
    if "reward" not in item and "rewards" not in item:
        missing.append("reward")
    if missing:
        raise WorkflowResultError(
            f"{where}: the dict lacks {', '.join(missing)}; it has {', '.join(map(str, item)) or 'nothing'}. "
            "All token fields have one entry for each token of the sequence, prompt included; "
            "Trajectory.from_response(response, reward) fills them."
        )
    known = {*_TOKEN_FIELDS, *_OPTIONAL, *_IGNORED}
    unknown = [str(name) for name in item if name not in known]
    if unknown:
        raise WorkflowResultError(
            f"{where}: unknown field {', '.join(unknown)}. Known: {', '.join((*_TOKEN_FIELDS, *_OPTIONAL))}."
        )
    optional = ("token_rewards", "supports", "attention_mask")
    names = [*_TOKEN_FIELDS, *(name for name in optional if item.get(name) is not None)]
    arrays: dict[str, Any] = {name: _tokens(item[name], name, where) for name in names}
    length = len(arrays["input_ids"])
    for name, array in arrays.items():
        if len(array) != length:
            raise WorkflowResultError(f"{where}: {name} has {len(array)} entries, but input_ids has {length}")
    if "attention_mask" in arrays:
        keep = arrays.pop("attention_mask").astype(bool)
        arrays = {name: array[keep] for name, array in arrays.items()}
    rewards = item.get("rewards")
    named: dict[str, float] = {}
    if isinstance(rewards, Mapping):
        named = {str(name): _number(value, f"rewards[{name!r}]", where) for name, value in rewards.items()}
    elif rewards is None:
        named = dict(getattr(item.get("reward"), "terms", {}))
    if "reward" in item:
        reward = _number(item["reward"], "reward", where)
    else:
        reward = sum(named.values()) if isinstance(rewards, Mapping) else _number(rewards, "rewards", where)
    other: dict[str, Any] = {name: item[name] for name in _COPIED if name in item}
    return Trajectory(**arrays, reward=reward, rewards=named, **other)


def _to_numpy(value: Any, name: str, where: str) -> np.ndarray[Any, Any]:
    # Only a program that has torch loaded can have made a tensor.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise WorkflowResultError(f"{where}: {name} is no array: {error}") from error
    if array.dtype.kind not in "bifu":
        raise WorkflowResultError(
            f"{where}: {name} is a {type(value).__name__} of {array.dtype}; it must hold numbers, one for each token"
        )
    return array


def _tokens(value: Any, name: str, where: str) -> np.ndarray[Any, Any]:
    array = _to_numpy(value, name, where)
    ndim, shape = (2, "[L, K] or [1, L, K]") if name == "supports" else (1, "[L] or [1, L]")
    if array.ndim == ndim + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != ndim:
        raise WorkflowResultError(f"{where}: {name} has shape {list(array.shape)}; it must be {shape}")
    if name in ("input_ids", "supports") and array.dtype.kind not in "iu":
        raise WorkflowResultError(f"{where}: {name} holds {array.dtype}; it must hold integers")
    return array


def _number(value: Any, name: str, where: str) -> float:
    array = _to_numpy(value, name, where)
    if array.size != 1 or array.dtype.kind == "b":
        raise WorkflowResultError(
            f"{where}: {name} has shape {list(array.shape)} and type {array.dtype}; it must be one number"
        )
    return float(array.reshape(()))
