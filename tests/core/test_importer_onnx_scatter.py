"""Writes to the places where a mask is true, as ONNX exporters spell them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx import from_onnx
from crossloom.testing import run_module

N = helper.make_node
#: index_put and, with the values cut to as many as there are places, masked_scatter of PyTorch's exporter.
LIST = [N("NonZero", ["mask"], ["listed"]), N("Transpose", ["listed"], ["index"], perm=[1, 0])]
PUT = [*LIST, N("ScatterND", ["x", "index", "values"], ["y"])]
SCATTER = [
    *LIST,
    N("Reshape", ["values", "minus_one"], ["flat"]),
    N("Shape", ["index"], ["sizes"]),
    N("Gather", ["sizes", "zero"], ["count"]),
    N("Slice", ["flat", "zero", "count", "zero"], ["cut"]),
    N("ScatterND", ["x", "index", "cut"], ["y"]),
]


def proto(nodes, kinds, outputs=("y",)):
    info = lambda name, spec: helper.make_tensor_value_info(name, spec[1], spec[0])
    constants = {"minus_one": np.array([-1]), "zero": np.array([0])}
    graph = helper.make_graph(
        nodes,
        "g",
        [info(name, spec) for name, spec in kinds.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def kinds(x, mask, values, of_mask=TensorProto.BOOL):
    return {"x": (x, TensorProto.FLOAT), "mask": (mask, of_mask), "values": (values, TensorProto.FLOAT)}


@pytest.mark.parametrize(
    ("nodes", "x", "mask", "values"),
    [
        (PUT, (1, "S", 6), (1, "S"), (3, 6)),
        (PUT, (2, 4, 6), (2, 4), (3, 6)),
        (PUT, ("S", 6), ("S",), ("n", 6)),
        (PUT, (2, "S"), (2, "S"), (3,)),
        (SCATTER, (1, "S", 2), (1, "S", 2), (3, 1)),
        (SCATTER, (1, "S", 2), (1, "S", 2), (3,)),
    ],
)
@pytest.mark.parametrize("of_mask", [TensorProto.BOOL, TensorProto.INT64])
def test_the_numbers_are_those_of_onnx_runtime(nodes, x, mask, values, of_mask):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = proto(nodes, kinds(x, mask, values, of_mask))
    rng = np.random.default_rng(0)
    sized = lambda shape: [{"S": 4, "n": 3}.get(d, d) for d in shape]
    flags = np.zeros(int(np.prod(sized(mask))), bool)
    flags[[1, 2, flags.size - 1]] = True
    given = {
        name: rng.standard_normal(sized(shape)).astype("float32") for name, shape in (("x", x), ("values", values))
    }
    given["mask"] = flags.reshape(sized(mask)) if of_mask == TensorProto.BOOL else 2 * flags.reshape(sized(mask))
    given["mask"] = given["mask"].astype("bool" if of_mask == TensorProto.BOOL else "int64")
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, given)
    found = from_onnx(model)
    assert "nonzero" not in found.mod.script()
    (got,) = run_module(found.mod, "main", [given[spec.name] for spec in found.entries["main"].inputs])
    np.testing.assert_array_equal(got, want)


def test_a_mask_of_other_sizes_is_refused():
    with pytest.raises(UnsupportedModel, match="mask"):
        from_onnx(proto(PUT, kinds((1, 5, 6), (1, 4), (3, 6))))


def test_places_that_are_a_result_too_are_still_listed():
    found = from_onnx(proto(PUT, kinds((1, 4, 6), (1, 4), (3, 6)), ("y", "index")))
    text = found.mod.script()
    assert "R.nonzero" in text and "R.where" in text and "scatter_nd" not in text


@pytest.mark.parametrize("case", ["sum", "other-order", "other-index"])
def test_what_is_no_such_write_is_left_to_the_operator(case):
    index = N("Transpose", ["listed"], ["index"], perm=[0, 1] if case == "other-order" else [1, 0])
    extra = {"reduction": "add"} if case == "sum" else {}
    place = "given" if case == "other-index" else "index"
    nodes = [LIST[0], index, N("ScatterND", ["x", place, "values"], ["y"], **extra)]
    shapes = kinds((1, 4, 6), (1, 4), (3, 6)) | {"given": ((3, 2), TensorProto.INT64)}
    if case == "sum":
        # TVM cannot prove that there are as many values as places.
        with pytest.raises(UnsupportedModel, match="ScatterND"):
            from_onnx(proto(nodes, shapes))
        return
    assert "scatter_nd" in from_onnx(proto(nodes, shapes)).mod.script()
