"""What a server offers, found by asking it: never by its version."""

from __future__ import annotations

from typing import Any

import attrs

from areal_core.errors import ArealError, BadInputError
from areal_vllm.client import Client, RequestRefused, ServerError, ServerGone
from areal_vllm.logprobs import LogprobMode, find_mode
from areal_vllm.protocol import PATHS, SPEAKERS, Call, Part, Transport, sampling_params

#: What each part of a run needs: its name here, the paths, and what is lost without.
_OFFERS: dict[str, tuple[tuple[str, ...], str]] = {
    "generate": ((PATHS["generate"],), "versions of single tokens (start it with --enable-scale-out)"),
    "completions": ((PATHS["completions"],), "the other way to generate"),
    "pause": (("/pause", "/resume"), "pausing in the middle of requests (VLLM_SERVER_DEV_MODE=1)"),
    "abort": (("/abort_requests",), "aborting by name (VLLM_SERVER_DEV_MODE=1)"),
    "weight_version": (("/update_weight_version", "/weight_info"), "labels of weights (VLLM_SERVER_DEV_MODE=1)"),
    "reset_prefix_cache": (("/reset_prefix_cache",), "clearing the prefix cache (VLLM_SERVER_DEV_MODE=1)"),
    "collective_rpc": (("/collective_rpc",), "weight updates from disk (VLLM_SERVER_DEV_MODE=1)"),
    "native_transfer": (
        ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        "weight updates over a process group (--weight-transfer-config)",
    ),
    "lora_loading": (
        ("/v1/load_lora_adapter",),
        "weight updates by adapters (--enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
    ),
    "sleep": (("/sleep", "/wake_up"), "offloading (VLLM_SERVER_DEV_MODE=1, --enable-sleep-mode)"),
}


#: What has no other way.
_NEEDED = ("pause", "weight_version", "collective_rpc")


@attrs.frozen(kw_only=True)
class Capabilities:
    """One server, as it described itself.

    Attributes:
        version: of vLLM, for people only.
        model: the name that requests carry.
        root: what the server loaded the model from; empty where it does not say.
        context: most tokens of prompt and completion.
        transport: the way to generate that is used.
        streams: whether it sends partial answers.
        logprob_mode: which log-probs it gives.
        label: of its weights; None where it has none.
        offered: the names in ``_OFFERS`` that it has.
    """

    version: str
    model: str
    root: str
    context: int
    transport: Transport
    streams: bool
    logprob_mode: LogprobMode
    label: str | None
    offered: frozenset[str]

    def __getattr__(self, name: str) -> bool:
        # Only names that are no attributes come here: ``capabilities.pause``, ``capabilities.collective_rpc``, ...
        if name in _OFFERS:
            return name in self.offered
        raise AttributeError(name)

    @property
    def tells_versions(self) -> bool:
        """Whether an answer says which weights made which token."""
        return SPEAKERS[self.transport].tells_versions and "weight_version" in self.offered

    @property
    def missing(self) -> dict[str, str]:
        """What it does not have, and what that means."""
        return {name: lost for name, (_, lost) in _OFFERS.items() if name not in self.offered}

    @property
    def shortcomings(self) -> list[str]:
        """What a run on this server cannot have, for people."""
        lacks = [f"it has no {lost}" for name, lost in self.missing.items() if name in _NEEDED]
        if self.logprob_mode is LogprobMode.RAW:
            lacks.append("its log-probs are right at temperature 1 only (--logprobs-mode processed_logprobs: at any)")
        elif self.logprob_mode is LogprobMode.PROCESSED:
            lacks.append("its log-probs are right without top-k, top-p, min-p, penalty and minimum length only")
        return lacks

    def describe(self) -> str:
        """One line for the log."""
        has = ", ".join(name for name in _OFFERS if name in self.offered)
        return (
            f"vLLM {self.version}, model {self.model!r}, context {self.context}, by {PATHS[self.transport]}, log-probs "
            f"{self.logprob_mode.value}; offers {has}"
        )


async def discover(
    client: Client, address: str, *, wanted: str = "auto", model: str | None = None, timeout: float
) -> Capabilities:
    """Ask a server that accepts connections.

    Args:
        wanted: the transport, or ``auto``.
        model: the served name; None: the only one.

    Raises:
        ServerGone: if it does not answer.
        BadInputError, ArealError: if it answers, and cannot be used.
    """
    paths = await _paths(client, address, timeout)
    offered = frozenset(name for name, (needed, _) in _OFFERS.items() if paths.issuperset(needed))
    card = await _model_card(client, address, model, timeout)
    name = str(card["id"])
    context = card.get("max_model_len")
    if not isinstance(context, int):
        raise ArealError(f"{address} does not say how many tokens fit its context (max_model_len in /v1/models)")
    transport, streams = await _transport(client, address, name, offered, wanted, timeout)
    version = await _optional(client, address, "/version", timeout)
    label = None
    if "weight_version" in offered:
        info = await client.get(address, "/weight_info", timeout=timeout)
        label = str(info["weight_version"])
    return Capabilities(
        version=str((version or {}).get("version", "of unknown version")),
        model=name,
        root=str(card.get("root") or ""),
        context=context,
        transport=transport,
        streams=streams,
        logprob_mode=await find_mode(client, address, name, transport, timeout=timeout),
        label=label,
        offered=offered,
    )


async def is_paused(client: Client, address: str, timeout: float) -> bool:
    """Whether it says so; a paused server answers no request to generate."""
    answer = await _optional(client, address, "/is_paused", timeout)
    return isinstance(answer, dict) and answer.get("is_paused") is True


async def _optional(client: Client, address: str, path: str, timeout: float) -> Any:
    try:
        return await client.get(address, path, timeout=timeout)
    except (RequestRefused, ServerError):
        return None


async def _paths(client: Client, address: str, timeout: float) -> set[str]:
    """The server's routes by its OpenAPI description; by trying each where it publishes none."""
    described = await _optional(client, address, "/openapi.json", timeout)
    if isinstance(described, dict) and described.get("paths"):
        return set(described["paths"])
    found = set()
    for needed, _ in _OFFERS.values():
        for path in needed:
            # The wrong method has no effect: a route that exists answers 405, another 404.
            try:
                await client.call("OPTIONS", address, path, timeout=timeout)
            except RequestRefused as error:
                if error.status != 405:
                    continue
            except ServerError:
                continue
            found.add(path)
    return found


async def _model_card(client: Client, address: str, model: str | None, timeout: float) -> dict[str, Any]:
    try:
        answer = await client.get(address, "/v1/models", timeout=timeout)
    except RequestRefused as error:
        if error.status in (401, 403):
            raise BadInputError(f"{error}. Set the environment variable VLLM_API_KEY to the server's key.") from error
        raise BadInputError(f"{address} is no vLLM server: {error}") from error
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not cards:
        raise BadInputError(f"{address} is no vLLM server: /v1/models names no model")
    if model is not None:
        for card in cards:
            if card.get("id") == model:
                return dict(card)
        names = ", ".join(repr(card.get("id")) for card in cards)
        raise BadInputError(f"rollout.vllm.model_name: {address} has no model {model!r}; it serves {names}.")
    # Adapters have a parent; aliases of the one model come after its first name.
    return dict(next((card for card in cards if not card.get("parent")), cards[0]))


async def _transport(
    client: Client, address: str, model: str, offered: frozenset[str], wanted: str, timeout: float
) -> tuple[Transport, bool]:
    """The first way to generate that works, and whether it streams."""
    order: list[Transport] = ["generate", "completions"]
    if wanted != "auto":
        order = [name for name in order if name == wanted]
    problems = []
    for name in order:
        if name not in offered:
            problems.append(f"{PATHS[name]} is not there")
            continue
        try:
            return name, await _try(client, address, model, name, timeout)
        except (RequestRefused, ServerError) as error:
            problems.append(str(error))
    key = "rollout.addresses" if wanted == "auto" else "rollout.vllm.transport"
    raise BadInputError(f"{key}: {address} cannot generate from tokens: {'; '.join(problems)}.")


async def _try(client: Client, address: str, model: str, transport: Transport, timeout: float) -> bool:
    from areal_core.api.io_struct import GenerationHyperparameters

    params = sampling_params(GenerationHyperparameters(), max_new_tokens=2, stop_token_ids=[], seed=0)
    params["ignore_eos"] = True
    call = Call(model=model, prompt=[1, 2], params=params, request_id="areal-connect", timeout=timeout)
    speaker = SPEAKERS[transport]
    await speaker.run(client, address, call, Part())
    try:
        await speaker.run(client, address, attrs.evolve(call, stream_interval=1), Part())
    except (RequestRefused, ServerError, ServerGone):
        return False
    return True
