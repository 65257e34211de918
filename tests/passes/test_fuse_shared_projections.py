"""Layers that several values go through are applied once, where copying rows costs less than reading weights again."""

from __future__ import annotations

import time

import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, function, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.fuse_shared_projections import FuseSharedProjections
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import limit_rewrites
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import Input, build
from crossloom.verdict import Ledger
from fused import calls, fused

op = relax.op
HOST = get_target("host").tvm_target()


def test_golden_one_row_of_each_of_two_modalities():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor((1, 40), "float32"), weight: R.Tensor((40, 30), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def decode(v: R.Tensor((1, 40), "float32"), t: R.Tensor((1, 40), "float32"), w: R.Tensor((40, 30), "float32")):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                a = cls.linear(v, w)
                e = R.exp(a)
                b = cls.linear(t, w)
                R.output(e, b)
            return (e, b)

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor((1, 40), "float32"), weight: R.Tensor((40, 30), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def linear1(x: R.Tensor((2, 40), "float32"), weight: R.Tensor((40, 30), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def decode(v: R.Tensor((1, 40), "float32"), t: R.Tensor((1, 40), "float32"), w: R.Tensor((40, 30), "float32")):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                rows = R.concat((v, t), axis=0)
                whole = cls.linear1(rows, w)
                parts = R.split(whole, [1], axis=0)
                first = parts[0]
                second = parts[1]
                both = (first, second)
                a = both[0]
                b = both[1]
                e = R.exp(a)
                R.output(e, b)
            return (e, b)

    tvm.ir.assert_structural_equal(FuseSharedProjections()(Before), Expected)


def both(e, v, t, w, b):
    return relax.Tuple([e(op.add(e(op.matmul(x, w)), b)) for x in (v, t)])


SMALL = [(1, 40), (2, 40), (40, 30), (1, 30)]


def shared(build_, shapes, names=("decode",), num_input=2, **kwargs):
    return fused(module(build_, shapes, names, num_input=num_input, **kwargs), FuseSharedProjections())


def test_two_entries_and_running_it_twice():
    mod, ledger = shared(both, SMALL, ("prefill", "decode"))
    assert calls(mod, "prefill") == calls(mod, "decode") == ["linear"]
    assert [v.code for v in ledger] == ["fired", "fired"]
    tvm.ir.assert_structural_equal(FuseSharedProjections()(mod), mod)
    v, t, w, b = arrays = data(*SMALL)
    for version in (mod, LowerFusedLinear(HOST)(FuseParallelProjections()(mod))):
        for got, want in zip(run_module(version, "decode", arrays), (v @ w + b, t @ w + b), strict=True):
            assert worst_error(want, got) < 1e-5


def test_values_of_every_rank_and_layers_of_both_layouts_share_rows_once():
    shapes = [(1, 2, 40), (3, 40), (1, 1, 1, 40), (40, 30), (50, 40), (1, 1, 50)]

    def build_(e, a, b, c, w, v, bias):
        turned = e(op.permute_dims(v))
        first = [e(op.matmul(x, w)) for x in (a, b, c)]
        return relax.Tuple(
            [
                *first,
                *(e(op.matmul(x, turned)) if x is b else e(op.add(e(op.matmul(x, turned)), bias)) for x in (a, b, c)),
            ]
        )

    mod, _ = shared(build_, shapes, num_input=3)
    a, b, c, w, v, bias = arrays = data(*shapes)
    wants = [a @ w, b @ w, c @ w, a @ v.T + bias, b @ v.T, c @ v.T + bias]
    for got, want in zip(run_module(mod, "decode", arrays), wants, strict=True):
        assert worst_error(want.astype("float32"), got.reshape(want.shape)) < 1e-5


def test_projections_of_the_same_values_are_one_kernel_afterwards():
    shapes = [(1, 64), (1, 64), (64, 48), (64, 32), (64, 32)]

    def build_(e, a, b, q, k, v):
        return relax.Tuple([e(op.matmul(x, w)) for x in (a, b) for w in (q, k, v)])

    mod, ledger = shared(build_, shapes)
    assert calls(mod, "decode") == ["linear"] * 3 and len(ledger.fired) == 1
    (verdict,) = ledger
    weights, rows, results = 64 * 112 * 4, 2 * 64 * 4, 2 * 112 * 4
    assert verdict.bytes_saved == weights - 2 * (rows + results) and verdict.macs == 2 * 64 * 112
    merged, _ = fused(mod, FuseParallelProjections())
    assert calls(merged, "decode") == ["fused_linear"]
    a, b, *ws = arrays = data(*shapes)
    for got, want in zip(
        run_module(LowerFusedLinear(HOST)(merged), "decode", arrays), [x @ w for x in (a, b) for w in ws]
    ):
        assert worst_error(want, got) < 1e-5


def test_a_result_that_nobody_reads():
    def build_(e, v, t, w, b):
        e(op.matmul(v, w))
        return e(op.matmul(t, w))

    mod, _ = shared(build_, SMALL)
    _, t, w, _ = arrays = data(*SMALL)
    assert worst_error(t @ w, run_module(mod, "decode", arrays)[0]) < 1e-5


def test_bisecting_does_not_leave_half_a_rewrite():
    mod = CanonicalizeTransformer()(module(both, SMALL, ("prefill", "decode"), num_input=2))
    site = mod["decode"].body.blocks[0].bindings[0].var.name
    with Ledger() as ledger, limit_rewrites({("shared-projections", "decode", site): 1}):
        out = FuseSharedProjections()(mod)
    assert sorted(v.code for v in ledger) == ["fired", "held-back"]
    assert calls(out, "decode") == ["linear"] and calls(out, "prefill") == ["linear", "linear"]
    assert "fused_shared" not in out.script(show_meta=False)


def codes(build_, shapes, **kwargs):
    before = CanonicalizeTransformer()(module(build_, shapes, ("vision",), **{"num_input": 2, **kwargs}))
    after, ledger = shared(build_, shapes, ("vision",), **kwargs)
    tvm.ir.assert_structural_equal(after, before)
    return [v.code for v in ledger]


def test_refusals():
    n = tirx.Var("n", "int64")
    assert codes(both, [(n, 40), (1, 40), (40, 30), (30,)]) == ["rows-not-known"]
    assert codes(both, [(0, 40), (1, 40), (40, 30), (30,)]) == ["no-rows"]
    assert codes(both, [(64, 40), (64, 40), (40, 30), (30,)]) == ["copies-cost-more"]

    def mixed(e, v, t, w):
        return relax.Tuple([e(op.matmul(x, w, out_dtype="float32")) for x in (v, t)])

    assert codes(mixed, SMALL[:3], dtype="float16") == ["different-dtypes"]

    def again(e, v, w):
        return e(op.matmul(e(op.matmul(v, w)), w))

    assert codes(again, [(1, 40), (40, 40)], num_input=1) == ["applied-to-its-own-result"]

    def deep(e, v, w):
        return e(op.matmul(e(op.exp(e(op.matmul(v, w)))), w))

    assert codes(deep, [(1, 40), (40, 40)], num_input=1) == ["not-convex"]


def test_other_weights_other_biases_and_the_same_value_twice_are_no_candidates():
    def build_(e, v, t, w, b):
        return relax.Tuple([e(op.add(e(op.matmul(v, w)), b)), e(op.matmul(t, w)), e(op.matmul(t, w))])

    assert codes(build_, SMALL) == []


@pytest.mark.timeout(300)
def test_ten_thousand_bindings_take_seconds_and_grow_linearly():
    def seconds(layers):
        def build_(e, v, t, *weights):
            for w in weights:
                v, t = (e(op.nn.relu(e(op.matmul(x, w)))) for x in (v, t))
                v, t = e(op.add(v, t)), e(op.negative(t))
            return relax.Tuple([v, t])

        mod = CanonicalizeTransformer()(function(build_, [(1, 32), (1, 32), *[(32, 32)] * layers], num_input=2))
        start = time.process_time()
        out = FuseSharedProjections()(mod)
        taken = time.process_time() - start
        assert calls(out, "decode") == ["linear"] * layers
        return taken

    seconds(20)
    small, large = seconds(160), seconds(1600)
    assert large < 20
    assert large < 25 * max(small, 0.01)


@st.composite
def modalities(draw):
    """One weight, with or without a bias, applied to two or three values of static rows."""
    depth, columns, count = (
        draw(st.sampled_from([7, 16, 33])),
        draw(st.sampled_from([8, 31, 40])),
        draw(st.integers(2, 3)),
    )
    shapes = [(draw(st.integers(1, 2)), depth) for _ in range(count)]
    biased, dtype = draw(st.booleans()), draw(st.sampled_from(["float32", "float16"]))

    def emit(bb, p):
        w, *bias = p[count:]
        values = [bb.emit(op.matmul(x, w)) for x in p[:count]]
        return [bb.emit(op.add(y, bias[0])) if bias else y for y in values]

    def reference(x):
        w, *bias = (a.astype("float64") for a in x[count:])
        return [a.astype("float64") @ w + (bias[0] if bias else 0) for a in x[:count]]

    rest = [(depth, columns), *([(columns,)] if biased else [])]
    return build(draw, [*(Input(s) for s in shapes), *rest], emit, reference, dtype)


def test_property_results_are_preserved():
    def run(mod, _):
        return FuseSharedProjections()(CanonicalizeTransformer()(mod))

    whole = tvm.transform.module_pass(run, opt_level=0, name="fuse-shared-projections")
    assert_pass_preserves(whole, modalities(), numerics=REASSOCIATES, max_examples=15)
