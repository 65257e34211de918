"""What installed packages add to us: entry points, loaded one by one so that a broken one harms nobody else."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable

from .errors import CrossloomWarning

_broken: dict[str, dict[str, str]] = {}


def load_entry_points(group: str, use: Callable[[str, object], None]) -> None:
    """Load every entry point of a group and hand it on.

    Parameters
    ----------
    group : str
        e.g. ``"crossloom.passes"``.
    use : callable (name, object) -> None
        What it raises counts as the plugin's failure.

    Warns
    -----
    CrossloomWarning
        For each plugin that does not load; it is left out, and :func:`broken_plugins` remembers why.
    """
    failures: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=group):
        try:
            use(entry.name, entry.load())
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            failures[entry.name] = why
            if entry.name not in _broken.get(group, {}):
                text = f"plugin {entry.name!r} ({entry.value}) of group {group} is left out: {why}"
                warnings.warn(text, CrossloomWarning, stacklevel=2)
    _broken[group] = failures


def broken_plugins(group: str) -> str:
    """Return one sentence about the group's plugins that failed to load, ``""`` when all did."""
    failures = _broken.get(group, {})
    return f"plugins left out: {'; '.join(f'{n} ({why})' for n, why in failures.items())}" if failures else ""
