"""The inference engine that talks to vLLM servers."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from areal_core.errors import ArealError, BadInputError
from areal_vllm import logprobs, truncation
from areal_vllm.command import API_KEY
from areal_vllm.config import VLLMConfig
from areal_vllm.eos import as_ids, model_eos_ids
from areal_vllm.fleet import Fleet
from areal_vllm.requests import Generator, Job
from areal_vllm.stats import Stats

if TYPE_CHECKING:
    from areal_core.api.check_api import Check
    from areal_vllm.capabilities import Capabilities
    from areal_vllm.routing import Replica


_ADDRESS = re.compile(r"https?://[^\s/]+(/\S*)?|(\[[0-9a-fA-F:]+\]|[^\s/:\[\]]+):\d{1,5}")


class VLLMEngine(InferenceEngine):
    """Generates by vLLM servers: those of ``rollout.addresses``, or as many as ``rollout.backend`` says are started.

    All HTTP happens in a thread of its own; ``agenerate`` may be called from any event loop.

    Raises:
        BadInputError: if the backend string has sizes that vLLM has not, or they do not fit ``rollout.addresses``.
    """

    takes_adapters: ClassVar[bool] = True
    returns_supports: ClassVar[bool] = True

    def __init__(self, config: InferenceEngineConfig) -> None:
        mesh = config.parsed_backend.parallel
        for name in ("context", "expert", "expert_tensor"):
            if getattr(mesh, name) != 1:
                raise BadInputError(
                    f"rollout.backend: {config.backend!r} has a size for {name}, which vLLM takes from "
                    "rollout.vllm.args. Use d (replicas), t (tensor parallel) and p (pipeline parallel)."
                )
        if config.addresses and mesh.data not in (1, len(config.addresses)):
            raise BadInputError(
                f"rollout.backend: {config.backend!r} means {mesh.data} servers, but rollout.addresses names "
                f"{len(config.addresses)}. Leave the sizes out: write 'vllm'."
            )
        _check_addresses(config.addresses)
        self.config = config
        self.options: VLLMConfig = config.options if isinstance(config.options, VLLMConfig) else VLLMConfig()
        self.stats = Stats()
        # What the servers' weights are of; see weight_update.
        self.last_update: WeightUpdateMeta | None = None
        self._launched: Any = None
        self._fleet: Fleet | None = None
        self._generator: Generator | None = None
        self._model_path = ""
        self._tokenizer: Any = None
        self._eos_ids: list[int] = []
        self._version = 0

    @classmethod
    def diagnose(cls, config: InferenceEngineConfig) -> list[Check]:
        from areal_vllm.doctor import diagnose

        return diagnose(config, config.options if isinstance(config.options, VLLMConfig) else VLLMConfig())

    # ------------------------------------------------------------------------------------------- life

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Start or find the servers, and ask them what they offer.

        Raises:
            BadInputError: if a server cannot be used.
            ArealError: if one is not ready within ``rollout.setup_timeout``.
        """
        if self._fleet is not None:
            raise ArealError("the engine is running already; destroy() it first")
        self._model_path, self._tokenizer = str(model_path), tokenizer
        self._eos_ids = model_eos_ids(self._model_path, trust_remote_code=self.config.trust_remote_code)
        atexit.register(_destroy_if_alive, weakref.ref(self))
        try:
            addresses = list(self.config.addresses) or self.launch_server()
            self._fleet = Fleet(
                addresses,
                self.options,
                setup_timeout=self.config.setup_timeout,
                keep_kv=self.config.weight_update_keep_kv,
                why_dead=getattr(self._launched, "why_dead", None),
                bring_up_to_date=self._bring_up_to_date,
            )
            self._fleet.members.version = self._version
            self._fleet.connect()
        except BaseException:
            self.destroy()
            raise
        self._generator = Generator(
            self._fleet.members, self.options, self.stats, keep_kv=self.config.weight_update_keep_kv
        )

    def destroy(self) -> None:
        fleet, self._fleet = self._fleet, None
        self._generator = None
        if fleet is not None:
            fleet.stop()
        self.teardown_server()

    @property
    def fleet(self) -> Fleet:
        """The servers. For weight updates and tests."""
        if self._fleet is None:
            raise ArealError("the engine is not running: it was not initialised, or destroyed")
        return self._fleet

    @property
    def capabilities(self) -> Capabilities:
        return self.fleet.capabilities

    @property
    def model_path(self) -> str:
        return self._model_path

    @property
    def request_model(self) -> str | None:
        """The name that requests carry, e.g. an adapter's; None: that of the served model."""
        return self.fleet.members.request_model

    @request_model.setter
    def request_model(self, name: str | None) -> None:
        self.fleet.members.request_model = name

    # ------------------------------------------------------------------------------------------- generation

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        fleet, generator = self.fleet, self._generator
        if generator is None:
            raise ArealError("the engine is not running: it was not initialised, or destroyed")
        job = self._accept(request, fleet)
        future = fleet.loop.submit(generator.run(job))
        try:
            return await asyncio.wrap_future(future)
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            task = asyncio.current_task()
            if self._fleet is fleet or (task is not None and task.cancelling()):
                raise
            # The engine was destroyed, and with it what ran.
            return job.response("abort")

    def _accept(self, request: ModelRequest, fleet: Fleet) -> Job:
        """Check a request against the servers.

        Raises:
            BadInputError: if it can never be answered.
        """
        gconfig, prompt, capabilities = request.gconfig, request.input_ids, fleet.capabilities
        if gconfig.n_samples != 1:
            raise BadInputError(f"gconfig.n_samples is {gconfig.n_samples}: send one request per sample")
        if request.image_data:
            raise BadInputError("image_data: the vllm engine sends no images yet. Use rollout.backend=local.")
        if request.return_supports:
            truncation.check(request)
        if not prompt:
            raise BadInputError("input_ids is empty: a prompt needs at least one token")
        if min(prompt) < 0:
            raise BadInputError("input_ids holds a negative id")
        most = request.room_for_completion(capabilities.context, "the servers' context")
        for replica in fleet.replicas:
            if replica.capabilities is not None:
                mode = replica.capabilities.logprob_mode
                logprobs.check(mode, gconfig, replica.address, supports=request.return_supports)
        tokenizer = request.tokenizer if request.tokenizer is not None else self._tokenizer
        ends = [*gconfig.stop_token_ids, *self._eos_ids, *as_ids(getattr(tokenizer, "eos_token_id", None))]
        ends = list(dict.fromkeys(ends))
        return Job(
            request=request,
            max_new_tokens=most,
            stop_token_ids=list(dict.fromkeys(gconfig.stop_token_ids)) if gconfig.ignore_eos else ends,
            # vLLM bans EOS before the minimum length even where it would not stop there.
            banned_ids=ends if gconfig.min_new_tokens else [],
            timeout=self.config.request_timeout,
        )

    def pause_generation(self) -> None:
        """No request starts, and those that run stop between two tokens.

        Servers that tell the version of each token freeze them. Of others the partial answers are taken, and go on from
        there after ``continue_generation``; servers that cannot be paused finish what they have.
        """
        self.fleet.pause()

    def continue_generation(self) -> None:
        self.fleet.resume()

    # ------------------------------------------------------------------------------------------- weights

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        from areal_vllm import weight_update

        self.fleet.pause_servers()
        weight_update.update_from_disk(self, meta)

    def weight_receivers(self) -> tuple[str, ...]:
        from areal_vllm import weight_update

        return weight_update.receivers(self)

    def init_weights_update_group(self, meta: WeightUpdateMeta) -> None:
        from areal_vllm import weight_update

        weight_update.init_group(self, meta)

    def update_weights_from_distributed(
        self,
        meta: WeightUpdateMeta,
        specs: list[tuple[str, list[int], str]],
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        from areal_vllm import weight_update

        self.fleet.pause_servers()
        weight_update.update_from_distributed(self, meta, specs, on_ready)

    def weights_updated(self, version: int, replicas: list[Replica] | None = None) -> None:
        """Servers have new weights: all live ones, or ``replicas`` alone, so that the others get no requests."""
        self.fleet.set_version(version, replicas)
        self._version = version

    def _bring_up_to_date(self, replica: Replica) -> bool:
        from areal_vllm import weight_update

        return bool(weight_update.bring_up_to_date(self, replica))

    def set_version(self, version: int) -> None:
        if self._fleet is not None and self._fleet.members.version != version:
            self._fleet.set_version(version, updated=False)
        self._version = version

    def get_version(self) -> int:
        return self._version

    # ------------------------------------------------------------------------------------------- servers

    def launch_server(self, server_args: Mapping[str, Any] | None = None) -> list[str]:
        """Start the servers of ``rollout.backend``, and wait until they are ready.

        Args:
            server_args: flags beside those of ``rollout.vllm.args``.
        """
        from areal_vllm import servers

        self._launched = servers.launch(self.config, self._model_path, server_args)
        return list(self._launched.addresses)

    def teardown_server(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.stop()

    def offload(self) -> None:
        """Put the servers to sleep, where they run with ``--enable-sleep-mode``: their weights go to the host."""
        self._sleep("/sleep", {"level": "1"})

    def onload(self) -> None:
        self._sleep("/wake_up", None)

    def _sleep(self, path: str, params: dict[str, str] | None) -> None:
        if self.capabilities.sleep:
            self.fleet.post_all(path, params=params)

    # ------------------------------------------------------------------------------------------- statistics

    def export_stats(self) -> dict[str, float]:
        """Counters since the last call, and gauges; see ``areal_vllm.stats.Stats``."""
        if self._fleet is None:
            return {}
        gauges = {
            "running": float(sum(len(replica.attempts) for replica in self._fleet.replicas)),
            "servers": float(len(self._fleet.members.router.ready)),
        }
        return {**self.stats.export(dropped_servers=self._fleet.members.drops), **gauges}


def _check_addresses(addresses: list[str]) -> None:
    for index, address in enumerate(addresses):
        if "@" in address:
            raise BadInputError(
                f"rollout.addresses[{index}] holds a user or a password, which would stand in logs and in the run's "
                f"configuration. Leave it out; for a server that wants a key set the environment variable {API_KEY}."
            )
        if not _ADDRESS.fullmatch(address):
            raise BadInputError(
                f"rollout.addresses[{index}]: {address!r} names no server. Write host:port, or a URL such as "
                "https://host/prefix; the paths of its API, such as /v1, are added."
            )
        if address in addresses[:index]:
            raise BadInputError(f"rollout.addresses[{index}]: {address!r} stands twice.")


def _destroy_if_alive(reference: weakref.ref[VLLMEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.destroy()
