"""Compute once what is computed twice from the same operands.

    c0 = R.take(cos, positions, axis=0); ...; c1 = R.take(cos, positions, axis=0)      # in every layer
->  c0 = R.take(cos, positions, axis=0); ...; c1 = c0

Fires for calls of pure operators and composites, tuples and their items, with equal operands and attributes, where the
first one is in scope: cos and sin that each layer looks up anew, masks that each layer makes.
Never for what has effects, nor between the branches of an ``if``.

Numerics: exact; it is TVM's EliminateCommonSubexpr with a verdict for each binding.  Linear in the module's size.
It belongs behind canonicalize-transformer, which follows values by their only reader.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite.driver import graphs_of
from crossloom.verdict import accept, record

_NAME = "share-equal-bindings"


def ShareEqualBindings() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    inner = relax.transform.EliminateCommonSubexpr()

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        out = inner(mod)
        before = {gvar.name_hint: graph for gvar, graph in graphs_of(mod)}
        changed = False
        for gvar, graph in graphs_of(out):
            old = before[gvar.name_hint]
            # Every binding stays, under another name of what it is equal to.
            for was, var in zip(old.order, graph.order):
                first = graph.value[var]
                if isinstance(first, relax.Var) and not isinstance(old.value[was], relax.Var):
                    changed = True
                    record(accept(detail=f"equal to {first.name}").at("equal-binding", graph.name, was.name, _NAME))
        return out if changed else mod

    return run


PASS = PassInfo(_NAME, ShareEqualBindings, "canonicalize", EXACT, doc="What layers compute alike is computed once.")
