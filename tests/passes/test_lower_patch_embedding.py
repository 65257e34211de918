"""Convolutions whose kernels do not overlap become linear layers over patches."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from canonical import data, function
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.inline_composites import InlineComposites
from crossloom.passes.lower_patch_embedding import LowerPatchEmbedding
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def patches(x, window):
    """Return every patch as a row of (N, P, C * window), in numpy."""
    places = [range(0, size - k + 1, k) for size, k in zip(x.shape[2:], window)]
    corners = [c.reshape(-1) for c in np.meshgrid(*places, indexing="ij")]
    cut = lambda corner: x[(slice(None), slice(None), *(slice(c, c + k) for c, k in zip(corner, window)))]
    rows = [cut(corner).reshape(x.shape[0], -1) for corner in zip(*corners)]
    return np.stack(rows, 1).astype("float64")


def embed(emit, x, w, bias=None, view="tokens", **attrs):
    """Return a patch embedding as exporters write it."""
    rank = len(w.ty.shape) - 2
    convolution = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[rank]
    y = emit(convolution(x, w, strides=tuple(int(d) for d in list(w.ty.shape)[2:]), **attrs))
    if bias is not None:
        y = emit(op.add(emit(op.reshape(bias, (1, -1, *[1] * rank))), y))
    batch, channels, *places = list(y.ty.shape)
    if view == "tokens":
        y = emit(op.reshape(y, (batch, channels, _product(places))))
        y = emit(op.permute_dims(y, (0, 2, 1)))
    elif view == "last":
        y = emit(op.permute_dims(y, (0, *range(2, rank + 2), 1)))
    elif view == "flat":
        y = emit(op.reshape(y, (batch, channels)))
    return y


def _product(sizes):
    out = sizes[0]
    for size in sizes[1:]:
        out = out * size
    return out


def lowered(mod, least_macs=0):
    """Return what the pass makes of a module, and the codes of its verdicts."""
    with Ledger() as ledger:
        out = LowerPatchEmbedding(least_macs)(mod)
    if not ledger.fired:
        assert out.same_as(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(LowerPatchEmbedding()(out), out)
    return out, [v.code for v in ledger]


def names(mod, entry="vision"):
    """Return the operators and composites that an entry calls, in order."""
    calls = [b.value for b in mod[entry].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    callee = lambda call: composite_name(mod[call.op]).removeprefix("crossloom.")
    return [c.op.name.removeprefix("relax.") if isinstance(c.op, tvm.ir.Op) else callee(c) for c in calls]


def check(lines, shapes, want, left, real=None, dtype="float32", tol=1e-5):
    out, codes = lowered(function(lines, shapes, "vision", dtype))
    assert codes == ["fired"] and names(out) == left
    values = data(*(real or shapes), dtype=dtype)
    (got,) = run_module(out, "vision", values)
    wanted = want(*values)
    np.testing.assert_allclose(got.astype("float64"), wanted, rtol=tol, atol=tol * np.abs(wanted).max())


def test_golden():
    def expected(emit, x, w, bias):
        p = emit(op.permute_dims(emit(op.reshape(x, (2, 3, 2, 2, 2, 3))), (0, 2, 4, 1, 3, 5)))
        p = emit(op.reshape(p, (2, 4, 18)))
        flat, bias = emit(op.reshape(w, (5, 18))), emit(op.reshape(bias, (5,)))
        return emit(op.add(emit(op.matmul(p, emit(op.permute_dims(flat, (1, 0))))), bias))

    def before(emit, x, w, bias):
        y = emit(op.add(emit(op.nn.conv2d(x, w, strides=(2, 3))), bias))
        return emit(op.permute_dims(emit(op.reshape(y, (2, 5, 4))), (0, 2, 1)))

    shapes = [(2, 3, 4, 6), (5, 3, 2, 3), (5, 1, 1)]
    mod, codes = lowered(function(before, shapes, "vision"))
    assert codes == ["fired"]
    inlined = relax.transform.CanonicalizeBindings()(InlineComposites()(mod))
    tvm.ir.assert_structural_equal(
        inlined, relax.transform.CanonicalizeBindings()(function(expected, shapes, "vision"))
    )


FRONT = ["reshape", "permute_dims", "reshape", "reshape"]


@pytest.mark.parametrize("window", [(3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("view", ["tokens", "last", "none"])
def test_one_to_three_axes(window, biased, view):
    count, places = 5, [2 * k for k in window]
    lines = lambda emit, x, w, *bias: embed(emit, x, w, *bias, view=view)

    def want(x, w, *bias):
        y = patches(x, window) @ w.reshape(count, -1).T + (bias[0] if biased else 0)
        if view == "tokens":
            return y
        y = y.reshape(x.shape[0], *[2] * len(window), count)
        return np.moveaxis(y, -1, 1) if view == "none" else y

    shapes = [(2, 3, *places), (5, 3, *window), *([(5,)] if biased else [])]
    left = ["reshape"] * biased + FRONT + ["reshape"] * biased + ["linear"] + ["permute_dims"] * (view == "none")
    check(lines, shapes, want, left)


def test_a_rest_is_not_read():
    want = lambda x, w, b: patches(x, (2, 3)) @ w.reshape(5, -1).T + b
    left = ["reshape", "strided_slice", *FRONT, "reshape", "linear"]
    check(embed, [(1, 3, 5, 8), (5, 3, 2, 3), (5,)], want, left)
    height, batch = tirx.Var("h", "int64"), tirx.Var("n", "int64")
    real = [(2, 3, 5, 6), (5, 3, 2, 3), (5,)]
    check(embed, [(batch, 3, height, 6), *real[1:]], want, left, real)


def test_a_kernel_as_large_as_its_input_moves_nothing():
    def lines(emit, x, w):
        return embed(emit, emit(op.reshape(x, (-1, 3, 2, 4, 4))), w, view="flat")

    rows = tirx.Var("n", "int64")
    want = lambda x, w: x.astype("float64") @ w.reshape(7, -1).T
    shapes = [(rows, 96), (7, 3, 2, 4, 4)]
    check(lines, shapes, want, ["reshape", "linear"], [(5, 96), shapes[1]])


def test_channels_behind():
    def lines(emit, x, w):
        return emit(op.nn.conv2d(x, w, strides=(2, 3), data_layout="NHWC", kernel_layout="HWIO"))

    def want(x, w):
        y = patches(x.transpose(0, 3, 1, 2), (2, 3)) @ w.transpose(3, 2, 0, 1).reshape(5, -1).T
        return y.reshape(1, 2, 3, 5)

    left = ["reshape", "permute_dims", "reshape", "permute_dims", "reshape", "linear"]
    check(lines, [(1, 4, 9, 3), (2, 3, 3, 5)], want, left)


def test_half_precision_is_summed_as_linear_layers_are():
    want = lambda x, w, b: patches(x, (2, 3)) @ w.reshape(5, -1).T.astype("float64") + b
    left = ["reshape", *FRONT, "reshape", "linear"]
    check(embed, [(1, 3, 4, 6), (5, 3, 2, 3), (5,)], want, left, dtype="float16", tol=4e-3)


def test_layers_are_those_that_canonicalize_transformer_makes():
    mod = CanonicalizeTransformer()(function(embed, [(1, 3, 4, 6), (5, 3, 2, 3), (5,)], "vision"))
    out, _ = lowered(mod)
    (layer,) = [f for f in out.functions.values() if composite_name(f)]
    assert composite_name(layer) == "crossloom.linear" and composite_attrs(layer)["weight_layout"] == "out_in"


def test_the_pipeline_runs_it_behind_image_normalization_and_before_regions_grow():
    order = [step.info.name for step in steps(None)]
    place = order.index("lower-patch-embedding")
    assert order.index("annotate-semantic-regions") < order.index("fold-batch-norm") < place
    assert place < min(i for i, n in enumerate(order) if n.startswith("fuse-"))


@pytest.mark.parametrize(
    ("shapes", "attrs", "code"),
    [
        ([(1, 4, 4, 6), (6, 2, 2, 3)], {"groups": 2}, "grouped"),
        ([(1, 4, 4, 6), (6, 4, 2, 3)], {"padding": 1}, "padded-or-dilated"),
        ([(1, 4, 9, 9), (6, 4, 2, 3)], {"dilation": 2}, "padded-or-dilated"),
        ([(1, 4, 4, 6), (tirx.Var("c", "int64"), 4, 2, 3)], {}, "channels-of-symbolic-number"),
        ([((1, 4, 4, 6), "float16"), ((6, 4, 2, 3), "float16")], {"out_dtype": "float32"}, "different-dtypes"),
    ],
)
def test_what_is_refused(shapes, attrs, code):
    lines = lambda emit, x, w: embed(emit, x, w, view="none", **attrs)
    assert lowered(function(lines, shapes, "vision"))[1] == [code]


def test_a_weight_that_is_an_input_is_refused():
    lines = lambda emit, x, w: embed(emit, x, w, view="none")
    mod = function(lines, [(1, 4, 4, 6), (6, 4, 2, 3)], "vision", num_input=2)
    assert lowered(mod)[1] == ["weight-is-an-input"]


@pytest.mark.parametrize(("count", "code"), [(8, "moves-outweigh-products"), (256, "fired")])
def test_results_are_turned_back_only_where_that_is_little(count, code):
    lines = lambda emit, x, w: embed(emit, x, w, view="none")
    shapes = [(1, 32, 4, 6), (count, 32, 2, 2)]
    assert lowered(function(lines, shapes, "vision"), 64)[1] == [code]


@pytest.mark.parametrize("case", ["one", "overlapping"])
def test_what_has_no_patches(case):
    shape = {"one": (6, 4, 1, 1), "overlapping": (6, 4, 3, 3)}[case]
    lines = lambda emit, x, w: emit(op.nn.conv2d(x, w, strides=1 if case == "one" else 2))
    assert lowered(function(lines, [(1, 4, 7, 7), shape], "vision"))[1] == []


@pytest.mark.parametrize("case", ["read-twice", "other-order", "escapes"])
def test_views_that_give_no_tokens_stay(case):
    def lines(emit, x, w):
        y = emit(op.nn.conv2d(x, w, strides=(2, 3)))
        flat = emit(op.reshape(y, (2, 5, 4)))
        if case == "other-order":
            return emit(op.permute_dims(flat, (1, 2, 0)))
        turned = emit(op.permute_dims(flat, (0, 2, 1)))
        return emit(op.concat([emit(op.reshape(flat, (2, 4, 5))), turned])) if case == "read-twice" else flat

    mod = function(lines, [(2, 3, 4, 6), (5, 3, 2, 3)], "vision")
    out, codes = lowered(mod)
    assert codes == ["fired"] and names(out)[4:6] == ["linear", "permute_dims"]
    values = data((2, 3, 4, 6), (5, 3, 2, 3))
    np.testing.assert_allclose(run_module(out, "vision", values)[0], run_module(mod, "vision", values)[0], atol=1e-5)


def test_vision_and_decode_are_treated_alike_and_twice_is_once():
    builder = relax.BlockBuilder()
    for name in ("vision", "decode"):
        function(embed, [(1, 3, 4, 6), (5, 3, 2, 3), (5,)], name, "float32", builder)
    mod = builder.get()
    with Ledger() as ledger:
        once = LowerPatchEmbedding()(mod)
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    tvm.ir.assert_structural_equal(LowerPatchEmbedding()(once), once)


@st.composite
def embeddings(draw):
    rank = draw(st.integers(1, 2))
    window = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank).filter(lambda w: max(w) > 1))
    places = [k * draw(st.integers(1, 2)) + draw(st.integers(0, k - 1)) for k in window]
    channels, count, biased = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.booleans())
    view = draw(st.sampled_from(["tokens", "last", "none"]))
    shapes = [("n", channels, *places), (count, channels, *window), (count,)]
    emit = lambda builder, p: [embed(builder.emit, p[0], p[1], p[2] if biased else None, view)]

    def reference(values):
        x, w, bias = (v.astype("float64") for v in values)
        y = patches(x, window) @ w.reshape(count, -1).T + (bias if biased else 0)
        if view == "tokens":
            return [y]
        y = y.reshape(x.shape[0], *(size // k for size, k in zip(places, window)), count)
        return [np.moveaxis(y, -1, 1) if view == "none" else y]

    return build(draw, shapes, emit, reference, "float32")


def test_it_preserves_patch_embeddings():
    assert_pass_preserves(LowerPatchEmbedding(0), embeddings(), numerics=REASSOCIATES, max_examples=10)
