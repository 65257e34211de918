"""The cache folder: things built once, keyed by what they were built from, shared by concurrent processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from crossloom.atomic import writing_file, writing_folder
from crossloom.errors import UsageError


def cache_dir() -> Path:
    """Return the cache folder, created: ``CROSSLOOM_CACHE``, else the platform's user cache.

    Raises
    ------
    UsageError
        It cannot be created.
    """
    chosen = os.environ.get("CROSSLOOM_CACHE")
    path = Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("crossloom"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(
            f"cannot create the cache folder {path}: {err.strerror or err}",
            "set CROSSLOOM_CACHE to a folder that can be written",
        ) from err
    return path.resolve()


def key(*parts: str | bytes) -> str:
    """Return a short key for `parts`: 20 hexadecimal digits of their sha256, lengths included."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache folder, shared by every process that uses it."""
    path = cache_dir() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def cached_file(name: str, build: Callable[[Path], None], mode: int = 0o644) -> Path:
    """Return the cached file `name`, calling ``build(temporary_path)`` first when it is missing.

    Parameters
    ----------
    name : str
        Path inside the cache folder; must carry the key of all it depends on.
    build : callable
        Writes the path it is given; when it raises, nothing is kept.
    mode : int
        Permission bits.
    """
    path = cache_dir() / name
    if not path.is_file():
        with lock(name):
            if not path.is_file():
                with writing_file(path, mode) as temporary:
                    build(temporary)
    return path


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`, calling ``build(temporary_folder)`` first when it is missing."""
    path = cache_dir() / name
    if not path.is_dir():
        with lock(name):
            if not path.is_dir():
                with writing_folder(path) as temporary:
                    build(temporary)
    return path
