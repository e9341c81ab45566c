"""How many groups may be under way, and which have grown too old."""

from __future__ import annotations

import attrs


@attrs.define
class StalenessManager:
    """Counts groups against the staleness bound.

    A batch for version ``v`` may hold what began at ``v - max_staleness`` or later. Everything submitted by version
    ``v`` is consumed by version ``v + max_staleness`` if no more than ``(max_staleness + v + 1) * batch_size`` groups
    were ever let in; that is the capacity formula (AReaL, arXiv:2505.24298, section 5.1).

    Attributes:
        batch_size: groups that one version consumes.
        max_staleness: the bound; 0 is synchronous.
        version: current version.
        consumed: groups that entered batches so far.
        waiting: complete groups that wait for a batch.
        running: groups being played.
    """

    batch_size: int
    max_staleness: int
    version: int = 0
    consumed: int = 0
    waiting: int = 0
    running: int = 0

    @property
    def capacity(self) -> int:
        """Groups that may start now; negative after a bound was lowered."""
        allowed = (self.max_staleness + self.version + 1) * self.batch_size
        return allowed - (self.consumed + self.waiting + self.running)

    def set_version(self, version: int) -> None:
        """Advance. A first version other than 0 counts as if every version before had consumed its batch."""
        if not self.consumed and not self.waiting and not self.running:
            self.consumed = version * self.batch_size
        self.version = version

    def is_stale(self, first_version: int) -> bool:
        return self.version - first_version > self.max_staleness
