"""A residual sum and the norms that read it become one region, the sum a result of it where it is read again."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import module
from crossloom.numerics import REASSOCIATES
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_residual_norm import FuseResidualNorm
from crossloom.testing import assert_pass_preserves, strategies
from fused import calls, canonicalized, fused
from residual import EPS, layer, residual_norms, rms

op = relax.op
N = tirx.Var("n", "int64")


def test_golden_pre_norm():
    """The sum is read again by the next residual."""

    @I.ir_module
    class Before:
        @R.function(private=True)
        def rms_norm(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4,), "float32")):
            R.func_attr({"Composite": "crossloom.rms_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), r: R.Tensor(("n", 4), "float32"), g: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                s = R.add(x, r)
                t = cls.rms_norm(s, g)
                e = R.exp(t)
                y = R.add(e, s)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def rms_norm(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4,), "float32")):
            R.func_attr({"Composite": "crossloom.rms_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_residual_norm(
            a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor(("n", 4), "float32"), a2: R.Tensor((4,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_residual_norm"})
            cls = Expected
            with R.dataflow():
                s = R.add(a0, a1)
                t = cls.rms_norm(s, a2)
                both = (s, t)
                R.output(both)
            return both

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), r: R.Tensor(("n", 4), "float32"), g: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                both = cls.fused_residual_norm(x, r, g)
                s = both[0]
                t = both[1]
                e = R.exp(t)
                y = R.add(e, s)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseResidualNorm()(Before), Expected)


def test_golden_post_norm():
    """Nothing else reads the sum: it is never written."""

    @I.ir_module
    class Before:
        @R.function(private=True)
        def layer_norm(
            x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4,), "float32"), bias: R.Tensor((4,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.layer_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function
        def vision(x: R.Tensor((3, 4), "float32"), r: R.Tensor((3, 4), "float32"), g: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                s = R.add(x, r)
                y = cls.layer_norm(s, g, g)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def layer_norm(
            x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4,), "float32"), bias: R.Tensor((4,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.layer_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_residual_norm(
            a0: R.Tensor((3, 4), "float32"), a1: R.Tensor((3, 4), "float32"), a2: R.Tensor((4,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_residual_norm"})
            cls = Expected
            with R.dataflow():
                s = R.add(a0, a1)
                y = cls.layer_norm(s, a2, a2)
                R.output(y)
            return y

        @R.function
        def vision(x: R.Tensor((3, 4), "float32"), r: R.Tensor((3, 4), "float32"), g: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                y = cls.fused_residual_norm(x, r, g)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseResidualNorm()(Before), Expected)


def several(emit, x, r, g, b):
    """One sum, three norms: of attention and MLP side by side, and one that is a result."""
    s = emit(op.add(x, r))
    first, second, third = rms(emit, s, g), layer(emit, s, g, b), layer(emit, s)
    return emit(relax.Tuple([emit(op.add(emit(op.exp(first)), second)), third]))


def test_several_norms_of_one_sum_in_both_entries_and_running_it_twice():
    mod = module(several, [(2, N, 5), (2, N, 5), (5,), (5,)], ("prefill", "decode"), num_input=2)
    once, ledger = fused(mod, FuseResidualNorm())
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_residual_norm"]
    assert sorted(v.function for v in ledger.fired) == ["decode", "prefill"] and not ledger.refused
    assert FuseResidualNorm()(once).same_as(once)


def test_what_is_saved_is_told():
    def saved(build, rows=3):
        _, ledger = fused(module(build, [(rows, 5), (rows, 5), (5,)], num_input=2), FuseResidualNorm())
        return [v.bytes_saved for v in ledger.fired]

    def kept(emit, x, r, g):
        s = emit(op.add(x, r))
        return emit(relax.Tuple([rms(emit, s, g), s]))

    # The norm does not read the sum; and where it is not a result it is not written either.
    assert saved(kept) == [3 * 5 * 4]
    assert saved(lambda emit, x, r, g: rms(emit, emit(op.add(x, r)), g)) == [2 * 3 * 5 * 4]
    assert saved(kept, N) == [0]


def test_a_norm_that_no_kernel_takes_stays_beside_those_that_join():
    def build(emit, x, r, g):
        s = emit(op.add(x, r))
        both = emit(op.nn.layer_norm(s, *(emit(op.broadcast_to(g, [3, 5])),) * 2, axes=[-2, -1], epsilon=EPS))
        return emit(relax.Tuple([both, rms(emit, s, g)]))

    mod, ledger = fused(module(build, [(2, 3, 5), (2, 3, 5), (5,)], ("vision",), num_input=2), FuseResidualNorm())
    assert sorted(calls(mod, "vision")) == ["fused_residual_norm", "layer_norm"]
    assert len(ledger.fired) == 1 and {v.code for v in ledger.refused} == {"no-kernel"}


def test_a_norm_in_float32_of_a_float16_sum_takes_its_cast_along():
    """Gemma's: the weight is applied in float32, and then all is rounded once."""

    def build(emit, x, r, g):
        s = emit(op.add(x, r))
        normed = emit(op.multiply(rms(emit, s, wide=True), g))
        return emit(relax.Tuple([emit(op.astype(normed, "float16")), s]))

    half = [((3, 5), "float16"), ((3, 5), "float16"), ((5,), "float32")]
    mod, ledger = fused(module(build, half, ("decode",), num_input=2), FuseResidualNorm())
    assert len(ledger.fired) == 1 and "astype" not in mod["decode"].script(show_meta=False)
    assert [str(field.dtype) for field in mod["fused_residual_norm"].ret_ty.fields] == ["float16", "float16"]


# Refusals ---------------------------------------------------------------------------------------------------------


def refusals(build, shapes, dtype="float32"):
    """Return why the pass refuses, code and detail, having checked that it leaves the module alone."""
    before = CanonicalizeTransformer()(module(build, shapes, ("decode",), dtype, num_input=2))
    after, ledger = fused(before, FuseResidualNorm())
    assert after.same_as(before) and not ledger.fired
    return [(v.code, v.detail) for v in ledger.refused if v.rewrite == "residual-norm"]


def summed(emit, x, r, *weights):
    return rms(emit, emit(op.add(x, r)), *weights)


def only(code, found, detail):
    assert [c for c, _ in found] == [code] and detail in found[0][1]


def test_refused_a_norm_over_several_axes():
    def build(emit, x, r, g):
        return emit(op.nn.layer_norm(emit(op.add(x, r)), g, g, axes=[-2, -1], epsilon=EPS))

    only("no-kernel", refusals(build, [(2, 3, 5), (2, 3, 5), (3, 5)]), "more than the last axis")


def test_refused_rows_of_unknown_or_no_length():
    d = tirx.Var("d", "int64")
    for size in (d, 0):
        only("no-kernel", refusals(summed, [(3, size), (3, size)]), "unknown or no length")


def test_refused_sizes_that_are_not_known_to_fit():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    # Either may be stretched over the other: TVM does not say what comes out.
    only("no-kernel", refusals(summed, [(n, 5), (m, 5)]), "unknown or no length")


def test_refused_a_result_of_another_type():
    def build(emit, x, r, g):
        s = emit(op.add(x, r))
        return emit(op.multiply(emit(op.astype(rms(emit, s), "float16")), g))

    only("no-kernel", refusals(build, [(3, 5), (3, 5), ((5,), "float16")]), "neither x's nor")


def test_refused_a_type_without_kernel():
    only("no-kernel", refusals(summed, [(3, 5), (3, 5)], "bfloat16"), "of type bfloat16")


def test_refused_a_sum_of_another_block():
    """The norm is a region by itself then."""
    bb = relax.BlockBuilder()
    x, r = (relax.Var(name, relax.TensorType((3, 5), "float32")) for name in "xr")
    with bb.function("decode", [x, r], attrs={"num_input": 2}):
        with bb.dataflow():
            s = bb.emit_output(op.add(x, r))
        e = bb.emit(op.exp(r))  # between the blocks, or TVM would make one of them
        with bb.dataflow():
            y = bb.emit_output(op.multiply(rms(bb.emit, s), e))
        bb.emit_func_output(y)
    mod, ledger = fused(bb.get(), FuseResidualNorm())
    assert [(v.rewrite, v.code) for v in ledger] == [("residual-norm", "crosses-a-branch"), ("norm", "fired")]
    assert calls(mod, "decode") == ["fused_residual_norm"] and "R.add" in mod["decode"].script(show_meta=False)


def test_norms_without_a_sum():
    """Of one value, whatever made it, or of an input: one region."""

    def build(emit, x, r, g, b):
        t = emit(op.multiply(x, r))
        return emit(relax.Tuple([layer(emit, t, g, b), emit(op.exp(rms(emit, t, g))), rms(emit, r)]))

    shapes = [(3, 5), (3, 5), (5,), (5,)]
    mod, ledger = fused(module(build, shapes, ("decode",), num_input=2), FuseResidualNorm())
    assert calls(mod, "decode") == ["fused_residual_norm"] * 2
    # The second norm of a value does not read it once more.
    assert [(v.rewrite, v.bytes_saved) for v in ledger] == [("norm", 3 * 5 * 4), ("norm", 0)]
    assert refusals(lambda emit, x, r: op.nn.softmax(emit(op.add(x, r))), [(3, 5), (3, 5)]) == []


# Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "count"), [(residual_norms, 10), (strategies.residual_norm, 6), (strategies.decoder_layer, 3)]
)
def test_property(cases, count):
    assert_pass_preserves(FuseResidualNorm(), canonicalized(cases()), numerics=REASSOCIATES, max_examples=count)


def test_regions_leave_no_array_behind():
    """A sum with a constant: position embeddings that a model was traced with stay where they are."""
    table = relax.const(np.ones((1, 4, 5), "float32"))

    def build(emit, x, r):
        return rms(emit, emit(op.add(x, table)))

    mod, ledger = fused(module(build, [(2, 4, 5), (1,)], ("vision",), num_input=2), FuseResidualNorm())
    assert calls(mod, "vision") == ["fused_residual_norm"] and len(ledger.fired) == 1
