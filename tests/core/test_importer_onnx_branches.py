"""`If` in ONNX graphs: chosen while importing where possible, else element by element; loops are refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx import from_onnx
from crossloom.testing import run_module

make, vi = h.make_node, h.make_tensor_value_info
MS = "com.microsoft"


def model_of(nodes, inputs, outputs, init=()):
    typed = [vi(name, kind, None) for name, kind in outputs]
    graph = h.make_graph(nodes, "g", [vi(*t) for t in inputs], typed, list(init))
    sets = [h.make_opsetid("", 17), h.make_opsetid(MS, 1)]
    return h.make_model(graph, opset_imports=sets, ir_version=8)


def branch(nodes, outputs, init=()):
    return h.make_graph(nodes, "branch", [], [vi(name, kind, None) for name, kind in outputs], list(init))


def compare(proto, **inputs):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, inputs)
    model = from_onnx(proto)
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    out = vm["main"](*[tvm.runtime.tensor(np.array(v, order="C")) for v in values])
    out = out if len(entry.outputs) > 1 else [out]
    for a, b in zip(out, wanted, strict=True):
        assert a.numpy().shape == b.shape
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-5)
    return model


def int64(name, *values):
    return nh.from_array(np.array(values, "int64"), name)


X = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("shape", [[], [1]])
def test_both_branches_read_outer_values_and_their_own_weights(flag, shape):
    """Names repeat inside the branches; each has weights, an operator of ONNX Runtime's, and reshapes (tvm #20191)."""
    w = nh.from_array(np.random.default_rng(1).standard_normal((4, 4)).astype("float32"), "w")
    gamma = nh.from_array(np.full(4, 0.5, "float32"), "gamma")
    flat = int64("flat", -1, 2)
    then = branch(
        [make("MatMul", ["h", "w"], ["t"]), make("Reshape", ["t", "flat"], ["r"]), make("Relu", ["r"], ["o"])],
        [("o", T.FLOAT), ("t", T.FLOAT)],
        [w, flat],
    )
    other = branch(
        [
            make("SimplifiedLayerNormalization", ["h", "gamma"], ["t"]),
            make("Reshape", ["t", "flat"], ["r"]),
            make("Neg", ["r"], ["o"]),
        ],
        [("o", T.FLOAT), ("h", T.FLOAT)],
        [gamma, flat],
    )
    other.output[1].name = "t"
    nodes = [
        make("Tanh", ["x"], ["h"]),
        make("If", ["flag"], ["a", "b"], then_branch=then, else_branch=other),
        make("Add", ["a", "a"], ["y"]),
    ]
    inputs = [("x", T.FLOAT, ["n", 4]), ("flag", T.BOOL, shape)]
    proto = model_of(nodes, inputs, [("y", T.FLOAT), ("b", T.FLOAT)])
    model = compare(proto, x=X, flag=np.full(shape, flag))
    assert len(model.entries["main"].weights) == 2


@pytest.mark.parametrize("size,squeezed", [(1, True), (4, False)])
def test_a_condition_on_the_shape_is_decided_while_importing(size, squeezed):
    """What exporters write for squeeze(1): the branch not taken would not even convert."""
    then = branch([make("Squeeze", ["x", "axis"], ["s"])], [("s", T.FLOAT)])
    other = branch([make("Identity", ["x"], ["i"])], [("i", T.FLOAT)])
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "one"], ["d"]),
        make("Equal", ["d", "one"], ["flag"]),
        make("If", ["flag"], ["y"], then_branch=then, else_branch=other),
    ]
    init = [nh.from_array(np.array(1, "int64"), "one"), int64("axis", 1)]
    proto = model_of(nodes, [("x", T.FLOAT, [3, size])], [("y", T.FLOAT)], init)
    # ONNX Runtime refuses the branch not taken.
    model = compare(proto, x=X[:, :size]) if squeezed else from_onnx(proto)
    assert model.entries["main"].outputs[0].shape == ((3,) if squeezed else (3, 4))
    assert "where" not in model.mod.script()


@pytest.mark.parametrize("a,b", [(True, True), (True, False), (False, True)])
def test_nested(a, b):
    deep = lambda op: branch([make(op, ["x"], ["o"])], [("o", T.FLOAT)])
    inner = make("If", ["b"], ["o"], then_branch=deep("Relu"), else_branch=deep("Neg"))
    then = branch([inner], [("o", T.FLOAT)])
    nodes = [make("If", ["a"], ["y"], then_branch=then, else_branch=deep("Tanh"))]
    inputs = [("x", T.FLOAT, ["n", 4]), ("a", T.BOOL, []), ("b", T.BOOL, [])]
    compare(model_of(nodes, inputs, [("y", T.FLOAT)]), x=X, a=np.array(a), b=np.array(b))


@pytest.mark.parametrize("flag", [True, False])
def test_ifs_whose_first_output_is_left_out_keep_their_branches_apart(flag):
    pair = lambda op: branch([make("Exp", ["x"], ["o"]), make(op, ["x"], ["p"])], [("o", T.FLOAT), ("p", T.FLOAT)])
    nodes = [
        make("If", ["flag"], ["", "a"], then_branch=pair("Relu"), else_branch=pair("Neg")),
        make("If", ["flag"], ["", "b"], then_branch=pair("Tanh"), else_branch=pair("Abs")),
        make("If", ["flag"], ["", ""], then_branch=pair("Sin"), else_branch=pair("Cos")),
    ]
    inputs = [("x", T.FLOAT, ["n", 4]), ("flag", T.BOOL, [1])]
    model = from_onnx(model_of(nodes, inputs, [("a", T.FLOAT), ("b", T.FLOAT)]))
    out = run_module(model.mod, "main", [X, np.array([flag])])
    wanted = [np.maximum(X, 0), np.tanh(X)] if flag else [-X, np.abs(X)]
    for value, expected in zip(out, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_an_unused_if_may_not_convert_and_a_used_one_is_named():
    odd = branch([make("Expand", ["x", "s"], ["o"], "grow")], [("o", T.FLOAT)])
    same = branch([make("Identity", ["x"], ["o"])], [("o", T.FLOAT)])
    nodes = [make("Shape", ["z"], ["s"]), make("If", ["flag"], ["y"], then_branch=odd, else_branch=same)]
    inputs = [("x", T.FLOAT, ["n"]), ("z", T.FLOAT, ["m"]), ("flag", T.BOOL, [])]
    with pytest.raises(UnsupportedModel, match="grow"):
        from_onnx(model_of(nodes, inputs, [("y", T.FLOAT)]))
    nodes.append(make("Relu", ["x"], ["used"]))
    assert from_onnx(model_of(nodes, inputs, [("used", T.FLOAT)])).entries["main"].outputs[0].shape == ("n",)


def test_different_shapes_at_run_time_are_refused_by_name():
    then = branch([make("Transpose", ["x"], ["o"])], [("o", T.FLOAT)])
    other = branch([make("Identity", ["x"], ["o"])], [("o", T.FLOAT)])
    nodes = [make("If", ["flag"], ["y"], "choose", then_branch=then, else_branch=other)]
    inputs = [("x", T.FLOAT, [3, 4]), ("flag", T.BOOL, [])]
    with pytest.raises(UnsupportedModel, match=r"choose.*float32\[4, 3\] and float32\[3, 4\]"):
        from_onnx(model_of(nodes, inputs, [("y", T.FLOAT)]))


def test_loops_are_refused_with_a_way_out():
    body = h.make_graph(
        [make("Add", ["v", "v"], ["w"]), make("Identity", ["go"], ["on"])],
        "body",
        [vi("i", T.INT64, []), vi("go", T.BOOL, []), vi("v", T.FLOAT, [2])],
        [vi("on", T.BOOL, []), vi("w", T.FLOAT, [2])],
    )
    node = make("Loop", ["trips", "", "x"], ["y"], "repeat", body=body)
    with pytest.raises(UnsupportedModel, match=r"Loop.*repeat[\s\S]*unroll"):
        from_onnx(model_of([node], [("x", T.FLOAT, [2])], [("y", T.FLOAT)], [nh.from_array(np.array(3), "trips")]))


@pytest.mark.parametrize("flag", [True, False])
def test_booleans_shapes_and_halves(flag):
    """Results that are no floats: a mask, a shape known while importing beside one that is a weight, fp16."""
    outputs = [("o1", T.BOOL), ("o2", T.INT64), ("o3", T.FLOAT16)]
    half = lambda source: make("Cast", [source], ["o3"], to=T.FLOAT16)
    then = branch([make("Not", ["p"], ["o1"]), make("Shape", ["x"], ["o2"]), half("x")], outputs)
    other = branch([make("Identity", ["p"], ["o1"]), make("Identity", ["k"], ["o2"]), half("z")], outputs)
    nodes = [make("Neg", ["x"], ["z"]), make("If", ["flag"], ["a", "b", "c"], then_branch=then, else_branch=other)]
    inputs = [("x", T.FLOAT, ["n", 4]), ("flag", T.BOOL, []), ("p", T.BOOL, ["n"])]
    proto = model_of(nodes, inputs, [("a", T.BOOL), ("b", T.INT64), ("c", T.FLOAT16)], [int64("k", 7, 9)])
    compare(proto, x=X, flag=np.array(flag), p=np.array([True, False, True]))
