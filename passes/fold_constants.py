"""Compute what depends on constants alone, without compiling kernels for it.

    wt = R.permute_dims(R.reshape(R.const(w), ...))     # weights in the order of a kernel
    y  = R.call_tir(kernel, (x, wt), ...)
->  y  = R.call_tir(kernel, (x, R.const(w_in_order)), ...)

Fires for operators that move values and for arithmetic (see :mod:`crossloom.known_values`) on constants; what is left
is TVM's FoldConstant's, which compiles a kernel for every fold and runs it.
Never for values of symbolic shape, nor where an operand is a parameter (those of a model are folded with it).

Numerics: exact (sums are made in float64 and rounded once).  Linear in the module's size.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import ir, relax

from crossloom.known_values import evaluate
from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite.driver import graphs_of
from crossloom.rewrite.replace import Replace
from crossloom.verdict import accept, record

_NAME = "fold-constants"


def FoldConstants() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        folder = Replace(mod)
        changed = False
        for gvar, graph in graphs_of(mod):
            known = evaluate(graph, {}, _NAME, constants=True)
            if not known.folded:
                continue
            constants: dict[relax.Var, relax.Expr] = {var: var for var in known.folded}
            for var, value in known.values.items():
                constants[var] = _constant(value, var)
                record(accept(bytes_saved=value.nbytes).at(_NAME, graph.name, var.name, _NAME))
            folder.values = constants
            folder.builder_.update_func(gvar, folder.visit_expr(graph.func))
            changed = True
        if not changed:
            return mod
        out = folder.builder_.get()
        relax.analysis.well_formed(out)
        return out.with_attrs(mod.attrs) if mod.attrs else out

    return run


def _constant(array: np.ndarray, var: relax.Var) -> relax.Expr:
    return relax.const(np.asarray(array, order="C"), str(var.ty.dtype))


PASS = PassInfo(_NAME, FoldConstants, "lower", EXACT, doc="Arithmetic and moves of constants, done at once.")
