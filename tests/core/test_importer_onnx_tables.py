"""Rotary tables and masks of an ONNX graph are constants of the program; weights stay parameters."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from crossloom.importers.load import load_model
from crossloom.importers.onnx import from_onnx
from crossloom.importers.onnx_tables import tables
from crossloom.models import shapes3
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import run_module

COS = np.cos(np.arange(12, dtype="float32").reshape(3, 4))
MASK = np.where(np.tri(3, 4, dtype=bool), 0, -1e9).astype("float32")
MUL = [helper.make_node("Mul", ["x", "t"], ["y"])]


@pytest.mark.parametrize(
    ("array", "nodes", "is_table"),
    [
        (COS, MUL, True),
        (COS, [helper.make_node("Unsqueeze", ["t", "axes"], ["v"]), helper.make_node("Mul", ["v", "x"], ["y"])], True),
        (COS * 3, MUL, False),
        (COS[0], MUL, False),
        (COS, [helper.make_node("MatMul", ["x", "t"], ["y"])], False),
        (COS, [*MUL, helper.make_node("MatMul", ["x", "t"], ["z"])], False),
        (COS, [helper.make_node("Add", ["x", "t"], ["y"])], False),
        (COS, [helper.make_node("Mul", ["x", "t"], ["y"], domain="com.example")], False),
        (COS, [helper.make_node("Gather", ["t", "x"], ["y"])], False),
        (MASK, [helper.make_node("Add", ["x", "t"], ["y"])], True),
        (MASK / 1e6, [helper.make_node("Add", ["x", "t"], ["y"])], False),
        (np.where(MASK < 0, -np.inf, 0).astype("float16"), [helper.make_node("Add", ["x", "t"], ["y"])], True),
        (MASK == 0, [helper.make_node("Where", ["t", "x", "z"], ["y"])], True),
        (
            MASK == 0,
            [helper.make_node("Cast", ["t"], ["v"], to=1), helper.make_node("MatMul", ["v", "x"], ["y"])],
            False,
        ),
        (np.zeros((0, 4), "float32"), MUL, False),
        (np.zeros((2, 1 << 20), "float32"), MUL, False),
        (COS, [], False),
    ],
)
def test_by_values_and_readers(array, nodes, is_table):
    assert tables(nodes, {"t": array}) == ({"t"} if is_table else set())


def test_a_table_is_a_constant_and_a_weight_a_parameter():
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "cos"], ["turned"]), helper.make_node("MatMul", ["turned", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", 3, 4])],
        [helper.make_tensor_value_info("y", 1, ["n", 3, 4])],
        [onnx.numpy_helper.from_array(COS, "cos"), onnx.numpy_helper.from_array(np.eye(4, dtype="float32"), "w")],
    )
    loaded = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert set(loaded.params) == {"w"} and loaded.entries["main"].weights == ("w",)
    x = np.linspace(-1, 1, 24, dtype="float32").reshape(2, 3, 4)
    np.testing.assert_allclose(run_module(loaded.mod, "main", [x, *loaded.entry_params("main")])[0], x * COS, rtol=1e-6)


def test_the_reference_models_rotations_are_told_apart_by_what_they_compute():
    mod = CanonicalizeTransformer()(load_model(shapes3.path() / "shapes3.toml").mod)
    found = [composite_attrs(func) for func in mod.functions.values() if composite_name(func) == "crossloom.rotary"]
    kinds = {
        (str(a["axes"]), tuple(map(int, a["sections"])), round(float(a["theta"])), bool(a["pair_equal"])) for a in found
    }
    # The text model turns 32 lanes by position; the vision tower half of them by row, half by column.
    assert kinds == {("1d", (16,), 10000, True), ("2d", (8, 8), 10000, True)}
