"""Operators whose signature or meaning changed between operator sets 9 and 21, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax

from crossloom.importers.onnx import from_onnx

OPSETS = range(9, 22)


class Graph:
    """Collects small cases, each with an output of its own, over ``x (n, 3, 6, 8)`` and ``m (n, 4, 6)``."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.init: list[onnx.TensorProto] = []
        self.outputs: list[str] = []

    def const(self, value, dtype="int64") -> str:
        name = f"c{len(self.init)}"
        self.init.append(nh.from_array(np.array(value, dtype), name))
        return name

    def add(self, op_type: str, inputs: list[str], outputs: int = 1, label: str = "", **attrs) -> list[str]:
        stem = f"{op_type}_{label}" if label else op_type
        names = [f"{stem}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(h.make_node(op_type, inputs, names, **attrs))
        self.outputs += names
        return names

    def axes(self, op_type: str, x: str, axes: list[int], since: int, outputs: int = 1, **attrs) -> list[str]:
        """Give axes as an attribute before opset `since`, as an operand from it on."""
        if self.opset < since:
            return self.add(op_type, [x], outputs, axes=axes, **attrs)
        return self.add(op_type, [x, self.const(axes)], outputs, **attrs)


def shapes(g: Graph) -> None:
    (up,) = g.axes("Unsqueeze", "m", [0, 2], 13)
    g.axes("Squeeze", up, [0], 13)
    g.add("Squeeze", [g.axes("Unsqueeze", g.add("Identity", [g.const([[1.0, 2.0]], "float32")])[0], [1], 13)[0]])
    if g.opset < 13:
        g.add("Split", ["x"], 2, axis=1, split=[1, 2])
    else:
        g.add("Split", ["x", g.const([1, 2])], 2, axis=1)
    if g.opset >= 18:
        g.add("Split", ["x"], 3, axis=3, num_outputs=3, label="ragged")
    else:
        g.add("Split", ["x"], 2, axis=3)
    if g.opset < 10:
        g.add("Slice", ["x"], axes=[2, 3], starts=[1, -3], ends=[1000, -1])
    else:
        g.add("Slice", ["x", g.const([1, -3]), g.const([2**31 - 1, -1]), g.const([2, 3])])
        g.add("Slice", ["x", g.const([-1]), g.const([-(2**31)]), g.const([3]), g.const([-2])], label="back")
    g.add("Flatten", ["x"], axis=2)
    if g.opset >= 11:
        g.add("Flatten", ["x"], axis=-1, label="negative")
        g.add("Gather", ["m", g.const([-1, 0])], axis=-1)
        g.add("Range", [g.const(1), g.const(7), g.const(2)])
    if g.opset >= 14:
        g.add("Trilu", ["m"], upper=0)
        g.add("Reshape", ["m", g.const([0, 2, -1])], allowzero=0)
    if g.opset >= 15:
        g.add("Shape", ["x"], start=1, end=-1)
        g.add("CastLike", ["m", g.const([1])])
    g.add("Tile", ["m", g.const([1, 2, 1])])
    g.add("DepthToSpace", [g.add("Concat", ["x", "x", "x", "x"], axis=1)[0]], blocksize=2)
    if g.opset >= 11:
        g.add("DepthToSpace", [g.outputs[-2]], blocksize=2, mode="CRD", label="crd")


def pads(g: Graph) -> None:
    for mode in ("constant", "reflect", "edge"):
        amounts = [0, 0, 1, 2, 0, 0, 2, 1]
        if g.opset < 11:
            g.add("Pad", ["x"], pads=amounts, mode=mode, label=mode, **({"value": 1.5} if mode == "constant" else {}))
        else:
            value = [g.const(1.5, "float32")] if mode == "constant" else []
            g.add("Pad", ["x", g.const(amounts), *value], mode=mode, label=mode)
    if g.opset >= 18:
        g.add("Pad", ["x", g.const([1, 2, 0, 1]), "", g.const([-1, 2])], label="axes")


def reductions(g: Graph) -> None:
    g.axes("ReduceSum", "x", [1, 3], 13, keepdims=0)
    for op_type in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"):
        g.axes(op_type, "m", [-1] if g.opset >= 11 else [2], 18, keepdims=1)
    g.add("ReduceMean", ["x"], keepdims=0, label="all")
    g.add("ReduceSum", ["x"], keepdims=1, label="all")
    g.add("ArgMax", ["m"], axis=2, keepdims=0)
    if g.opset >= 13:
        g.add("ReduceSum", ["m"], noop_with_empty_axes=1, label="noop")
    if g.opset >= 18:
        g.add("ReduceMax", ["m"], noop_with_empty_axes=1, label="noop")
    if g.opset >= 11:
        g.add("CumSum", ["m", g.const(1)], exclusive=1)
    if g.opset < 10:
        g.add("TopK", ["m"], 2, axis=2, k=2)
    else:
        g.add("TopK", ["m", g.const([2])], 2, axis=2)
    if g.opset >= 11:
        g.add("TopK", ["m", g.const([3])], 2, axis=-1, largest=0)


def activations(g: Graph) -> None:
    for op_type in ("Softmax", "LogSoftmax"):
        g.add(op_type, ["x"], label="default")
        g.add(op_type, ["x"], axis=2)
        g.add(op_type, ["m"], axis=1)
    if g.opset < 11:
        g.add("Clip", ["m"], min=-0.5, max=0.25)
        g.add("Clip", ["m"], max=0.25, label="above")
    else:
        low, high = g.const(-0.5, "float32"), g.const(0.25, "float32")
        g.add("Clip", ["m", low, high])
        g.add("Clip", ["m", "", high], label="above")
        g.add("Clip", ["m", low], label="below")
    if g.opset >= 14:
        g.add("HardSwish", ["m"])
    if g.opset >= 20:
        g.add("Gelu", ["m"], approximate="tanh")
        g.add("Gelu", ["m"])
    if g.opset < 12:
        g.add("Dropout", ["m"], ratio=0.3)
    else:
        g.add("Dropout", ["m", g.const(0.3, "float32")])
    g.add("Pow", ["m", g.const(2.0, "float32")])
    if g.opset >= 12:
        g.add("Pow", ["m", g.const(2)], label="integer")
        g.add("Einsum", ["m", g.const(np.ones((6, 2)), "float32")], equation="nij,jk->nik")
        g.add("Max", [g.const([1, 5]), g.const([3, 2])])


def norms(g: Graph) -> None:
    rng = np.random.default_rng(0)
    channel = [g.const(rng.uniform(0.5, 1.5, 3), "float32") for _ in range(4)]
    g.add("BatchNormalization", ["x", *channel], epsilon=1e-3)
    g.add("InstanceNormalization", ["x", *channel[:2]], epsilon=1e-3)
    if g.opset >= 17:
        row = [g.const(rng.uniform(0.5, 1.5, 6), "float32") for _ in range(2)]
        g.add("LayerNormalization", ["m", *row], axis=-1, epsilon=1e-3)
    if g.opset >= 21:  # before, it took a scale a group and ONNX calls it deprecated
        g.add("GroupNormalization", ["x", *channel[:2]], num_groups=3, epsilon=1e-3)


def resizes(g: Graph) -> None:
    scales = g.const([1, 1, 2, 1.5], "float32")
    for mode in ("nearest", "linear"):
        if g.opset < 10:
            g.add("Upsample", ["x", scales], mode=mode)
        elif g.opset == 10:
            g.add("Resize", ["x", scales], mode=mode)
        else:
            for how in ("half_pixel", "asymmetric", "align_corners"):
                if mode == "nearest" and how != "asymmetric":
                    continue
                extra = {"nearest_mode": "floor"} if mode == "nearest" else {}
                none = "" if g.opset >= 13 else g.const([], "float32")
                g.add("Resize", ["x", none, scales], mode=mode, coordinate_transformation_mode=how, label=how, **extra)
    if g.opset >= 18:
        sizes = g.const([9, 4])
        g.add("Resize", ["x", "", "", sizes], mode="linear", axes=[2, 3], label="axes")


def pools(g: Graph) -> None:
    g.add("MaxPool", ["x"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    g.add("AveragePool", ["x"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
    g.add("AveragePool", ["x"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], label="inner")
    if g.opset >= 10:
        g.add("MaxPool", ["x"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, label="ceil")
        g.add("MaxPool", ["x"], kernel_shape=[2, 2], dilations=[2, 2], label="dilated")
        g.add("AveragePool", ["x"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, label="ceil")
    if g.opset >= 19:
        g.add("AveragePool", ["x"], kernel_shape=[2, 2], dilations=[2, 2], label="dilated")
    g.add("GlobalMaxPool", ["x"])
    w = g.const(np.random.default_rng(1).standard_normal((3, 2, 3, 3)) * 0.2, "float32")
    g.add("ConvTranspose", ["x", w], strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])


def arithmetic(g: Graph) -> None:
    """Ties, signs and defaults; what opsets 10 to 13 added types to."""
    ties = g.const([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]], "float32")
    if g.opset >= 11:
        g.add("Round", [g.add("Add", [ties, g.axes("ReduceSum", g.add("Sub", ["m", "m"])[0], [0, 1], 13)[0]])[0]])
    a, b = g.const([7, -7, 7, -7]), g.const([3, 3, -3, -3])
    g.add("Div", [a, b])
    if g.opset >= 10:
        g.add("Mod", [a, b])
        g.add("Mod", ["m", g.const(0.7, "float32")], fmod=1, label="fmod")
    rows = g.add("Flatten", ["m"], axis=2)[0]
    w, bias = g.const(np.linspace(-1, 1, 30).reshape(5, 6), "float32"), g.const(np.arange(5), "float32")
    g.add("Gemm", [rows, w, bias], transB=1, alpha=0.5, beta=2.0)
    if g.opset >= 11:
        g.add("Gemm", [rows, w], transB=1, label="bare")
    g.add("PRelu", ["x", g.const([[[0.1]], [[0.2]], [[0.3]]], "float32")])
    for op_type in ("HardSigmoid", "Elu", "Selu", "Softplus", "Softsign", "Erf", "LeakyRelu"):
        g.add(op_type, ["m"])
    g.add("LRN", ["x"], size=3, alpha=0.01, beta=0.6, bias=1.5)
    g.add("OneHot", [g.const([0, -1 if g.opset >= 11 else 2, 3]), g.const(4), g.const([0.5, 2.0], "float32")], axis=0)
    g.add("Where", [g.add("Greater", ["m", g.const(0.0, "float32")])[0], "m", g.const(9.0, "float32")])
    if g.opset >= 12:
        g.add("ArgMax", [g.const([[3, 1, 3]])], axis=1, select_last_index=1)
    updates = g.const([[9.0, 8.0]], "float32")
    table = g.const(np.arange(12).reshape(3, 4), "float32")
    g.add(
        "Scatter" if g.opset < 11 else "ScatterElements",
        [table, g.const([[1, -1 if g.opset >= 11 else 3]]), updates],
        axis=1,
    )
    g.add("Expand", [ties, g.const([3, 1])])
    g.add("Cast", ["m"], to=T.INT32)
    g.add("Sum", ["m", "m", g.const(1.0, "float32")])


GROUPS = {f.__name__: f for f in (shapes, pads, reductions, activations, norms, resizes, pools, arithmetic)}


def compare(g: Graph, n: int = 2) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    vi = h.make_tensor_value_info
    inputs = [vi("x", T.FLOAT, ["n", 3, 6, 8]), vi("m", T.FLOAT, ["n", 4, 6])]
    graph = h.make_graph(g.nodes, "g", inputs, [h.make_empty_tensor_value_info(o) for o in g.outputs], g.init)
    proto = h.make_model(graph, opset_imports=[h.make_opsetid("", g.opset)], ir_version=7)
    inferred = {v.name: v for v in onnx.shape_inference.infer_shapes(proto).graph.output}
    for value in proto.graph.output:
        # Inference says nothing about some functions; their results are floats here.
        value.type.tensor_type.elem_type = inferred[value.name].type.tensor_type.elem_type or T.FLOAT
    rng = np.random.default_rng(g.opset)
    given = {"x": rng.standard_normal((n, 3, 6, 8)), "m": rng.standard_normal((n, 4, 6))}
    given = {key: value.astype("float32") for key, value in given.items()}
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, given)
    model = from_onnx(proto)
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    values = [given[i.name] for i in model.entries["main"].inputs] + model.entry_params("main")
    got = vm["main"](*[tvm.runtime.tensor(v) for v in values])
    got = [got] if len(g.outputs) == 1 else got
    for name, a, b in zip(g.outputs, [o.numpy() for o in got], wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("opset", OPSETS)
def test_opset(opset, group):
    g = Graph(opset)
    GROUPS[group](g)
    compare(g)
