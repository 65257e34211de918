"""A bundle that is written again is run as it is now, whatever of the old one is still loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx

from crossloom.bundle import write_bundle
from crossloom.model import Entry, Model, TensorSpec
from crossloom.runtime import open_session

TARGET = tvm.target.Target({"kind": "llvm"})
X = np.array([1, 2, 3], "float32")


def write(path: Path, op: Any, weight: float) -> Path:
    x, w = (rx.Var(name, rx.TensorType((3,), "float32")) for name in ("x", "w"))
    bb = rx.BlockBuilder()
    with bb.function("main", [x, w], attrs={"num_input": 1}):
        with bb.dataflow():
            out = bb.emit_output(op(x, w))
        bb.emit_func_output(out)
    spec = TensorSpec("x", (3,), "float32")
    entry = Entry("main", (spec,), (TensorSpec("y", (3,), "float32"),), ("w",))
    model = Model(bb.get(), {"w": np.full(3, weight, "float32")}, {"main": entry})
    return write_bundle(path, executable=tvm.compile(model.mod, target=TARGET), model=model, target=TARGET)


@pytest.mark.parametrize("close_first", [True, False])
def test_the_new_code_runs_with_the_new_weights(tmp_path, close_first) -> None:
    path = tmp_path / "bundle"
    first = open_session(write(path, rx.op.multiply, 10.0), "host")
    np.testing.assert_array_equal(first.run("main", {"x": X})[0], X * 10)
    if close_first:
        first.close()
    write(path, rx.op.add, 5.0)
    with open_session(path, "host") as second:
        np.testing.assert_array_equal(second.run("main", {"x": X})[0], X + 5)
        if not close_first:  # the old one goes on as it was
            np.testing.assert_array_equal(first.run("main", {"x": X})[0], X * 10)
    if not close_first:
        np.testing.assert_array_equal(first.run("main", {"x": X})[0], X * 10)
        first.close()


def test_no_copy_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with open_session(write(tmp_path / "bundle", rx.op.add, 1.0), "host") as session:
        np.testing.assert_array_equal(session.run("main", {"x": X})[0], X + 1)
    assert list((tmp_path / "tmp").glob("crossloom-library-*")) == []
