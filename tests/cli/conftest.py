"""Small models, and `tvmc` called in process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from crossloom.cli.main import execute


@pytest.fixture
def tvmc(capfd):
    """Run `tvmc` with arguments; returns exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = execute([str(a) for a in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def write_model(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """y = relu(x @ w + b), z = x + c, with (n, 5) inputs; returns w and b."""
    rng = np.random.default_rng(4)
    w, b = rng.standard_normal((5, 3)).astype("float32"), rng.standard_normal(3).astype("float32")
    c = rng.standard_normal(5).astype("float32")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="mm"),
        helper.make_node("Add", ["p", "b"], ["q"], name="bias"),
        helper.make_node("Relu", ["q"], ["y"], name="relu"),
        helper.make_node("Add", ["x", "c"], ["z"], name="shift"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "tiny",
        [value("x", TensorProto.FLOAT, ["n", 5])],
        [value("y", TensorProto.FLOAT, ["n", 3]), value("z", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(v, k) for k, v in (("w", w), ("b", b), ("c", c))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return w, b


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    write_model(path)
    return path


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> tuple[np.ndarray, np.ndarray]:
    """The model's w and b."""
    return write_model(tmp_path_factory.mktemp("again") / "tiny.onnx")


@pytest.fixture(scope="session")
def bundle(model) -> Path:
    """The model compiled for this machine, with its code."""
    path = model.parent / "bundle"
    assert execute(["compile", str(model), "--target", "host", "-o", str(path), "--dump-code", "relax,tir,asm"]) == 0
    return path


@pytest.fixture
def program() -> list[str]:
    """`tvmc` as a program of its own."""
    return [sys.executable, "-m", "crossloom.cli.main"]
