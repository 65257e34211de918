"""The residual norm kernel against numpy, over shapes, types, operands that are stretched, and machines."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.schedules.fused_linear import Norm
from crossloom.schedules.machine import Machine
from crossloom.schedules.residual_norm import ResidualNorm, kernel
from crossloom.targets import get_target

HOST = get_target("host").tvm_target()
PLAIN = tvm.target.Target({"kind": "llvm"})


def run(spec, operands, shape, target=HOST):
    """Build a kernel and call it: the results."""
    func = kernel(spec, Machine.of(target)).with_attr("global_symbol", "main")
    built = tvm.compile(tvm.ir.IRModule({"main": func}), target)
    types = [spec.dtype] * spec.keeps_sum + list(spec.types or [spec.dtype] * len(spec.norms))
    # What is not written stays visible.
    results = [tvm.runtime.tensor(np.full(shape, np.nan, dtype)) for dtype in types]
    built["main"](*[tvm.runtime.tensor(o) for o in operands], *results)
    return [r.numpy() for r in results]


def reference(spec, terms, weights):
    """Return sum and norms in float64, of the sum as it is rounded to its type."""
    total = sum(term.astype("float64") for term in terms).astype(spec.dtype)
    x, rest = total.astype("float64"), iter(weights)
    out = [x] if spec.keeps_sum else []
    for norm in spec.norms:
        centred = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
        y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + norm.epsilon)
        y = y * next(rest).astype("float64") if norm.weight else y
        out.append(y + next(rest).astype("float64") if norm.bias else y)
    return out


def arrays(spec, sizes, seed=0):
    """Return terms and weights; ``sizes`` are the rows."""
    rng = np.random.default_rng(seed)
    extents = (*sizes, spec.depth)
    terms = [[1 if axis is None else extents[axis] for axis in follows] for follows in spec.terms]
    count = sum(norm.weight + norm.bias for norm in spec.norms)
    shapes = [*terms, *[(spec.depth,)] * count]
    types = [spec.dtype] * len(terms) + [
        norm.dtype or spec.dtype for norm in spec.norms for _ in range(norm.weight + norm.bias)
    ]
    drawn = [rng.standard_normal(s).astype(dtype) for s, dtype in zip(shapes, types, strict=True)]
    return drawn[: len(terms)], drawn[len(terms) :]


def check(spec, sizes, target=HOST, seed=0):
    terms, weights = arrays(spec, sizes, seed)
    got = run(spec, [*terms, *weights], (*sizes, spec.depth), target)
    want = reference(spec, terms, weights)
    for g, w in zip(got, want, strict=True):
        assert worst_error(w, g.astype("float64")) < REASSOCIATES.bound(str(g.dtype))
    if spec.keeps_sum:
        assert np.array_equal(got[0], sum(terms))  # the very same rounding


NORMS = st.builds(Norm, st.sampled_from(["rms", "layer"]), st.just(1e-3), st.booleans(), st.booleans())


@st.composite
def specs(draw):
    """Draw a kernel of static or symbolic rows, and sizes for them."""
    rank = draw(st.integers(0, 3))
    sizes = [draw(st.sampled_from([0, 1, 1, 2, 3, 5])) for _ in range(rank)]
    depth = draw(st.sampled_from([2, 3, 7, 8, 9, 16, 31, 33, 64, 97, 130]))
    rows = tuple(tirx.Var(f"r{i}", "int64") if draw(st.booleans()) else s for i, s in enumerate(sizes))
    whole = tuple(range(rank + 1))
    terms, form = [whole, whole], draw(st.sampled_from(["alone", "alike", "stretched", "stretched"]))
    if form == "alone":
        terms = [whole]
    elif form == "stretched":
        # One operand keeps every axis, the other is stretched along some or lacks the first ones.
        other = tuple(axis if draw(st.booleans()) else None for axis in whole)[draw(st.integers(0, rank)) :]
        terms[draw(st.integers(0, 1))] = other
    norms = tuple(draw(st.lists(NORMS, min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "float64"]))
    return ResidualNorm(rows, depth, dtype, tuple(terms), norms, len(terms) > 1 and draw(st.booleans())), tuple(sizes)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(specs())
def test_kernels_compute_what_numpy_does(drawn):
    check(*drawn)


@pytest.mark.parametrize("target", [HOST, PLAIN], ids=["host", "sse"])
@pytest.mark.parametrize("depth", [1, 15, 17, 48, 127, 384, 390, 576])
def test_every_length_of_row(depth, target):
    """What is left of a row behind vectors of several widths, on machines of different vectors."""
    weighted = (Norm("rms", 1e-3, True), Norm("layer", 1e-3, True, True))
    for norms, keeps in ((weighted[:1], True), (weighted[1:], False), (weighted, False)):
        if depth > 1 or norms[0].kind == "rms":
            check(ResidualNorm((5,), depth, "float32", ((0, 1), (0, 1)), norms, keeps), (5,), target)


def test_both_operands_stretched():
    norm = (Norm("layer", 1e-3, True, True),)
    check(ResidualNorm((3, 5), 9, "float32", ((0, None, 2), (None, 1, 2)), norm, True), (3, 5))
    check(ResidualNorm((5,), 9, "float32", ((0, None), (None, 1)), norm), (5,))
    check(ResidualNorm((5,), 9, "float32", ((), (0, 1)), norm, True), (5,))


def test_norms_of_a_float16_sum_in_float32():
    """Statistics are of the sum as it is rounded, where a float32 result is its only place too."""
    norms = (Norm("rms", 1e-3, True, dtype="float32"), Norm("layer", 1e-3, True, True))
    for order, types in ((1, ("float32", "float16")), (-1, ("float16", "float32")), (1, ("float32", "float32"))):
        for keeps in (False, True):
            check(ResidualNorm((5,), 70, "float16", ((0, 1), (0, 1)), norms[::order], keeps, types), (5,))


def test_rows_over_all_threads_and_on_one():
    """Symbolic rows choose when they are called."""
    n = tirx.Var("n", "int64")
    spec = ResidualNorm((n,), 64, "float32", ((0, 1), (0, 1)), (Norm("rms", 1e-5, True),))
    for rows in (0, 1, 7, 4001):
        check(spec, (rows,))
    check(ResidualNorm((4001,), 64, "float32", ((0, 1), (0, 1)), (Norm("rms", 1e-5, True),)), (4001,))
    text = kernel(spec, Machine.of(HOST)).script()
    assert "T.parallel(n)" in text and "range(n)" in text


def test_the_variance_of_values_far_from_zero():
    """The mean is taken off before squares are summed: their difference would be nothing but rounding here."""
    spec = ResidualNorm((3,), 256, "float32", ((0, 1), (0, 1)), (Norm("layer", 1e-5),))
    rng = np.random.default_rng(1)
    left = (1e4 + rng.standard_normal((3, 256))).astype("float32")
    right = rng.standard_normal((3, 256)).astype("float32")
    total = (left + right).astype("float64")
    want = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(spec, [left, right], (3, 256))[0], want, rtol=0, atol=2e-3)


def test_squares_beyond_float16():
    """300 squared is no float16; and a sum that is none is infinite, as it would be by itself."""
    spec = ResidualNorm((2,), 40, "float16", ((0, 1), (0, 1)), (Norm("rms", 1e-5), Norm("layer", 1e-5)), True)
    left, right = np.full((2, 40), 250, "float16"), np.full((2, 40), 50, "float16")
    left[:, ::2] *= -1
    total, rms, layer = run(spec, [left, right], (2, 40))
    want = reference(spec, [left, right], [])
    for got, exact in zip((total, rms, layer), want):
        assert worst_error(exact, got.astype("float64")) < REASSOCIATES.bound("float16")
    big = np.full((2, 40), 60000, "float16")
    total, rms, _ = run(spec, [big, big], (2, 40))
    assert np.isinf(total).all() and np.isnan(rms).all()


def test_arm_gets_vectors():
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"})
    spec = ResidualNorm((64,), 576, "float32", ((0, 1), (0, 1)), (Norm("rms", 1e-5, True),))
    func = kernel(spec, Machine.of(target)).with_attr("global_symbol", "main")
    text = tvm.compile(tvm.ir.IRModule({"main": func}), target).mod.inspect_source("s")
    assert "fadd\tv" in text and "fmla\tv" in text
