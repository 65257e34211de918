"""Drop what nothing uses, in one walk backwards: TVM's ``remove_all_unused`` searches every user of what it drops."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr import _update_type as update_type

from ..rewrite.graph import Graph


def drop_unused(mod: tvm.IRModule) -> tvm.IRModule:
    """Drop the dataflow bindings that no result and no kept binding reads.

    Parameters
    ----------
    mod : tvm.IRModule
        Its Relax functions normalized.

    Returns
    -------
    tvm.IRModule
        The same functions.  Kept are what a ``match_cast`` asserts, what defines a size, and all outside dataflow
        blocks, where effects may be, or within branches.
    """
    functions = {gv: _dropped(gv.name_hint, function, mod) for gv, function in mod.functions_items()}
    if all(function.same_as(mod[gv]) for gv, function in functions.items()):
        return mod
    out = mod.clone()
    for gv, function in functions.items():
        if not function.same_as(mod[gv]):
            out.update_func(gv, function)
    return out


def _dropped(name: str, function: tvm.ir.BaseFunc, mod: tvm.IRModule) -> tvm.ir.BaseFunc:
    if not isinstance(function, relax.Function) or not isinstance(function.body, relax.SeqExpr):
        return function
    dead = _unused(Graph(name, function, mod))
    if not dead:
        return function
    blocks = []
    for block in function.body.blocks:
        kept = [binding for binding in block.bindings if binding.var not in dead]
        if len(kept) == len(block.bindings):
            blocks.append(block)
        elif kept:
            blocks.append(relax.DataflowBlock(kept))
    body = relax.SeqExpr(blocks, function.body.body)
    update_type(body, function.body.ty)
    return relax.Function(function.params, body, function.ret_ty, bool(function.is_pure), function.attrs)


def _unused(graph: Graph) -> set[relax.Var]:
    needed: set[relax.Var] = set(graph.escapes)
    dead: set[relax.Var] = set()
    for var in reversed(graph.order):
        droppable = var in graph.block and graph.scope[var] == 0 and var not in graph.casts
        if droppable and var not in needed and not tvm.ir.is_prim_var(var):
            dead.add(var)
        else:
            needed.update(leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var))
    return dead
