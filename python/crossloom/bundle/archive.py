"""Bundles as one .tar: written reproducibly, extracted without ever leaving the folder."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from crossloom.bundle.manifest import damaged, is_safe

_MAX_MEMBERS = 10_000


def pack(folder: Path, names: Sequence[str], path: Path) -> None:
    """Write the files `names` of `folder` to the .tar `path`; equal input gives equal bytes."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = (folder / name).stat().st_size
            info.mode = 0o644
            with (folder / name).open("rb") as file:
                archive.addfile(info, file)


def unpack(path: Path, folder: Path) -> None:
    """Extract the .tar `path` into `folder`.

    Only plain files (and folders) with safe relative names, each once.  Only uncompressed archives are read, so
    what is written can be no larger than the archive itself.

    Raises
    ------
    UsageError
        The archive is damaged or holds anything else.
    """
    where = str(path)
    seen: set[str] = set()
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = member.name
                if member.isdir() and is_safe(name.rstrip("/")):
                    continue
                if not is_safe(name):
                    raise damaged(where, f"member `{name}` would be written outside the folder")
                if not member.isreg() or member.sparse is not None:
                    raise damaged(where, f"member `{name}` is not a plain file")
                if name in seen:
                    raise damaged(where, f"member `{name}` comes twice")
                seen.add(name)
                if len(seen) > _MAX_MEMBERS:
                    raise damaged(where, f"more than {_MAX_MEMBERS} members")
                source = archive.extractfile(member)
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if source is None:
                    raise damaged(where, f"member `{name}` cannot be read")
                with source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                if target.stat().st_size != member.size:
                    raise damaged(where, f"member `{name}` is cut short")
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError) as err:
        raise damaged(where, f"the archive cannot be read ({err})") from err
