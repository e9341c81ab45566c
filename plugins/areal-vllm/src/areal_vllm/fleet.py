"""All servers at once: calls to each, pausing, and what weights they have."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from areal_core.errors import ArealError
from areal_vllm.capabilities import Capabilities
from areal_vllm.client import ServerError, ServerGone
from areal_vllm.config import VLLMConfig
from areal_vllm.logprobs import LogprobMode, find_mode
from areal_vllm.loop import Loop
from areal_vllm.membership import Membership
from areal_vllm.routing import Replica

#: Seconds without an answer after which no more of those to aborted requests are waited for.
_ABORT_SECONDS = 0.5

Body = Any | Callable[[int, Replica], Any]


class Fleet:
    """The trainer's blocking face of the servers, and the event loop in a thread that talks to them.

    Args:
        addresses: of the servers.
        setup_timeout: seconds until all must be ready.
        keep_kv: keep keys and values over a pause.
        why_dead, bring_up_to_date: see ``Membership``.

    Attributes:
        loop: where ``members`` lives.
        members: the servers and their states.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: VLLMConfig,
        *,
        setup_timeout: float,
        keep_kv: bool = False,
        why_dead: Callable[[str], str | None] | None = None,
        bring_up_to_date: Callable[[Replica], bool] | None = None,
    ) -> None:
        self.options = options
        self._keep_kv, self._setup_timeout = keep_kv, setup_timeout
        self.loop = Loop("areal-vllm")

        async def make() -> Membership:
            return Membership(addresses, options, why_dead=why_dead, bring_up_to_date=bring_up_to_date)

        self.members = self.loop.call(make())

    def connect(self) -> None:
        """Wait until every server is ready, and ask each what it offers.

        Raises:
            BadInputError: if one cannot be used, or they do not serve the same model.
            ArealError: if one is not ready in time.
        """
        self.loop.call(self.members.connect(self._setup_timeout))

    def stop(self) -> None:
        self.loop.stop(self.members.client.close())

    @property
    def replicas(self) -> list[Replica]:
        """All servers, in the order of their addresses."""
        return self.members.replicas

    @property
    def live(self) -> list[Replica]:
        """Servers that answer: those with the current weights, and those that need an update."""
        return self.members.live

    @property
    def capabilities(self) -> Capabilities:
        """Of the first server that was asked; all must serve the same model, and should run with the same flags."""
        for replica in self.replicas:
            if replica.capabilities is not None:
                return replica.capabilities
        raise ArealError("no server was asked yet")

    # -------------------------------------------------------------------------------------------- calls to all

    def post_all(
        self,
        path: str,
        *,
        json: Body = None,
        params: dict[str, str] | None = None,
        timeout: float | None = None,
        replicas: Sequence[Replica] | None = None,
    ) -> list[Any]:
        """POST to all live servers (or ``replicas``) at once, and wait.

        Args:
            json: the body, or a function of the index and the replica that makes it.
            timeout: seconds; None: ``rollout.vllm.control_timeout``.

        Returns:
            The decoded answers, in the order of the servers; None for one that is gone, which is dropped.

        Raises:
            ArealError: what a server answered; or that none is left.
        """
        return self.start_all(path, json=json, params=params, timeout=timeout, replicas=replicas).result()

    def get_all(
        self, path: str, *, timeout: float | None = None, replicas: Sequence[Replica] | None = None
    ) -> list[Any]:
        """As ``post_all``."""
        return self.loop.call(self._call_all("GET", path, None, None, timeout, replicas))

    def start_all(
        self,
        path: str,
        *,
        json: Body = None,
        params: dict[str, str] | None = None,
        timeout: float | None = None,
        replicas: Sequence[Replica] | None = None,
    ) -> concurrent.futures.Future[list[Any]]:
        """As ``post_all``, without waiting: for what the trainer does at the same time."""
        return self.loop.submit(self._call_all("POST", path, json, params, timeout, replicas))

    async def _call_all(
        self,
        method: str,
        path: str,
        json: Body,
        params: dict[str, str] | None,
        timeout: float | None,
        replicas: Sequence[Replica] | None,
    ) -> list[Any]:
        chosen = list(self.live if replicas is None else replicas)
        if not chosen:
            raise self.members.nobody()
        limit = timeout or self.options.control_timeout

        async def ask(index: int, replica: Replica) -> Any:
            body = json(index, replica) if callable(json) else json
            return await self.members.client.call(
                method, replica.address, path, body=body, params=params, timeout=limit
            )

        results = await asyncio.gather(
            *(ask(index, replica) for index, replica in enumerate(chosen)), return_exceptions=True
        )
        answers, lost = [], 0
        for replica, result in zip(chosen, results, strict=True):
            if isinstance(result, ServerGone):
                self.members.drop(replica, str(result))
                lost += 1
            elif isinstance(result, BaseException):
                raise result
            answers.append(None if isinstance(result, BaseException) else result)
        if lost == len(chosen):
            raise self.members.nobody()
        return answers

    # -------------------------------------------------------------------------------------------- pausing

    def pause(self) -> None:
        """Let no further request start, and stop those that run between two tokens."""
        self.loop.call(self._pause(everywhere=False))

    def pause_servers(self) -> None:
        """After ``pause``: also servers that had nothing to do, before their weights are replaced."""
        self.loop.call(self._pause(everywhere=True))

    async def _pause(self, *, everywhere: bool) -> None:
        self.members.gate.clear()
        async with self.members.lock:
            # Of a server that computes nothing there is nothing to stop.
            targets = [r for r in self.live if r not in self.members.paused and (everywhere or r.attempts)]
            await asyncio.gather(*(self._pause_one(replica) for replica in targets))

    async def _pause_one(self, replica: Replica) -> None:
        capabilities = _known(replica)
        if not capabilities.pause:
            # It cannot be stopped in the middle: its requests get to their ends.
            await replica.idle.wait()
            return
        mode = "keep" if capabilities.tells_versions else "abort"
        params = {"mode": mode, "clear_cache": str(not self._keep_kv).lower()}
        self.members.paused.add(replica)
        try:
            await self.members.client.post(
                replica.address, "/pause", params=params, timeout=self.options.control_timeout
            )
        except (ServerGone, ServerError) as error:
            self.members.drop(replica, str(error))
            return
        if mode == "abort":
            # What has not come back was not computed yet. It is sent again, so that no answer is of two versions.
            left = -1
            while left != len(replica.attempts) and replica.attempts:
                left = len(replica.attempts)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(replica.idle.wait(), _ABORT_SECONDS)
            for attempt in list(replica.attempts):
                attempt.lost = True
                if attempt.task is not None:
                    attempt.task.cancel()

    def resume(self) -> None:
        """Undo ``pause`` and ``pause_servers``."""
        self.loop.call(self._resume())

    async def _resume(self) -> None:
        async with self.members.lock:
            paused, self.members.paused = self.members.paused, set()
            await asyncio.gather(*(self._resume_one(replica) for replica in paused if replica.state != "down"))
            for replica in self.live:
                await self._ask_mode_again(replica)
        self.members.gate.set()

    async def _ask_mode_again(self, replica: Replica) -> None:
        """Of a server whose first weights did not tell which log-probs it gives."""
        known = _known(replica)
        if known.logprob_mode is LogprobMode.UNKNOWN:
            mode = await find_mode(
                self.members.client, replica.address, known.model, known.transport, timeout=self.options.control_timeout
            )
            replica.capabilities = attrs.evolve(known, logprob_mode=mode)

    async def _resume_one(self, replica: Replica) -> None:
        try:
            await self.members.client.post(replica.address, "/resume", timeout=self.options.control_timeout)
        except (ServerGone, ServerError) as error:
            self.members.drop(replica, str(error))

    # -------------------------------------------------------------------------------------------- versions

    def set_version(self, version: int, replicas: Sequence[Replica] | None = None, *, updated: bool = True) -> None:
        """Note that servers have weights of ``version`` now, and label them so.

        Args:
            replicas: those that have; None: all live ones. Others that were ready are stale.
            updated: whether their weights were touched, so that earlier tokens are of others.
        """
        self.loop.call(self._set_version(version, replicas, updated))

    async def _set_version(self, version: int, replicas: Sequence[Replica] | None, updated: bool) -> None:
        chosen = list(self.live if replicas is None else replicas)
        if not updated:
            # A new number for the weights that are current does not make old ones current.
            chosen = [replica for replica in chosen if replica.state == "ready"]
        self.members.version = version
        self.members.updates += updated
        for replica in self.replicas:
            if replica in chosen and replica.state != "down":
                replica.state, replica.version = "ready", version
                replica.updates += 1
            elif replica.state == "ready":
                replica.state = "stale"
        await asyncio.gather(*(self.members.label(replica) for replica in chosen if replica.state != "down"))
        self.members.note_changes()


def _known(replica: Replica) -> Capabilities:
    """Of a server that has joined."""
    assert replica.capabilities is not None
    return replica.capabilities
