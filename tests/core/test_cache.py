"""The cache: built once however many processes ask, and nothing kept of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from crossloom import cache
from crossloom.errors import ToolchainFailed, UnsupportedTarget, UsageError
from crossloom.runtime.board_libs import extract_members, runtime_libs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folder_is_where_the_variable_says(own_cache, tmp_path, monkeypatch) -> None:
    assert cache.cache_dir() == own_cache and own_cache.is_dir()
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("CROSSLOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set CROSSLOOM_CACHE"):
        cache.cache_dir()


def test_keys_tell_parts_apart() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc") != cache.key("abc")
    assert cache.key("a") == cache.key(b"a") and len(cache.key()) == 20


def test_built_once_and_not_kept_when_it_fails(own_cache) -> None:
    calls = []

    def build(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise ZeroDivisionError
        path.write_text("done")

    with pytest.raises(ZeroDivisionError):
        cache.cached_file("a/b", build)
    assert not (own_cache / "a" / "b").exists()
    for _ in range(2):
        assert cache.cached_file("a/b", build).read_text() == "done"
    assert len(calls) == 2


def test_concurrent_processes_build_once(own_cache, tmp_path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from crossloom import cache\n"
        "def build(folder):\n"
        "    open(sys.argv[1], 'a').write('built\\n'); time.sleep(0.3); (folder / 'x').write_text('x')\n"
        "assert (cache.cached_folder('shared', build) / 'x').read_text() == 'x'"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", code, str(log)]
    running = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_only_the_named_members_are_unpacked(tmp_path) -> None:
    wheel, out = tmp_path / "w.whl", tmp_path / "out"
    out.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pkg/lib/a.so", "pkg/lib/b.so", "../evil.so", "pkg/lib/../../../evil.so"):
            archive.writestr(name, name)
    extract_members(wheel, ("pkg/lib/a.so",), out)
    assert os.listdir(out) == ["a.so"] and sorted(os.listdir(tmp_path)) == ["out", "w.whl"]
    with pytest.raises(ToolchainFailed, match=r"gone\.so"):
        extract_members(wheel, ("pkg/lib/gone.so",), out)
    wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(ToolchainFailed, match="BadZipFile"):
        extract_members(wheel, ("pkg/lib/b.so",), out)


def test_failed_download_is_an_error_with_its_log(own_cache, monkeypatch) -> None:
    # No index, no folder of wheels: pip finds nothing, at once and offline.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(own_cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr("crossloom.runtime.board_libs.host_arch", lambda: "none")
    with pytest.raises(ToolchainFailed, match="apache-tvm") as caught:
        runtime_libs("aarch64")
    assert caught.value.returncode == 1 and "No matching distribution" in caught.value.log
    assert not list(own_cache.glob("libs/aarch64*/*"))


def test_machine_without_wheels() -> None:
    with pytest.raises(UnsupportedTarget, match="riscv128"):
        runtime_libs("riscv128")
