"""Turn composites back into the operators they stand for, so that operator fusion sees one graph.

    y = rms_norm(x, w)            # private function, Composite = "crossloom.rms_norm"
->  y = R.nn.rms_norm(x, w, ...)

Fires for every call to a Relax function with the attribute ``Composite``.  Never for what a code generator claimed
(attribute ``Codegen``).  Numerics: exact.  Linear in the module's size.

TVM's InlinePrivateFunctions is not used: it leaves a callee's symbolic dimensions inside shape operands unbound.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import splice


def _is_composite(func: ir.BaseFunc) -> bool:
    attrs = func.attrs
    return isinstance(func, relax.Function) and attrs is not None and "Composite" in attrs and "Codegen" not in attrs


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
        # A composite within a composite is inlined along.
        return splice(self.builder_, callee, list(call.args), self.visit_call_)


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
