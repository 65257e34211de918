"""The RPC server program for a machine: installed for the host, built when first needed for others."""

from __future__ import annotations

import hashlib
import sysconfig
from importlib.metadata import version
from pathlib import Path

import tvm_ffi

from crossloom import cache
from crossloom.bundle.link import find_compiler, host_arch, run_compiler
from crossloom.errors import InternalError
from crossloom.runtime.board_libs import runtime_libs

SOURCE = Path(__file__).with_name("rpc_server.cc")
PROGRAM = "crossloom_rpc"


def server_program(arch: str, cross_compiler: str | None = None) -> Path:
    """Return the server program for `arch`.

    For the host the installed program is used, unless its source has changed since (an editable install).  Else
    it is compiled into the cache, keyed by source, versions and compiler.

    Parameters
    ----------
    arch : str
        ``"aarch64"``, ``"x86_64"``, ...
    cross_compiler : str, optional

    Raises
    ------
    ToolchainMissing, ToolchainFailed
    """
    if not SOURCE.is_file():
        raise InternalError(f"{SOURCE} is missing from the installation")
    if arch == host_arch() and not cross_compiler:
        installed = _installed()
        if installed is not None:
            return installed
    compiler = find_compiler(arch, cross_compiler)
    libs = runtime_libs(arch)
    key = cache.key(SOURCE.read_bytes(), version("apache-tvm-ffi"), compiler, str(Path(compiler).stat().st_mtime_ns))

    def build(path: Path) -> None:
        run_compiler(
            [
                compiler,
                "-std=c++17",
                "-O2",
                str(SOURCE),
                "-o",
                str(path),
                *(f"-isystem{folder}" for folder in _include_folders()),
                f"-L{libs}",
                "-ltvm_ffi",
                "-ldl",
                # On a board the program and the libraries lie in one folder.
                "-Wl,-rpath,$ORIGIN",
            ]
        )

    return cache.cached_file(f"server/{arch}-{key}/{PROGRAM}", build, mode=0o755)


def _include_folders() -> list[str]:
    return [str(tvm_ffi.libinfo.find_include_path()), str(tvm_ffi.libinfo.find_dlpack_include_path())]


def _installed() -> Path | None:
    """Return the program installed with the package, if it was built from the source that is there."""
    for folder in (SOURCE.parent, Path(sysconfig.get_path("platlib")) / "crossloom" / "runtime"):
        program, built_from = folder / "bin" / PROGRAM, folder / "bin" / f"{PROGRAM}.sha256"
        if program.is_file() and built_from.is_file():
            if built_from.read_text().strip() == hashlib.sha256(SOURCE.read_bytes()).hexdigest():
                return program
    return None
