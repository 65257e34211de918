"""Turn composites back into the operators they stand for, so that operator fusion sees one graph.

    y = rms_norm(x, w)            # private function, Composite = "crossloom.rms_norm"
->  y = R.nn.rms_norm(x, w, ...)

Fires for every call to a Relax function with the attribute ``Composite``.  Never for what a code generator claimed
(attribute ``Codegen``).  Numerics: exact.  Linear in the module's size.

TVM's InlinePrivateFunctions is not used: it leaves a callee's symbolic dimensions inside shape operands unbound.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import rebuild


def _is_composite(func: ir.BaseFunc) -> bool:
    attrs = func.attrs
    return isinstance(func, relax.Function) and attrs is not None and "Composite" in attrs and "Codegen" not in attrs


def _dimensions(func: relax.Function, call: relax.Call) -> dict[tirx.Var, tirx.Expr]:
    """Return what the caller's types say of the callee's symbolic dimensions."""
    out: dict[tirx.Var, tirx.Expr] = {}
    for param, arg in zip(func.params, call.args):
        if isinstance(param.ty, relax.TensorType) and param.ty.shape is not None and arg.ty.shape is not None:
            for inner, outer in zip(param.ty.shape, arg.ty.shape):
                if isinstance(inner, tirx.Var):
                    out.setdefault(inner, outer)
    return out


@mutator
class _Inliner(PyExprMutator):
    """Emits a composite's bindings in the place of each call to it."""

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, ir.GlobalVar) or call.op not in self.mod.functions:
            return call
        callee = self.mod[call.op]
        if not _is_composite(callee):
            return call
        dims = _dimensions(callee, call)
        values: dict[relax.Var, relax.Expr] = dict(zip(callee.params, call.args))

        def outer(leaf: relax.Expr) -> relax.Expr:
            """Return an operand of the callee in terms of the caller."""
            if isinstance(leaf, relax.ShapeExpr):
                return relax.ShapeExpr([tvm_ffi.structural_map(dim, (ir.Var, dimension)) for dim in leaf.values])
            return values.get(leaf, leaf) if isinstance(leaf, relax.Var) else leaf

        def dimension(var: tirx.Var) -> tirx.Expr:
            return dims.get(var, var)

        for block in callee.body.blocks:
            for binding in block.bindings:
                value = rebuild(binding.value, outer)
                # A composite within a composite.
                value = self.visit_call_(value) if isinstance(value, relax.Call) else value
                values[binding.var] = self.builder_.emit(value)
        return rebuild(callee.body.body, outer)


def InlineComposites() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""

    @tvm.transform.module_pass(opt_level=0, name="inline-composites")
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        composites = [gvar for gvar, func in mod.functions_items() if _is_composite(func)]
        if not composites:
            return mod
        inliner = _Inliner(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function) and not _is_composite(func):
                inliner.builder_.update_func(gvar, inliner.visit_expr(func))
        functions = {gvar: func for gvar, func in inliner.builder_.get().functions_items() if not _is_composite(func)}
        out = ir.IRModule(functions, attrs=mod.attrs)
        relax.analysis.well_formed(out)
        return out

    return run


PASS = PassInfo("inline-composites", InlineComposites, "lower", EXACT, doc="composites become plain operators again")
