"""Operators that the ONNX importer adds to TVM's, compiled and compared with ONNX Runtime or numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx import from_onnx

MS = "com.microsoft"


def model_of(nodes, inputs, outputs, init=(), opset=17):
    vi = lambda t: h.make_tensor_value_info(*t)
    graph = h.make_graph(nodes, "g", [vi(t) for t in inputs], [vi(t) for t in outputs], list(init))
    sets = [h.make_opsetid("", opset), h.make_opsetid(MS, 1)]
    return h.make_model(graph, opset_imports=sets, ir_version=10)


def ours(proto, inputs):
    model = from_onnx(proto)
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target("llvm")), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    out = vm["main"](*[tvm.runtime.tensor(np.ascontiguousarray(v)) for v in values])
    return [o.numpy() for o in (out if len(entry.outputs) > 1 else [out])]


def theirs(proto, inputs):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def compare(proto, inputs, tolerance=1e-5):
    for a, b in zip(ours(proto, inputs), theirs(proto, inputs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype.kind in "iu":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_skip_norms(rms, bias):
    rng = np.random.default_rng(0)
    init = [nh.from_array(normal(rng, 6), n) for n in ("gamma", "beta", "bias")]
    names = ["x", "skip", "gamma"] + ([] if rms else ["beta"]) + (["bias"] if bias else [])
    op_type = "SkipSimplifiedLayerNormalization" if rms else "SkipLayerNormalization"
    node = h.make_node(op_type, names, ["y", "", "", "sum"], domain=MS, epsilon=1e-3)
    shaped = lambda n: (n, T.FLOAT, ["b", "s", 6])
    proto = model_of([node], [shaped("x"), shaped("skip")], [shaped("y"), shaped("sum")], init)
    compare(proto, {"x": normal(rng, 2, 3, 6), "skip": normal(rng, 2, 3, 6)})


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("skip", [(1, 3, 6), (3, 6)], ids=str)
def test_skip_that_is_broadcast_over_the_batch(rms, skip):
    rng = np.random.default_rng(11)
    op_type = "SkipSimplifiedLayerNormalization" if rms else "SkipLayerNormalization"
    node = h.make_node(op_type, ["x", "skip", "gamma"], ["y", "", "", "sum"], domain=MS)
    shaped = lambda n: (n, T.FLOAT, [2, 3, 6])
    proto = model_of(
        [node],
        [shaped("x"), ("skip", T.FLOAT, skip)],
        [shaped("y"), shaped("sum")],
        [nh.from_array(normal(rng, 6), "gamma")],
    )
    compare(proto, {"x": normal(rng, 2, 3, 6), "skip": normal(rng, *skip)})


@pytest.mark.parametrize("op_type", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_half_precision_norms_of_rows_whose_squares_overflow(op_type):
    rng = np.random.default_rng(12)
    x = np.zeros((4, 64))
    x[0], x[2, 5:7], x[3] = 300 * np.sign(rng.standard_normal(64)), (1000.0, 0.5), rng.standard_normal(64)
    x, w = x.astype("float16"), rng.uniform(0.9, 1.1, 64).astype("float16")
    node = h.make_node(op_type, ["x", "w"], ["y"], axis=-1, epsilon=1e-5)
    typed = lambda n: (n, T.FLOAT16, ["n", 64])
    (got,) = ours(model_of([node], [typed("x")], [typed("y")], [nh.from_array(w, "w")]), {"x": x})
    wide = x.astype("float64") - (x.astype("float64").mean(-1, keepdims=True) if op_type[0] == "L" else 0)
    wanted = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


def test_simplified_norm_that_ort_keeps_in_the_default_domain():
    rng = np.random.default_rng(1)
    node = h.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-2, axis=-1)
    g = nh.from_array(normal(rng, 5), "g")
    proto = model_of([node], [("x", T.FLOAT, ["n", 5])], [("y", T.FLOAT, ["n", 5])], [g])
    compare(proto, {"x": normal(rng, 3, 5)})


def test_layer_norm_over_two_axes_with_statistics():
    rng = np.random.default_rng(2)
    node = h.make_node("LayerNormalization", ["x", "g", "b"], ["y", "mean", "inv"], axis=1, epsilon=1e-3)
    init = [nh.from_array(normal(rng, 3, 4), n) for n in "gb"]
    outputs = [("y", T.FLOAT, ["n", 3, 4]), ("mean", T.FLOAT, ["n", 1, 1]), ("inv", T.FLOAT, ["n", 1, 1])]
    compare(model_of([node], [("x", T.FLOAT, ["n", 3, 4])], outputs, init), {"x": normal(rng, 2, 3, 4)}, 1e-4)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank,positions", [(3, (2, 5)), (4, (1,))])
def test_rotary_embedding(interleaved, rank, positions):
    rng = np.random.default_rng(3)
    heads, dim, seq = 3, 8, 5
    shape = (2, seq, heads * dim) if rank == 3 else (2, heads, seq, dim)
    angle = np.outer(np.arange(16), 0.1 ** np.arange(dim // 2))
    init = [nh.from_array(f(angle).astype("float32"), n) for f, n in ((np.cos, "cos"), (np.sin, "sin"))]
    node = h.make_node("RotaryEmbedding", ["x", "pos", "cos", "sin"], ["y"], domain=MS, interleaved=interleaved)
    pos = rng.integers(0, 9, positions)
    proto = model_of([node], [("x", T.FLOAT, shape), ("pos", T.INT64, positions)], [("y", T.FLOAT, shape)], init)
    compare(proto, {"x": normal(rng, *shape), "pos": pos})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotary_embedding_of_a_part_of_each_head(dtype):
    rng = np.random.default_rng(13)
    shape, angle = (2, 5, 48), np.outer(np.arange(16), 0.1 ** np.arange(4))
    init = [nh.from_array(f(angle).astype(dtype), n) for f, n in ((np.cos, "cos"), (np.sin, "sin"))]
    attrs = {"rotary_embedding_dim": 8, "num_heads": 3}
    node = h.make_node("RotaryEmbedding", ["x", "pos", "cos", "sin"], ["y"], domain=MS, **attrs)
    kind = {"float32": T.FLOAT, "float16": T.FLOAT16}[dtype]
    proto = model_of([node], [("x", kind, shape), ("pos", T.INT64, (2, 5))], [("y", kind, shape)], init)
    values = {"x": normal(rng, *shape).astype(dtype), "pos": rng.integers(0, 16, (2, 5))}
    compare(proto, values, 1e-5 if dtype == "float32" else 4e-3)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "axis", "blocked"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_dequantize(dtype, kind, constant):
    rng = np.random.default_rng(4)
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, (3, 7)).astype(dtype)
    shape, attrs = {"tensor": ((), {}), "axis": ((3,), {"axis": 0}), "blocked": ((3, 3), {"axis": 1, "block_size": 3})}[
        kind
    ]
    scale = rng.uniform(0.01, 0.1, shape).astype("float32")
    zero = rng.integers(info.min, info.max + 1, shape).astype(dtype)
    init = [nh.from_array(np.asarray(scale), "s"), nh.from_array(np.asarray(zero), "z")]
    nodes = [h.make_node("DequantizeLinear", ["x", "s", "z"], ["d"], **attrs), h.make_node("Relu", ["d"], ["y"])]
    given = [("x", getattr(T, dtype.upper()), [3, 7])]
    if constant:
        init.append(nh.from_array(x, "x"))
        given = [("u", T.FLOAT, [3, 7])]
        nodes[1] = h.make_node("Mul", ["d", "u"], ["y"])
    proto = model_of(nodes, given, [("y", T.FLOAT, [3, 7])], init, 21)
    compare(proto, {"u": normal(rng, 3, 7)} if constant else {"x": x}, 1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_four_bit_blocked_weight(signed):
    rng = np.random.default_rng(5)
    low, high = (-8, 8) if signed else (0, 16)
    four = ml_dtypes.int4 if signed else ml_dtypes.uint4
    q, z = rng.integers(low, high, (4, 10)), rng.integers(low, high, (4, 3))
    s = rng.uniform(0.1, 0.2, (4, 3)).astype("float32")
    init = [nh.from_array(q.astype(four), "q"), nh.from_array(z.astype(four), "z"), nh.from_array(s, "s")]
    nodes = [
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1, block_size=4),
        h.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    proto = model_of(nodes, [("x", T.FLOAT, ["m", 4])], [("y", T.FLOAT, ["m", 10])], init, 21)
    x = normal(rng, 2, 4)
    wide = lambda t: np.repeat(t, 4, 1)[:, :10]
    np.testing.assert_allclose(ours(proto, {"x": x})[0], x @ ((q - wide(z)) * wide(s)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name,low,high", [("INT4", -8, 7), ("UINT4", 0, 15), ("INT8", -128, 127), ("INT16", -32768, 32767)]
)
def test_quantize_saturates_at_the_range_of_its_zero_point(name, low, high):
    dtype = onnx.helper.tensor_dtype_to_np_dtype(getattr(T, name))
    zero = nh.from_array(np.array(1).astype(dtype), "z")
    scale = nh.from_array(np.array(0.5, "float32"), "s")
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    proto = model_of(nodes, [("x", T.FLOAT, ["n"])], [("y", T.FLOAT, ["n"])], [scale, zero], 21)
    x = np.array([0.25, 0.75, 1.25, -0.25, 3e4, -3e4, 2.0], "float32")
    expected = (np.clip(np.round(x / 0.5) + 1, low, high) - 1) * 0.5
    np.testing.assert_array_equal(ours(proto, {"x": x})[0], expected.astype("float32"))


def test_quantize_per_axis_equals_onnx_runtime():
    rng = np.random.default_rng(6)
    init = [
        nh.from_array(rng.uniform(0.01, 0.1, 3).astype("float32"), "s"),
        nh.from_array(np.array([1, 2, 3], "uint8"), "z"),
    ]
    node = h.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=1)
    proto = model_of([node], [("x", T.FLOAT, ["n", 3, 4])], [("y", T.UINT8, ["n", 3, 4])], init, 19)
    compare(proto, {"x": 10 * normal(rng, 2, 3, 4)})


def gqa(
    rng, *, heads=4, groups=2, dim=16, seq=3, past=0, rotary=0, interleaved=0, packed=False, batch=1, dtype=T.FLOAT
):
    """A GroupQueryAttention model with symbolic sequence and past lengths, and inputs for it."""
    width = (heads + 2 * groups) * dim if packed else heads * dim
    inputs = [("q", dtype, ["b", "s", width])]
    values = {"q": normal(rng, batch, seq, width)}
    names = ["q", "", ""]
    if not packed:
        for name in "kv":
            inputs.append((name, dtype, ["b", "s", groups * dim]))
            values[name] = normal(rng, batch, seq, groups * dim)
        names = ["q", "k", "v"]
    for name in ("pk", "pv"):
        inputs.append((name, dtype, ["b", groups, "p", dim]))
        values[name] = normal(rng, batch, groups, past, dim)
    inputs.append(("lens", T.INT32, ["b"]))
    values["lens"] = np.full(batch, past + seq - 1, "int32")
    init = [nh.from_array(np.array(past + seq, "int32"), "total")]
    names += ["pk", "pv", "lens", "total"]
    if rotary:
        angle = np.outer(np.arange(32), 0.2 ** np.arange(dim // 2))
        init += [nh.from_array(f(angle).astype("float32"), n) for f, n in ((np.cos, "cos"), (np.sin, "sin"))]
        names += ["cos", "sin"]
    outputs = [("y", dtype, ["b", "s", heads * dim])]
    outputs += [(n, dtype, ["b", groups, "t", dim]) for n in ("nk", "nv")]
    node = h.make_node(
        "GroupQueryAttention",
        names,
        ["y", "nk", "nv"],
        domain=MS,
        num_heads=heads,
        kv_num_heads=groups,
        do_rotary=rotary,
        rotary_interleaved=interleaved,
    )
    return model_of([node], inputs, outputs, init), values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"past": 5, "seq": 1},
        {"rotary": 1},
        {"rotary": 1, "past": 4, "seq": 1},
        {"rotary": 1, "interleaved": 1, "past": 4, "seq": 2},
        {"packed": True, "rotary": 1, "past": 2, "seq": 1},
        {"batch": 2, "past": 3, "seq": 1, "heads": 6, "groups": 3},
        {"groups": 4, "seq": 6},
    ],
    ids=str,
)
def test_group_query_attention(options):
    compare(*gqa(np.random.default_rng(7), **options), 1e-4)


def test_group_query_attention_with_caches_of_different_lengths():
    proto, values = gqa(np.random.default_rng(8), batch=3, past=5, seq=1, rotary=1)
    values["lens"] = np.array([5, 3, 1], "int32")
    mine, runtime = ours(proto, values), theirs(proto, values)
    np.testing.assert_allclose(mine[0], runtime[0], rtol=1e-4, atol=1e-4)
    for b, length in enumerate(values["lens"] + 1):
        for cache in (1, 2):
            np.testing.assert_allclose(mine[cache][b, :, :length], runtime[cache][b, :, :length], rtol=1e-4, atol=1e-4)


def test_group_query_attention_in_half_precision():
    proto, values = gqa(np.random.default_rng(14), past=4, seq=2, rotary=1, dtype=T.FLOAT16)
    for tensor in proto.graph.initializer:
        if tensor.name in ("cos", "sin"):
            tensor.CopyFrom(nh.from_array(nh.to_array(tensor).astype("float16"), tensor.name))
    half = lambda array: array.astype("float16") if array.dtype == np.float32 else array
    compare(proto, {name: half(array) for name, array in values.items()}, 4e-3)


def test_group_query_attention_names_what_it_lacks():
    proto, _ = gqa(np.random.default_rng(9))
    proto.graph.node[0].attribute.append(h.make_attribute("smooth_softmax", 1))
    with pytest.raises(UnsupportedModel, match="smooth_softmax=1"):
        from_onnx(proto)


@pytest.mark.parametrize("window,softcap", [(1, 0.0), (3, 0.0), (64, 0.0), (-1, 2.5), (2, 0.7)])
@pytest.mark.parametrize("past,seq", [(0, 6), (6, 1), (3, 4)])
def test_group_query_attention_windows_and_soft_caps(window, softcap, past, seq):
    proto, values = gqa(np.random.default_rng(10), past=past, seq=seq, rotary=1)
    attributes = proto.graph.node[0].attribute
    attributes.append(h.make_attribute("local_window_size", window))
    attributes.append(h.make_attribute("softcap", softcap))
    for name in "qk":
        values[name] = 3 * values[name]  # scores that the cap bends
    compare(proto, values, 1e-4)
