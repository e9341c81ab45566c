"""Rewards that an agent makes itself, judged as those of a reward function are."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from areal_core.api.reward_api import RewardError, RewardErrorKind, Score
from areal_core.api.reward_worker import INF, NAN, NONE, OK, classify
from areal_core.errors import BadInputError
from areal_core.logging import getLogger

OnError = Literal["reject", "zero", "raise"]

logger = getLogger("Reward")


class RewardJudge:
    """Turns what an agent gives as a reward into a float, under a policy for what is none.

    ``reject``: the controller rejects the episode with the reason ``reward_KIND``; ``zero``: it counts 0; ``raise``:
    the run stops.
    """

    def __init__(self, agent: str, on_error: OnError = "reject") -> None:
        self.agent, self.on_error = agent, on_error
        self.errors: Counter[str] = Counter()
        self._logged: set[str] = set()

    def checked(self, value: Any, what: str) -> float:
        """``value`` as a float; a ``Score`` stays one.

        Args:
            what: whose it is, for messages, e.g. ``"completion 'chatcmpl-1'"``.

        Raises:
            RewardError, BadInputError: if it is no finite number, as the policy says.
        """
        code, number, message = classify(value)
        if code == OK:
            return value if isinstance(value, Score) else number
        kinds: dict[int, RewardErrorKind] = {NONE: "none", NAN: "nan", INF: "inf"}
        self.failed(kinds.get(code, "type"), f"{message} for {what}")
        return 0.0

    def failed(self, kind: RewardErrorKind, message: str) -> None:
        """Count an error. Raises as ``checked``; if it returns, the reward is 0."""
        self.errors[kind] += 1
        error = RewardError(kind, f"the agent {self.agent!r} {message}")
        if self.on_error == "raise":
            raise BadInputError(
                f"{error}. A reward is a finite number; reward.on_error: reject would go on without it."
            )
        if kind not in self._logged:
            self._logged.add(kind)
            what = "its episode is rejected" if self.on_error == "reject" else "it counts 0"
            logger.warning("%s; %s. Later ones of this kind are counted only", error, what)
        if self.on_error == "reject":
            raise error
