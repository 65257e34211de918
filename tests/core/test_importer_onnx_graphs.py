"""ONNX graphs by structure: shape arithmetic, operator sets 9 to 21, empty tensors, cycles, repeated names."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx import from_onnx

make = h.make_node


def model_of(nodes, inputs, outputs, init=(), opset=17):
    vi = lambda t: h.make_tensor_value_info(*t)
    graph = h.make_graph(nodes, "g", [vi(t) for t in inputs], [vi(t) for t in outputs], list(init))
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)


def run(proto, **inputs):
    model = from_onnx(proto)
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target("llvm")), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    out = vm["main"](*[tvm.runtime.tensor(np.ascontiguousarray(v)) for v in values])
    return [o.numpy() for o in (out if len(entry.outputs) > 1 else [out])]


def int64(name, *values):
    return nh.from_array(np.array(values, "int64"), name)


def scalar(name, value):
    return nh.from_array(np.array(value, "int64"), name)


def test_flattening_by_shape_arithmetic_keeps_symbols():
    nodes = [
        make("Shape", ["x"], ["s"]),
        make("Gather", ["s", "zero"], ["b"]),
        make("Gather", ["s", "one"], ["n"]),
        make("Mul", ["b", "n"], ["bn"]),
        make("Unsqueeze", ["bn", "axis"], ["bn1"]),
        make("Concat", ["bn1", "minus"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["y"]),
        make("Range", ["zero", "n", "one"], ["r"]),
        make("ConstantOfShape", ["bn1"], ["c"], value=nh.from_array(np.array([3], "int64"))),
    ]
    init = [scalar("zero", 0), scalar("one", 1), int64("axis", 0), int64("minus", -1)]
    outputs = [("y", T.FLOAT, None), ("r", T.INT64, None), ("c", T.INT64, None), ("bn", T.INT64, [])]
    proto = model_of(nodes, [("x", T.FLOAT, ["b", "n", 2, 3])], outputs, init)
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 3)).astype("float32")
    y, r, c, bn = run(proto, x=x)
    np.testing.assert_array_equal(y, x.reshape(10, 6))
    np.testing.assert_array_equal(r, np.arange(5))
    np.testing.assert_array_equal(c, np.full(10, 3))
    assert bn == 10 and r.dtype == c.dtype == bn.dtype == np.int64
    shape = [str(d) for d in from_onnx(proto).mod["main"].ret_ty.fields[0].shape]
    assert "b" in shape[0] and "n" in shape[0] and "6" in shape[1]


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("start,end", [("half", "n"), ("minus", "big"), ("zero", "half"), ("nminus", "n")])
def test_slices_with_symbolic_bounds(size, start, end):
    nodes = [
        make("Shape", ["x"], ["n"], start=0, end=1),
        make("Div", ["n", "two"], ["half"]),
        make("Sub", ["two", "n"], ["nminus"]),
        make("Slice", ["x", start, end, "zero"], ["y"]),
    ]
    init = [int64("two", 2), int64("zero", 0), int64("minus", -3), int64("big", 2**63 - 1)]
    proto = model_of(nodes, [("x", T.FLOAT, ["n", 2])], [("y", T.FLOAT, None)], init)
    x = np.arange(2 * size, dtype="float32").reshape(size, 2)
    bounds = {"half": size // 2, "n": size, "minus": -3, "big": None, "zero": 0, "nminus": 2 - size}
    np.testing.assert_array_equal(run(proto, x=x)[0], x[bounds[start] : bounds[end]])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_at_run_time_are_not_taken_for_absent(axis):
    """The tensor, the starts and the ends are known while importing: only the axes are not."""
    nodes = [make("Slice", ["t", "one", "two", "axes"], ["cut"]), make("Add", ["cut", "z"], ["y"])]
    t = np.arange(12, dtype="int64").reshape(3, 4)
    init = [nh.from_array(t, "t"), int64("one", 1), int64("two", 2)]
    proto = model_of(nodes, [("axes", T.INT64, [1]), ("z", T.INT64, [1])], [("y", T.INT64, None)], init)
    wanted = t[1:2] if axis == 0 else t[:, 1:2]
    np.testing.assert_array_equal(run(proto, axes=np.array([axis]), z=np.array([0]))[0], wanted)


def test_axes_left_out_before_steps_are_the_first_ones():
    nodes = [make("Slice", ["t", "zero", "three", "", "two"], ["cut"]), make("Add", ["cut", "z"], ["y"])]
    t = np.arange(12, dtype="int64").reshape(3, 4)
    init = [nh.from_array(t, "t"), int64("zero", 0), int64("three", 3), int64("two", 2)]
    proto = model_of(nodes, [("z", T.INT64, [1])], [("y", T.INT64, None)], init)
    np.testing.assert_array_equal(run(proto, z=np.array([0]))[0], t[[0, 2]])


def test_expand_as_torch_spells_it():
    """Where(shape == -1, ones, shape) and a target taken from another input."""
    nodes = [
        make("Shape", ["other"], ["s"]),
        make("Equal", ["s", "minus"], ["e"]),
        make("ConstantOfShape", ["two"], ["ones"], value=nh.from_array(np.array([1], "int64"))),
        make("Where", ["e", "ones", "s"], ["target"]),
        make("Expand", ["x", "target"], ["y"]),
    ]
    init = [int64("minus", -1), int64("two", 2)]
    inputs = [("x", T.FLOAT, [1, 3]), ("other", T.FLOAT, ["n", 3])]
    x = np.arange(3, dtype="float32")[None]
    proto = model_of(nodes, inputs, [("y", T.FLOAT, None)], init)
    np.testing.assert_array_equal(run(proto, x=x, other=np.ones((4, 3), "float32"))[0], np.repeat(x, 4, 0))


def test_expand_of_unrelated_symbols_is_refused_by_name_and_nothing_is_printed(capfd):
    gc.collect()
    capfd.readouterr()
    nodes = [make("Shape", ["other"], ["s"]), make("Expand", ["x", "s"], ["y"], "grow")]
    inputs = [("x", T.FLOAT, ["n"]), ("other", T.FLOAT, ["m"])]
    with pytest.raises(UnsupportedModel, match=r"grow[\s\S]*one name"):
        from_onnx(model_of(nodes, inputs, [("y", T.FLOAT, None)]))
    gc.collect()
    printed = capfd.readouterr()
    assert printed.err == "" and printed.out == ""


def test_64_bit_constants_keep_their_width():
    big = 2**40 + 1
    proto = model_of(
        [make("Add", ["x", "c"], ["y"])], [("x", T.INT64, ["n"])], [("y", T.INT64, ["n"])], [scalar("c", big)]
    )
    np.testing.assert_array_equal(run(proto, x=np.array([1, 2]))[0], np.array([1, 2]) + big)


@pytest.mark.parametrize("opset", [9, 11, 13, 15, 17, 19, 21])
def test_operator_sets(opset):
    """Axes, squeezes, splits and clips moved between attributes and operands at opsets 10, 11 and 13."""
    old = opset < 13
    init, axes = [nh.from_array(np.full((4, 4), 0.5, "float32"), "w")], {"axes": [0]} if old else {}
    if not old:
        init.append(int64("a0", 0))
    operand = [] if old else ["a0"]
    nodes = [
        make("MatMul", ["x", "w"], ["m"]),
        make("Unsqueeze", ["m", *operand], ["u"], **axes),
        make("Squeeze", ["u", *operand], ["s"], **axes),
        make("ReduceMean", ["s"], ["mean"], axes=[-1], keepdims=1)
        if opset < 18
        else make("ReduceMean", ["s", "last"], ["mean"], keepdims=1),
        make("Sub", ["s", "mean"], ["d"]),
    ]
    if opset >= 18:
        init.append(int64("last", -1))
    if opset < 10:
        nodes.append(make("Slice", ["d"], ["c"], starts=[1], ends=[4], axes=[1]))
    else:
        init += [int64("b", 1), int64("e", 4), int64("ax", 1)]
        nodes.append(make("Slice", ["d", "b", "e", "ax"], ["c"]))
    if opset < 11:
        nodes.append(make("Clip", ["c"], ["y"], min=-0.5, max=0.5))
    else:
        init += [nh.from_array(np.array(v, "float32"), n) for n, v in (("lo", -0.5), ("hi", 0.5))]
        nodes.append(make("Clip", ["c", "lo", "hi"], ["y"]))
    x = np.random.default_rng(opset).standard_normal((3, 4)).astype("float32")
    m = x @ np.full((4, 4), 0.5, "float32")
    expected = np.clip((m - m.mean(-1, keepdims=True))[:, 1:4], -0.5, 0.5)
    proto = model_of(nodes, [("x", T.FLOAT, ["n", 4])], [("y", T.FLOAT, ["n", 3])], init, opset)
    np.testing.assert_allclose(run(proto, x=x)[0], expected, atol=1e-5)


def test_empty_tensors():
    nodes = [make("Concat", ["x", "none"], ["y"], axis=0), make("Shape", ["none"], ["s"])]
    init = [nh.from_array(np.zeros((0, 3), "float32"), "none")]
    proto = model_of(nodes, [("x", T.FLOAT, ["n", 3])], [("y", T.FLOAT, None), ("s", T.INT64, [2])], init)
    for size in (0, 2):
        x = np.ones((size, 3), "float32")
        y, s = run(proto, x=x)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(s, [0, 3])


def test_reshape_of_an_empty_tensor_needs_its_size_spelled_out():
    nodes = [make("Reshape", ["x", "t"], ["y"], "flat")]
    proto = model_of(nodes, [("x", T.FLOAT, [0, 3])], [("y", T.FLOAT, None)], [int64("t", 0, -1)])
    with pytest.raises(UnsupportedModel):
        from_onnx(proto)


@pytest.mark.parametrize(
    "nodes,init,what",
    [
        ([make("Add", ["x", "b"], ["a"]), make("Relu", ["a"], ["b"]), make("Relu", ["b"], ["y"])], [], "b"),
        ([make("Relu", ["x"], ["y"]), make("Neg", ["x"], ["y"])], [], "y"),
        ([make("Add", ["x", "w"], ["y"])], [nh.from_array(np.ones(2, "float32"), "w")] * 2, "w"),
        ([make("Add", ["x", "absent"], ["y"])], [], "absent"),
        ([make("Relu", ["x"], ["other"])], [], "y"),
    ],
    ids=["cycle", "output twice", "weight twice", "undefined", "no such output"],
)
def test_broken_graphs_name_the_tensor(nodes, init, what):
    with pytest.raises(UnsupportedModel, match=f"'{what}'"):
        from_onnx(model_of(nodes, [("x", T.FLOAT, [2])], [("y", T.FLOAT, [2])], init))


def test_input_shapes_fix_a_symbol_without_declared_outputs():
    proto = model_of([make("Relu", ["x"], ["y"])], [("x", T.FLOAT, ["n", 3])], [("y", T.FLOAT, ["n", 3])])
    assert from_onnx(proto, input_shapes={"x": (4, 3)}).entries["main"].outputs[0].shape == (4, 3)
