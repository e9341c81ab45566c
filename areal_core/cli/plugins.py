"""`areal plugins`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_core.cli import console

if TYPE_CHECKING:
    from areal_core.plugins import PluginManager
    from areal_core.plugins.inspection import Entry, PluginInfo


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What is installed, and what is wrong with it.", no_args_is_help=True)

    @group.command(
        "list",
        short_help="List plugins, what they register, and what is broken.",
        epilog="Example: areal plugins list --registry rewards",
    )
    def list_(
        registry: Annotated[
            str | None, typer.Option(help="Only one registry, e.g. rewards or train_engines.", metavar="NAME")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """List every plugin: what it registers, and why it cannot be used if so."""
        from areal_core.plugins import get_plugin_manager

        manager = get_plugin_manager()
        wanted = _registry(registry)
        if as_json:
            console.print_json(_as_data(manager, wanted))
        else:
            _print_list(manager, wanted)

    @group.command("show", epilog="Example: areal plugins show fsdp")
    def show(
        name: Annotated[str, typer.Argument(help="A registered name, name@distribution, plugin or distribution.")],
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show one plugin with its options."""
        from areal_core.plugins import get_plugin_manager

        manager = get_plugin_manager()
        found = _find(manager, name)
        data = [_entry_data(entry, manager, options=True) for entry in found[1]]
        if as_json:
            console.print_json({"plugins": [_plugin_data(plugin) for plugin in found[0]], "registrations": data})
            return
        for plugin in found[0]:
            _print_plugin(plugin)
        for item in data:
            console.stdout()
            _print_entry(item)

    app.add_typer(group, name="plugins")


def _registry(text: str | None) -> str | None:
    if text is None:
        return None
    from areal_core.errors import BadInputError, did_you_mean
    from areal_core.plugins.inspection import REGISTRIES

    short = text.removeprefix("areal_").replace("-", "_")
    for registry, kind in REGISTRIES.items():
        if short in (registry.removeprefix("areal_"), kind.replace(" ", "_")):
            return registry
    known = [registry.removeprefix("areal_") for registry in REGISTRIES]
    raise BadInputError(
        f"--registry: unknown registry {text!r}. Known: {', '.join(known)}.{did_you_mean(short, known)}"
    )


def _print_list(manager: PluginManager, registry: str | None) -> None:
    from areal_core.errors import did_you_mean
    from areal_core.plugins.discovery import unmatched
    from areal_core.plugins.inspection import REGISTRIES

    rows, notes = [], []
    for plugin in manager.plugins:
        entries = [entry for entry in plugin.entries if registry in (None, entry.registry)]
        for entry in entries:
            status = plugin.status if plugin.status != "ok" else "broken" if entry.problem else "ok"
            rows.append((REGISTRIES[entry.registry], entry.name, _source(plugin), status, _one_line(entry.description)))
            if entry.problem and plugin.status == "ok":
                notes.append(f"{REGISTRIES[entry.registry]} {entry.name} of {entry.distribution}: {entry.problem}")
        if not plugin.entries and registry is None:
            rows.append(("-", "-", _source(plugin), plugin.status, ""))
        if plugin.reason:
            notes.append(f"{plugin.distribution} ({plugin.name}) is {plugin.status}: {plugin.reason}")
    names = sorted({name for plugin in manager.plugins for name in (plugin.name, plugin.distribution)})
    for variable, name in unmatched(plugin.entry_point for plugin in manager.plugins):
        notes.append(f"{variable} names {name!r}, which is not installed.{did_you_mean(name, names)}")
    rows.sort(key=lambda row: (list(REGISTRIES.values()).index(row[0]) if row[0] != "-" else 99, row[1], row[2]))
    console.print_table(("KIND", "NAME", "FROM", "STATUS", "DESCRIPTION"), rows)
    if notes:
        console.stdout()
        for note in notes:
            console.stdout(note)


def _source(plugin: PluginInfo) -> str:
    return f"{plugin.distribution} {plugin.version}"


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _as_data(manager: PluginManager, registry: str | None) -> dict[str, Any]:
    from areal_core import API_VERSION

    plugins = []
    for plugin in manager.plugins:
        entries = [entry for entry in plugin.entries if registry in (None, entry.registry)]
        if registry is None or entries or plugin.status != "ok":
            data = _plugin_data(plugin)
            data["registrations"] = [_entry_data(entry, manager) for entry in entries]
            plugins.append(data)
    return {"api_version": API_VERSION, "plugins": plugins}


def _plugin_data(plugin: PluginInfo) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.entry_point.module,
        "status": plugin.status,
        "reason": plugin.reason,
    }


def _entry_data(entry: Entry, manager: PluginManager, *, options: bool = False) -> dict[str, Any]:
    registration = entry.registration
    data: dict[str, Any] = {
        "registry": entry.registry,
        "name": entry.name,
        "description": registration.description,
        "distribution": entry.distribution,
        "version": entry.plugin.version,
        "status": "broken" if entry.problem else "ok",
        "problem": entry.problem,
        "target": registration.target,
        "config": registration.config,
        "requires": list(registration.requires),
        "extra": registration.extra,
        "device": registration.device,
        "metadata": registration.metadata,
    }
    if options:
        data["options"] = _options(entry, manager) if entry.problem is None else []
    return data


def _options(entry: Entry, manager: PluginManager) -> list[dict[str, Any]]:
    from areal_core.config import classes
    from areal_core.config.plain import plain_value
    from areal_core.errors import PluginError

    try:
        cls = manager.options_class(entry.registry, f"{entry.name}@{entry.distribution}")
    except PluginError as error:
        console.warning(str(error))
        return []
    return [
        {
            "name": name,
            "type": classes.type_text(field.type),
            "required": not classes.has_default(field),
            "default": plain_value(classes.default_of(field)) if classes.has_default(field) else None,
            "help": field.metadata.get("help", ""),
        }
        for name, field in (classes.public_fields(cls).items() if cls is not None else ())
    ]


def _find(manager: PluginManager, name: str) -> tuple[list[PluginInfo], list[Entry]]:
    from areal_core.errors import PluginError, did_you_mean
    from areal_core.plugins.discovery import canonical

    short, _, source = name.partition("@")
    plugins, entries = [], []
    for plugin in manager.plugins:
        here = canonical(plugin.distribution)
        if source and canonical(source) != here:
            continue
        named = [entry for entry in plugin.entries if entry.name == short]
        if not named and not source and (canonical(name) == here or name == plugin.name):
            named = list(plugin.entries)
        elif not named:
            continue
        plugins.append(plugin)
        entries += named
    if not plugins:
        known = {entry.name for plugin in manager.plugins for entry in plugin.entries}
        known |= {name for plugin in manager.plugins for name in (plugin.name, plugin.distribution)}
        raise PluginError(
            f"no plugin has the name {name!r}.{did_you_mean(short, sorted(known))} See: areal plugins list"
        )
    return plugins, entries


def _print_plugin(plugin: PluginInfo) -> None:
    reason = f" ({plugin.reason})" if plugin.reason else ""
    console.stdout(f"{plugin.distribution} {plugin.version}: {plugin.status}{reason}")


def _print_entry(data: dict[str, Any]) -> None:
    from areal_core.plugins.inspection import REGISTRIES

    console.stdout(f"{REGISTRIES[data['registry']]} {data['name']}: {data['description']}")
    lines = {"from": f"{data['distribution']} {data['version']}", "target": data["target"], "needs": ""}
    lines["needs"] = ", ".join([*data["requires"], *(["a GPU"] if data["device"] == "cuda" else [])])
    lines["problem"] = data["problem"] or ""
    for label, text in lines.items():
        if text:
            console.stdout(f"  {label}: {text}")
    if data["options"]:
        console.stdout()
        rows = [
            (
                option["name"],
                option["type"],
                "required" if option["required"] else repr(option["default"]),
                option["help"],
            )
            for option in data["options"]
        ]
        console.print_table(("OPTION", "TYPE", "DEFAULT", "MEANING"), rows)
