"""``tvmc doctor``: what is installed of all that compiling, running and testing need."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from crossloom.errors import CrossloomError

from . import arguments as args
from .console import print_json, print_table, progress, say

TOOLCHAIN = 5
_PINNED = ("apache-tvm", "apache-tvm-ffi")
_OPTIONAL = {
    "onnx": ("ONNX models", "pip install 'crossloom[onnx]'"),
    "onnxruntime": ("tvmc verify --against onnxruntime", "pip install 'crossloom[onnx]'"),
    "torch": ("torch.export models (.pt2)", "pip install 'crossloom[torch]'"),
    "xgboost": ("tuning", "pip install 'crossloom[tune]'"),
    "coremltools": ("the Apple Neural Engine", "pip install 'crossloom[ane]'"),
}


@dataclass(frozen=True)
class Check:
    """One line: what was looked for, whether it is there, what it is for, how to get it."""

    name: str
    ok: bool
    required: bool
    found: str
    needed_for: str
    remedy: str = ""


def command(as_json: args.Json = False) -> None:
    """Check compilers, emulators, pinned versions and the cache; exit 5 if a required one is missing."""
    with progress("looking"):
        checks = list(_checks())
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        mark = {(True, True): "ok", (True, False): "ok", (False, True): "MISSING", (False, False): "absent"}
        rows = [(mark[c.ok, c.required], c.name, c.found, c.needed_for, "" if c.ok else c.remedy) for c in checks]
        print_table("", ("", "what", "found", "needed for", "remedy"), rows)
    missing = [c.name for c in checks if c.required and not c.ok]
    if missing:
        say(f"error: required, but missing: {', '.join(missing)}")
        raise typer.Exit(TOOLCHAIN)


def _checks() -> Iterator[Check]:
    version = platform.python_version()
    yield Check("python", sys.version_info >= (3, 10), True, version, "everything", "Python 3.10 or newer")
    yield from _pins()
    yield _tvm_works()
    for name, (use, remedy) in _OPTIONAL.items():
        found = _installed(name)
        yield Check(name, bool(found), False, found, use, remedy)
    yield from _programs()
    yield _cache()


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def satisfies(version: str, specifier: str) -> bool:
    """Tell whether a release fits ``==1.2`` or ``>=1.2,<1.3``; enough for the pins of this package."""
    have = _number(version)
    for sign, wanted in re.findall(r"(==|>=|<=|<|>)\s*([\w.]+)", specifier):
        want = _number(wanted)
        fits = {"==": have == want, ">=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}
        if not fits[sign]:
            return False
    return True


def _pins() -> Iterator[Check]:
    try:
        required = importlib.metadata.requires("crossloom") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("crossloom", False, True, "", "everything", "pip install crossloom")
        return
    for name in _PINNED:
        pin = next((r for r in required if re.match(rf"{re.escape(name)}(?![\w-])", r)), name)
        found = _installed(name)
        ok = bool(found) and satisfies(found, pin.removeprefix(name))
        yield Check(name, ok, True, found, f"everything; pinned: {pin}", f"pip install '{pin}'")


def _tvm_works() -> Check:
    """Load TVM in a process of its own: a broken one may crash."""
    code = "import tvm; print(tvm.__version__, ' '.join(tvm.target.codegen.llvm_get_targets()))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Check("tvm loads", False, True, "no answer in 120 s", "everything", "reinstall apache-tvm")
    words = done.stdout.split()
    if done.returncode != 0 or not words:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return Check("tvm loads", False, True, last, "everything", "reinstall apache-tvm")
    arms = [word for word in words[1:] if word in ("aarch64", "arm")]
    found = f"{words[0]}, LLVM with {', '.join(arms) or 'no Arm code generator'}"
    return Check("tvm loads", "aarch64" in arms, True, found, "everything", "reinstall apache-tvm")


def _programs() -> Iterator[Check]:
    from crossloom.bundle.link import find_compiler, host_arch

    def compiler(arch: str, required: bool, use: str) -> Check:
        try:
            return Check(f"C++ compiler, {arch}", True, required, find_compiler(arch), use)
        except CrossloomError as error:
            return Check(f"C++ compiler, {arch}", False, required, "", use, error.remedy)

    host = host_arch()
    yield compiler(host, True, "linking for this machine")
    if host != "aarch64":
        yield compiler("aarch64", False, "linking for Arm Linux boards")
    else:
        yield compiler("x86_64", False, "linking for x86 Linux")
    other = "aarch64" if host != "aarch64" else "x86_64"
    emulator = shutil.which(f"qemu-{other}") or ""
    yield Check(
        f"qemu-{other}", bool(emulator), False, emulator, "running without a board", "apt-get install qemu-user"
    )
    root = Path(os.environ.get("QEMU_LD_PREFIX", f"/usr/{other}-linux-gnu"))
    yield Check(
        f"C library, {other}", root.is_dir(), False, str(root) if root.is_dir() else "", "running under QEMU",
        f"apt-get install g++-{other}-linux-gnu, or set QEMU_LD_PREFIX",
    )  # fmt: skip
    micro = shutil.which("arm-none-eabi-gcc") or ""
    yield Check("arm-none-eabi-gcc", bool(micro), False, micro, "microcontrollers", "apt-get install gcc-arm-none-eabi")


def _cache() -> Check:
    from crossloom.cache import cache_dir

    try:
        folder = cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except CrossloomError as error:
        return Check("cache", False, True, error.message, "everything", error.remedy)
    except OSError as error:
        remedy = "set CROSSLOOM_CACHE to a folder that can be written"
        return Check("cache", False, True, str(error), "everything", remedy)
    return Check("cache", True, True, str(folder), "servers, kernels")
