"""Sizes that a graph's operators imply: ``x (n, m)`` times ``w (5, 3)`` makes m 5.

TVM infers shapes without proving that such sizes agree, and its kernels do not look: a call with another m would read
past the weights.  Bound in the entry, the size is checked like any other when the entry is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from ..errors import UnsupportedModel
from ..model import Entry, Model
from ..rewrite import Graph
from .specialize import bind_entry
from .unify import ShapeConflict, Substitution, resolve, unify

_CONVOLUTIONS = {"relax.nn.conv1d": "NCW OIW", "relax.nn.conv2d": "NCHW OIHW", "relax.nn.conv3d": "NCDHW OIDHW"}
_NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm")
Dims = list[tvm.ir.Expr]


def bind_implied_sizes(model: Model) -> Model:
    """Return the model with every symbolic dimension bound that products, convolutions, norms, joins and views fix.

    Parameters
    ----------
    model : Model

    Returns
    -------
    Model
        The same object where nothing is implied.

    Raises
    ------
    UnsupportedModel
        Two sizes that can never agree, naming the operator and both.
    """
    functions = dict(model.mod.functions_items())
    entries = dict(model.entries)
    changed = False
    for gvar, func in model.mod.functions_items():
        entry = entries.get(gvar.name_hint)
        if entry is None or not isinstance(func, relax.Function):
            continue
        bound = _implied(Graph(gvar.name_hint, func, model.mod))
        if bound:
            changed = True
            entries[entry.name] = _narrowed(entry, bound)
            functions[gvar], entries[entry.name] = bind_entry(func, entries[entry.name], bound)
    if not changed:
        return model
    mod = tvm.IRModule(functions, attrs=model.mod.attrs, global_infos=model.mod.global_infos)
    relax.analysis.well_formed(mod)
    return replace(model, mod=mod, entries=entries)


def _implied(graph: Graph) -> Substitution:
    bound: Substitution = {}
    for var in graph.order:
        value = graph.value[var]
        if not isinstance(value, relax.Call) or not graph.op(var):
            continue
        for left, right in _equal(graph, var, value):
            try:
                unify([left], [right], bound)
            except ShapeConflict as error:
                if _never_equal(left, right, bound):
                    raise UnsupportedModel(
                        f"{graph.op(var)} (binding {var.name!r} of function {graph.name!r}): "
                        f"size {error.left} meets size {error.right}",
                        "give sizes that agree with --input-shapes",
                    ) from error
    return bound


def _never_equal(left: tvm.ir.Expr, right: tvm.ir.Expr, bound: Substitution) -> bool:
    difference = resolve(left - right, bound)
    return isinstance(difference, tirx.IntImm) and int(difference) != 0


def _dims(expr: relax.Expr) -> Dims | None:
    ty = expr.ty
    return list(ty.shape.values) if isinstance(ty, relax.TensorType) and hasattr(ty.shape, "values") else None


def _equal(graph: Graph, var: relax.Var, call: relax.Call) -> Iterator[tuple[tvm.ir.Expr, tvm.ir.Expr]]:
    """Yield pairs of sizes that an operator needs to be equal."""
    op = graph.op(var)
    shapes = [_dims(arg) for arg in call.args if isinstance(arg.ty, relax.TensorType)]
    if op == "relax.concat":
        yield from _joined(call)
    elif any(shape is None for shape in shapes):
        return
    elif op == "relax.matmul":
        left, right = shapes
        if left and right:
            yield left[-1], right[-2] if len(right) > 1 else right[0]
    elif op in _CONVOLUTIONS:
        data, kernel = _CONVOLUTIONS[op].split()
        if (str(call.attrs.data_layout), str(call.attrs.kernel_layout)) == (data, kernel) and shapes[0] and shapes[1]:
            yield shapes[0][1], shapes[1][1] * int(call.attrs.groups)
    elif op in _NORMS:
        source, axes = shapes[0] or [], [int(axis) for axis in call.attrs.axes]
        for factor in shapes[1:]:
            for axis, size in zip(axes, factor or []):
                yield source[axis], size
    elif op == "relax.reshape" and (target := _dims(var)) is not None and shapes[0] is not None:
        if not any(_divides(size) for size in target):
            yield _product(shapes[0]), _product(target)


def _joined(call: relax.Call) -> Iterator[tuple[tvm.ir.Expr, tvm.ir.Expr]]:
    fields = getattr(call.args[0], "fields", ())
    shapes = [_dims(field) for field in fields]
    if not shapes or call.attrs.axis is None or any(shape is None for shape in shapes):
        return
    first = shapes[0] or []
    for other in shapes[1:]:
        for axis, (left, right) in enumerate(zip(first, other or [])):
            if axis != int(call.attrs.axis) % len(first):
                yield left, right


def _divides(size: tvm.ir.Expr) -> bool:
    """Whether a size is a quotient, as the one that a view works out by itself."""
    stack = [size]
    while stack:
        expr = stack.pop()
        if isinstance(expr, (tirx.FloorDiv, tirx.Div)):
            return True
        if hasattr(expr, "a") and hasattr(expr, "b"):
            stack += [expr.a, expr.b]
    return False


def _product(sizes: Sequence[tvm.ir.Expr]) -> tvm.ir.Expr:
    return Analyzer().simplify(prod(sizes, start=tirx.IntImm("int64", 1)))


def _narrowed(entry: Entry, bound: Mapping[tirx.Var, tvm.ir.Expr]) -> Entry:
    """Return the entry with the bounds of a dimension passed on to the one it now is."""
    upper, lower = dict(entry.upper_bounds), dict(entry.lower_bounds)
    for var, value in bound.items():
        high, low = upper.pop(var.name, None), lower.pop(var.name, 0)
        if isinstance(value, tirx.Var):
            if high is not None:
                upper[value.name] = min(high, upper.get(value.name, high))
            if low:
                lower[value.name] = max(low, lower.get(value.name, 0))
        elif isinstance(value, tirx.IntImm) and not (low <= int(value) and (high is None or int(value) <= high)):
            raise UnsupportedModel(
                f"entry {entry.name!r}: the graph makes {var.name} {int(value)}, which its bounds leave out",
                "mend the bounds of the dimension",
            )
    return replace(entry, upper_bounds=upper, lower_bounds=lower)
