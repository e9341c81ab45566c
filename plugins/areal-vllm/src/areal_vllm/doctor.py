"""What ``areal doctor CONFIG`` says of vLLM: the package where servers are started, or the servers that run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from areal_core.api.check_api import Check
from areal_core.api.configs import InferenceEngineConfig
from areal_core.errors import ArealError
from areal_vllm.capabilities import Capabilities, discover
from areal_vllm.client import Client
from areal_vllm.command import API_KEY
from areal_vllm.config import VLLMConfig

_SECONDS = 20.0
#: Without importing vLLM, which takes many seconds. Its builds have distributions of several names.
_FIND = (
    "import importlib.metadata as m, importlib.util as u\n"
    "names = m.packages_distributions().get('vllm', []) if u.find_spec('vllm') else []\n"
    "print(' '.join(f'{n}=={m.version(n)}' for n in dict.fromkeys(names)))"
)


def diagnose(config: InferenceEngineConfig, options: VLLMConfig) -> list[Check]:
    if not config.addresses:
        return [_package(options)]
    return asyncio.run(_servers(config.addresses, options))


def _package(options: VLLMConfig) -> Check:
    python = options.python or sys.executable
    try:
        found = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, timeout=_SECONDS, check=False)
        problem = found.stderr.strip().splitlines()[-1:] if found.returncode else []
        version = found.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem, version = [str(error)], ""
    if version:
        return Check(name="vllm", status="ok", detail=f"{version}, of {python}")
    return Check(
        name="vllm",
        status="error",
        detail=f"not found by {python}{f': {problem[0]}' if problem else ''}",
        fix="Install vllm into an environment, its own if need be, and name its interpreter in rollout.vllm.python; or "
        "name servers that run in rollout.addresses.",
    )


async def _servers(addresses: list[str], options: VLLMConfig) -> list[Check]:
    client = Client(max_connections=8, connect_timeout=options.connect_timeout, api_key=os.environ.get(API_KEY))
    try:
        return list(await asyncio.gather(*(_server(client, address, options) for address in addresses)))
    finally:
        await client.close()


async def _server(client: Client, address: str, options: VLLMConfig) -> Check:
    name = f"vllm {address}"
    try:
        await client.get(address, "/health", timeout=_SECONDS)
        found = await discover(client, address, wanted=options.transport, model=options.model_name, timeout=_SECONDS)
    except ArealError as error:
        return Check(
            name=name, status="error", detail=str(error), fix="Start the server, or correct rollout.addresses."
        )
    return describe(name, found)


def describe(name: str, found: Capabilities) -> Check:
    """The row of a server: a warning where a run can use it for some things only."""
    absent = ", ".join(found.missing)
    lacks = found.shortcomings
    return Check(
        name=name,
        status="warning" if lacks else "ok",
        detail=f"{found.describe()}{f'; has no {absent}' if absent else ''}",
        fix=f"{'; '.join(lacks)}." if lacks else "",
    )
