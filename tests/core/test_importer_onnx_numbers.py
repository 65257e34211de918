"""What single ONNX operators compute, where TVM's own converters got it wrong, against ONNX Runtime or numpy."""

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

make = h.make_node


def model_of(node, inputs, outputs, opset=18, **constants):
    vi = h.make_tensor_value_info
    typed = [vi(name, kind, None) for name, kind in outputs]
    init = [nh.from_array(np.array(value), name) for name, value in constants.items()]
    graph = h.make_graph([node], "g", [vi(*t) for t in inputs], typed, init)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)


def run(proto, **inputs):
    model = from_onnx(proto)
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    out = vm["main"](*[tvm.runtime.tensor(np.array(v, order="C")) for v in values])
    return [o.numpy() for o in (out if len(entry.outputs) > 1 else [out])]


def same_as_runtime(proto, tolerance=1e-5, **inputs):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for mine, theirs in zip(run(proto, **inputs), session.run(None, inputs), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("mode", ["SAME_LOWER", "SAME_UPPER", "VALID"])
@pytest.mark.parametrize("kernel,strides", [([3, 3], [2, 2]), ([2, 4], [1, 3])])
def test_pools_with_automatic_padding(op_type, mode, kernel, strides):
    node = make(op_type, ["x"], ["y"], auto_pad=mode, kernel_shape=kernel, strides=strides)
    x = np.random.default_rng(0).standard_normal((1, 2, 9, 7)).astype("float32")
    same_as_runtime(model_of(node, [("x", T.FLOAT, list(x.shape))], [("y", T.FLOAT)]), x=x)


def test_same_padding_of_a_symbolic_size():
    """With a stride of 1 the padding does not depend on the size; otherwise the node and the size are named."""
    x = np.random.default_rng(1).standard_normal((1, 1, 6)).astype("float32")
    attrs = {"auto_pad": "SAME_LOWER", "kernel_shape": [4]}
    same_as_runtime(
        model_of(make("MaxPool", ["x"], ["y"], **attrs), [("x", T.FLOAT, [1, 1, "n"])], [("y", T.FLOAT)]), x=x
    )
    strided = make("MaxPool", ["x"], ["y"], strides=[2], **attrs)
    with pytest.raises(UnsupportedModel, match=r"MaxPool.*'y'.*size n is symbolic"):
        from_onnx(model_of(strided, [("x", T.FLOAT, [1, 1, "n"])], [("y", T.FLOAT)]))


@pytest.mark.parametrize("shape", [None, [1, 1, 5, 5], [1, 1, 4, 4]])
def test_max_unpool(shape):
    node = make("MaxUnpool", ["x", "i", "s"] if shape else ["x", "i"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    inputs = [("x", T.FLOAT, [1, 1, 2, 2]), ("i", T.INT64, [1, 1, 2, 2])]
    given = {"s": np.array(shape, "int64")} if shape else {}
    x = np.arange(1, 5, dtype="float32").reshape(1, 1, 2, 2)
    i = np.array([[[[5, 7], [13, 15]]]], "int64")
    same_as_runtime(model_of(node, inputs, [("y", T.FLOAT)], opset=11, **given), x=x, i=i)


def test_max_unpool_needs_a_known_output_shape():
    node = make("MaxUnpool", ["x", "i", "s"], ["y"], kernel_shape=[2, 2])
    inputs = [("x", T.FLOAT, [1, 1, 2, 2]), ("i", T.INT64, [1, 1, 2, 2]), ("s", T.INT64, [4])]
    with pytest.raises(UnsupportedModel, match=r"MaxUnpool.*known at run time only"):
        from_onnx(model_of(node, inputs, [("y", T.FLOAT)], opset=11))
