"""Looking at one plugin in isolation: does it load, what does it register, and what is wrong with it."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any, Literal

import attrs
import pluggy

from areal_core import hookspecs
from areal_core.errors import did_you_mean
from areal_core.plugins.discovery import EntryPoint, why_disabled
from areal_core.plugins.loading import describe
from areal_core.registration import API_VERSION, Registration

Status = Literal["ok", "broken", "disabled"]

#: Every registry hook and what one of its registrations is called in messages.
REGISTRIES: dict[str, str] = {
    "areal_train_engines": "train engine",
    "areal_inference_engines": "inference engine",
    "areal_workflows": "workflow",
    "areal_rewards": "reward",
    "areal_datasets": "dataset",
    "areal_model_specs": "model spec",
    "areal_algorithms": "algorithm",
    "areal_launchers": "launcher",
    "areal_trackers": "tracker",
}

HOOK_NAMES: frozenset[str] = frozenset(
    name
    for name, value in vars(hookspecs).items()
    if name.startswith("areal_") and hasattr(value, f"{hookspecs.PROJECT_NAME}_spec")
)
_IMPL_MARK = f"{hookspecs.PROJECT_NAME}_impl"


@attrs.frozen
class Entry:
    """One registration and the plugin it comes from.

    Attributes:
        plugin_problem: what is wrong with the whole plugin, if anything is.
    """

    registry: str
    registration: Registration
    plugin: EntryPoint
    plugin_problem: str | None = None

    @functools.cached_property
    def problem(self) -> str | None:
        """Why it cannot be used, and what would mend it; None when it can. Looks for the requirements when asked."""
        return self.plugin_problem or missing_requirement(self.registration, self.plugin)

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def description(self) -> str:
        return self.registration.description

    @property
    def distribution(self) -> str:
        return self.plugin.distribution

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.distribution}"


@attrs.define
class PluginInfo:
    """One plugin as ``areal plugins list`` shows it."""

    entry_point: EntryPoint
    status: Status
    reason: str | None = None
    entries: list[Entry] = attrs.field(factory=list)
    module: ModuleType | None = None

    @property
    def name(self) -> str:
        return self.entry_point.name

    @property
    def distribution(self) -> str:
        return self.entry_point.distribution

    @property
    def version(self) -> str:
        return self.entry_point.version


class _Broken(Exception):
    """Why a plugin cannot be used."""


def new_pluggy_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    return manager


def inspect_plugin(entry_point: EntryPoint) -> PluginInfo:
    """Import a plugin's module and call its registry hooks. Never raises on account of the plugin."""
    reason = why_disabled(entry_point)
    if reason is not None:
        return PluginInfo(entry_point, "disabled", reason)
    registrations: list[tuple[str, Registration]] = []
    module: ModuleType | None = None
    try:
        module = _import(entry_point)
        _check_api_version(module, entry_point)
        _check_hook_names(module)
        _collect(module, registrations)
    except _Broken as error:
        reason = str(error)
    entries = [Entry(registry, registration, entry_point, reason) for registry, registration in registrations]
    return PluginInfo(entry_point, "broken" if reason else "ok", reason, entries, module)


def _import(entry_point: EntryPoint) -> ModuleType:
    try:
        return importlib.import_module(entry_point.module)
    except (Exception, SystemExit) as error:
        raise _Broken(
            f"importing {entry_point.module} failed: {describe(error)}. Reinstall or update it: "
            f"pip install --upgrade {entry_point.distribution}"
        ) from error


def _check_api_version(module: ModuleType, entry_point: EntryPoint) -> None:
    wanted = getattr(module, "AREAL_API_VERSION", None)
    if wanted is None:
        raise _Broken(f'{module.__name__} does not state its API version. Add AREAL_API_VERSION = "{API_VERSION}"')
    try:
        major, minor = (int(part) for part in wanted.split("."))
    except (AttributeError, ValueError):
        raise _Broken(f'AREAL_API_VERSION is {wanted!r}; write major and minor as text, e.g. "{API_VERSION}"') from None
    our_major, our_minor = (int(part) for part in API_VERSION.split("."))
    if (major, minor) > (our_major, our_minor):
        raise _Broken(
            f"it needs kernel API {wanted}, but this areal-core has {API_VERSION}. Update the kernel: "
            "pip install --upgrade areal-core"
        )
    if major < our_major:
        raise _Broken(
            f"it was written for kernel API {wanted}, but this areal-core has {API_VERSION}. Update the plugin: "
            f"pip install --upgrade {entry_point.distribution}"
        )


def _check_hook_names(module: ModuleType) -> None:
    for name, value in vars(module).items():
        if hasattr(value, _IMPL_MARK) and callable(value):
            hook = getattr(value, _IMPL_MARK).get("specname") or name
            if hook not in HOOK_NAMES:
                raise _Broken(f"there is no hook {hook!r}.{did_you_mean(hook, HOOK_NAMES)}")
        elif name in HOOK_NAMES and inspect.isfunction(value) and value.__module__ == module.__name__:
            raise _Broken(f"{name} is not marked as a hook. Put @areal_core.hookimpl above it")


def _collect(module: ModuleType, registrations: list[tuple[str, Registration]]) -> None:
    # A manager of its own, so that a hook with wrong arguments leaves nothing behind in the shared one.
    manager = new_pluggy_manager()
    try:
        manager.register(module)
    except pluggy.PluginValidationError as error:
        raise _Broken(str(error).strip().splitlines()[-1]) from error
    problem: _Broken | None = None
    for registry in REGISTRIES:
        try:
            results = getattr(manager.hook, registry)()
        except (Exception, SystemExit) as error:
            problem = problem or _Broken(f"its hook {registry} failed: {describe(error)}")
            continue
        for result in results:
            try:
                _check_result(registry, result, registrations)
            except _Broken as error:
                problem = problem or error
    if problem is not None:
        raise problem


def _check_result(registry: str, result: Any, registrations: list[tuple[str, Registration]]) -> None:
    if not isinstance(result, (list, tuple)):
        raise _Broken(f"its hook {registry} must return a list of Registration, not {type(result).__name__}")
    for item in result:
        if not isinstance(item, Registration):
            raise _Broken(f"its hook {registry} must return a list of Registration, but one item is {item!r:.80}")
        if any(known == registry and other.name == item.name for known, other in registrations):
            raise _Broken(f"it registers the {REGISTRIES[registry]} {item.name!r} twice")
        registrations.append((registry, item))


def missing_requirement(registration: Registration, entry_point: EntryPoint) -> str | None:
    """Which requirement of a registration is not installed, and the command that installs it; None if all are."""
    if not registration.requires:
        return None
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    for text in registration.requires:
        try:
            requirement = Requirement(text)
        except (InvalidRequirement, TypeError):
            return f"its requirement {text!r} cannot be read"
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        wanted = f"{entry_point.distribution}[{registration.extra}]" if registration.extra else text
        command = f"pip install '{wanted}'"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            return f"it needs {text}, which is not installed. Install it: {command}"
        if not requirement.specifier.contains(version, prereleases=True):
            return f"it needs {text}, but {requirement.name} {version} is installed. Install it: {command}"
    return None
