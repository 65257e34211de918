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


POWERS = [(2, 10), (-3, 3), (7, 0), (0, 0), (1, 70), (-1, 71), (-1, -3), (2, -1), (3, 19), (0, 65)]


@pytest.mark.parametrize("base,exponent", [("int64", "int64"), ("int32", "int32"), ("int32", "int64")])
def test_integers_to_the_power_of_integers(base, exponent):
    """Exact, in the base's type; what numpy refuses (negative exponents) rounds towards zero."""
    x, y = (np.array(v, t) for v, t in zip(zip(*POWERS), (base, exponent)))
    proto = model_of(
        make("Pow", ["x", "y"], ["z"]),
        [("x", getattr(T, base.upper()), ["n"]), ("y", getattr(T, exponent.upper()), ["n"])],
        [("z", getattr(T, base.upper()))],
    )
    (out,) = run(proto, x=x, y=y)
    assert out.dtype == base
    np.testing.assert_array_equal(out, np.array([int(float(a) ** b) for a, b in POWERS], "int64").astype(base))


@pytest.mark.parametrize("base,exponent", [("int32", "float32"), ("float32", "int64"), ("float32", "float32")])
def test_powers_of_mixed_types(base, exponent):
    x, y = np.array([2, 3, 9], base), np.array([2, 3, 1], exponent)
    proto = model_of(
        make("Pow", ["x", "y"], ["z"]),
        [("x", h.np_dtype_to_tensor_dtype(x.dtype), [3]), ("y", h.np_dtype_to_tensor_dtype(y.dtype), [3])],
        [("z", h.np_dtype_to_tensor_dtype(x.dtype))],
    )
    same_as_runtime(proto, x=x, y=y)


@pytest.mark.parametrize("op_type", ["Equal", "And", "Or", "Xor", "Not"])
def test_logic_of_booleans(op_type):
    given = {"x": np.array([[1], [0]], bool), "y": np.array([1, 0, 1], bool)}
    names = ["x"] if op_type == "Not" else ["x", "y"]
    given = {name: given[name] for name in names}
    inputs = [(name, T.BOOL, list(given[name].shape)) for name in names]
    same_as_runtime(model_of(make(op_type, names, ["z"]), inputs, [("z", T.BOOL)]), **given)


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_extremes_of_booleans(op_type):
    x = np.array([[1, 1], [0, 1], [0, 0]], bool)
    node = make(op_type, ["x", "a"], ["z"], keepdims=0)
    proto = model_of(node, [("x", T.BOOL, [3, 2])], [("z", T.BOOL)], opset=20, a=np.array([1], "int64"))
    same_as_runtime(proto, x=x)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("shape", [[2, 5], ["n", 5]])
def test_mean_of_integers(opset, shape):
    """Keeps its type and rounds towards zero, also where the sum leaves int32."""
    attrs, given = ({"axes": [0, -1]}, {}) if opset < 18 else ({}, {"a": np.array([0, -1], "int64")})
    node = make("ReduceMean", ["x", *given], ["z"], keepdims=0, **attrs)
    proto = model_of(node, [("x", T.INT32, shape)], [("z", T.INT32)], opset=opset, **given)
    for value in (np.array([[3, -7, -5, 4, 0], [-9, 0, 0, 0, -3]], "int32"), np.full((2, 5), 2**31 - 2, "int32")):
        (out,) = run(proto, x=value)
        assert out.dtype == "int32"
        assert out == np.trunc(value.mean(dtype="float64"))


REDUCED = {
    "ReduceL1": lambda x: np.abs(x).sum(),
    "ReduceL2": lambda x: np.sqrt((x * x).sum()),
    "ReduceSumSquare": lambda x: (x * x).sum(),
    "ReduceLogSum": lambda x: np.log(x.sum()),
    "ReduceLogSumExp": lambda x: np.log(np.exp(x).sum()),
}


@pytest.mark.parametrize("op_type,value", [("ReduceL1", 8.5), ("ReduceL2", 60), ("ReduceSumSquare", 3.5),
                                           ("ReduceLogSum", 60), ("ReduceLogSumExp", 4)])  # fmt: skip
def test_reductions_of_float16_sum_in_float32(op_type, value):
    x = np.full((4096,), value, "float16")
    (out,) = run(model_of(make(op_type, ["x"], ["z"]), [("x", T.FLOAT16, [4096])], [("z", T.FLOAT16)]), x=x)
    assert out.dtype == "float16"
    np.testing.assert_allclose(out, [REDUCED[op_type](x.astype("float64"))], rtol=1e-3)


@pytest.mark.parametrize("op_type", [*REDUCED])
def test_reductions_of_integers(op_type):
    x = np.array([[3, 7, 5, 40]], "int32")
    same_as_runtime(model_of(make(op_type, ["x"], ["z"]), [("x", T.INT32, [1, 4])], [("z", T.INT32)]), x=x)


@pytest.mark.parametrize(
    "source,kind", [("float32", k) for k in (T.INT64, T.FLOAT16, T.BOOL, None)] + [("bool", T.FLOAT)]
)
def test_eye_like_of_another_type(source, kind):
    attrs = {"k": 1} if kind is None else {"k": 1, "dtype": kind}
    (out,) = run(
        model_of(
            make("EyeLike", ["x"], ["z"], **attrs),
            [("x", h.np_dtype_to_tensor_dtype(np.dtype(source)), [3, 4])],
            [("z", kind or T.FLOAT)],
        ),
        x=np.zeros((3, 4), source),
    )
    expected = np.eye(3, 4, 1, dtype=h.tensor_dtype_to_np_dtype(kind or T.FLOAT))
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("other,told", [("m", "sizes n and m meet at axis 0"), (5, "sizes n and 5 meet at axis 0")])
def test_sizes_that_may_not_broadcast_are_named(other, told):
    inputs = [("x", T.FLOAT, ["n", 4]), ("y", T.FLOAT, [other, 4])]
    with pytest.raises(UnsupportedModel, match=rf"(?s)Add.*{told}.*--input-shapes"):
        from_onnx(model_of(make("Add", ["x", "y"], ["z"]), inputs, [("z", T.FLOAT)]))


def test_one_symbol_broadcasts():
    x, y = np.ones((2, 4), "float32"), np.full((1, 2, 1), 2, "float32")
    inputs = [("x", T.FLOAT, ["n", 4]), ("y", T.FLOAT, [1, "n", 1])]
    same_as_runtime(model_of(make("Add", ["x", "y"], ["z"]), inputs, [("z", T.FLOAT)]), x=x, y=y)


def test_a_split_fixes_its_axis():
    """The caller's upper bound of a symbol that is now a number goes; one too small is refused."""
    node = make("Split", ["x", "parts"], ["a", "b"], axis=-1)
    inputs = [("x", T.FLOAT, ["n", "m + 1"]), ("u", T.FLOAT, ["m"])]
    proto = model_of(node, inputs, [("a", T.FLOAT), ("b", T.FLOAT)], parts=np.array([2, 3], "int64"))
    entry = from_onnx(proto, upper_bounds={"m": 8, "n": 3}).entries["main"]
    assert [spec.shape for spec in entry.inputs] == [("n", 5), (4,)]
    assert [spec.shape for spec in entry.outputs] == [("n", 2), ("n", 3)]
    assert entry.upper_bounds == {"n": 3}
    x, u = np.arange(10, dtype="float32").reshape(2, 5), np.zeros(4, "float32")
    same_as_runtime(proto, x=x, u=u)
    with pytest.raises(UnsupportedModel, match="'m' is at most 3, but the graph needs 4"):
        from_onnx(proto, upper_bounds={"m": 3})


def two(first, second, outputs, **constants):
    """Return a model of two nodes that both read x (n)."""
    typed = [h.make_tensor_value_info(name, kind, None) for name, kind in outputs]
    init = [nh.from_array(np.array(value), name) for name, value in constants.items()]
    inputs = [h.make_tensor_value_info("x", T.FLOAT, ["n"])]
    graph = h.make_graph([first, second], "g", inputs, typed, init)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8)


SPLIT = make("Split", ["x", "parts"], ["a", "b"])
PARTS = np.array([2, 3], "int64")


def test_a_fixed_size_is_known_to_the_other_nodes():
    """``x (n) + w (5)`` is refused by itself; a Split of x makes n 5."""
    outputs = [(name, T.FLOAT) for name in "abc"]
    proto = two(SPLIT, make("Add", ["x", "w"], ["c"]), outputs, parts=PARTS, w=np.arange(5, dtype="float32"))
    same_as_runtime(proto, x=np.ones(5, "float32"))


def test_what_the_graph_asks_of_one_size_must_agree():
    outputs = [("a", T.FLOAT), ("b", T.FLOAT), ("c", T.FLOAT)]
    other = make("Split", ["x", "more"], ["c", "d"])
    with pytest.raises(UnsupportedModel, match=r"Split.*needs an axis of size 6, which"):
        from_onnx(two(SPLIT, other, [*outputs, ("d", T.FLOAT)], parts=PARTS, more=np.array([3, 3], "int64")))
    with pytest.raises(UnsupportedModel, match=r"TopK.*takes 6 elements of an axis of size 5"):
        from_onnx(two(SPLIT, make("TopK", ["x", "k"], ["c", "i"]), outputs, parts=PARTS, k=np.array([6], "int64")))


@pytest.mark.parametrize("size,least", [("n", 4), ("n + 1", 3)])
def test_top_k_bounds_its_axis(size, least):
    node = make("TopK", ["x", "k"], ["v", "i"], axis=0)
    inputs = [("x", T.FLOAT, [size]), ("u", T.FLOAT, ["n"])]
    proto = model_of(node, inputs, [("v", T.FLOAT), ("i", T.INT64)], k=np.array([4], "int64"))
    assert from_onnx(proto).entries["main"].lower_bounds == {"n": least}


@pytest.mark.parametrize("indices,least", [([0, 6], 7), ([-1, 2], 3), ([-5], 5), ([-1], 1)])
def test_a_gather_bounds_its_axis(indices, least):
    proto = model_of(
        make("Gather", ["x", "i"], ["y"], axis=1),
        [("x", T.FLOAT, [2, "n"])],
        [("y", T.FLOAT)],
        i=np.array(indices, "int64"),
    )
    assert from_onnx(proto).entries["main"].lower_bounds == {"n": least}
    same_as_runtime(proto, x=np.arange(2 * least, dtype="float32").reshape(2, least))
