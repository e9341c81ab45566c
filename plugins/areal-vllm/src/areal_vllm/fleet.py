"""The servers of a run: connecting, watching, pausing, and calls to all of them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_vllm.capabilities import Capabilities, discover, is_paused
from areal_vllm.client import Client, RequestRefused, ServerError, ServerGone
from areal_vllm.config import VLLMConfig
from areal_vllm.logprobs import LogprobMode, find_mode
from areal_vllm.loop import Loop
from areal_vllm.routing import Replica, Router

_FIRST_LOOKS = 0.5
_OTHER_FILES = 512
_PROGRESS_SECONDS = 10.0
#: Seconds without an answer after which no more of those to aborted requests are waited for.
_ABORT_SECONDS = 0.5

logger = getLogger("VLLMEngine")

Body = Any | Callable[[int, Replica], Any]


class Fleet:
    """All servers, and the event loop that talks to them.

    The blocking methods are for the trainer's thread, the coroutines for this fleet's own loop.

    Args:
        addresses: of the servers.
        setup_timeout: seconds until all must be ready.
        keep_kv: keep keys and values over a pause.
        why_dead: what is known of the process behind an address that does not answer.
        bring_up_to_date: gives a server that came back the current weights; False if it cannot. Blocking.
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
        self.replicas = [Replica(address) for address in addresses]
        self.router = Router(self.replicas)
        self.version = 0
        self.updates = 0
        self.drops = 0
        self.request_model: str | None = None
        self._keep_kv, self._setup_timeout = keep_kv, setup_timeout
        self._why_dead, self._bring_up_to_date = why_dead, bring_up_to_date
        self.loop = Loop("areal-vllm")
        self._paused: set[Replica] = set()
        self._checks: dict[Replica, asyncio.Task[bool]] = {}
        self.loop.call(self._open())

    async def _open(self) -> None:
        options = self.options
        _allow_open_files(len(self.replicas) * options.max_connections)
        self.client = Client(
            max_connections=options.max_connections,
            connect_timeout=options.connect_timeout,
            api_key=os.environ.get("VLLM_API_KEY"),
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self._up = asyncio.Event()
        # Held while a server is taken back, and while the servers are being paused.
        self._membership = asyncio.Lock()

    # -------------------------------------------------------------------------------------------- life

    def connect(self) -> None:
        """Wait until every server is ready, and ask each what it offers.

        Raises:
            BadInputError: if one cannot be used, or they do not serve the same model.
            ArealError: if one is not ready in time.
        """
        self.loop.call(self._connect())

    async def _connect(self) -> None:
        deadline = time.monotonic() + self._setup_timeout
        await asyncio.gather(*(self._wait_until_ready(replica, deadline) for replica in self.replicas))
        for replica in self.replicas:
            await self._join(replica)
            known = self._known(replica)
            logger.info("%s: %s", replica.address, known.describe())
            for lack in known.shortcomings:
                logger.info("%s: %s", replica.address, lack)
        self._watcher = asyncio.create_task(self._watch())

    async def _wait_until_ready(self, replica: Replica, deadline: float) -> None:
        start = said = time.monotonic()
        while True:
            try:
                await self.client.get(replica.address, "/health", timeout=self.options.health_timeout)
                return
            except RequestRefused as error:
                raise BadInputError(f"{replica.address} is no vLLM server: {error}") from error
            except (ServerGone, ServerError) as error:
                now = time.monotonic()
                dead = self._why_dead(replica.address) if self._why_dead is not None else None
                if dead is not None or now > deadline:
                    waited = "" if dead is not None else f" after {self._setup_timeout:g} s (rollout.setup_timeout)"
                    raise ArealError(
                        f"the vLLM server at {replica.address} is not ready{waited}: {dead or error}"
                    ) from error
                if now - said > _PROGRESS_SECONDS:
                    said = now
                    logger.info("waiting for the server at %s since %.0f s", replica.address, now - start)
            await asyncio.sleep(_FIRST_LOOKS)

    def stop(self) -> None:
        self.loop.stop(self.client.close())

    @property
    def capabilities(self) -> Capabilities:
        """Of the first server that was asked; all must serve the same model, and should run with the same flags."""
        for replica in self.replicas:
            if replica.capabilities is not None:
                return replica.capabilities
        raise ArealError("no server was asked yet")

    def _known(self, replica: Replica) -> Capabilities:
        assert replica.capabilities is not None
        return replica.capabilities

    # -------------------------------------------------------------------------------------------- calls to all

    @property
    def live(self) -> list[Replica]:
        """Servers that answer: those with the current weights, and those that need an update."""
        return [replica for replica in self.replicas if replica.state != "down"]

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
            raise self.nobody()
        limit = timeout or self.options.control_timeout

        async def ask(index: int, replica: Replica) -> Any:
            body = json(index, replica) if callable(json) else json
            return await self.client.call(method, replica.address, path, body=body, params=params, timeout=limit)

        results = await asyncio.gather(
            *(ask(index, replica) for index, replica in enumerate(chosen)), return_exceptions=True
        )
        answers, lost = [], 0
        for replica, result in zip(chosen, results, strict=True):
            if isinstance(result, ServerGone):
                self.drop(replica, str(result))
                lost += 1
            elif isinstance(result, BaseException):
                raise result
            answers.append(None if isinstance(result, BaseException) else result)
        if lost == len(chosen):
            raise self.nobody()
        return answers

    # -------------------------------------------------------------------------------------------- pausing

    def pause(self) -> None:
        """Let no further request start, and stop those that run between two tokens."""
        self.loop.call(self._pause(everywhere=False))

    def pause_servers(self) -> None:
        """After ``pause``: also servers that had nothing to do, before their weights are replaced."""
        self.loop.call(self._pause(everywhere=True))

    async def _pause(self, *, everywhere: bool) -> None:
        self.gate.clear()
        async with self._membership:
            # Of a server that computes nothing there is nothing to stop.
            targets = [r for r in self.live if r not in self._paused and (everywhere or r.attempts)]
            await asyncio.gather(*(self._pause_one(replica) for replica in targets))

    async def _pause_one(self, replica: Replica) -> None:
        capabilities = self._known(replica)
        if not capabilities.pause:
            # It cannot be stopped in the middle: its requests get to their ends.
            await replica.idle.wait()
            return
        mode = "keep" if capabilities.tells_versions else "abort"
        params = {"mode": mode, "clear_cache": str(not self._keep_kv).lower()}
        self._paused.add(replica)
        try:
            await self.client.post(replica.address, "/pause", params=params, timeout=self.options.control_timeout)
        except (ServerGone, ServerError) as error:
            self.drop(replica, str(error))
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
        async with self._membership:
            paused, self._paused = self._paused, set()
            await asyncio.gather(*(self._resume_one(replica) for replica in paused if replica.state != "down"))
            for replica in self.live:
                await self._ask_mode_again(replica)
        self.gate.set()

    async def _ask_mode_again(self, replica: Replica) -> None:
        """Of a server whose first weights did not tell which log-probs it gives."""
        known = self._known(replica)
        if known.logprob_mode is LogprobMode.UNKNOWN:
            mode = await find_mode(
                self.client, replica.address, known.model, known.transport, timeout=self.options.control_timeout
            )
            replica.capabilities = attrs.evolve(known, logprob_mode=mode)

    async def _resume_one(self, replica: Replica) -> None:
        try:
            await self.client.post(replica.address, "/resume", timeout=self.options.control_timeout)
        except (ServerGone, ServerError) as error:
            self.drop(replica, str(error))

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
        self.version = version
        self.updates += updated
        for replica in self.replicas:
            if replica in chosen and replica.state != "down":
                replica.state, replica.version = "ready", version
                replica.updates += 1
            elif replica.state == "ready":
                replica.state = "stale"
        await asyncio.gather(*(self._label(replica) for replica in chosen if replica.state != "down"))
        self._note_changes()

    async def _label(self, replica: Replica) -> None:
        if not self._known(replica).weight_version:
            return
        body = {"new_version": str(replica.version)}
        try:
            await self.client.post(
                replica.address, "/update_weight_version", body=body, timeout=self.options.control_timeout
            )
        except (ServerGone, ServerError) as error:
            self.drop(replica, str(error))

    # -------------------------------------------------------------------------------------------- health

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.options.health_interval)
            try:
                await asyncio.gather(*(self.check(replica) for replica in self.replicas))
            except Exception:
                logger.exception("the health check failed")

    async def check(self, replica: Replica) -> bool:
        """Look whether a server lives: drop it, or take it back. Those who ask at the same time share one look."""
        task = self._checks.get(replica)
        if task is None:
            task = self._checks[replica] = asyncio.create_task(self._check(replica))
            task.add_done_callback(lambda _: self._checks.pop(replica, None))
        return await asyncio.shield(task)

    async def _check(self, replica: Replica) -> bool:
        try:
            await self.client.get(replica.address, "/health", timeout=self.options.health_timeout)
        except (ServerGone, ServerError, RequestRefused) as error:
            self.drop(replica, str(error))
            return False
        if replica.state == "down" or (replica.state == "stale" and self._bring_up_to_date is not None):
            await self._take_back(replica)
        return replica.state == "ready"

    async def _take_back(self, replica: Replica) -> None:
        async with self._membership:
            # While weights are replaced nobody joins; the next look is soon enough.
            if not self.gate.is_set():
                return
            was_down = replica.state == "down"
            try:
                if was_down:
                    await self._join(replica)
                    logger.info("%s is back, with weights of version %s", replica.address, replica.version)
                if replica.state == "stale" and self._bring_up_to_date is not None:
                    update = self._bring_up_to_date
                    if await asyncio.to_thread(update, replica):
                        replica.state, replica.version = "ready", self.version
                        await self._label(replica)
                        logger.info("%s has the weights of version %d", replica.address, self.version)
            except (ArealError, KeyError, TypeError) as error:
                if was_down:
                    replica.state, replica.reason = "down", f"it came back, and cannot be used: {error}"
            self._note_changes()

    async def _join(self, replica: Replica) -> None:
        """Ask a server what it is, and what weights it has."""
        options = self.options
        if await is_paused(self.client, replica.address, options.control_timeout):
            logger.warning("%s was paused, perhaps by a run that died: it goes on now", replica.address)
            await self.client.post(replica.address, "/resume", timeout=options.control_timeout)
        found = await discover(
            self.client,
            replica.address,
            wanted=options.transport,
            model=options.model_name,
            timeout=options.control_timeout,
        )
        for other in self.replicas:
            known = other.capabilities
            if known is not None and (known.model, known.context) != (found.model, found.context):
                raise BadInputError(
                    f"rollout.addresses: {replica.address} serves {found.model!r} with a context of {found.context}, "
                    f"{other.address} {known.model!r} with {known.context}. All must serve the same model alike."
                )
        replica.capabilities = found
        replica.updates += 1
        replica.data.clear()
        # Before the first update what a server has loaded is what the run begins with.
        current = self.updates == 0 or found.label == str(self.version)
        if self.updates == 0 and found.label not in (None, "default", str(self.version)):
            logger.warning(
                "%s has weights of version %r, which another run gave it: they are not those of its model folder.",
                replica.address,
                found.label,
            )
        replica.state = "ready" if current else "stale"
        replica.version = self.version if current else None
        if current:
            await self._label(replica)
        self._note_changes()

    def drop(self, replica: Replica, reason: str) -> None:
        """Take a server out of use until a health check finds it well."""
        if replica.state == "down":
            return
        dead = self._why_dead(replica.address) if self._why_dead is not None else None
        count = len(replica.attempts)
        logger.warning("dropped %s with %d requests: %s", replica.address, count, dead or reason)
        self.drops += 1
        self._paused.discard(replica)
        self.router.drop(replica, dead or reason)
        self._note_changes()

    def _note_changes(self) -> None:
        if self.router.ready:
            self._up.set()
        else:
            self._up.clear()

    async def acquire(self, tokens: int, session: str | None, avoid: set[Replica]) -> Replica:
        """The server for a request; waits while none is ready.

        Raises:
            ArealError: if none is for ``rollout.vllm.wait_for_server`` seconds.
        """
        deadline = time.monotonic() + self.options.wait_for_server
        while True:
            replica = self.router.choose(tokens, session, avoid)
            if replica is not None:
                return replica
            try:
                await asyncio.wait_for(self._up.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise self.nobody() from None

    def nobody(self) -> ArealError:
        """The error that says why no server can be used."""
        states = "; ".join(
            f"{r.address} {'has old weights' if r.state == 'stale' else f'is down ({r.reason})'}" for r in self.replicas
        )
        return ArealError(f"no vLLM server is left: {states}")


def _allow_open_files(connections: int) -> None:
    """Raise the soft limit of open files, often 1,024, as far as ``connections`` need it and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
