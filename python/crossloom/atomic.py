"""Write a file or folder whole or not at all: into a temporary sibling, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from crossloom.errors import UsageError


@contextlib.contextmanager
def writing_file(path: str | os.PathLike[str], mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on failure nothing is left.

    Parameters
    ----------
    path : path
        The file to write; its folder is created.
    mode : int
        Permission bits of the finished file.

    Raises
    ------
    UsageError
        The folder cannot be written, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"cannot write {target}: it is a folder", "name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(descriptor)
    except OSError as err:
        raise _unwritable(target, err) from err
    temporary = Path(name)
    try:
        yield temporary
        try:
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except OSError as err:
            raise _unwritable(target, err) from err
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`.

    An existing folder is moved aside first and removed last, so a failure leaves the old one.  Whether an
    existing folder may be replaced is for the caller to decide.

    Raises
    ------
    UsageError
        The parent cannot be written, or `path` is a file.
    """
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise UsageError(f"cannot write {target}: it is a file", "name a folder, or remove the file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as err:
        raise _unwritable(target, err) from err
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        yield new
        try:
            if target.exists():
                os.rename(target, old)
            try:
                os.rename(new, target)
            except OSError:
                if old.exists():
                    os.rename(old, target)
                raise
        except OSError as err:
            raise _unwritable(target, err) from err
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with writing_file(path) as temporary:
        try:
            temporary.write_bytes(data)
        except OSError as err:
            raise _unwritable(Path(path), err) from err


def _unwritable(path: Path, err: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {err.strerror or err}", "choose a path that can be written")
