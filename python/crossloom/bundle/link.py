"""Link a compiled executable into one shared library for its machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from crossloom.errors import ToolchainFailed, ToolchainMissing, UnsupportedTarget

if TYPE_CHECKING:
    from crossloom.targets import Target

_LINK_SECONDS = 600
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64", "x64": "x86_64"}


def host_arch() -> str:
    """Return this machine: ``"x86_64"``, ``"aarch64"``, ..."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def arch_of(target: tvm.target.Target) -> str:
    """Return the machine a TVM target's code runs on: the first word of its triple, else this machine."""
    triple = str(target.attrs.get("mtriple", "") or "")
    name = triple.split("-")[0].lower()
    return _MACHINES.get(name, name) if name else host_arch()


def check_linkable(target: Target, cross_compiler: str | None = None) -> None:
    """Refuse a target for whose system no shared library can be linked here, before anything is compiled.

    Parameters
    ----------
    target : crossloom.targets.Target
    cross_compiler : str, optional
        A compiler the user named: it may know systems the usual ones do not, but none makes a shared library
        without an operating system.

    Raises
    ------
    UnsupportedTarget
        Says what can be done with the target instead.
    """
    system = target.triple.partition("-")[2]
    bare = any(word in system.split("-") for word in ("none", "elf", "eabi"))
    source = target.cpu.kind == "c"
    if not source and (not system or target.is_host or (not bare and ("linux" in system or cross_compiler))):
        return
    asks = f"`tvmc lint` and `tvmc explain` work with --target {str(target)!r}"
    bare = bare or source
    raise UnsupportedTarget(
        f"a bundle for {target} ({target.triple or target.cpu.kind}) cannot be linked yet: "
        + ("only shared libraries can be, and it has none" if bare else "no compiler for its system is known here"),
        asks if bare else f"{asks}; compile on that system, or name its compiler with --cross-compiler",
    )


def find_compiler(arch: str, cross_compiler: str | None = None) -> str:
    """Return the C++ compiler that makes code for `arch`.

    Parameters
    ----------
    arch : str
    cross_compiler : str, optional
        A program name or path that is used instead of the usual ones.

    Raises
    ------
    ToolchainMissing
        None is installed; says what to install.
    """
    if cross_compiler:
        candidates = [cross_compiler]
    elif arch == host_arch():
        candidates = [*filter(None, [os.environ.get("CXX")]), "g++", "c++", "clang++"]
    else:
        candidates = [f"{arch}-linux-gnu-g++"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    package = "g++" if arch == host_arch() else f"g++-{arch}-linux-gnu"
    raise ToolchainMissing(
        f"no C++ compiler for {arch}: {', '.join(candidates)} not found",
        f"apt-get install {package}, or name one with --cross-compiler",
    )


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises
    ------
    ToolchainFailed
        It failed or took longer than ten minutes.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LINK_SECONDS
        )
    except subprocess.TimeoutExpired as err:
        raise ToolchainFailed(command, None, str(err.stderr or "")) from err
    except OSError as err:
        raise ToolchainFailed(command, 126, str(err)) from err
    if done.returncode != 0:
        raise ToolchainFailed(command, done.returncode, done.stdout + done.stderr)


def link(executable: Any, path: Path, arch: str, cross_compiler: str | None = None) -> None:
    """Write the shared library of `executable` to `path`.

    Parameters
    ----------
    executable : tvm.relax.VMExecutable
    path : pathlib.Path
        Must end in ``.so``.
    arch : str
    cross_compiler : str, optional

    Raises
    ------
    ToolchainMissing, ToolchainFailed
    """
    compiler = find_compiler(arch, cross_compiler)

    def fcompile(output: str, objects: str | list[str], options: list[str] | None = None, **_: Any) -> None:
        files = [objects] if isinstance(objects, str) else list(objects)
        run_compiler([compiler, "-shared", "-fPIC", "-O2", "-o", output, *files, *(options or []), "-lm"])

    executable.export_library(str(path), fcompile=fcompile)
