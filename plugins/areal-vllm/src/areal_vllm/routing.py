"""Which server a request goes to. Plain bookkeeping: nothing here talks to anybody, and one thread calls it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal

import attrs

from areal_vllm.capabilities import Capabilities

State = Literal["ready", "stale", "down"]


@attrs.define(eq=False)
class Replica:
    """One server.

    Attributes:
        address: ``host:port`` or a URL.
        capabilities: as of the last time it was asked; None before the first.
        state: ``ready``; ``stale``: it lives, with weights that are not the current ones; ``down``.
        version: of its weights; None where that is not known.
        updates: how often its weights were touched: tokens of two numbers may be of two versions.
        outstanding: tokens of the requests that it has, those to come among them.
        attempts: the requests that it has.
        reason: why it is down.
        data: for whoever updates weights.
        idle: whether it has no request.
    """

    address: str
    capabilities: Capabilities | None = None
    state: State = "down"
    version: int | None = None
    updates: int = 0
    outstanding: int = 0
    attempts: set[Attempt] = attrs.field(factory=set)
    reason: str = "not asked yet"
    data: dict[str, Any] = attrs.field(factory=dict)
    idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.idle.set()


@attrs.define(eq=False)
class Attempt:
    """A request at a server.

    Attributes:
        tokens: what it counts for.
        task: the one to cancel when the server goes down.
        lost: that this has happened.
    """

    replica: Replica
    tokens: int
    task: asyncio.Task[Any] | None = None
    lost: bool = False
    updates: int = 0
    version: int | None = None


class Router:
    """Least outstanding tokens first; the turns of an episode stay with the server that has their prefix.

    An episode moves when its server has more than ``slack`` times the tokens of the least busy one, and ``patience``
    requests of that size more: its prefix is worth less than the wait then.

    Args:
        replicas: all servers; those that are ``ready`` are chosen from.
        most_sessions: episodes that are remembered; the oldest are forgotten.
    """

    slack = 2.0
    patience = 8

    def __init__(self, replicas: list[Replica], most_sessions: int = 65536) -> None:
        self.replicas = replicas
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._most_sessions = most_sessions
        self._turn = 0

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    def choose(self, tokens: int, session: str | None = None, avoid: Collection[Replica] = ()) -> Replica | None:
        """The server for a request of ``tokens``; None when none is ready. ``avoid``: unless there is no other."""
        ready = self.ready
        if not ready:
            return None
        candidates = [replica for replica in ready if replica not in avoid] or ready
        # Of equally busy ones each has its turn: a single request at a time would always go to the first.
        self._turn += 1
        order = {id(replica): (index - self._turn) % len(candidates) for index, replica in enumerate(candidates)}
        least = min(candidates, key=lambda replica: (replica.outstanding, order[id(replica)]))
        if session is None:
            return least
        home = self._homes.get(session)
        if home is None or home not in candidates or self._is_overloaded(home, least, tokens):
            home = least
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > self._most_sessions:
            self._homes.popitem(last=False)
        return home

    def _is_overloaded(self, home: Replica, least: Replica, tokens: int) -> bool:
        excess = home.outstanding - least.outstanding
        return excess > max((self.slack - 1) * least.outstanding, self.patience * tokens)

    def begin(self, replica: Replica, tokens: int, task: asyncio.Task[Any] | None = None) -> Attempt:
        attempt = Attempt(replica, tokens, task, updates=replica.updates, version=replica.version)
        replica.outstanding += tokens
        replica.attempts.add(attempt)
        replica.idle.clear()
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Twice is fine."""
        replica = attempt.replica
        if attempt in replica.attempts:
            replica.attempts.remove(attempt)
            replica.outstanding -= attempt.tokens
            if not replica.attempts:
                replica.idle.set()

    def drop(self, replica: Replica, reason: str) -> None:
        """Take a server out; its requests are cancelled, as ``lost``, to be sent to others."""
        replica.state, replica.reason = "down", reason
        for attempt in list(replica.attempts):
            if attempt.task is not None and not attempt.lost:
                attempt.lost = True
                attempt.task.cancel()
