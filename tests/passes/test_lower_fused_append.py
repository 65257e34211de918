"""Regions of joins become kernels that copy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from crossloom.errors import UnsupportedTarget
from crossloom.numerics import EXACT
from crossloom.passes.fuse_cache_append import FuseCacheAppend
from crossloom.passes.lower_fused_append import LowerFusedAppend
from crossloom.schedules.join import Join, kernel
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def host():
    return get_target("host").tvm_target()


def along(axis, heads, size):
    shape = [1, heads, 4]
    shape.insert(axis, size)
    return shape


def caches(names=("decode",), dtype="float32", axis=2, heads=2):
    builder = relax.BlockBuilder()
    for name in names:
        past, new = tirx.Var("P", "int64"), tirx.Var("S", "int64")
        shapes = [along(axis, heads, size) for size in (past, new) * 2]
        params = [relax.Var(f"p{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
        with builder.function(name, params, attrs={"num_input": 4}):
            with builder.dataflow():
                joined = [builder.emit(op.concat(params[i : i + 2], axis=axis)) for i in (0, 2)]
                out = builder.emit_output(relax.Tuple(joined))
            builder.emit_func_output(out)
    return FuseCacheAppend()(builder.get())


def test_golden():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def fused_append(a: R.Tensor((2, 3), "float32"), b: R.Tensor((2, 1), "float32")) -> R.Tuple(
            R.Tensor((2, 4), "float32"), R.Tensor((2, 4), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_append"})
            with R.dataflow():
                k = R.concat((a, b), axis=1)
                v = R.concat((b, a), axis=1)
                gv = (k, v)
                R.output(gv)
            return gv

        @R.function
        def decode(a: R.Tensor((2, 3), "float32"), b: R.Tensor((2, 1), "float32")) -> R.Tuple(
            R.Tensor((2, 4), "float32"), R.Tensor((2, 4), "float32")
        ):
            cls = Before
            with R.dataflow():
                both = cls.fused_append(a, b)
                R.output(both)
            return both

    joins = [Join(((2, 3), (2, 1)), 1, "float32"), Join(((2, 1), (2, 3)), 1, "float32")]
    builder = relax.BlockBuilder()
    a, b = (relax.Var(n, relax.TensorType((2, w), "float32")) for n, w in (("a", 3), ("b", 1)))
    gvar = builder.add_func(kernel(joins, Machine.of(host())), "fused_append_kernel")
    with builder.function("decode", [a, b]):
        with builder.dataflow():
            out = relax.TensorType((2, 4), "float32")
            both = builder.emit_output(relax.call_tir(gvar, [a, b, b, a], [out, out]))
        builder.emit_func_output(both)
    after = LowerFusedAppend(host())(Before)
    expected = builder.get()
    tvm.ir.assert_structural_equal(after["decode"], expected["decode"].with_attrs(after["decode"].attrs), True)
    tvm.ir.assert_structural_equal(after["fused_append_kernel"], expected["fused_append_kernel"], True)


@pytest.mark.parametrize(
    "old, new, heads, axis", [(0, 1, 2, 2), (5, 1, 2, 2), (7, 3, 1, 1), (1, 0, 3, 0), (300, 2, 8, 2)]
)
def test_the_numbers(old, new, heads, axis):
    before = caches(heads=heads, axis=axis)
    with Ledger() as ledger:
        mod = LowerFusedAppend(host())(before)
    assert [v.code for v in ledger] == ["fired"]
    rng = np.random.default_rng(0)
    shapes = [along(axis, heads, n) for n in (old, new, old, new)]
    given = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    got = run_module(mod, "decode", given)
    for out, i in zip(got, (0, 2)):
        np.testing.assert_array_equal(out, np.concatenate(given[i : i + 2], axis=axis))


def test_prefill_and_decode_are_treated_alike_and_twice_is_once():
    before = caches(("prefill", "decode"))
    with Ledger() as ledger:
        once = LowerFusedAppend(host())(before)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    tvm.ir.assert_structural_equal(LowerFusedAppend(host())(once), once)


def test_anything_else_is_refused():
    mod = caches()
    (region,) = [gv for gv, f in mod.functions_items() if f.attrs is not None and "Composite" in f.attrs]
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, p.ty) for p in mod[region].params]
    with builder.function("other", params, attrs={"Composite": "crossloom.fused_append"}, private=True):
        with builder.dataflow():
            parts = [builder.emit(op.concat(params[i : i + 2], axis=2)) for i in (0, 2)]
            out = builder.emit_output(relax.Tuple([parts[0], builder.emit(op.abs(parts[1]))]))
        builder.emit_func_output(out)
    mod.update_func(region, builder.get()["other"])
    with Ledger() as ledger:
        assert LowerFusedAppend(host())(mod).same_as(mod)
    assert [v.code for v in ledger] == ["no-kernel"]


def test_without_a_target_it_says_so():
    with pytest.raises(UnsupportedTarget, match="knows no target"):
        LowerFusedAppend()(caches())


@st.composite
def joins(draw):
    count, dtype = draw(st.integers(2, 3)), draw(st.sampled_from(["float32", "float16"]))
    axis = draw(st.integers(0, 2))
    parts = [draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)) for _ in range(count)]
    shapes = [tuple(n if a == axis else a + 2 for a in range(3)) for lengths in parts for n in lengths]

    def apart(values):
        rest = iter(values)
        return [[next(rest) for _ in lengths] for lengths in parts]

    def emit(builder, p):
        return [builder.emit(op.concat(group, axis=axis)) for group in apart(p)]

    def reference(x):
        return [np.concatenate(group, axis=axis).astype("float64") for group in apart(x)]

    return build(draw, shapes, emit, reference, dtype)


def test_it_preserves_joins():
    passes = tvm.transform.Sequential([FuseCacheAppend(), LowerFusedAppend(host())], name="append")
    assert_pass_preserves(passes, joins(), numerics=EXACT, max_examples=15)
