"""Sizes that a graph works out of floats, and of filled shapes: grids of positions in vision transformers."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from crossloom.importers.onnx import from_onnx
from crossloom.testing import run_module


def graph(nodes, inputs, outputs, constants):
    info = lambda name, dtype, shape: helper.make_tensor_value_info(name, dtype, shape)
    made = helper.make_graph(
        nodes,
        "sizes",
        [info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(model, **given):
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    loaded = from_onnx(model)
    entry = next(iter(loaded.entries))
    got = run_module(loaded.mod, entry, [*given.values(), *loaded.entry_params(entry)])
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("count, side", [(16.0, 4), (9.0, 3), (1.0, 1)])
def test_the_side_of_a_grid_is_the_root_of_how_many_places_it_has(count, side):
    nodes = [
        helper.make_node("Pow", ["count", "half"], ["root"]),
        helper.make_node("Cast", ["root"], ["side"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["side", "zero"], ["one"]),
        helper.make_node("Concat", ["one", "one"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    constants = {"count": np.float32(count), "half": np.float32(0.5), "zero": np.array([0], "int64")}
    x = np.random.default_rng(0).standard_normal(side * side).astype("float32")
    check(graph(nodes, {"x": [side * side]}, ["y"], constants), x=x)


def test_a_shape_with_minus_ones_in_it_is_expanded_to():
    """torch's ``expand(batch, -1, -1)`` as its exporter spells it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "scalar"], ["batch"], axis=0),
        helper.make_node("Unsqueeze", ["batch", "first"], ["leading"]),
        helper.make_node("Concat", ["leading", "rest"], ["wanted"], axis=0),
        helper.make_node("Shape", ["wanted"], ["rank"]),
        helper.make_node("ConstantOfShape", ["rank"], ["ones"], value=numpy_helper.from_array(np.array([1], "int64"))),
        helper.make_node("Mul", ["ones", "minus"], ["kept"]),
        helper.make_node("Equal", ["wanted", "kept"], ["open"]),
        helper.make_node("Where", ["open", "ones", "wanted"], ["target"]),
        helper.make_node("Expand", ["token", "target"], ["wide"]),
        helper.make_node("Concat", ["wide", "x"], ["y"], axis=1),
    ]
    token = np.arange(4, dtype="float32").reshape(1, 1, 4)
    constants = {"scalar": np.array(0), "first": np.array([0]), "rest": np.array([-1, -1]), "minus": np.array(-1)}
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")
    check(graph(nodes, {"x": [2, 3, 4]}, ["y"], constants | {"token": token}), x=x)


def test_a_filled_tensor_of_floats_stays_a_tensor():
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["filled"]),
        helper.make_node("Add", ["x", "filled"], ["y"]),
    ]
    x = np.ones((2, 3), "float32")
    check(graph(nodes, {"x": [2, 3]}, ["y"], {"shape": np.array([2, 3], "int64")}), x=x)
