"""Bundles: one compiled model as a folder or a .tar, with everything needed to run it.

``write_bundle(...)`` writes one, ``Bundle.open(path)`` checks and reads one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from crossloom.bundle.archive import unpack
from crossloom.bundle.manifest import LIBRARY, MANIFEST, WEIGHTS, Manifest, Part, damaged
from crossloom.bundle.weights import map_weights
from crossloom.bundle.write import sha256, write_bundle
from crossloom.errors import UsageError
from crossloom.model import Entry

__all__ = ["Bundle", "Manifest", "Part", "write_bundle"]

_MAX_MANIFEST_BYTES = 64_000_000


class Bundle:
    """An opened bundle; close it, or use it as a context manager, to drop the extracted copy of a .tar.

    Attributes
    ----------
    path : pathlib.Path
        What was opened.
    folder : pathlib.Path
        Where its files are.
    manifest : Manifest
    weights : dict of str to numpy.ndarray
        Every weight by its name, mapped from the file, read-only.
    weight_offsets : dict of str to int
        Where each begins in ``weights.safetensors``, in bytes.
    """

    def __init__(self, path: Path, folder: Path, manifest: Manifest, temporary: Path | None = None) -> None:
        self.path, self.folder, self.manifest = path, folder, manifest
        self._temporary = temporary
        tensors = map_weights(folder / WEIGHTS, str(path))
        for name, stored in manifest.weights.items():
            if stored not in tensors:
                raise damaged(str(path), f"weight `{name}` (stored as `{stored}`) is not in {WEIGHTS}")
        self.weights: dict[str, np.ndarray] = {n: tensors[s].array for n, s in manifest.weights.items()}
        self.weight_offsets: dict[str, int] = {n: tensors[s].offset_bytes for n, s in manifest.weights.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Open the bundle at `path`, checking every part.

        Raises
        ------
        UsageError
            There is none, or it is damaged, of another format, or holds what it should not.
        """
        where = Path(path)
        if where.is_dir():
            return cls(where, where, _read_manifest(where, where))
        if not where.is_file():
            raise UsageError(f"no bundle at {where}", "name the folder or .tar that `tvmc compile` wrote")
        temporary = Path(tempfile.mkdtemp(prefix="crossloom-bundle-"))
        try:
            unpack(where, temporary)
            return cls(where, temporary, _read_manifest(temporary, where), temporary)
        except OSError as err:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UsageError(f"cannot read {where}: {err.strerror or err}") from err
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries by name."""
        return self.manifest.entries

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / LIBRARY

    def entry(self, name: str) -> Entry:
        """Return one entry.

        Raises
        ------
        UsageError
            There is none of that name.
        """
        if name not in self.entries:
            raise UsageError(f"{self.path} has no entry `{name}`", f"it has: {', '.join(self.entries)}")
        return self.entries[name]

    def read(self, name: str) -> bytes:
        """Return the content of one part, e.g. ``"ledger.json"``.

        Raises
        ------
        UsageError
            There is no such part.
        """
        if name not in (part.path for part in self.manifest.parts):
            raise UsageError(
                f"{self.path} holds no `{name}`", f"it has: {', '.join(p.path for p in self.manifest.parts)}"
            )
        return (self.folder / name).read_bytes()

    def close(self) -> None:
        """Drop the mapped weights and the extracted copy of a .tar."""
        self.weights = {}
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_temporary", None) is not None:
            self.close()


def _read_manifest(folder: Path, where: Path) -> Manifest:
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise damaged(str(where), f"it has no {MANIFEST}")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise damaged(str(where), f"{MANIFEST} is too large")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise damaged(str(where), f"{MANIFEST} is not text") from err
    manifest = Manifest.from_json(text, str(where))
    for part in manifest.parts:
        _check_part(folder, part, str(where))
    return manifest


def _check_part(folder: Path, part: Part, where: str) -> None:
    path = folder / part.path
    # A link could name a file anywhere; resolve() also catches a linked folder on the way.
    if path.is_symlink() or not path.is_file() or folder.resolve() not in path.resolve().parents:
        raise damaged(where, f"part `{part.path}` is missing")
    if path.stat().st_size != part.size_bytes:
        raise damaged(where, f"part `{part.path}` has {path.stat().st_size} bytes, not {part.size_bytes}")
    if sha256(path) != part.sha256:
        raise damaged(where, f"the content of part `{part.path}` has changed (sha256)")
