"""The manifest of a bundle: what it holds, for which target, and how each entry is called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from crossloom.errors import UsageError
from crossloom.model import Entry, TensorSpec

FORMAT = 2
MANIFEST = "manifest.json"
LIBRARY = "lib.so"
WEIGHTS = "weights.safetensors"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE = re.compile(r"[a-z][a-z0-9_]*")
_MAX_DIMENSION = 2**63 - 1


@dataclass(frozen=True)
class Part:
    """One file of a bundle.

    Attributes
    ----------
    path : str
        Relative, with ``/``.
    size_bytes : int
    sha256 : str
        Hexadecimal.
    """

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says; the file ends with the sha256 of all else in it.

    Attributes
    ----------
    name : str
        Name of the model.
    target : str
        Name of the target, e.g. ``"rk3588"``.
    arch : str
        Machine the library runs on: ``"aarch64"``, ``"x86_64"``, ...
    tvm_target : mapping
        The TVM target it was compiled for.
    entries : dict of str to Entry
    weights : dict of str to str
        Name of a weight -> name of the tensor in the weights file (equal weights share one).
    modalities : dict of str to str
    parts : tuple of Part
        Every file but the manifest.
    versions : dict of str to str
        Versions of crossloom and TVM that wrote it.
    """

    name: str
    target: str
    arch: str
    tvm_target: Mapping[str, Any]
    entries: dict[str, Entry]
    weights: dict[str, str]
    modalities: dict[str, str]
    parts: tuple[Part, ...]
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        data = {
            "format": FORMAT,
            "versions": self.versions,
            "name": self.name,
            "target": {"name": self.target, "arch": self.arch, "tvm": dict(self.tvm_target)},
            "modalities": self.modalities,
            "entries": [_entry_to_json(entry) for entry in self.entries.values()],
            "weights": self.weights,
            "parts": [{"path": p.path, "bytes": p.size_bytes, "sha256": p.sha256} for p in self.parts],
        }
        return json.dumps(data | {"sha256": digest(data)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read and check the text of a manifest.

        Parameters
        ----------
        text : str
        where : str
            The bundle's path, for messages.

        Raises
        ------
        UsageError
            It is no manifest, of another format version, or inconsistent.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise damaged(where, f"{MANIFEST} is not JSON ({err})") from err
        if not isinstance(data, dict) or "format" not in data:
            raise damaged(where, f"{MANIFEST} has no `format`")
        if data["format"] != FORMAT:
            raise UsageError(
                f"{where}: bundle format {data['format']!r}, this crossloom reads format {FORMAT}",
                "compile the model again with this version",
            )
        try:
            manifest = _from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise damaged(where, f"{MANIFEST}: {type(err).__name__} {err}") from err
        manifest._check(where)
        # Last, for the checks before it say more.
        if data.get("sha256") != digest({key: value for key, value in data.items() if key != "sha256"}):
            raise damaged(where, f"the content of {MANIFEST} has changed (sha256)")
        return manifest

    def _check(self, where: str) -> None:
        paths = [part.path for part in self.parts]
        for path in paths:
            if not is_safe(path) or path == MANIFEST:
                raise damaged(where, f"part `{path}` is not a plain relative path")
        if len(set(paths)) != len(paths):
            raise damaged(where, "a part is listed twice")
        for wanted in (LIBRARY, WEIGHTS):
            if wanted not in paths:
                raise damaged(where, f"part `{wanted}` is not listed")
        for part in self.parts:
            if part.size_bytes < 0 or not _SHA256.fullmatch(part.sha256):
                raise damaged(where, f"size or sha256 of part `{part.path}`")
        if not self.entries:
            raise damaged(where, "it has no entry")
        for entry in self.entries.values():
            for weight in entry.weights:
                if weight not in self.weights:
                    raise damaged(where, f"entry `{entry.name}` takes weight `{weight}`, which is not listed")


def damaged(where: str, what: str) -> UsageError:
    """Return the error for a bundle that is not what it should be."""
    return UsageError(f"{where} is not a usable bundle: {what}", "write it again with `tvmc compile`")


def digest(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's content, however it is spaced; hexadecimal."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_safe(path: str) -> bool:
    """Tell whether `path` is relative, normalised and stays inside its folder."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and "\0" not in path
        and "\\" not in path
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and path != "."
    )


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    def specs(items: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in items]

    return {
        "name": entry.name,
        "inputs": specs(entry.inputs),
        "outputs": specs(entry.outputs),
        "weights": list(entry.weights),
        "modality": entry.modality,
        "upper_bounds": dict(entry.upper_bounds),
        "lower_bounds": dict(entry.lower_bounds),
    }


def _from_dict(data: Mapping[str, Any]) -> Manifest:
    entries: dict[str, Entry] = {}
    for item in data["entries"]:
        entry = Entry(
            name=_text(item["name"]),
            inputs=tuple(_spec(s) for s in item["inputs"]),
            outputs=tuple(_spec(s) for s in item["outputs"]),
            weights=tuple(_text(w) for w in item["weights"]),
            modality=_text(item["modality"]),
            upper_bounds={_text(k): _count(v) for k, v in item["upper_bounds"].items()},
            lower_bounds={_text(k): _count(v) for k, v in item["lower_bounds"].items()},
        )
        if entry.name in entries:
            raise ValueError(f"entry `{entry.name}` twice")
        entries[entry.name] = entry
    target = data["target"]
    return Manifest(
        name=_text(data["name"]),
        target=_text(target["name"]),
        arch=_text(target["arch"]),
        tvm_target=dict(target["tvm"]),
        entries=entries,
        weights={_text(k): _text(v) for k, v in data["weights"].items()},
        modalities={_text(k): _text(v) for k, v in data["modalities"].items()},
        parts=tuple(Part(_text(p["path"]), _count(p["bytes"]), _text(p["sha256"])) for p in data["parts"]),
        versions={_text(k): _text(v) for k, v in data["versions"].items()},
    )


def _spec(item: Mapping[str, Any]) -> TensorSpec:
    name, dtype = _text(item["name"]), _text(item["dtype"])
    shape = tuple(dim if isinstance(dim, str) else _count(dim) for dim in item["shape"])
    for dim in shape:
        if isinstance(dim, int) and dim > _MAX_DIMENSION:
            raise ValueError(f"dimension {dim} of `{name}` is too large")
    if not _is_dtype(dtype):
        raise ValueError(f"`{name}` has the unknown type `{dtype}`")
    return TensorSpec(name, shape, dtype)


def _is_dtype(name: str) -> bool:
    if not _DTYPE.fullmatch(name):
        return False
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return False
    return dtype.name == name and (dtype.kind in "biufc" or hasattr(ml_dtypes, name))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a non-negative integer")
    return value
