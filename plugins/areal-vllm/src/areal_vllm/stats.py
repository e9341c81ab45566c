"""What an engine counts."""

from __future__ import annotations

import time

import attrs


@attrs.define
class Stats:
    """Counters, written by the engine's loop and read by the trainer.

    Attributes:
        generated_tokens, prefill_tokens: sampled, and sent as prompts (what a prefix cache saved among them).
        finished: answered requests.
        retries: requests sent again because a server failed.
        resumed: requests sent again after a pause that ended them.
        continued_tokens: that were not generated again, thanks to a partial answer.
        lost_tokens: that were.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    finished: int = 0
    retries: int = 0
    resumed: int = 0
    continued_tokens: int = 0
    lost_tokens: int = 0
    _running: int = 0
    _busy: float = 0.0
    _since: float = 0.0
    _exported: dict[str, float] = attrs.field(factory=dict)

    def begin(self) -> None:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._busy += time.perf_counter() - self._since

    def export(self, **more: float) -> dict[str, float]:
        """Since the last call; also ``busy_seconds``, in which a request ran, and ``tokens_per_second`` of them."""
        busy = self._busy + (time.perf_counter() - self._since if self._running else 0.0)
        now = {
            "generated_tokens": float(self.generated_tokens),
            "prefill_tokens": float(self.prefill_tokens),
            "finished": float(self.finished),
            "retries": float(self.retries),
            "resumed": float(self.resumed),
            "continued_tokens": float(self.continued_tokens),
            "lost_tokens": float(self.lost_tokens),
            "busy_seconds": busy,
            **more,
        }
        stats = {name: value - self._exported.get(name, 0.0) for name, value in now.items()}
        self._exported = now
        seconds = stats["busy_seconds"]
        stats["tokens_per_second"] = stats["generated_tokens"] / seconds if seconds > 0 else 0.0
        return stats
