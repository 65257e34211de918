"""Give sizes that only the data decides a symbolic dimension, so that everything after them can be compiled.

Before: ``i = R.nonzero(x)  # Tensor(ndim=2)``; ``y = R.multiply(i, 2)  # Tensor(ndim=2)``
After: ``i = R.nonzero(x); j = R.match_cast(i, R.Tensor((d0, d1))); y = R.multiply(j, 2)  # Tensor((d0, d1))``

Fires when an operator whose result's shape depends on values (or a packed function) leaves a tensor of known rank and
unknown shape.
Never when the rank is unknown too (``unknown-rank``), or where the shape is unknown for another reason: two sizes
that nothing proves equal are not made one (``shape-not-inferred``).

Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph
from crossloom.verdict import accept, record, refuse

NAME = "match-data-dependent-shapes"
#: Operators whose result's shape their operands' values decide.
_DATA_DEPENDENT = (
    "relax.nonzero",
    "relax.unique",
    "relax.dynamic_strided_slice",
    "relax.call_pure_packed",
    "relax.call_dps_packed",
    "relax.tensor_to_shape",
    "relax.vision.get_valid_counts",
    "relax.vision.non_max_suppression",
    "relax.vision.all_class_non_max_suppression",
)


def _unknown(expr: relax.Expr) -> bool:
    ty = expr.ty
    return isinstance(ty, relax.TensorType) and not isinstance(ty.shape, relax.ShapeExpr)


def _from_data(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call):
        # An element of what a packed function returned.
        return isinstance(value, relax.TupleGetItem)
    return not isinstance(value.op, ir.Op) or value.op.name in _DATA_DEPENDENT


def _waiting(graph: Graph) -> set[relax.Var]:
    """Return the bound tensors of unknown shape that something else than a match_cast reads."""
    out = set()
    for var in filter(_unknown, graph.order):
        users = graph.users.get(var, ())
        cast = all(graph.value[user].same_as(var) and not _unknown(user) for user in users)
        if var in graph.escapes or not users or not cast:
            out.add(var)
    return out


@mutator
class _Matcher(PyExprMutator):
    """Emits a function anew, with a match_cast after each tensor whose shape the data decides."""

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.function, self.count = "", 0
        self.waiting: set[relax.Var] = set()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.waiting:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.normalize(self.visit_expr(binding.value))
        leaves = self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar)
        if _unknown(value):
            value = self._matched(self.builder_.emit(value), value)
        emit = self.builder_.emit_output if leaves else self.builder_.emit
        self.set_var_remap(binding.var, value if isinstance(value, relax.Var) and not leaves else emit(value))

    def _matched(self, var: relax.Var, value: relax.Expr) -> relax.Var:
        if not _from_data(value):
            verdict = refuse("shape-not-inferred", var.name, "its operands' sizes are known, its own is not")
        elif var.ty.ndim < 0:
            verdict = refuse("unknown-rank", var.name)
        else:
            verdict = accept()
        record(verdict.at(NAME, self.function, var.name))
        if not verdict.fired:
            return var
        dims = [tirx.Var(f"d{self.count + i}", "int64") for i in range(var.ty.ndim)]
        self.count += len(dims)
        return self.builder_.match_cast(var, relax.TensorType(dims, var.ty.dtype, var.ty.vdevice))


def MatchDataDependentShapes() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""

    @tvm.transform.module_pass(opt_level=0, name=NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        matcher = _Matcher(mod)
        changed = False
        for gvar, func in mod.functions_items():
            if not isinstance(func, relax.Function):
                continue
            waiting = _waiting(Graph(gvar.name_hint, func, mod))
            if waiting:
                changed = True
                matcher.function, matcher.waiting = gvar.name_hint, waiting
                matcher.builder_.update_func(gvar, matcher.visit_expr(func))
        if not changed:
            return mod
        out = matcher.builder_.get()
        relax.analysis.well_formed(out)
        return out

    return run


PASS = PassInfo(
    NAME,
    MatchDataDependentShapes,
    "canonicalize",
    EXACT,
    doc="Sizes that only the data decides become symbolic dimensions.",
)
