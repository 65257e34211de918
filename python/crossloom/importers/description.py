"""Model descriptions: a TOML file that says which files are a model's parts and which entries they make.

::

    name = "shapes3"
    [parts.vision]
    file = "vision.onnx"            # or .gguf; beside or below the description
    modality = "image"
    [entries.vision]
    parts = ["vision", "projector"] # "part:entry" picks one of several
    upper_bounds = { n = 60 }       # largest size of a symbolic dimension
    outputs = ["features"]          # what to return; by default all that no part takes
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model import Model
from .compose import Chain, compose

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

MODALITIES = ("", "image", "audio", "text")


def load_description(path: str | Path) -> Model:
    """Load every part of a description and compose them.

    Parameters
    ----------
    path : str or Path
        The TOML file; part files must lie in its folder or below.

    Raises
    ------
    UsageError
        The file is missing, no TOML, or a key is unknown, missing or of the wrong type; names key and file.
    UnsupportedModel
        From the importers and from :func:`compose`.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the model description {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} is not TOML: {error}") from error
    read = _Reader(path)
    read.keys(document, "", {"name": str, "weights": str, "parts": dict, "entries": dict}, ("parts", "entries"))
    files: dict[str, Path] = {}
    tags: dict[str, str] = {}
    for key, table in document["parts"].items():
        where = f"parts.{key}"
        read.keys(table, where, {"file": str, "modality": str}, ("file",))
        files[key] = read.inside(table["file"], f"{where}.file")
        tags[key] = read.modality(table, where)
    chains: dict[str, Chain] = {}
    for key, table in document["entries"].items():
        where = f"entries.{key}"
        read.keys(table, where, {"parts": list, "modality": str, "upper_bounds": dict, "outputs": list}, ("parts",))
        if not table["parts"] or not all(isinstance(item, str) for item in table["parts"]):
            raise read.wrong(f"{where}.parts", "must be a list of part names")
        for item in table["parts"]:
            if item.partition(":")[0] not in files:
                raise read.wrong(f"{where}.parts", f"names an unknown part {item!r}")
        bounds = table.get("upper_bounds", {})
        for name, value in bounds.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise read.wrong(f"{where}.upper_bounds.{name}", f"must be a size, is {value!r}")
        outputs = table.get("outputs", [])
        if not all(isinstance(item, str) for item in outputs):
            raise read.wrong(f"{where}.outputs", "must be a list of output names")
        chains[key] = Chain(tuple(table["parts"]), read.modality(table, where), bounds, tuple(outputs))
    if "weights" in document:
        read.inside(document["weights"], "weights")
    parts = {key: _load_part(file) for key, file in files.items()}
    return compose(parts, chains, modalities=tags, name=document.get("name", path.stem))


def _load_part(file: Path) -> Model:
    if file.suffix.lower() == ".gguf":
        from .gguf import from_gguf

        return from_gguf(file)
    from .onnx import from_onnx

    return from_onnx(file)


class _Reader:
    """Check values of one description, naming key and file when one is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, key: str, what: str) -> UsageError:
        return UsageError(f"{str(self.path)!r}: {key or 'the description'} {what}")

    def keys(self, table: Any, where: str, allowed: Mapping[str, type], required: tuple[str, ...]) -> None:
        """Check a table's keys and the types of their values."""
        if not isinstance(table, dict):
            raise self.wrong(where, "must be a table")
        prefix = f"{where}." if where else ""
        for key, value in table.items():
            if key not in allowed:
                raise self.wrong(f"{prefix}{key}", f"is not a known key; known: {', '.join(allowed)}")
            if not isinstance(value, allowed[key]):
                raise self.wrong(f"{prefix}{key}", f"must be a {allowed[key].__name__}, is {value!r}")
        for key in required:
            if not table.get(key):
                raise self.wrong(f"{prefix}{key}", "is missing")

    def modality(self, table: Mapping[str, Any], where: str) -> str:
        value = table.get("modality", "")
        if value not in MODALITIES:
            raise self.wrong(f"{where}.modality", f"must be one of {', '.join(MODALITIES[1:])}, is {value!r}")
        return str(value)

    def inside(self, name: str, key: str) -> Path:
        """Return the path of a part file, confined to the description's folder (links followed)."""
        root = self.path.resolve().parent
        file = (root / name).resolve()
        if not file.is_relative_to(root):
            raise self.wrong(key, f"leads outside the description's folder: {name!r}")
        if not file.is_file():
            raise self.wrong(key, f"names a file that does not exist: {name!r}")
        if key != "weights" and file.suffix.lower() not in (".onnx", ".gguf"):
            raise self.wrong(key, f"must be an .onnx or .gguf file, is {name!r}")
        return file
