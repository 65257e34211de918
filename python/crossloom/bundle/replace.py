"""What a new bundle may take the place of: nothing, an empty folder, or another bundle and nothing else."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from crossloom.bundle.manifest import LIBRARY, MANIFEST, WEIGHTS
from crossloom.errors import UsageError

_MAX_MANIFEST_BYTES = 64_000_000


def check_replaceable(output: Path, chosen: str) -> None:
    """Refuse an output whose replacement would delete anything but a bundle.

    Bundles of other format versions, and such that lack parts, may be replaced.

    Parameters
    ----------
    output : pathlib.Path
    chosen : {"dir", "tar"}
        What is to be written.

    Raises
    ------
    UsageError
        Naming the first file that is no part of a bundle.
    """
    try:
        if chosen == "tar":
            _check_file(output)
        elif output.is_dir():
            _check_folder(output)
    except OSError as err:
        raise UsageError(f"cannot write {output}: {err.strerror or err}", "choose another path") from err


def _check_file(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"cannot write {output}: it is a folder", "name a .tar file")
    if not output.exists():
        return
    strange = UsageError(f"{output} is a file that is no bundle; it is left alone", "name a new file")
    if not output.is_file():
        raise strange
    try:
        with tarfile.open(output, "r:") as archive:
            # A folder has no content of its own that could get lost.
            names = [member.name for member in archive if not member.isdir()]
            source = archive.extractfile(MANIFEST) if MANIFEST in names else None
            text = source.read(_MAX_MANIFEST_BYTES) if source is not None else b""
    except (tarfile.TarError, EOFError, ValueError, KeyError) as err:
        raise strange from err
    parts = _parts(text)
    if parts is None:
        raise strange
    _refuse_foreign(output, sorted(set(names) - parts))


def _check_folder(output: Path) -> None:
    names = sorted(_walk(output))
    if not names:
        return
    manifest = output / MANIFEST
    parts = None
    if not manifest.is_symlink() and manifest.is_file():
        with manifest.open("rb") as file:
            parts = _parts(file.read(_MAX_MANIFEST_BYTES))
    if parts is None:
        raise UsageError(
            f"{output} is a folder that is no bundle; it is left alone, with {names[0]!r}", "name a new folder"
        )
    folders = {str(above) for part in parts for above in PurePosixPath(part).parents}
    _refuse_foreign(output, [name for name in names if name not in parts and name.rstrip("/") not in folders])


def _refuse_foreign(output: Path, foreign: list[str]) -> None:
    if foreign:
        raise UsageError(
            f"{output} holds {foreign[0]!r}, which is no part of the bundle there; it is left alone",
            "move that file elsewhere, or choose another output",
        )


def _walk(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield everything below `folder` by relative name, folders with a ``/`` at the end; links are not followed."""
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                yield f"{prefix}{item.name}/"
                yield from _walk(Path(item.path), f"{prefix}{item.name}/")
            else:
                yield prefix + item.name


def _parts(text: bytes) -> set[str] | None:
    """Return the files a manifest speaks for, itself included; None where it is no manifest of a bundle."""
    try:
        data = json.loads(text)
        if not isinstance(data["format"], int):
            return None
        parts = {part["path"] for part in data["parts"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    named = all(isinstance(path, str) for path in parts) and {LIBRARY, WEIGHTS} <= parts
    return parts | {MANIFEST} if named else None
