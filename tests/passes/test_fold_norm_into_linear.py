"""Norms join the linear layers that read them; an RMS norm's weight goes into constant weights."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_norm_into_linear import FoldNormIntoLinear
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger
from fused import calls, fused, layers
from residual import reference as norm_reference
from residual import rms

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()


def test_golden_norm():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def rms_norm(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4,), "float32")):
            R.func_attr({"Composite": "crossloom.rms_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function
        def decode(x: R.Tensor((3, 4), "float32"), g: R.Tensor((4,), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                n = cls.rms_norm(x, g)
                y = cls.linear(n, w)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def rms_norm(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4,), "float32")):
            R.func_attr({"Composite": "crossloom.rms_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor((3, 4), "float32"), a1: R.Tensor((4,), "float32"), a2: R.Tensor((6, 4), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                n = cls.rms_norm(a0, a1)
                y = cls.linear(n, a2)
                R.output(y)
            return y

        @R.function
        def decode(x: R.Tensor((3, 4), "float32"), g: R.Tensor((4,), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                y = cls.fused_linear(x, g, w)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FoldNormIntoLinear()(Before), Expected)


def projections(emit, x, g, *weights):
    n = rms(emit, x, g, eps=1e-5)
    return emit(relax.Tuple([emit(op.matmul(n, w)) for w in weights]))


def test_all_readers_join_in_both_entries_and_running_it_twice():
    mod = module(projections, [(1, N, 4), (4,), (4, 6), (4, 2), (4, 2)], ("prefill", "decode"))
    # Merged or not, the readers become one region with the norm.
    for passes in ((FoldNormIntoLinear(),), (FuseParallelProjections(), FoldNormIntoLinear())):
        once, ledger = fused(mod, *passes)
        assert calls(once, "prefill") == calls(once, "decode") == ["fused_linear"]
        assert {v.function for v in ledger.fired if v.rewrite == "norm-into-linear"} == {"decode", "prefill"}
        tvm.ir.assert_structural_equal(FoldNormIntoLinear()(once), once)


@pytest.mark.parametrize("num_input", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_weight_is_folded_only_where_it_is_a_weight(num_input, dtype):
    """A norm weight that is an input of the entry is multiplied where it comes, not into a copy of the weights."""
    mod = module(projections, [(3, 4), (4,), (4, 6), (4, 2), (4, 2)], ("decode",), dtype, num_input=num_input)
    lowered, _ = fused(mod, FoldNormIntoLinear(), LowerFusedLinear(HOST))
    values = data((3, 4), (4,), (4, 6), (4, 2), (4, 2), dtype=dtype)
    text = lowered["decode"].script(show_meta=False)
    if num_input < 5:
        assert ("R.multiply" in text) == (num_input == 1 and dtype == "float32")
    n = norm_reference(values[0].astype("float64"), "rms", values[1], eps=1e-5)
    for got, w in zip(run_module(lowered, "decode", values), values[2:], strict=True):
        assert worst_error(n @ w.astype("float64"), got.astype("float64")) < REASSOCIATES.bound(dtype)


def codes(build, shapes):
    mod = module(build, shapes, ("decode",))
    before = CanonicalizeTransformer()(mod)
    after, ledger = fused(mod, FoldNormIntoLinear())
    tvm.ir.assert_structural_equal(after, before)
    return {v.code for v in ledger.refused}


def test_refused_what_else_reads_the_norm():
    def build(emit, x, g, w):
        n = rms(emit, x, g, eps=1e-5)
        return emit(relax.Tuple([emit(op.matmul(n, w)), n]))

    assert codes(build, [(3, 4), (4,), (4, 6)]) == {"norm-read-elsewhere"}


def test_refused_a_norm_over_several_axes():
    def build(emit, x, g, w):
        n = emit(op.nn.layer_norm(x, g, g, axes=[-2, -1], epsilon=1e-5))
        return emit(op.matmul(n, w))

    assert codes(build, [(2, 3, 4), (3, 4), (4, 6)]) == {"no-kernel"}


def test_refused_a_norm_that_is_also_the_residual():
    """A kernel does not have the normed rows to add: the region that adds them stays one of its own."""

    def build(emit, x, g, w):
        n = rms(emit, x, g, eps=1e-5)
        return emit(op.add(n, emit(op.matmul(n, w))))

    mod = module(build, [(3, 4), (4,), (4, 4)], ("decode",))
    grown, _ = fused(mod, FuseLinearEpilogue())
    assert calls(grown, "decode") == ["rms_norm", "fused_linear"]
    with Ledger() as ledger:
        assert FoldNormIntoLinear()(grown).same_as(grown)
    assert [v.code for v in ledger] == ["no-kernel"]


def test_refused_a_norm_in_front_of_a_region_that_norms():
    def build(emit, x, g, h, w):
        return emit(op.matmul(rms(emit, rms(emit, x, g, eps=1e-5), h, eps=1e-5), w))

    mod = module(build, [(3, 4), (4,), (4,), (4, 6)], ("decode",))
    once, _ = fused(mod, FoldNormIntoLinear())
    assert calls(once, "decode") == ["rms_norm", "fused_linear"]
    with Ledger() as ledger:
        assert FoldNormIntoLinear()(once).same_as(once)
    assert [v.code for v in ledger] == ["no-kernel"]


@st.composite
def normed(draw):
    layered, biased = draw(st.booleans()), draw(st.booleans())

    def emit(bb, p):
        x, g, b, w, v = p
        if layered:
            n = bb.emit(op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-2))
        else:
            n = rms(bb.emit, x, g, 1e-2)
        y = bb.emit(op.matmul(n, w))
        return [bb.emit(op.add(y, v)) if biased else y]

    def reference(values):
        x, g, b, w, v = (a.astype("float64") for a in values)
        n = norm_reference(x, "layer", g, b, eps=1e-2) if layered else norm_reference(x, "rms", g, eps=1e-2)
        return [n @ w + (v if biased else 0)]

    shapes = lambda d, m, k: [("n", d + 1), (d + 1,), (d + 1,), (d + 1, m), (m,)]
    return draw(layers(emit, reference, shapes))


def test_property():
    run = tvm.transform.Sequential([CanonicalizeTransformer(), FoldNormIntoLinear(), LowerFusedLinear(HOST)])
    assert_pass_preserves(run, normed(), numerics=REASSOCIATES, max_examples=20)
