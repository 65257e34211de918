"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from crossloom.atomic import write_bytes, writing_file, writing_folder
from crossloom.errors import UsageError


def test_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.bin"
    with writing_file(path, mode=0o755) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists() and temporary.parent == path.parent
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(path.parent) == ["x.bin"]


def test_failure_keeps_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"old")
    with pytest.raises(ZeroDivisionError), writing_file(tmp_path / "x") as temporary:
        temporary.write_bytes(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with writing_folder(tmp_path / "f") as folder:
            (folder / content).write_text(content)
    assert os.listdir(tmp_path) == ["f"] and os.listdir(tmp_path / "f") == ["two"]
    with pytest.raises(ZeroDivisionError), writing_folder(tmp_path / "f") as folder:
        (folder / "three").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["f"] and os.listdir(tmp_path / "f") == ["two"]


def test_wrong_kinds_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="folder: it is a folder"), writing_file(tmp_path / "folder"):
        raise AssertionError("must not get here")
    with pytest.raises(UsageError, match="file: it is a file"), writing_folder(tmp_path / "file"):
        raise AssertionError("must not get here")
    with pytest.raises(UsageError, match="cannot write"), writing_file(tmp_path / "file" / "x"):
        raise AssertionError("must not get here")
