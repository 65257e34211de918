"""Say of functions with one argument that no two of their arguments overlap, so that it may hold for all others too.

TVM's LLVM code generator keeps what it knows of aliases for a whole module: where one function lacks the attribute
``tirx.noalias``, stores of every other function may touch what it loads, and sums of products go through memory instead
of registers (a linear kernel of 576 x 1024 x 2048 takes 2.4 times as long).  ``VMShapeLower`` adds such a function, the
one that computes symbolic shapes, to every module that has any.
"""

from __future__ import annotations

import tvm
from tvm import ir, tirx


def restrict_single_arguments() -> tvm.transform.Pass:
    """Return a pass that marks TIR functions of one argument, or none, as free of aliases; others stay as they are."""

    @tvm.transform.module_pass(opt_level=0, name="restrict-single-arguments")
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        marked = {
            gvar: func.with_attr("tirx.noalias", True)
            for gvar, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and len(func.params) < 2 and "tirx.noalias" not in (func.attrs or {})
        }
        if not marked:
            return mod
        functions = {gvar: marked.get(gvar, func) for gvar, func in mod.functions_items()}
        return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    return run
