"""The plugin manager: names to implementations, and the relay of lifecycle hooks."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs
import pluggy

from areal_core.errors import PluginError, did_you_mean
from areal_core.plugins.discovery import EntryPoint, canonical, discover
from areal_core.plugins.inspection import REGISTRIES, Entry, PluginInfo, inspect_plugin, new_pluggy_manager
from areal_core.plugins.loading import describe, import_path, is_import_path
from areal_core.registration import Registration


class PluginManager:
    """Finds plugins on first use, and keeps them.

    A plugin that cannot be used never raises here; using one of its names does.

    Args:
        entry_points: what to load instead of what is installed, for tests.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._entry_points = None if entry_points is None else list(entry_points)
        self._pluggy = new_pluggy_manager()
        self._plugins: list[PluginInfo] | None = None
        self._lock = threading.RLock()
        self._observers: dict[str, list[tuple[str, Any]]] = {}
        #: How often each ``(hook, plugin)`` raised in :meth:`call_lifecycle`.
        self.lifecycle_errors: Counter[tuple[str, str]] = Counter()

    # ------------------------------------------------------------------------------------------------- discovery

    @property
    def plugins(self) -> list[PluginInfo]:
        """Every plugin found, broken and disabled ones too: the kernel first, then by distribution and name."""
        with self._lock:
            if self._plugins is None:
                entry_points = discover() if self._entry_points is None else self._entry_points
                self._plugins = [inspect_plugin(entry_point) for entry_point in entry_points]
                # pluggy calls the last registered first; hooks are to run in the order of the list.
                for plugin in reversed(self._plugins):
                    if plugin.status == "ok" and plugin.module is not None:
                        self._register_module(plugin)
            return self._plugins

    def _register_module(self, plugin: PluginInfo) -> None:
        name = f"{plugin.name}@{plugin.distribution}"
        if self._pluggy.is_registered(plugin.module):
            return  # two entry points of one module
        self._pluggy.register(plugin.module, name=name)

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay: every hook, over all plugins that work."""
        _ = self.plugins
        return self._pluggy.hook

    def register(self, plugin: object, name: str) -> None:
        """Add an object with hook implementations at run time, e.g. an observer of the program's own."""
        _ = self.plugins
        self._pluggy.register(plugin, name=name)
        self._pluggy.check_pending()
        self._observers.clear()

    def unregister(self, plugin: object) -> None:
        """Undo :meth:`register`."""
        self._pluggy.unregister(plugin)
        self._observers.clear()

    # ------------------------------------------------------------------------------------------------ registries

    def registrations(self, registry: str) -> list[Entry]:
        """Everything registered there, usable or not, in the order of :attr:`plugins`."""
        _check_registry(registry)
        return [entry for plugin in self.plugins for entry in plugin.entries if entry.registry == registry]

    def entry(self, registry: str, name: str, key: str | None = None) -> Entry:
        """The one usable entry of a name, or of ``name@distribution``.

        Args:
            key: the configuration key that holds the name; begins the error message.

        Raises:
            PluginError: if the name is unknown, ambiguous or broken.
        """
        entries = self.registrations(registry)
        kind, prefix = REGISTRIES[registry], f"{key}: " if key else ""
        wanted, _, source = name.partition("@")
        matches = [entry for entry in entries if entry.name == wanted]
        if source:
            matches = _from_source(matches, source)
        if not matches:
            raise PluginError(f"{prefix}{self._unknown(registry, name, entries)}")
        if len(matches) > 1:
            choices = [entry.full_name for entry in matches]
            if len(set(choices)) < len(choices):
                choices = [f"{entry.name}@{entry.plugin.name}" for entry in matches]
            raise PluginError(
                f"{prefix}{len(matches)} plugins have a {kind} {wanted!r}. Write {' or '.join(map(repr, choices))}."
            )
        entry = matches[0]
        if entry.problem is not None:
            raise PluginError(f"{prefix}the {kind} {name!r} of {entry.distribution} cannot be used: {entry.problem}")
        return entry

    def get(self, registry: str, name: str, key: str | None = None) -> Registration:
        """The registration of a name; see :meth:`entry`."""
        return self.entry(registry, name, key).registration

    def _unknown(self, registry: str, name: str, entries: list[Entry]) -> str:
        kind = REGISTRIES[registry]
        wanted = name.partition("@")[0]
        known = sorted({entry.name for entry in entries})
        if wanted in known:
            sources = ", ".join(sorted(entry.full_name for entry in entries if entry.name == wanted))
            return f"no plugin brings the {kind} {name!r}. There is: {sources}."
        message = f"unknown {kind} {name!r}. Known: {', '.join(known) or 'none'}.{did_you_mean(wanted, known)}"
        path, dot, attribute = name.rpartition(".")
        if dot and not registry.endswith("_engines") and all(part.isidentifier() for part in name.split(".")):
            # As Python writes it, and other programs.
            message += f" An import path has a colon: {path}:{attribute}."
        elif not known or not did_you_mean(wanted, known):
            message += " Install the plugin that brings it"
            # A backend's colon begins the sizes of its mesh, so engines cannot be given by import path.
            message += "." if registry.endswith("_engines") else ", or write package.module:attribute."
        return message + self.list_absent(wanted)

    def list_absent(self, wanted: str) -> str:
        """A line for each plugin that is broken or disabled, for the end of a message about an unknown name.

        Their names are unknown, so any of them may bring the one that was ``wanted``; the likeliest comes first.
        """
        absent = [plugin for plugin in self.plugins if plugin.status != "ok"]
        absent.sort(key=lambda plugin: wanted not in (plugin.name, *canonical(plugin.distribution).split("-")))
        return "".join(f"\n  {plugin.distribution} is {plugin.status}: {plugin.reason}" for plugin in absent)

    def load(self, registry: str, name: str, key: str | None = None) -> Any:
        """Import what a name, or an import path ``package.module:attribute``, stands for.

        Raises:
            PluginError: if it is unknown, ambiguous or broken, needs a GPU that is not there, or cannot be imported.
        """
        _check_registry(registry)
        kind, prefix = REGISTRIES[registry], f"{key}: " if key else ""
        if is_import_path(name):
            target = import_path(name, subject=f"{prefix}{kind} {name!r}")
        else:
            entry = self.entry(registry, name, key)
            if entry.registration.device == "cuda" and not _has_gpu():
                raise PluginError(
                    f"{prefix}the {kind} {name!r} of {entry.distribution} needs a GPU, and PyTorch finds none here."
                )
            target = import_path(entry.registration.target, **_blame(entry, prefix))
        if registry != "areal_model_specs" and not callable(target):
            raise PluginError(f"{prefix}{kind} {name!r}: {target!r:.80} is not a class or function.")
        return target

    def options_class(self, registry: str, name: str, key: str | None = None) -> type | None:
        """The attrs class that validates a plugin's options; None if it has none, or for an import path.

        Raises:
            PluginError: as :meth:`load`.
        """
        _check_registry(registry)
        if is_import_path(name):
            return None
        entry = self.entry(registry, name, key)
        path = entry.registration.config
        if path is None:
            return None
        blame = _blame(entry, f"{key}: " if key else "")
        target = import_path(path, **blame) if is_import_path(path) else None
        if not isinstance(target, type) or not attrs.has(target):
            raise PluginError(f"{blame['subject']}: its config {path!r} is not an attrs class.{blame['hint']}")
        return target

    # ------------------------------------------------------------------------------------------------- lifecycle

    def call_lifecycle(self, hook_name: str, **arguments: Any) -> None:
        """Tell every observer. What one raises is counted and logged (the 1st, 10th, 100th, ... time), not raised."""
        for name, caller in self._callers(hook_name):
            try:
                caller(**arguments)
            except Exception as error:
                # Only here, so that the command line's help does not wait for it.
                from areal_core.logging import getLogger

                self.lifecycle_errors[hook_name, name] += 1
                count = self.lifecycle_errors[hook_name, name]
                logger = getLogger("PluginManager")
                if count == 1:
                    logger.warning("%s of plugin %s failed; training goes on", hook_name, name, exc_info=True)
                elif str(count).strip("0") == "1":
                    logger.warning("%s of plugin %s failed %d times: %s", hook_name, name, count, describe(error))

    def _callers(self, hook_name: str) -> list[tuple[str, Any]]:
        with self._lock:
            if hook_name not in self._observers:
                hook = getattr(self.hook, hook_name)
                implementing = [impl.plugin for impl in reversed(hook.get_hookimpls())]
                self._observers[hook_name] = [
                    (
                        self._pluggy.get_name(plugin) or "?",
                        self._pluggy.subset_hook_caller(hook_name, [p for p in implementing if p is not plugin]),
                    )
                    for plugin in dict.fromkeys(implementing)
                ]
            return self._observers[hook_name]

    def implementations(self, hook_name: str) -> list[tuple[str, Any]]:
        """``(plugin, caller)`` of every plugin that implements a hook; each caller reaches that plugin alone."""
        return list(self._callers(hook_name))


@functools.cache
def get_plugin_manager() -> PluginManager:
    """The plugin manager of this process."""
    return PluginManager()


def _check_registry(registry: str) -> None:
    if registry not in REGISTRIES:
        raise ValueError(f"{registry!r} is not a registry; one of {', '.join(REGISTRIES)}")


def _from_source(entries: list[Entry], source: str) -> list[Entry]:
    by_distribution = [entry for entry in entries if canonical(entry.distribution) == canonical(source)]
    if len(by_distribution) == 1:
        return by_distribution
    return [entry for entry in entries if entry.plugin.name == source] or by_distribution


def _blame(entry: Entry, prefix: str) -> dict[str, str]:
    kind = REGISTRIES[entry.registry]
    return {
        "subject": f"{prefix}{kind} {entry.name!r} of {entry.distribution} {entry.plugin.version}",
        "hint": f" Reinstall or update it: pip install --upgrade {entry.distribution}",
    }


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
