"""A callee's lines in the place of a call to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from .graph import rebuild
from .sizes import dimensions, is_size


def _sizes(func: relax.Function, args: Sequence[relax.Expr]) -> dict[tirx.Var, tirx.Expr]:
    """Return what the arguments' types say of the callee's symbolic dimensions."""
    out: dict[tirx.Var, tirx.Expr] = {}
    for param, arg in zip(func.params, args):
        for inner, outer in zip(dimensions(param), dimensions(arg)):
            if isinstance(inner, tirx.Var):
                out.setdefault(inner, outer)
    return out


def splice(
    builder: relax.BlockBuilder,
    callee: relax.Function,
    args: Sequence[relax.Expr],
    inner: Callable[[relax.Call], relax.Expr] = lambda call: call,
) -> relax.Expr:
    """Emit a callee's bindings and return its result, all in terms of the caller.

    Parameters
    ----------
    builder : relax.BlockBuilder
    callee : relax.Function
        Of straight bindings, as composites are.
    args : sequence of relax.Expr
        One per parameter.
    inner : callable
        What becomes of the callee's own calls, in terms of the caller already; by default they stay.
    """
    sizes = _sizes(callee, args)
    values: dict[relax.Var, relax.Expr] = dict(zip(callee.params, args))

    def dimension(var: tirx.Var) -> tirx.Expr:
        return sizes.get(var, var)

    def size(dim: tirx.Expr) -> tirx.Expr:
        new = tvm_ffi.structural_map(dim, (ir.Var, dimension))
        # A product of numbers is a number: TVM's virtual machine takes 2 * 3 for a size it has yet to be told.
        return new if new.same_as(dim) else Analyzer().simplify(new)

    def outer(leaf: relax.Expr) -> relax.Expr:
        if isinstance(leaf, relax.ShapeExpr):
            return relax.ShapeExpr([size(dim) for dim in leaf.values])
        if is_size(leaf):
            return size(leaf)
        return values.get(leaf, leaf) if isinstance(leaf, relax.Var) else leaf

    for block in callee.body.blocks:
        for binding in block.bindings:
            value = rebuild(binding.value, outer)
            if isinstance(value, relax.Call) and value.ty_args:
                # Types that a call is told (what a call to TIR makes) are in the callee's sizes too.
                told = [tvm_ffi.structural_map(ty, (ir.Var, dimension)) for ty in value.ty_args]
                value = relax.Call(value.op, value.args, value.attrs, told)
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
                values[binding.var] = value.tuple_value.fields[value.index]
                continue
            if isinstance(value, relax.Tuple):
                # Its fields are picked one by one, above.
                values[binding.var] = value
                continue
            value = inner(value) if isinstance(value, relax.Call) else value
            values[binding.var] = value if isinstance(value, relax.Tuple) else builder.emit(value)
    return rebuild(callee.body.body, outer)
