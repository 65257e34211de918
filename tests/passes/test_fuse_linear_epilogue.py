"""Activations, factors and residual sums join the linear layer before them, as far as a kernel takes them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from fused import calls, fused, layers

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()


def test_golden_residual():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), r: R.Tensor(("n", 6), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                t = cls.linear(x, w)
                y = R.add(r, t)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor((6, 4), "float32"), a2: R.Tensor(("n", 6), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                t = cls.linear(a0, a1)
                y = R.add(a2, t)
                R.output(y)
            return y

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), r: R.Tensor(("n", 6), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                y = cls.fused_linear(x, w, r)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseLinearEpilogue()(Before), Expected)


def test_two_entries_and_running_it_twice():
    def build(emit, x, r, w):
        return emit(op.add(emit(op.nn.silu(emit(op.matmul(x, w)))), r))

    once, ledger = fused(
        module(build, [(N, 4), (N, 6), (4, 6)], ("prefill", "decode"), num_input=2), FuseLinearEpilogue()
    )
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_linear"]
    assert sorted(v.function for v in ledger.fired) == ["decode", "prefill"]
    tvm.ir.assert_structural_equal(FuseLinearEpilogue()(once), once)


def chained(*steps):
    def build(emit, x, r, w):
        value = emit(op.matmul(x, w))
        for step in steps:
            value = emit(step(value, r))
        return value

    return module(build, [(3, 4), (3, 6), (4, 6)], ("vision",), num_input=2)


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([lambda v, r: op.nn.gelu(v)], 0),
        ([lambda v, r: op.nn.relu(v), lambda v, r: op.add(v, r)], 0),
        ([lambda v, r: op.multiply(v, relax.const(0.5, "float32")), lambda v, r: op.add(r, v)], 0),
        # A kernel adds last: what follows the sum stays outside.
        ([lambda v, r: op.add(v, r), lambda v, r: op.nn.relu(v)], 1),
        # A factor by an activation is no number.
        ([lambda v, r: op.nn.gelu(v), lambda v, r: op.multiply(v, r)], 1),
    ],
)
def test_the_longest_chain_that_a_kernel_takes(steps, left):
    mod, ledger = fused(chained(*steps), FuseLinearEpilogue())
    assert len(ledger.fired) == 1
    lines = [b.value for block in mod["vision"].body.blocks for b in block.bindings]
    assert sum(isinstance(value, relax.Call) for value in lines) == 1 + left
    lowered = LowerFusedLinear(HOST)(mod)
    x, r, w = data((3, 4), (3, 6), (4, 6))
    want = run_module(chained(*steps), "vision", [x, r, w])[0]
    np.testing.assert_allclose(run_module(lowered, "vision", [x, r, w])[0], want, rtol=1e-5, atol=1e-6)


def codes(build, shapes):
    mod = module(build, shapes, ("vision",), num_input=2)
    before = CanonicalizeTransformer()(mod)
    after, ledger = fused(mod, FuseLinearEpilogue())
    tvm.ir.assert_structural_equal(after, before)
    return {v.code for v in ledger.refused}


def test_refused_what_is_read_elsewhere():
    def build(emit, x, r, w):
        t = emit(op.matmul(x, w))
        return emit(relax.Tuple([emit(op.add(t, r)), emit(op.exp(t))]))

    assert codes(build, [(3, 4), (3, 6), (4, 6)]) == {"intermediate-used-outside"}


def test_refused_a_sum_that_widens():
    def build(emit, x, r, w):
        return emit(op.add(emit(op.matmul(x, w)), r))

    assert codes(build, [(1, 4), (3, 6), (4, 6)]) == {"no-kernel"}


def _silu(x):
    return x / (1 + np.exp(-x))


def test_a_sum_joins_over_rows_of_a_composed_number():
    """Image tokens in front of text of any length: two spellings of the size are two objects, and one size."""

    def build(e, image, text, w):
        x = e(op.concat([image, text], 0))
        return op.add(x, e(op.matmul(x, w)))

    mod = module(build, [(3, 4), (N, 4), (4, 4)], ("prefill",))
    out, ledger = fused(mod, FuseLinearEpilogue())
    assert calls(out, "prefill") == ["fused_linear"] and not list(ledger.refused)
    arrays = data((3, 4), (5, 4), (4, 4))
    image, text, w = (a.astype("float64") for a in arrays)
    x = np.concatenate([image, text])
    (got,) = run_module(out, "prefill", arrays)
    assert worst_error((x + x @ w).astype("float32"), got) <= REASSOCIATES.bound("float32")


def test_property():
    def emit(bb, p):
        return [op.add(bb.emit(op.nn.silu(bb.emit(op.add(bb.emit(op.matmul(p[0], p[2])), p[3])))), p[1])]

    def reference(v):
        x, r, w, b = (a.astype("float64") for a in v)
        return [_silu(x @ w + b) + r]

    cases = layers(emit, reference, lambda d, m, k: [("n", d), ("n", m), (d, m), (m,)])
    run = tvm.transform.Sequential([CanonicalizeTransformer(), FuseLinearEpilogue(), LowerFusedLinear(HOST)])
    assert_pass_preserves(run, cases, numerics=REASSOCIATES, max_examples=20)


def test_refused_a_number_of_more_axes():
    """The product has an axis more than the layer's result, which no kernel puts there."""

    def build(emit, x, r, w):
        return emit(op.multiply(emit(op.matmul(x, w)), relax.const(np.full((1, 1, 1), 0.5), "float32")))

    assert codes(build, [(3, 4), (3, 6), (4, 6)]) == {"no-kernel"}
