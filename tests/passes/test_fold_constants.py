"""What depends on constants alone is computed at once; the numbers stay, and nothing else changes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import EXACT
from crossloom.passes.fold_constants import FoldConstants
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.verdict import Ledger

op = relax.op
N = tirx.Var("n", "int64")


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor(("n", 2), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                a = R.permute_dims(R.const([[1.0, 2.0], [3.0, 4.0]], "float32"))
                b = R.multiply(a, R.const(2.0, "float32"))
                y = R.matmul(x, b)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def decode(x: R.Tensor(("n", 2), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.matmul(x, R.const([[2.0, 6.0], [4.0, 8.0]], "float32"))
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FoldConstants()(Before), Expected)


def folds(build, *shapes, names=("prefill", "decode")):
    mod = module(build, list(shapes), names)
    with Ledger() as ledger:
        out = FoldConstants()(mod)
    return mod, out, ledger


def test_two_entries_and_running_it_twice():
    (w,) = data((3, 4))

    def build(e, x):
        return op.matmul(x, e(op.permute_dims(relax.const(w))))

    _, out, ledger = folds(build, (N, 4))
    assert sorted(v.function for v in ledger.fired) == ["decode", "prefill"]
    assert FoldConstants()(out).same_as(out)
    x = data((5, 4), seed=1)
    for entry in ("prefill", "decode"):
        (got,) = run_module(out, entry, x)
        np.testing.assert_allclose(got, x[0] @ w.T, rtol=1e-5, atol=1e-6)


def test_parameters_symbolic_shapes_and_other_operators_stay():
    (w,) = data((3, 4))

    def build(e, x, p):
        turned = e(op.permute_dims(p))  # a parameter
        wide = e(op.zeros(relax.ShapeExpr([N, 3]), "float32"))  # as long as the input
        rolled = e(op.cumsum(relax.const(w.T.copy()), 0))  # not known to the folder
        return op.add(e(op.add(e(op.matmul(x, rolled)), wide)), e(op.matmul(x, turned)))

    mod, out, ledger = folds(build, (N, 4), (3, 4))
    assert out.same_as(mod) and not list(ledger.fired)


def test_a_value_that_is_returned_becomes_a_constant():
    _, out, _ = folds(lambda e, x: relax.Tuple([e(op.negative(relax.const(np.float32([1, -2])))), x]), (N,))
    (x,) = data((3,))
    first, second = run_module(out, "decode", [x])
    np.testing.assert_array_equal(first, [-1, 2])
    np.testing.assert_array_equal(second, x)


_UNARY = {
    "permute": lambda e, x: op.permute_dims(x),
    "flat": lambda e, x: op.reshape(x, (-1,)),
    "rows": lambda e, x: op.expand_dims(x, [0]),
    "half": lambda e, x: op.astype(e(op.astype(x, "float16")), "float32"),
    "sum": lambda e, x: op.sum(x, [0], keepdims=True),
    "roots": lambda e, x: op.sqrt(e(op.multiply(x, x))),
    "twice": lambda e, x: op.concat([x, x], 0),
    "picked": lambda e, x: op.take(x, relax.const([0, 0], "int64"), axis=0, mode="clip"),
    "less": lambda e, x: op.subtract(relax.const(1.5), x),
    "part": lambda e, x: op.divide(x, relax.const(np.float32([3.0]))),
    "square": lambda e, x: op.matmul(x, e(op.permute_dims(x))),
}


@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(_UNARY)), min_size=1, max_size=4), st.integers(0, 99))
def test_folds_are_what_tvm_computes(steps, seed):
    (w,) = data((3, 2), seed=seed)
    taken = []

    def build(e, x):
        at = relax.const(w)
        for name in steps:
            if name in ("permute", "square") and at.ty.ndim != 2:
                continue
            at = e(_UNARY[name](e, at))
            taken.append(name)
        return op.add(e(op.sum(x)), at)

    mod, out, _ = folds(build, (N,), names=("prefill", "decode"))
    x = data((4,), seed=1)
    for entry in ("prefill", "decode"):
        (want,), (got,) = run_module(mod, entry, x), run_module(out, entry, x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert out.same_as(mod) == (not taken)


def test_property_modules_are_preserved():
    assert_pass_preserves(FoldConstants(), strategies.linear(), numerics=EXACT, max_examples=6)


@pytest.mark.parametrize("count", [400])
def test_folds_take_no_compiler(count):
    """TVM's FoldConstant takes some 30 ms for each."""
    (w,) = data((8, 8))

    def build(e, x):
        for i in range(count):
            x = e(op.matmul(x, e(op.permute_dims(relax.const(w + np.float32(i))))))
        return x

    mod = module(build, [(N, 8)], ("decode",))
    start = time.process_time()
    FoldConstants()(mod)
    assert time.process_time() - start < 4


def test_numbers_that_an_integer_does_not_hold_stay_with_the_operator():
    for values, kind, folded in (
        ([1.7, -1.7, 127.9, -128.9], "int8", True),
        ([128.0], "int8", False),
        ([-129.0], "int8", False),
        ([-0.5, 255.5], "uint8", True),
        ([2.0**63], "int64", False),
        ([np.nan], "int32", False),
        ([np.inf], "int32", False),
    ):
        array = np.array(values, "float32")
        build = lambda emit, x: emit(op.add(x, emit(op.astype(relax.const(array), kind))))  # noqa: B023
        mod = FoldConstants()(module(build, [array.shape], ["decode"], kind))
        calls = [b.value.op.name for b in mod["decode"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
        assert calls == (["relax.add"] if folded else ["relax.astype", "relax.add"]), values
        if folded:
            (got,) = run_module(mod, "decode", [np.zeros(array.shape, kind)])
            np.testing.assert_array_equal(got, [int(v) for v in values])
