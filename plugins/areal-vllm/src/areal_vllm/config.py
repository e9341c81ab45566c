"""Options of the vLLM engine: ``rollout.vllm.*``."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from areal_core.config.fields import option


@attrs.define(kw_only=True)
class VLLMConfig:
    """vLLM servers: those of `rollout.addresses`, or else as many as `rollout.backend` says are started."""

    args: dict[str, Any] = option(
        factory=dict,
        help="Flags of the servers that are started, e.g. {max-num-seqs: 64, enforce-eager: true}; they replace ours.",
    )
    env: dict[str, str] = option(factory=dict, help="Further environment variables of the servers that are started.")
    python: str | None = option(None, "Interpreter that has vLLM installed; None: the one that runs the trainer.")
    host: str = option("127.0.0.1", "Address that the servers which are started listen on.")
    port: int | None = option(None, "Port of the first server that is started, counted up; None: free ones.", ge=1)
    max_lora_rank: int | None = option(
        None, "Start servers that take LoRA adapters up to this rank (actor.weight_update.type: lora).", ge=1
    )
    model_name: str | None = option(None, "Name of the model in requests; None: the one that the server reports.")
    transport: Literal["auto", "generate", "completions"] = option(
        "auto", "How tokens travel: by /inference/v1/generate, by /v1/completions, or the first that a server has."
    )
    stream_interval: int | None = option(
        64,
        "Tokens after which a server sends what it has of an answer, for another to go on from if it dies; null: at "
        "the end only.",
        ge=1,
    )
    max_connections: int = option(1024, "Most connections to one server; further requests wait here.", ge=1)
    connect_timeout: float = option(10.0, "Seconds until a server must accept a connection.", gt=0)
    control_timeout: float = option(
        120.0, "Seconds until a server must have paused, resumed or answered a query.", gt=0
    )
    update_timeout: float = option(600.0, "Seconds until a server must have taken new weights.", gt=0)
    health_interval: float = option(5.0, "Seconds between two looks at whether a server lives.", gt=0)
    health_timeout: float = option(30.0, "Seconds until a look counts as failed.", gt=0)
    max_retries: int = option(3, "How often a request is sent again after its server failed.", ge=0)
    wait_for_server: float = option(
        120.0, "Seconds that requests wait for a server to come back when none is left.", ge=0
    )
