"""Joins that only the result reads become one region, in whatever order they stand, and stay what they were."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from crossloom.numerics import EXACT
from crossloom.passes.fuse_cache_append import FuseCacheAppend
from crossloom.rewrite import composite_name
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def caches(names=("decode",), layers=2, new=1, dtype="float32", extra=lambda emit, joined: []):
    """Return entries of keys and values to which a step appends its own."""
    builder = relax.BlockBuilder()
    for name in names:
        past = tirx.Var("P", "int64")
        shapes = [(1, 2, n, 4) for _ in range(2 * layers) for n in (past, new)]
        params = [relax.Var(f"p{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
        with builder.function(name, params, attrs={"num_input": len(params)}):
            with builder.dataflow():
                joined = []
                for old, own in zip(params[::2], params[1::2]):
                    doubled = builder.emit(op.multiply(own, relax.const(2.0, dtype)))
                    joined.append(builder.emit(op.concat([old, doubled], axis=2)))
                out = builder.emit_output(relax.Tuple([*joined, *extra(builder.emit, joined)]))
            builder.emit_func_output(out)
    return builder.get()


def regions(mod):
    return [f for f in mod.functions.values() if composite_name(f) == "crossloom.fused_append"]


def code(mod):
    with Ledger() as ledger:
        assert FuseCacheAppend()(mod).same_as(mod)
    return [v.code for v in ledger]


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def decode(
            a: R.Tensor((1, "P", 2), "float32"), b: R.Tensor((1, 1, 2), "float32"), c: R.Tensor((1, "P", 2), "float32")
        ) -> R.Tuple(R.Tensor((1, "P + 1", 2), "float32"), R.Tensor((1, "P + 1", 2), "float32")):
            R.func_attr({"num_input": 3})
            with R.dataflow():
                k = R.concat((a, b), axis=1)
                v = R.concat((c, b), axis=1)
                R.output(k, v)
            return (k, v)

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def fused_append(
            a: R.Tensor((1, "P", 2), "float32"), b: R.Tensor((1, 1, 2), "float32"), c: R.Tensor((1, "P", 2), "float32")
        ) -> R.Tuple(R.Tensor((1, "P + 1", 2), "float32"), R.Tensor((1, "P + 1", 2), "float32")):
            R.func_attr({"Composite": "crossloom.fused_append"})
            with R.dataflow():
                k = R.concat((a, b), axis=1)
                v = R.concat((c, b), axis=1)
                gv = (k, v)
                R.output(gv)
            return gv

        @R.function
        def decode(
            a: R.Tensor((1, "P", 2), "float32"), b: R.Tensor((1, 1, 2), "float32"), c: R.Tensor((1, "P", 2), "float32")
        ) -> R.Tuple(R.Tensor((1, "P + 1", 2), "float32"), R.Tensor((1, "P + 1", 2), "float32")):
            R.func_attr({"num_input": 3})
            cls = Expected
            with R.dataflow():
                both = cls.fused_append(a, b, c)
                k = both[0]
                v = both[1]
                R.output(k, v)
            return (k, v)

    tvm.ir.assert_structural_equal(FuseCacheAppend()(Before), Expected, map_free_vars=True)


@pytest.mark.parametrize("layers", [1, 3])
def test_all_layers_are_one_region(layers):
    with Ledger() as ledger:
        mod = FuseCacheAppend()(caches(layers=layers))
    assert [v.detail for v in ledger.fired] == [f"{2 * layers} joins"]
    (region,) = regions(mod)
    assert len(region.params) == 4 * layers


def test_prefill_and_decode_are_treated_alike_and_twice_is_once():
    with Ledger() as ledger:
        once = FuseCacheAppend()(caches(("prefill", "decode")))
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    tvm.ir.assert_structural_equal(FuseCacheAppend()(once), once)


@pytest.mark.parametrize("old", [0, 1, 5])
def test_the_numbers(old):
    rng = np.random.default_rng(0)
    shapes = [(1, 2, n, 4) for _ in range(4) for n in (old, 3)]
    given = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    got = run_module(FuseCacheAppend()(caches(new=3)), "decode", given)
    for out, past, new in zip(got, given[::2], given[1::2]):
        np.testing.assert_array_equal(out, np.concatenate([past, 2 * new], axis=2))


def test_what_is_read_stays_as_it_is():
    read = caches(layers=1, extra=lambda emit, joined: [emit(op.add(joined[0], joined[1]))])
    assert code(read) == []
    some = FuseCacheAppend()(caches(layers=2, extra=lambda emit, joined: [emit(op.abs(joined[0]))]))
    (region,) = regions(some)
    assert len(region.ret_ty.fields) == 3


def test_a_join_by_itself_is_refused():
    assert code(caches(layers=1, extra=lambda emit, joined: [emit(op.abs(joined[0]))])) == ["nothing-beside-it"]


def test_an_unknown_shape_is_refused():
    builder = relax.BlockBuilder()
    params = [relax.Var(n, relax.TensorType(ndim=2, dtype="float32")) for n in "abc"]
    with builder.function("decode", params, attrs={"num_input": 3}):
        with builder.dataflow():
            joined = [builder.emit(op.concat([params[i], params[2]], axis=0)) for i in (0, 1)]
            out = builder.emit_output(relax.Tuple(joined))
        builder.emit_func_output(out)
    assert code(builder.get()) == ["no-kernel"]


@st.composite
def joins(draw):
    """Joins along any axis of two or three parts."""
    count, dtype = draw(st.integers(2, 3)), draw(st.sampled_from(["float32", "float16"]))
    axis, rank = draw(st.integers(0, 2)), 3
    parts = [draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)) for _ in range(count)]
    shapes = [tuple(n if a == axis else a + 2 for a in range(rank)) for lengths in parts for n in lengths]

    def apart(values):
        rest = iter(values)
        return [[next(rest) for _ in lengths] for lengths in parts]

    def emit(builder, p):
        return [builder.emit(op.concat(group, axis=axis)) for group in apart(p)]

    def reference(x):
        return [np.concatenate(group, axis=axis).astype("float64") for group in apart(x)]

    return build(draw, shapes, emit, reference, dtype)


def test_it_preserves_joins():
    assert_pass_preserves(FuseCacheAppend(), joins(), numerics=EXACT, max_examples=15)
