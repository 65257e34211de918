"""The wheel built from the checkout: what it holds, and that it works in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


def run(*command: str | Path, cwd: Path, **extra: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN} | extra
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "--no-cache-dir", "-w", out, ROOT, cwd=out)
    (path,) = out.glob("crossloom-*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel; dependencies come from the test environment by path."""
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", home / "env", cwd=home)
    python = home / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=home)
    (site,) = (home / "env" / "lib").glob("python*/site-packages")
    # Paths added by a .pth are not searched for .pth files, so the editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("platlib") + "\n")
    return python


def test_wheel_holds_what_runs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tracked = run("git", "ls-files", cwd=ROOT).split()
    mapped = {"python/crossloom/": "crossloom/"}
    mapped |= {f"{room}/": f"crossloom/{room}/" for room in ("passes", "codegen", "schedules")}
    for source, place in mapped.items():
        for name in tracked:
            if name.startswith(source) and (ROOT / name).exists():
                assert place + name.removeprefix(source) in names, f"{name} is not in the wheel"
    for wanted in (
        "crossloom/runtime/rpc_server.cc",
        "crossloom/runtime/bin/crossloom_rpc",
        "crossloom/models/shapes3/shapes3.safetensors",
        "crossloom/models/shapes3/shapes3.toml",
        "crossloom/passes/__init__.py",
        "crossloom/codegen/__init__.py",
        "crossloom/schedules/__init__.py",
    ):
        assert wanted in names
    assert any(name.startswith("crossloom/targets/") and name.endswith(".toml") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_wheel_serves_every_python(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")


def test_clean_environment_imports_every_package(clean: Path, tmp_path: Path) -> None:
    code = (
        "import crossloom, crossloom.passes, crossloom.schedules, crossloom.codegen, crossloom.runtime;"
        "print(crossloom.__file__); print(crossloom.passes.__file__)"
    )
    for line in run(clean, "-c", code, cwd=tmp_path).split():
        assert line.startswith(str(clean.parents[1]))


def test_console_script_is_installed(clean: Path) -> None:
    script = clean.parent / "tvmc"
    assert script.is_file() and os.access(script, os.X_OK)
    assert "crossloom.cli.main" in script.read_text()


def test_installed_server_is_used_and_works(clean: Path, tmp_path: Path) -> None:
    code = """
import numpy as np, tvm
from tvm import relax as rx
from crossloom.bundle import write_bundle
from crossloom.model import Entry, Model, TensorSpec
from crossloom.runtime import open_session
from crossloom.runtime.cross import server_program
from crossloom.bundle.link import host_arch
bb = rx.BlockBuilder()
x = rx.Var("x", rx.TensorType((3,), "float32"))
with bb.function("main", [x], attrs={"num_input": 1}):
    with bb.dataflow():
        out = bb.emit_output(rx.op.add(x, x))
    bb.emit_func_output(out)
spec = TensorSpec("x", (3,), "float32")
model = Model(bb.get(), {}, {"main": Entry("main", (spec,), (TensorSpec("y", (3,), "float32"),))})
target = tvm.target.Target({"kind": "llvm"})
write_bundle("b.tar", executable=tvm.compile(model.mod, target=target), model=model, target=target)
with open_session("b.tar", "host-process") as session:
    (y,) = session.run("main", {"x": np.arange(3, dtype="float32")})
assert y.tolist() == [0, 2, 4], y
print(server_program(host_arch()))
"""
    printed = run(clean, "-c", code, cwd=tmp_path, CROSSLOOM_CACHE=str(tmp_path / "cache"))
    assert printed.strip().startswith(str(clean.parents[1]))
    assert printed.strip().endswith("crossloom/runtime/bin/crossloom_rpc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "cache"]


@pytest.mark.aarch64
def test_toolchain_file_cross_builds_the_server(tmp_path: Path) -> None:
    libs = run(sys.executable, "-m", "crossloom.runtime.board_libs", "aarch64", cwd=tmp_path).strip()
    configure = ["cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DPython3_EXECUTABLE={sys.executable}"]
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}"
    run(*configure, toolchain, f"-DCROSSLOOM_LIBS={libs}", cwd=tmp_path)
    run("cmake", "--build", tmp_path / "build", cwd=tmp_path)
    program = (tmp_path / "build" / "crossloom_rpc").read_bytes()
    assert program[:4] == b"\x7fELF"
    assert int.from_bytes(program[18:20], "little") == 183  # EM_AARCH64
