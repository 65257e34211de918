"""The strategies agree with their references; the property finds a wrong pass."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.errors import UsageError
from crossloom.numerics import EXACT, REASSOCIATES
from crossloom.testing import assert_pass_preserves, strategies
from crossloom.testing.runner import run_module
from crossloom.testing.strategies import Case


@settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(strategies.modules())
def test_strategies_agree_with_their_references(case: Case) -> None:
    inputs = case.inputs(1)
    expected = case.expected(inputs)
    for entry, outputs in ((n, run_module(case.mod, n, x)) for n, x in inputs.items()):
        assert len(outputs) == len(expected[entry])
        for got, want in zip(outputs, expected[entry]):
            tolerance = 5e-2 if case.dtype == "float16" else 1e-4
            np.testing.assert_allclose(got.astype("float64"), want.astype("float64"), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("convention", ["half-split", "interleaved"])
def test_rotary_agrees_with_its_own_convention(convention: str) -> None:
    @settings(max_examples=4, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategies.rotary(convention))
    def prove(case: Case) -> None:
        inputs = case.inputs(2)
        for entry, outputs in ((n, run_module(case.mod, n, x)) for n, x in inputs.items()):
            for got, want in zip(outputs, case.expected(inputs)[entry]):
                np.testing.assert_allclose(got.astype("float64"), want.astype("float64"), atol=5e-3)

    prove()


@mutator
class _WrongSilu(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if isinstance(call.op, tvm.ir.Op) and call.op.name == "relax.nn.silu":
            return relax.op.sigmoid(call.args[0])
        return call


@tvm.transform.module_pass(opt_level=0, name="Wrong")
def _wrong(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
    walker = _WrongSilu(mod)
    for gvar, func in mod.functions_items():
        walker.builder_.update_func(gvar, walker.visit_expr(func))
    return walker.builder_.get()


def test_right_pass() -> None:
    assert_pass_preserves(relax.transform.Normalize(), numerics=EXACT, max_examples=4)


def test_wrong_pass_is_found() -> None:
    with pytest.raises(AssertionError, match="entry main, output 0"):
        assert_pass_preserves(_wrong, strategies.gated_mlp(), numerics=REASSOCIATES, max_examples=5)


def test_unregistered_pass_needs_a_class() -> None:
    with pytest.raises(UsageError, match="not in the registry"):
        assert_pass_preserves(_wrong, max_examples=1)
