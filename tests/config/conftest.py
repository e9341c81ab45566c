"""A plugin manager whose plugins are modules made here, so that tests do not depend on what is installed."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import attrs
import pytest

from areal_core import Registration, hookimpl
from areal_core.config.fields import option
from areal_core.plugins import PluginManager
from areal_core.plugins.discovery import EntryPoint

PLUGIN_MODULE = "config_test_plugin"


@attrs.define(kw_only=True)
class EngineOptions:
    """Options of a train engine."""

    shards: int = option(1, "Shards.", ge=1)
    flavour: str = option("plain", "Flavour.")


@attrs.define(kw_only=True)
class RewardOptions:
    answer: str = option(help="The right answer.")
    weights: dict[str, float] = option(factory=dict, help="Weights.")


class TunedAlgorithm:
    presets: ClassVar = {"actor.eps_clip": 0.3, "actor.adv_norm.std_level": None}


class WrongAlgorithm:
    presets: ClassVar = {"actor.eps_clipp": 0.3}


def _registration(name: str, target: str, config: str | None = None) -> Registration:
    return Registration(
        name=name,
        target=f"{PLUGIN_MODULE}:{target}",
        description=f"The {name}",
        config=config and f"{PLUGIN_MODULE}:{config}",
    )


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """Knows train engines ``fake`` and ``bare``, inference engine ``local``, reward ``exact``, dataset ``rows``, ..."""
    module: Any = types.ModuleType(PLUGIN_MODULE)
    module.AREAL_API_VERSION = "1.0"
    for cls in (EngineOptions, RewardOptions, TunedAlgorithm, WrongAlgorithm):
        setattr(module, cls.__name__, cls)

    @hookimpl
    def areal_train_engines() -> list[Registration]:
        return [_registration("fake", "EngineOptions", "EngineOptions"), _registration("bare", "EngineOptions")]

    @hookimpl
    def areal_inference_engines() -> list[Registration]:
        return [_registration("local", "EngineOptions")]

    @hookimpl
    def areal_rewards() -> list[Registration]:
        return [_registration("exact", "RewardOptions", "RewardOptions"), _registration("free", "RewardOptions")]

    @hookimpl
    def areal_datasets() -> list[Registration]:
        return [_registration("rows", "RewardOptions")]

    @hookimpl
    def areal_algorithms() -> list[Registration]:
        return [_registration("tuned", "TunedAlgorithm"), _registration("wrong", "WrongAlgorithm")]

    for hook in (areal_train_engines, areal_inference_engines, areal_rewards, areal_datasets, areal_algorithms):
        setattr(module, hook.__name__, hook)
    monkeypatch.setitem(sys.modules, PLUGIN_MODULE, module)
    monkeypatch.delenv("AREAL_PLUGINS", raising=False)
    monkeypatch.delenv("AREAL_DISABLE_PLUGINS", raising=False)
    return PluginManager(
        [
            EntryPoint("core", "areal_core.builtin", "areal-core", "0"),
            EntryPoint("config-test", PLUGIN_MODULE, "areal-config-test", "1.0"),
        ]
    )
