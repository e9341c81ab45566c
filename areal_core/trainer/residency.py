"""Which models hold memory of the device: those that give way to others do so except while they work themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from areal_core.api.configs import TrainEngineConfig
    from areal_core.api.engine_api import TrainEngine
    from areal_core.stats import StatsTracker

Place = Literal["device", "logits", "host"]


class Residency:
    """Moves models with ``offload: true`` to host memory and back: when another one needs the room, not before.

    Every rank calls the same methods in the same order.

    Args:
        stats: takes the time of it, ``time/offload_s``.
    """

    def __init__(self, stats: StatsTracker) -> None:
        self.stats = stats
        self._places: dict[TrainEngine, Place] = {}
        """Of the models that give way; ``logits``: only what ``TrainEngine.logits`` needs is on the device."""

    def add(self, engine: TrainEngine, config: TrainEngineConfig) -> None:
        """A model that was just loaded. It gives way at once, so that the next one finds room."""
        if config.offload:
            self._places[engine] = "device"
            self.release()

    def use(self, engine: TrainEngine, *, logits_of: TrainEngine | None = None) -> None:
        """``engine`` works next. The others go first, so that no two need room at once.

        Args:
            logits_of: a model whose ``logits`` are asked for meanwhile: that much of it stays.
        """
        self._move({engine: "device"} if logits_of is None else {engine: "device", logits_of: "logits"})

    def release(self) -> None:
        """A model of somebody else, such as the sampler's, works next."""
        self._move({})

    def _move(self, wanted: dict[TrainEngine, Place]) -> None:
        moves = {e: wanted.get(e, "host") for e, place in self._places.items() if place != wanted.get(e, "host")}
        if not moves:
            return
        with self.stats.time("offload"):
            for engine, place in moves.items():
                if place != "device":
                    engine.offload(keep_logits=place == "logits")
            for engine, place in moves.items():
                if place == "device":
                    engine.onload()
        self._places.update(moves)
