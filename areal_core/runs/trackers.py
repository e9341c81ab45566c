"""Several trackers as one, none of which can stop a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.api.run_api import RunInfo
from areal_core.api.tracker_api import Tracker
from areal_core.config.plain import plugin_keywords
from areal_core.errors import BadInputError
from areal_core.logging import getLogger

if TYPE_CHECKING:
    from areal_core.api.configs import TrackerConfig
    from areal_core.plugins.manager import PluginManager

logger = getLogger("Trackers")


class TrackerSet:
    """Passes metrics on to every tracker. An exception of one is logged the first time, and the others go on.

    Args:
        trackers: name and tracker.
    """

    def __init__(self, trackers: Iterable[tuple[str, Tracker]] = ()) -> None:
        self._trackers = list(trackers)
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def from_config(cls, configs: Sequence[TrackerConfig], run: RunInfo, manager: PluginManager) -> TrackerSet:
        """Load and construct the trackers of a configuration.

        Raises:
            BadInputError: if a name is unknown, or a tracker rejects its options. What else goes wrong while one is
                constructed (a server that is down) is logged, and the run goes without it.
        """
        result = cls()
        for index, config in enumerate(configs):
            factory = manager.load("areal_trackers", config.name, key=f"trackers[{index}].name")
            options = plugin_keywords(config)

            def construct(factory: Any = factory, options: Any = options, name: str = config.name) -> None:
                result._trackers.append((name, factory(run, **options)))

            result._guard(config.name, "start", construct)
        return result

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics everywhere."""
        for name, tracker in self._trackers:
            self._guard(name, "log", lambda tracker=tracker: tracker.log(step, metrics))  # type: ignore[misc]

    def close(self) -> None:
        """Close them all. May be called twice."""
        trackers, self._trackers = self._trackers, []
        for name, tracker in trackers:
            self._guard(name, "close", tracker.close)

    def _guard(self, name: str, action: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BadInputError:
            raise
        except Exception as error:
            if (name, action) in self._reported:
                return
            self._reported.add((name, action))
            logger.warning("tracker %r failed to %s: %s: %s", name, action, type(error).__name__, error)
            logger.debug("tracker %r failed to %s", name, action, exc_info=True)
