"""Plugins of ``tvmc``: entry points of the group ``tvmc.plugins``.

Each resolves to ``plugin(app: typer.Typer) -> None``, which may add subcommands.  It is called at every start, so it
should import what is slow inside the subcommands.  Targets, passes and code generators have groups of their own:
``crossloom.targets``, ``crossloom.passes``, ``crossloom.codegen``.
"""

from __future__ import annotations

import importlib.metadata

import typer
from typer.models import CommandInfo, TyperInfo

GROUP = "tvmc.plugins"


def _name(info: CommandInfo | TyperInfo) -> str:
    if isinstance(info.name, str):
        return info.name
    callback = info.callback
    return callback.__name__.lower().replace("_", "-") if callback is not None and callable(callback) else ""


def _warn(entry: importlib.metadata.EntryPoint, what: str) -> None:
    typer.echo(f"warning: plugin {entry.name!r} ({entry.value}) {what}", err=True)


def load_plugins(app: typer.Typer) -> list[str]:
    """Let every installed plugin add to the application.

    One that fails, or takes a name that is taken, gives a warning that names it and is left out.

    Returns
    -------
    list of str
        Names of the plugins that were loaded.
    """
    loaded = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        commands, groups = list(app.registered_commands), list(app.registered_groups)
        taken = {*map(_name, commands), *map(_name, groups)}
        callback = app.registered_callback
        try:
            entry.load()(app)
        except Exception as error:
            app.registered_commands[:], app.registered_groups[:] = commands, groups
            app.registered_callback = callback
            _warn(entry, f"is left out: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        # Ours carries --version and --debug.
        app.registered_callback = callback
        new_commands = app.registered_commands[len(commands) :]
        new_groups = app.registered_groups[len(groups) :]
        for name in (*map(_name, new_commands), *map(_name, new_groups)):
            if name in taken:
                _warn(entry, f"adds the subcommand {name!r}, which exists already; it is left out")
        app.registered_commands[:] = [*commands, *(i for i in new_commands if _name(i) not in taken)]
        app.registered_groups[:] = [*groups, *(i for i in new_groups if _name(i) not in taken)]
        loaded.append(entry.name)
    return loaded
