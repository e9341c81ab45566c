"""Which servers there are and how they are: joining, watching, dropping, taking back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Sequence

from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_vllm.capabilities import Capabilities, discover, is_paused
from areal_vllm.client import Client, RequestRefused, ServerError, ServerGone
from areal_vllm.command import API_KEY
from areal_vllm.config import VLLMConfig
from areal_vllm.routing import Replica, Router

_FIRST_LOOKS = 0.5
_OTHER_FILES = 512
_PROGRESS_SECONDS = 10.0

logger = getLogger("VLLMEngine")


class Membership:
    """The servers of a run. Everything here runs in one event loop, in which it is also made.

    Args:
        why_dead: what is known of the process behind an address that does not answer.
        bring_up_to_date: gives a server that came back the current weights; False if it cannot. Blocking.

    Attributes:
        gate: closed while no request may start.
        lock: held while a server joins, and while the servers are being paused.
        paused: the servers that were told to pause.
        version: of the current weights.
        updates: how often weights were replaced.
        drops: how often a server was dropped.
        request_model: the name that requests carry, e.g. an adapter's; None: that of the served model.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: VLLMConfig,
        *,
        why_dead: Callable[[str], str | None] | None = None,
        bring_up_to_date: Callable[[Replica], bool] | None = None,
    ) -> None:
        self.options = options
        self.replicas = [Replica(address) for address in addresses]
        self.router = Router(self.replicas)
        _allow_open_files(len(addresses) * options.max_connections)
        self.client = Client(
            max_connections=options.max_connections,
            connect_timeout=options.connect_timeout,
            api_key=os.environ.get(API_KEY),
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.lock = asyncio.Lock()
        self.paused: set[Replica] = set()
        self.version = self.updates = self.drops = 0
        self.request_model: str | None = None
        self.bring_up_to_date = bring_up_to_date
        self._why_dead = why_dead
        self._up = asyncio.Event()
        self._checks: dict[Replica, asyncio.Task[bool]] = {}
        self._watcher: asyncio.Task[None] | None = None

    @property
    def live(self) -> list[Replica]:
        """Servers that answer: those with the current weights, and those that need an update."""
        return [replica for replica in self.replicas if replica.state != "down"]

    # -------------------------------------------------------------------------------------------- joining

    async def connect(self, setup_timeout: float) -> None:
        """Wait until every server is ready, and ask each what it offers; then watch them."""
        deadline = time.monotonic() + setup_timeout
        await asyncio.gather(*(self._wait_until_ready(r, deadline, setup_timeout) for r in self.replicas))
        for replica in self.replicas:
            known = await self._join(replica, self.options.control_timeout)
            logger.info("%s: %s", replica.address, known.describe())
            for lack in known.shortcomings:
                logger.info("%s: %s", replica.address, lack)
        self._watcher = asyncio.create_task(self._watch())

    async def _wait_until_ready(self, replica: Replica, deadline: float, setup_timeout: float) -> None:
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
                    waited = "" if dead is not None else f" after {setup_timeout:g} s (rollout.setup_timeout)"
                    raise ArealError(
                        f"the vLLM server at {replica.address} is not ready{waited}: {dead or error}"
                    ) from error
                if now - said > _PROGRESS_SECONDS:
                    said = now
                    logger.info("waiting for the server at %s since %.0f s", replica.address, now - start)
            await asyncio.sleep(_FIRST_LOOKS)

    async def _join(self, replica: Replica, timeout: float) -> Capabilities:
        """Ask a server what it is, and what weights it has."""
        options = self.options
        if await is_paused(self.client, replica.address, timeout):
            logger.warning("%s was paused, perhaps by a run that died: it goes on now", replica.address)
            await self.client.post(replica.address, "/resume", timeout=timeout)
        found = await discover(
            self.client, replica.address, wanted=options.transport, model=options.model_name, timeout=timeout
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
            await self.label(replica)
        self.note_changes()
        return found

    async def label(self, replica: Replica) -> None:
        """Tell a server the version of its weights, which it then writes beside its tokens."""
        if replica.capabilities is None or not replica.capabilities.weight_version:
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
        # Each by itself: a look at one may last as long as it takes to load weights.
        await asyncio.gather(*(self._watch_one(replica) for replica in self.replicas))

    async def _watch_one(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self.options.health_interval)
            try:
                await self.check(replica)
            except Exception:
                logger.exception("the health check of %s failed", replica.address)

    async def check(self, replica: Replica) -> bool:
        """Look whether a server lives: drop it, or take it back. Those who ask at the same time share one look."""
        return await asyncio.shield(self.look(replica))

    def look(self, replica: Replica) -> asyncio.Task[bool]:
        """Begin what ``check`` waits for."""
        task = self._checks.get(replica)
        if task is None:
            task = self._checks[replica] = asyncio.create_task(self._check(replica))
            task.add_done_callback(lambda _: self._checks.pop(replica, None))
        return task

    async def _check(self, replica: Replica) -> bool:
        try:
            await self.client.get(replica.address, "/health", timeout=self.options.health_timeout)
        except (ServerGone, ServerError, RequestRefused) as error:
            self.drop(replica, str(error))
            return False
        if replica.state == "down" or (replica.state == "stale" and self.bring_up_to_date is not None):
            await self._take_back(replica)
        return replica.state == "ready"

    async def _take_back(self, replica: Replica) -> None:
        async with self.lock:
            # While weights are replaced nobody joins; the next look is soon enough.
            if not self.gate.is_set():
                return
            was_down = replica.state == "down"
            try:
                if was_down:
                    await self._join(replica, self.options.health_timeout)
                    logger.info("%s is back, with weights of version %s", replica.address, replica.version)
                if replica.state == "stale" and self.bring_up_to_date is not None:
                    update = self.bring_up_to_date
                    if await asyncio.to_thread(update, replica):
                        replica.state, replica.version = "ready", self.version
                        await self.label(replica)
                        logger.info("%s has the weights of version %d", replica.address, self.version)
            except (ArealError, KeyError, TypeError) as error:
                reason = f"it came back, and cannot be used: {error}"
                if reason != replica.reason:
                    logger.warning("%s: %s", replica.address, reason)
                replica.reason = reason
                if was_down:
                    replica.state = "down"
            self.note_changes()

    def drop(self, replica: Replica, reason: str) -> None:
        """Take a server out of use until a health check finds it well."""
        if replica.state == "down":
            return
        dead = self._why_dead(replica.address) if self._why_dead is not None else None
        count = len(replica.attempts)
        logger.warning("dropped %s with %d requests: %s", replica.address, count, dead or reason)
        self.drops += 1
        self.paused.discard(replica)
        self.router.drop(replica, dead or reason)
        self.note_changes()

    def note_changes(self) -> None:
        """After a change of states: wake up requests that wait for a server."""
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
