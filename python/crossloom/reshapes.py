"""Make views of kernels that only reshape, and leave alone the kernels that TVM's pass for it cannot read.

``RewriteDataflowReshape`` asks of every kernel of one operand whether it is a reshape, and takes for granted that its
body is a schedulable block: one of plain loops, as ours are written (a norm without a weight has one operand), ends the
compilation.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax, s_tir, tirx


def rewrite_reshapes() -> tvm.transform.Pass:
    """Return TVM's ``RewriteDataflowReshape`` for modules that hold kernels of plain loops, too."""
    inner = relax.transform.RewriteDataflowReshape()

    @tvm.transform.module_pass(opt_level=0, name="rewrite-reshapes")
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        plain = {gvar: func for gvar, func in mod.functions_items() if _is_plain(func)}
        if not plain:
            return inner(mod)
        # A kernel that reads none of its operands is not asked.
        nothing = {gvar: func.with_body(tirx.Evaluate(0)) for gvar, func in plain.items()}
        out = inner(_with(mod, nothing))
        return _with(out, {gvar: func for gvar, func in plain.items() if gvar in out.functions})

    return run


def _is_plain(func: ir.BaseFunc) -> bool:
    return isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize)


def _with(mod: ir.IRModule, new: dict[ir.GlobalVar, tirx.PrimFunc]) -> ir.IRModule:
    functions = {gvar: new.get(gvar, func) for gvar, func in mod.functions_items()}
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
