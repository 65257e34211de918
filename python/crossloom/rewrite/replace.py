"""Values in the places of bindings."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@mutator
class Replace(PyExprMutator):
    """Drops bindings, and puts other values where they were read.

    Parameters
    ----------
    mod : tvm.ir.IRModule or None
        Whose functions are rewritten, where they are put back through ``builder_``.

    Attributes
    ----------
    values : mapping of relax.Var to relax.Expr
        What stands in the place of each binding; a binding that nothing reads any more may stand for itself.
    """

    def __init__(self, mod: ir.IRModule | None = None) -> None:
        super().__init__(mod)
        self.values: Mapping[relax.Var, relax.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.values:
            super().visit_var_binding_(binding)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.values[var] if var in self.values else super().visit_var_(var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.values[var] if var in self.values else super().visit_dataflow_var_(var)
