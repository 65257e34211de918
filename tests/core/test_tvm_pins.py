"""The pinned TVM does what the pins are there for; `import crossloom` stays light."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import tvm_ffi

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    return done.stdout


def test_save_json_round_trips_in_a_fresh_process() -> None:
    """With a newer tvm-ffi this segfaults, so it runs apart."""
    code = """
import tvm
from tvm import relax as rx
bb = rx.BlockBuilder()
x = rx.Var("x", rx.TensorType((2, 3), "float32"))
with bb.function("main", [x]):
    with bb.dataflow():
        out = bb.emit_output(rx.op.nn.relu(x))
    bb.emit_func_output(out)
mod = bb.get()
text = tvm.ir.save_json(mod)
tvm.ir.assert_structural_equal(tvm.ir.load_json(text), mod)
print(text)
"""
    assert "relax" in json.dumps(json.loads(python(code)))


def test_installed_versions_are_the_pinned_ones() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("apache-tvm", "apache-tvm-ffi"):
        assert version(name) == pins[name]
        assert f'"{name}' in (ROOT / "pyproject.toml").read_text()


def test_import_crossloom_imports_no_tvm() -> None:
    loaded = python("import sys, crossloom; print(*sys.modules)").split()
    assert "crossloom" in loaded
    assert not [name for name in loaded if name.split(".")[0] in ("tvm", "numpy", "onnx", "torch")]


@pytest.mark.parametrize("package", ["crossloom.passes", "crossloom.schedules", "crossloom.codegen"])
def test_rooms_leave_the_slow_intrinsics_alone(package: str) -> None:
    """tvm.s_tir.tensor_intrin parses every CUDA intrinsic: 15 s of processor time."""
    loaded = python(f"import sys, crossloom, {package}; print(*sys.modules)").split()
    assert package in loaded and not [n for n in loaded if n.startswith("tvm.s_tir.tensor_intrin")]


def test_headers_for_the_server_are_in_the_wheel() -> None:
    include = Path(tvm_ffi.libinfo.find_include_path())
    for header in ("function.h", "extra/module.h", "container/tensor.h"):
        assert (include / "tvm" / "ffi" / header).is_file()
