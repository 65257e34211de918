"""The property in one line: right passes hold, a wrong one is found and shrunk, an undeclared one is asked about."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.errors import UsageError
from crossloom.numerics import EXACT, REASSOCIATES
from crossloom.testing import assert_pass_preserves, strategies


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
    assert_pass_preserves(relax.transform.LegalizeOps(), numerics=EXACT, max_examples=4)


def test_wrong_pass_is_found() -> None:
    with pytest.raises(AssertionError, match="entry main, output 0"):
        assert_pass_preserves(_wrong, strategies.gated_mlp(), numerics=REASSOCIATES, max_examples=5)


def test_unregistered_pass_needs_a_class() -> None:
    with pytest.raises(UsageError, match="not in the registry"):
        assert_pass_preserves(_wrong, max_examples=1)


def test_a_pass_that_never_does_anything_is_not_taken_for_tested() -> None:
    idle = tvm.transform.module_pass(lambda mod, ctx: mod, opt_level=0, name="Idle")
    with pytest.raises(AssertionError, match=r"the pass changed none of [1-3] modules"):
        assert_pass_preserves(idle, strategies.gated_mlp(), numerics=EXACT, max_examples=3)
    assert_pass_preserves(idle, strategies.gated_mlp(), numerics=EXACT, max_examples=3, may_do_nothing=True)
