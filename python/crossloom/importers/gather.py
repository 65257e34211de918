"""Keep gathers and scatters inside their tensors, whatever the indices say.

TVM reads and writes through an index unchecked, so that a wrong token id ends the process.  Here an index
beyond the last element reads (or writes) the last one and an index before the first reads the first, after
those that count from the end (``-n .. -1``) are resolved where the source format allows them.  An axis whose
size at run time may be 0 has no such element: a gather from it reads nothing then and returns NaN, or 0 where
that is no number of the type or TVM's operator has no way to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from .onnx_symbolic import ShapeMath
from .unused import drop_unused

op = relax.op
Emit = Callable[[Any], Any]


def known_sizes(x: Any) -> list[Any] | None:
    """Return the sizes of a tensor (elements), ints where fixed; None where its type does not tell them."""
    shape = getattr(x.ty, "shape", None)
    if shape is None or not hasattr(shape, "values"):
        return None
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in shape.values]


def size_tensor(emit: Emit, sizes: Sequence[Any]) -> Any:
    """Emit sizes, fixed or symbolic, as an int64 vector."""
    if all(isinstance(size, int) for size in sizes):
        return relax.const(np.array(sizes, "int64"), "int64")
    return emit(op.shape_to_tensor(relax.ShapeExpr(list(sizes))))


def bounded(emit: Emit, indices: Any, sizes: Sequence[Any], *, from_end: bool) -> Any:
    """Return indices brought into ``0 .. size - 1``.

    Parameters
    ----------
    emit : callable
        Binds an expression to a variable.
    indices : relax.Expr
        Integers of any shape and width; for several sizes the last axis has one index for each.
    sizes : sequence of int or PrimExpr
        One size (elements) for all indices, or one per column of their last axis.
    from_end : bool
        Whether ``-size .. -1`` count from the end; otherwise they become 0.

    Returns
    -------
    relax.Expr
        Constants stay constants; indices known to be in range are returned as they are.
    """
    if isinstance(indices, tvm.ir.GenericConst) and not indices.value.numpy().any():
        return indices
    dtype = str(indices.ty.dtype)
    fixed = all(isinstance(size, int) for size in sizes)
    extents = sizes if len(sizes) > 1 else sizes[0]
    if isinstance(indices, tvm.ir.GenericConst) and fixed:
        given = indices.value.numpy()
        limit = np.array(extents, "int64")
        wide = given.astype("int64")
        if from_end:
            wide = np.where(wide < 0, wide + limit, wide)
        wide = np.clip(wide, 0, np.maximum(limit - 1, 0))
        return indices if np.array_equal(wide, given) else relax.const(wide, "int64")
    # In a narrow type the size may not fit; int32 holds every fixed size that is no larger than it.
    if dtype != "int64" and not (dtype == "int32" and fixed and max(sizes, default=0) < 2**31):
        indices, dtype = emit(op.astype(indices, "int64")), "int64"
    if fixed:
        size = relax.const(np.array(extents, dtype), dtype)
        last = relax.const(np.maximum(np.array(extents, dtype) - 1, 0), dtype)
    else:
        size = size_tensor(emit, sizes)
        size = size if len(sizes) > 1 else emit(op.reshape(size, []))
        last = emit(op.subtract(size, relax.const(1, dtype)))
    if from_end:
        indices = _counted_from_end(emit, indices, size)
    return emit(op.maximum(emit(op.minimum(indices, last)), relax.const(0, dtype)))


def _counted_from_end(emit: Emit, indices: Any, size: Any) -> Any:
    """Emit ``indices`` with ``size`` added to the negative ones; both of one type."""
    below = emit(op.less(indices, relax.const(0, str(indices.ty.dtype))))
    return emit(op.where(below, emit(op.add(indices, size)), indices))


def may_be_empty(size: Any) -> bool:
    """Whether a size, fixed or made of symbols that are at least 0, can be 0."""
    return size == 0 if isinstance(size, int) else not ShapeMath().proves(size > 0)


def padded(emit: Emit, x: Any, axes: Sequence[int]) -> Any:
    """Return a tensor with one element of zeros behind each axis that may be empty; the others are not copied."""
    for axis in axes:
        sizes = known_sizes(x) or []
        if may_be_empty(sizes[axis]):
            sizes[axis] = 1
            x = emit(op.concat([x, emit(op.zeros(sizes, str(x.ty.dtype)))], axis))
    return x


def safe_take(emit: Emit, x: Any, indices: Any, axis: int, *, from_end: bool) -> relax.Call:
    """Return ``take`` along one axis; indices as in :func:`bounded`, whose upper bound ``take`` applies itself."""
    sizes = known_sizes(x)
    if sizes is None:
        raise ValueError("a gather from a tensor of unknown shape")
    size = sizes[axis]
    if may_be_empty(size):
        indices = bounded(emit, indices, [size], from_end=from_end)
        if str(x.ty.dtype) in ("float16", "bfloat16", "float32", "float64"):
            return op.take(x, indices, axis, mode="nan")
        return op.take(padded(emit, x, [axis]), indices, axis, mode="clip")
    if isinstance(indices, tvm.ir.GenericConst) and isinstance(size, int):
        indices = bounded(emit, indices, [size], from_end=from_end)
    elif from_end and not str(indices.ty.dtype).startswith("uint"):
        if str(indices.ty.dtype) != "int64":
            indices = emit(op.astype(indices, "int64"))
        fixed = isinstance(size, int)
        extent = relax.const(size, "int64") if fixed else emit(op.reshape(size_tensor(emit, [size]), []))
        indices = _counted_from_end(emit, indices, extent)
    return op.take(x, indices, axis, mode="clip")


@mutator
class _Bounder(PyExprMutator):
    """Bound the indices of every gather and scatter that TVM would follow unchecked."""

    def __init__(self, mod: tvm.IRModule, from_end: bool) -> None:
        super().__init__(mod)
        self.from_end = from_end

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name == "relax.take" and call.attrs.mode == "fast":
            return self._take(call)
        handled = ("gather_elements", "gather_nd", "scatter_elements", "scatter_nd", "index_tensor", "index_put")
        if name not in {f"relax.{key}" for key in handled}:
            return call
        data, indices = call.args[0], call.args[1]
        sizes = known_sizes(data)
        if sizes is None:
            return call
        args = list(call.args)
        # TVM's own scatters count from the end already.
        scatters = name.startswith("relax.scatter_")
        emit = self.builder_.emit
        if name in ("relax.gather_elements", "relax.scatter_elements"):
            axis = int(call.attrs.axis)
            args[1] = self._bound(indices, [sizes[axis]], scatters)
            args[0] = data if scatters else padded(emit, data, [axis])
        elif name in ("relax.gather_nd", "relax.scatter_nd"):
            columns = known_sizes(indices)
            first = int(call.attrs.batch_dims) if name == "relax.gather_nd" else 0
            if columns is None or not isinstance(columns[-1], int):
                return call
            args[1] = self._bound(indices, sizes[first : first + columns[-1]], scatters)
            args[0] = data if scatters else padded(emit, data, range(first, first + columns[-1]))
        else:
            fields = self._fields(indices)
            if any("int" not in str(field.ty.dtype) for field in fields):
                return call
            args[1] = relax.Tuple([self._bound(field, [sizes[axis]]) for axis, field in enumerate(fields)])
            args[0] = padded(emit, data, range(len(fields))) if name == "relax.index_tensor" else data
        if all(new.same_as(old) for new, old in zip(args, call.args)):
            return call
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    def _take(self, call: relax.Call) -> relax.Expr:
        data, indices, axis = call.args[0], call.args[1], call.attrs.axis
        emit = self.builder_.emit
        axis = 0 if axis is None else int(axis)
        if isinstance(indices.ty, relax.TensorType) and known_sizes(data) is not None:
            return safe_take(emit, data, indices, axis, from_end=self.from_end)
        return op.take(data, indices, axis, mode="clip")

    def _bound(self, indices: relax.Expr, sizes: list[Any], scatters: bool = False) -> relax.Expr:
        if self._is_bounded(indices, sizes):
            return indices
        return bounded(self.builder_.emit, indices, sizes, from_end=self.from_end or scatters)

    def _is_bounded(self, indices: relax.Expr, sizes: list[Any]) -> bool:
        """Recognise what :func:`bounded` emits for sizes no larger, so that a second run changes nothing."""
        upper = self._operand(indices, "relax.maximum", 0)
        last = (
            self._operand(upper, "relax.minimum", 1) if self._zero(self._operand(indices, "relax.maximum", 1)) else None
        )
        if isinstance(last, tvm.ir.GenericConst) and all(isinstance(size, int) for size in sizes):
            highest = last.value.numpy().reshape(-1)
            return highest.size == len(sizes) and bool(np.all(highest <= np.maximum(np.array(sizes) - 1, 0)))
        shape = self._operand(last, "relax.subtract", 0)
        shape = self._operand(shape, "relax.reshape", 0) if len(sizes) == 1 else shape
        shape = self._operand(shape, "relax.shape_to_tensor", 0)
        if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != len(sizes):
            return False
        return all(ShapeMath().proves(a <= b) for a, b in zip(shape.values, sizes))

    def _operand(self, expr: Any, name: str, index: int) -> Any:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != name:
            return None
        arg = value.args[index]
        bound = self.lookup_binding(arg) if isinstance(arg, relax.Var) else None
        return bound if isinstance(bound, tvm.ir.GenericConst | relax.ShapeExpr) else arg

    def _zero(self, expr: Any) -> bool:
        return isinstance(expr, tvm.ir.GenericConst) and not expr.value.numpy().any()

    def _fields(self, indices: relax.Expr) -> list[relax.Expr]:
        value = self.lookup_binding(indices) if isinstance(indices, relax.Var) else indices
        if isinstance(value, relax.Tuple):
            return list(value.fields)
        return [self.builder_.emit(relax.TupleGetItem(indices, i)) for i in range(len(indices.ty.fields))]


def bound_gathers(mod: tvm.IRModule, *, from_end: bool) -> tvm.IRModule:
    """Bound every unchecked index in the Relax functions of a module.

    Parameters
    ----------
    mod : tvm.IRModule
    from_end : bool
        Whether the source format lets negative indices count from the end.

    Returns
    -------
    tvm.IRModule
        The same functions; ``take`` in mode ``"clip"``, the rest with bounded indices.  Modules without an
        unchecked gather come back as they are.
    """
    change, changed = _Bounder(mod, from_end), False
    for gv, function in mod.functions_items():
        if isinstance(function, relax.Function) and _unchecked(function):
            change.builder_.update_func(gv, change.visit_expr(function))
            changed = True
    return drop_unused(change.builder_.finalize()) if changed else mod


def _unchecked(function: relax.Function) -> bool:
    found = []

    def visit(expr: relax.Expr) -> None:
        name = getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""
        if name == "relax.take":
            found.append(expr.attrs.mode == "fast")
        elif name.startswith(("relax.gather_", "relax.scatter_", "relax.index_")):
            found.append(True)

    relax.analysis.post_order_visit(function, visit)
    return any(found)
