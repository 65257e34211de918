"""Read target files: TOML with a strict schema, in which every statement names its source."""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .model import CONFIDENCES, EFFECTS, Bank, Capability, Cluster, Cpu, Fusion, Npu, Precision, Target

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

DATA = Path(__file__).parent / "data"

#: Word in a source before what nobody has held against a document yet.
UNCHECKED = "unchecked"

_SECTIONS = {"cluster": Cluster, "bank": Bank, "precision": Precision, "capability": Capability, "fusion": Fusion}
_CHOICES: dict[str, tuple[str, ...]] = {
    "confidence": CONFIDENCES,
    "effect": EFFECTS,
    "chain": ("elementwise", "linear", "region"),
    "supported": ("yes", "no", "unknown"),
    "unit": ("npu", "cpu"),
    "family": ("linux", "macos", "micro", "host"),
}
#: Keys a file may not set: other sections or the loader fill them in.
_FILLED = {Cpu: {"clusters", "extra"}, Npu: {"options"}}
_TOP = {"name", "description", "family", "bandwidth", "bandwidth_source"}


def _fail(path: Path, key: str, what: str) -> typing.NoReturn:
    raise UsageError(f"target file {path.name}: {key}: {what}", f"correct {key} in {path}")


def _convert(path: Path, key: str, hint: Any, value: Any) -> Any:
    """Check one value against a field's type; lists become tuples, a lone string a tuple of one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert(path, key, args[0], value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(path, key, hint, value)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            _fail(path, key, f"wants a list, has {value!r}")
        return tuple(_convert(path, key, args[0], item) for item in items)
    if origin is Mapping:
        if not isinstance(value, dict):
            _fail(path, key, f"wants a table, has {value!r}")
        return {k: _convert(path, f"{key}.{k}", args[1], v) for k, v in value.items()}
    if origin is typing.Literal:
        hint = str
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        _fail(path, key, f"wants {hint.__name__}, has {value!r}")
    if hint in (int, float) and value < 0 and not key.endswith((".arg", ".axes")):
        _fail(path, key, f"may not be negative, has {value!r}")
    return value


def _build(path: Path, where: str, kind: type, table: Any) -> Any:
    if not isinstance(table, dict):
        _fail(path, where, f"wants a table, has {table!r}")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.name not in _FILLED.get(kind, set())}
    for key in table:
        if key not in known:
            _fail(path, f"{where}.{key}", f"unknown key; known: {', '.join(known)}")
    values = {key: _convert(path, f"{where}.{key}", hints[key], value) for key, value in table.items()}
    for key, field in known.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            _fail(path, f"{where}.{key}", "is missing")
    for key, choices in _CHOICES.items():
        if key in values and values[key] not in choices:
            _fail(path, f"{where}.{key}", f"{values[key]!r} is not one of {', '.join(filter(None, choices))}")
    if "source" in known and not values["source"].strip():
        _fail(path, f"{where}.source", "is empty; every statement needs one")
    if values.get("verified") and UNCHECKED in values["source"]:
        _fail(path, f"{where}.verified", f"is true, but the source says {UNCHECKED!r}")
    return kind(**values)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"target file {path}: {error.strerror}", "give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"target file {path} is not TOML: {error}", "correct the file") from None


def _sections(path: Path, raw: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    out: dict[str, tuple[Any, ...]] = {}
    for section, kind in _SECTIONS.items():
        rows = raw.pop(section, [])
        if not isinstance(rows, list):
            _fail(path, section, "wants an array of tables, written [[...]]")
        out[section] = tuple(_build(path, f"{section}[{i}]", kind, row) for i, row in enumerate(rows))
    return out


def _table(path: Path, name: str) -> dict[str, tuple[Any, ...]]:
    """Read a shared table: beside the file, or one of ours."""
    for folder in (path.parent, DATA):
        file = folder / f"table_{name}.toml"
        if file.is_file():
            raw = _parse(file)
            out = _sections(file, raw)
            if raw:
                _fail(file, next(iter(raw)), f"unknown key; a table holds {', '.join(_SECTIONS)}")
            return out
    _fail(path, "tables", f"there is no table_{name}.toml beside the file or among crossloom's own")


def load_target_file(path: str | Path) -> Target:
    """Read one target file.

    Parameters
    ----------
    path : str or Path
        TOML: ``name``, ``description``, ``family``, ``bandwidth`` with ``bandwidth_source``, ``tables``
        (names of shared files ``table_<name>.toml``), ``[cpu]``, ``[npu]`` and the arrays ``[[cluster]]``,
        ``[[bank]]``, ``[[precision]]``, ``[[capability]]``, ``[[fusion]]``; keys are the fields of the dataclasses.

    Raises
    ------
    UsageError
        Naming the file and the key: unknown, missing, of the wrong type, or without a source.
    """
    path = Path(path)
    raw = _parse(path)
    tables = raw.pop("tables", [])
    if not isinstance(tables, list) or not all(isinstance(t, str) for t in tables):
        _fail(path, "tables", "wants a list of names")
    shared = [_table(path, name) for name in tables]
    own = _sections(path, raw)
    merged = {s: tuple(row for part in (*shared, own) for row in part[s]) for s in _SECTIONS}
    for required in ("cpu", "name", "description", "family"):
        if required not in raw:
            _fail(path, required, "is missing")
    cpu = _build(path, "cpu", Cpu, raw.pop("cpu"))
    npu = _build(path, "npu", Npu, raw.pop("npu")) if "npu" in raw else None
    for key in raw:
        if key not in _TOP:
            _fail(path, key, "unknown key")
    hints = typing.get_type_hints(Target)
    top = {key: _convert(path, key, hints[key], value) for key, value in raw.items()}
    if top["family"] not in _CHOICES["family"]:
        _fail(path, "family", f"{top['family']!r} is not one of {', '.join(_CHOICES['family'])}")
    if top.get("bandwidth") and not top.get("bandwidth_source", "").strip():
        _fail(path, "bandwidth_source", "is missing")
    return Target(
        **top,
        cpu=Cpu(**{**vars(cpu), "clusters": merged["cluster"]}),
        npu=npu,
        banks=merged["bank"],
        precisions=merged["precision"],
        capabilities=merged["capability"],
        fusions=merged["fusion"],
        spec=top["name"],
    )
