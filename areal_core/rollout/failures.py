"""When episodes go wrong: whether an error is worth another try, and whether the run can go on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.reward_api import RewardError
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_core.rollout.episode import Episode, EpisodeRejected, EpisodeTimeout

_WINDOW = 100
_HUNG_REWARDS = 8
_KINDS = 100

logger = getLogger("RolloutController")


def describe(error: BaseException) -> str:
    """Type and message in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


class FailureWatch:
    """Judges errors, and counts them against ``max_failure_rate``.

    Args:
        config: retries, timeout, failure rate.
        episodes_per_batch: the rate is taken over as many episodes, at most 100.
        notify: called when there is a fatal error.

    Attributes:
        fatal: the error that ends the run, once there is one.
        scored: whether the reward ever gave a score.
    """

    def __init__(self, config: InferenceEngineConfig, episodes_per_batch: int, notify: Callable[[], None]) -> None:
        self.config, self.notify = config, notify
        self.fatal: BaseException | None = None
        self.scored = False
        self._window = max(1, min(_WINDOW, episodes_per_batch))
        self._ended = 0
        self._failed: deque[int] = deque()  # numbers of the failed ones among the last ``_window`` that ended
        self._exceptions: Counter[str] = Counter()
        self._hung_rewards = 0

    def try_again(self, episode: Episode, error: BaseException) -> bool:
        """Whether to play the episode once more after ``error``; if not, its outcome is set."""
        if episode.timed_out:
            self.time_out(episode)
        elif isinstance(error, EpisodeRejected):
            episode.reject(error.reason)
        elif isinstance(error, RewardError):
            episode.reject(f"reward_{error.kind}")
            episode.error = error
            self._watch_hanging_reward(error)
        elif isinstance(error, BadInputError):
            self._fail(episode, error)
            self.stop_for(error)
        elif episode.attempts <= self.config.max_retries and self.fatal is None:
            return True
        else:
            self._fail(episode, error)
        return False

    def time_out(self, episode: Episode) -> None:
        limit = self.config.episode_timeout
        message = f"an episode took more than {limit:g} s (rollout.episode_timeout) and was cancelled"
        self._fail(episode, EpisodeTimeout(message))

    def _fail(self, episode: Episode, error: BaseException) -> None:
        episode.outcome, episode.error = "failed", error
        episode.reason = type(error).__name__
        kind = describe(error)
        if kind not in self._exceptions:
            if len(self._exceptions) >= _KINDS:  # Messages that hold a number or a name, each time another.
                kind = type(error).__name__
            # Bad input stops the run, and is its one error: a traceback into the engine would only hide it.
            elif not isinstance(error, BadInputError):
                logger.warning("an episode failed: %s", kind, exc_info=error)
        self._exceptions[kind] += 1

    def _watch_hanging_reward(self, error: RewardError) -> None:
        # A reward that hangs each time would take reward.timeout for every episode of the batch before it is noticed.
        if error.kind != "timeout":
            self.scored = True
        if self.scored:
            return
        self._hung_rewards += 1
        if self._hung_rewards >= _HUNG_REWARDS:
            message = f"the first {self._hung_rewards} calls of the reward all took too long: {error}"
            self.stop_for(BadInputError(message))

    def count(self, outcome: str) -> None:
        """One more training episode ended by itself; too many failures among the last ones are fatal."""
        self._ended += 1
        failed, window = self._failed, self._window
        if outcome == "failed":
            failed.append(self._ended)
        elif self._ended != window or not failed:  # A success adds no failure, but may be the last of the first window.
            return
        while failed[0] <= self._ended - window:
            failed.popleft()
        if self._ended >= window and len(failed) > self.config.max_failure_rate * window:
            self.stop_for(self.error(len(failed), window))

    def error(self, failed: int, total: int) -> ArealError:
        """The error of a rollout in which too many episodes failed."""
        message, count = self._exceptions.most_common(1)[0] if self._exceptions else ("?", 0)
        return ArealError(
            f"{failed} of the last {total} episodes failed, more than rollout.max_failure_rate "
            f"({self.config.max_failure_rate:g}) allows. Most common exception ({count} times so far): {message}"
        )

    def stop_for(self, error: BaseException) -> None:
        """The run cannot go on; the first such error is kept."""
        if self.fatal is None:
            self.fatal = error
            self.notify()
