"""Transformer pieces as exporters spell them, over sizes, types and operator sets, against numpy in float64."""

from __future__ import annotations

import ml_dtypes
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
KINDS = {"float32": T.FLOAT, "float16": T.FLOAT16}


def model_of(nodes, inputs, outputs, init=(), opset=17):
    vi = h.make_tensor_value_info
    typed = [vi(name, kind, None) for name, kind in outputs]
    graph = h.make_graph(nodes, "g", [vi(*t) for t in inputs], typed, list(init))
    sets = [h.make_opsetid("", opset), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(graph, opset_imports=sets, ir_version=8)


def run(proto, **inputs):
    model = from_onnx(proto)
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    out = vm["main"](*[tvm.runtime.tensor(np.array(v, order="C")) for v in values])
    return [o.numpy() for o in (out if len(entry.outputs) > 1 else [out])]


def int64(name, *values):
    return nh.from_array(np.array(values, "int64"), name)


@pytest.mark.parametrize(
    "opset,heads,seq,dim,rotated,dtype",
    [(11, 1, 1, 8, 8, "float32"), (13, 3, 7, 16, 6, "float32"), (18, 2, 5, 10, 10, "float16")],
)
def test_two_rotary_conventions_in_one_graph(opset, heads, seq, dim, rotated, dtype):
    """Half-split through Split or Slice, interleaved through steps of two; partial heads; symbolic length."""
    half, rest = rotated // 2, dim - rotated
    axes = lambda name, axis: ([name], {"axes": [axis]}) if opset < 13 else ([name, f"ax{axis}"], {})
    cut = [make("Slice", ["x", "zero", "rot", "last"], ["xr"]), make("Slice", ["x", "rot", "big", "last"], ["keep"])]
    halves = {"split": [half, half]} if opset < 13 else {}
    split = ["xr"] if opset < 13 else ["xr", "halves"]
    nodes = [
        *cut,
        make("Concat", ["cos", "cos"], ["cosd"], axis=-1),
        make("Concat", ["sin", "sin"], ["sind"], axis=-1),
        make("Split", split, ["x1", "x2"], axis=-1, **halves),
        make("Neg", ["x2"], ["nx2"]),
        make("Concat", ["nx2", "x1"], ["turned"], axis=-1),
        make("Mul", ["xr", "cosd"], ["a"]),
        make("Mul", ["turned", "sind"], ["b"]),
        make("Add", ["a", "b"], ["ab"]),
        make("Concat", ["ab", "keep"], ["half"], axis=-1),
        make("Slice", ["xr", "zero", "big", "last", "two"], ["even"]),
        make("Slice", ["xr", "one", "big", "last", "two"], ["odd"]),
        make("Mul", ["even", "cos"], ["ec"]),
        make("Mul", ["odd", "sin"], ["os"]),
        make("Sub", ["ec", "os"], ["re"]),
        make("Mul", ["even", "sin"], ["es"]),
        make("Mul", ["odd", "cos"], ["oc"]),
        make("Add", ["es", "oc"], ["im"]),
    ]
    for name in ("re", "im"):
        operands, attrs = axes(name, -1)
        nodes.append(make("Unsqueeze", operands, [name + "5"], **attrs))
    nodes += [
        make("Concat", ["re5", "im5"], ["pair"], axis=-1),
        make("Shape", ["xr"], ["shape"]),
        make("Reshape", ["pair", "shape"], ["flat"]),
        make("Concat", ["flat", "keep"], ["inter"], axis=-1),
    ]
    init = [int64("zero", 0), int64("one", 1), int64("two", 2), int64("rot", rotated), int64("big", 2**63 - 1)]
    init += [int64("last", 3), int64("ax-1", -1), int64("halves", half, half)]
    kind = KINDS[dtype]
    inputs = [("x", kind, ["b", heads, "s", dim])] + [(n, kind, ["s", half]) for n in ("cos", "sin")]
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((2, heads, seq, dim)).astype(dtype)
    angle = np.outer(np.arange(seq) + 3, 0.3 ** np.arange(half))
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    got = run(model_of(nodes, inputs, [("half", kind), ("inter", kind)], init, opset), x=x, cos=cos, sin=sin)
    turn = cos.astype("float64") + 1j * sin.astype("float64")
    z = (x[..., :half].astype("float64") + 1j * x[..., half:rotated]) * turn
    w = (x[..., 0:rotated:2].astype("float64") + 1j * x[..., 1:rotated:2]) * turn
    keep = x[..., rotated:]
    assert keep.shape[-1] == rest
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(got[0], np.concatenate([z.real, z.imag, keep], -1), atol=tolerance)
    pairs = np.stack([w.real, w.imag], -1).reshape(*x.shape[:-1], rotated)
    np.testing.assert_allclose(got[1], np.concatenate([pairs, keep], -1), atol=tolerance)


@pytest.mark.parametrize("rows,columns,masked", [(1, 9, -np.inf), (4, 4, -65504.0), (3, 1, 0.0)])
@pytest.mark.parametrize("heads,groups", [(6, 2), (3, 3), (4, 1)])
def test_heads_repeated_by_expand_with_symbolic_lengths(heads, groups, rows, columns, masked):
    """The target of Expand is put together from shapes, as transformers' repeat_kv is exported; fp16 and masks."""
    dim, nodes = 8, []
    for t in "kv":
        nodes += [
            make("Shape", [t], [t + "s"]),
            make("Gather", [t + "s", "two"], [t + "n"]),
            make("Unsqueeze", [t, "two"], [t + "5"]),
            make("Concat", ["one", "groups", "times", t + "n", "dim"], [t + "target"], axis=0),
            make("Expand", [t + "5", t + "target"], [t + "e"]),
            make("Concat", ["one", "heads", t + "n", "dim"], [t + "f"], axis=0),
            make("Reshape", [t + "e", t + "f"], [t + "r"]),
        ]
    nodes += [
        make("Transpose", ["kr"], ["kt"], perm=[0, 1, 3, 2]),
        make("MatMul", ["q", "kt"], ["s0"]),
        make("Mul", ["s0", "scale"], ["s1"]),
        make("Add", ["s1", "mask"], ["s2"]),
        make("Cast", ["s2"], ["s3"], to=T.FLOAT),
        make("Softmax", ["s3"], ["p0"], axis=-1),
        make("Cast", ["p0"], ["p"], to=T.FLOAT16),
        make("MatMul", ["p", "vr"], ["o"]),
    ]
    init = [int64("one", 1), int64("two", 2), int64("dim", dim), int64("groups", groups), int64("heads", heads)]
    init += [int64("times", heads // groups), nh.from_array(np.array(dim**-0.5, "float16"), "scale")]
    half = T.FLOAT16
    inputs = [("q", half, [1, heads, "r", dim]), ("k", half, [1, groups, "c", dim]), ("v", half, [1, groups, "c", dim])]
    inputs.append(("mask", half, [1, 1, "r", "c"]))
    rng = np.random.default_rng(heads)
    f = lambda *s: (rng.standard_normal(s) * 0.5).astype("float16")
    q, k, v = f(1, heads, rows, dim), f(1, groups, columns, dim), f(1, groups, columns, dim)
    mask = np.where(np.tri(rows, columns, columns - rows if columns > rows else 0), 0.0, masked)[None, None]
    mask = np.nan_to_num(mask, nan=0.0, neginf=-np.inf).astype("float16")
    (got,) = run(model_of(nodes, inputs, [("o", half)], init), q=q, k=k, v=v, mask=mask)
    rep = lambda t: np.repeat(t.astype("float64"), heads // groups, axis=1)
    s = q.astype("float64") @ rep(k).swapaxes(-1, -2) * dim**-0.5 + mask
    e = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(got, (e / e.sum(-1, keepdims=True)) @ rep(v), atol=5e-3)


@pytest.mark.parametrize(
    "k,n,block,bits,points,dtype,biased",
    [
        (80, 5, 32, 4, "packed", "float32", False),
        (16, 1, 16, 4, None, "float32", True),
        (100, 3, 64, 4, "packed", "float16", True),
        (130, 2, 128, 4, "float", "float32", False),
        (48, 7, 32, 8, "packed", "float32", True),
        (7, 2, 16, 4, "packed", "float32", False),
    ],
)
def test_matmul_nbits_of_many_shapes(k, n, block, bits, points, dtype, biased):
    rng = np.random.default_rng(k)
    blocks = -(-k // block)
    q = rng.integers(0, 2**bits, (n, blocks * block))
    scale = rng.uniform(0.01, 0.1, (n, blocks)).astype(dtype)
    zero = np.full((n, blocks), float(2 ** (bits - 1)))

    def pack(a):
        if bits == 8:
            return a.astype("uint8")
        a = np.pad(a, ((0, 0), (0, a.shape[1] % 2))).astype("uint8")
        return a[:, 0::2] | (a[:, 1::2] << 4)

    init = [nh.from_array(pack(q).reshape(n, blocks, -1), "B"), nh.from_array(scale.reshape(-1), "S")]
    names = ["A", "B", "S", "", "", ""]
    if points == "packed":
        zero = rng.integers(0, 2**bits, (n, blocks))
        init.append(nh.from_array(pack(zero).reshape(-1), "Z"))
        names[3] = "Z"
    elif points == "float":
        zero = rng.uniform(3, 12, (n, blocks)).astype(dtype)
        init.append(nh.from_array(zero.reshape(-1), "Z"))
        names[3] = "Z"
    bias = rng.standard_normal(n).astype(dtype) if biased else np.zeros(n)
    if biased:
        init.append(nh.from_array(bias, "bias"))
        names[5] = "bias"
    while not names[-1]:
        names.pop()
    node = make("MatMulNBits", names, ["Y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block)
    kind = KINDS[dtype]
    proto = model_of([node], [("A", kind, ["b", "m", k])], [("Y", kind)], init)
    w = ((q - np.repeat(zero.astype("float64"), block, 1)) * np.repeat(scale.astype("float64"), block, 1))[:, :k]
    for m in (1, 3):
        a = (rng.standard_normal((2, m, k)) * 0.5).astype(dtype)
        (got,) = run(proto, A=a)
        tolerance = 1e-4 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(got, a.astype("float64") @ w.T + bias, rtol=tolerance, atol=tolerance)


def test_several_defaults_one_shared_and_one_unused():
    w = np.arange(12, dtype="float32").reshape(3, 4)
    nodes = [make("MatMul", ["x", "w"], ["m"]), make("Add", ["m", "b"], ["n"]), make("Mul", ["n", "b"], ["y"])]
    init = [nh.from_array(w, "w"), nh.from_array(np.ones(4, "float32"), "b"), nh.from_array(w, "spare")]
    inputs = [("b", T.FLOAT, [4]), ("x", T.FLOAT, ["n", 3]), ("w", T.FLOAT, [3, 4]), ("spare", T.FLOAT, [3, 4])]
    proto = model_of(nodes, inputs, [("y", T.FLOAT)], init)
    model = from_onnx(proto)
    assert [i.name for i in model.entries["main"].inputs] == ["b", "x", "w", "spare"]
    assert set(model.params) == {"w", "b", "spare"} and not model.entries["main"].weights
    x, b, other = np.ones((2, 3), "float32"), np.full(4, 2, "float32"), w[::-1].copy()
    np.testing.assert_allclose(run(proto, x=x, b=b, w=other, spare=w)[0], (x @ other + b) * b)


def test_a_shape_that_the_caller_may_override_is_refused_by_name():
    node = make("Reshape", ["x", "target"], ["y"], "fold")
    inputs = [("x", T.FLOAT, [2, 3]), ("target", T.INT64, [2])]
    proto = model_of([node], inputs, [("y", T.FLOAT)], [int64("target", 3, 2)])
    try:
        (got,) = run(proto, x=np.arange(6, dtype="float32").reshape(2, 3), target=np.array([3, 2]))
    except UnsupportedModel as error:
        assert "fold" in str(error) or "target" in str(error)
    else:
        np.testing.assert_array_equal(got, np.arange(6, dtype="float32").reshape(3, 2))


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_groups_of_zeros_and_of_one_value_dequantize_exactly(kind):
    """Degenerate groups: all zero with scale 0, all at the zero point, one outlier."""
    q = np.zeros((16, 3), "int64")
    q[4:8], q[8:12], q[13] = 3, 7, 7
    scale = np.array([[0.0] * 3, [0.5] * 3, [1e-30] * 3, [50.0] * 3], "float32")
    zero = np.array([[0] * 3, [3] * 3, [0] * 3, [0] * 3])
    init = [nh.from_array(q.astype(kind), "q"), nh.from_array(zero.astype(kind), "z"), nh.from_array(scale, "s")]
    nodes = [make("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0, block_size=4), make("MatMul", ["x", "w"], ["y"])]
    proto = model_of(nodes, [("x", T.FLOAT, ["n", 16])], [("y", T.FLOAT)], init, 21)
    proto.ir_version = 10
    weight = from_onnx(proto).params["w"]
    wanted = ((q - np.repeat(zero, 4, 0)) * np.repeat(scale, 4, 0)).astype("float32")
    np.testing.assert_array_equal(weight, wanted)
    assert np.isfinite(weight).all() and not weight[:8].any()
