"""What a session records, and the tree that the completions of an episode form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from areal_core.api.io_struct import ModelResponse
from areal_core.rollout.agents.messages import Message

FinishReason = Literal["stop", "length", "tool_calls"]


@attrs.define(kw_only=True, eq=False)
class Completion:
    """One sampled answer, with the exact tokens around it.

    Attributes:
        id: what a reward is given under: the response's id; with ``n`` > 1, that of choice ``i`` > 0 is ``ID#i``.
        request_id: the response's id.
        order: number of the request in the session, from 0, in the order in which they were sent.
        index: of the choice in its request.
        n: choices of the request.
        messages: the request's, normalised.
        message: the answer, normalised.
        tool_calls: of the answer, as the client got them.
        finish_reason: as the client got it.
        response: the engine's: prompt ids as sent, output ids, log-probs, versions, stop reason.
        parent: the completion whose tokens its prompt extends, or None.
        created: Unix time in seconds.
        reward: its own reward, or None.
    """

    id: str
    request_id: str
    order: int
    index: int
    n: int
    messages: list[Message]
    message: Message
    tool_calls: list[dict[str, Any]]
    finish_reason: FinishReason
    response: ModelResponse
    parent: Completion | None
    created: int = 0
    reward: float | None = None
    children: list[Completion] = attrs.field(factory=list, repr=False)

    @property
    def prompt_ids(self) -> list[int]:
        return self.response.input_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.response.output_tokens

    @property
    def logprobs(self) -> list[float]:
        return self.response.output_logprobs

    @property
    def versions(self) -> list[int]:
        return self.response.output_versions

    @property
    def stop_reason(self) -> str:
        return self.response.stop_reason

    @property
    def is_chosen(self) -> bool:
        """Whether it belongs to the episode: of several choices, those that came back or were rewarded."""
        return self.n == 1 or bool(self.children) or self.reward is not None

    def path(self) -> list[Completion]:
        """From the first completion of its branch to this one."""
        path: list[Completion] = []
        node: Completion | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


def chosen(completions: Sequence[Completion]) -> list[Completion]:
    """The completions that belong to the episode, in the order of their requests."""
    kept = [completion for completion in completions if completion.is_chosen]
    return sorted(kept, key=lambda completion: (completion.order, completion.index))


def returns(completions: Sequence[Completion], discount: float) -> Mapping[str, float]:
    """Rewards handed back along the tree: ``R_i = r_i + discount * R_next(i)``, by completion id.

    ``R_next(i)`` is the mean over the children of ``i``. A completion without children and without a reward of its own
    is one that the agent went on from in another chat (it edited the history): for it, ``R_next(i)`` is that of the
    next request in the session. A rewarded leaf keeps its reward.

    Args:
        completions: chosen ones, see ``chosen``. A missing reward counts 0.
    """
    values: dict[str, float] = {}
    ordered = sorted(completions, key=lambda completion: (completion.order, completion.index))
    inside = {completion.id for completion in ordered}
    for position in range(len(ordered) - 1, -1, -1):
        completion = ordered[position]
        after = [values[child.id] for child in completion.children if child.id in inside]
        if not after and completion.reward is None:
            later = next((other for other in ordered[position + 1 :] if other.order > completion.order), None)
            after = [] if later is None else [values[later.id]]
        own = completion.reward if completion.reward is not None else 0.0
        values[completion.id] = own + (discount * sum(after) / len(after) if after else 0.0)
    return values
