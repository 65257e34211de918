"""Pow of integers and of mixed types, Equal of booleans, EyeLike of another type, and sizes that may not broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes
from crossloom.importers.onnx_contrib import Call, Converter, dtype_of
from crossloom.importers.onnx_delegate import by_tvm
from crossloom.importers.onnx_symbolic import ShapeMath

op = relax.op
#: Operators that broadcast all their operands against each other.
BROADCASTS = frozenset(
    "Add Sub Mul Div Pow Mod And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual BitwiseAnd BitwiseOr BitwiseXor "
    "BitShift Where Min Max Sum Mean PRelu".split()
)


def check_broadcast(m: ShapeMath, where: str, operands: list[Any]) -> None:
    """Refuse operands of which two sizes are neither 1 nor known to be equal.

    Parameters
    ----------
    m : ShapeMath
    where : str
    operands : list of relax.Expr or None

    Raises
    ------
    UnsupportedModel
        Whether the sizes fit, and what the result's size is, shows at run time only; or they never fit.
    """
    shapes = [known_sizes(x) for x in operands if x is not None and isinstance(x.ty, relax.TensorType)]
    known = [s for s in shapes if s is not None]
    rank = max((len(s) for s in known), default=0)
    for axis in range(-rank, 0):
        seen: Any = None
        for shape in known:
            size = shape[axis] if len(shape) >= -axis else 1
            if isinstance(size, int) and size == 1:
                continue
            if seen is None:
                seen = size
            elif not m.same(seen, size):
                fixed = isinstance(seen, int) and isinstance(size, int)
                raise UnsupportedModel(
                    f"{where}: sizes {seen} and {size} meet at axis {axis + rank}"
                    + ("" if fixed else ", and nothing tells that they are equal"),
                    "correct the shapes"
                    if fixed
                    else "give both dimensions one name when exporting, or sizes with --input-shapes (input_shapes)",
                )


def _int_power(c: Call, x: Any, y: Any) -> Any:
    """Raise int64 to int64 by squaring, exactly wherever the result fits; a negative exponent rounds towards zero.

    From an exponent of 64 on only the bases 0, 1 and -1 have a result that fits.
    """
    e, const = c.emit, lambda v: relax.const(v, "int64")
    odd = e(op.bitwise_and(y, const(1)))
    unit = e(op.equal(e(op.abs(x)), const(1)))
    big = e(op.logical_or(e(op.less(y, const(0))), e(op.greater(y, const(63)))))
    left = e(op.where(big, odd, y))
    result: Any = const(1)
    square = x
    for bit in range(6):
        taken = e(op.greater(e(op.bitwise_and(left, const(1 << bit))), const(0)))
        result = e(op.where(taken, e(op.multiply(result, square)), result))
        square = e(op.multiply(square, square)) if bit < 5 else square
    return e(op.where(e(op.logical_and(big, e(op.logical_not(unit)))), const(0), result))


def power(c: Call) -> list[Any]:
    """Pow: the result has the base's type, whatever the exponent's."""
    x, y = c.need(0), c.need(1)
    base, exponent = dtype_of(x), dtype_of(y)
    whole = tuple(t.startswith(("int", "uint")) for t in (base, exponent))
    constant = isinstance(x, tvm.ir.GenericConst) and isinstance(y, tvm.ir.GenericConst)
    if base == exponent and not whole[0]:
        if constant:  # The side of a grid, from how many positions it has: a size is made of it.
            return [relax.const(np.power(x.value.numpy(), y.value.numpy()).astype(base), base)]
        return [by_tvm(c, "Pow")]
    if base == exponent and constant and (y.value.numpy() >= 0).all():
        return [by_tvm(c, "Pow")]  # folded: the result may be a size
    cast = lambda t, dtype: t if dtype_of(t) == dtype else c.emit(op.astype(t, dtype))
    if all(whole):
        out = _int_power(c, cast(x, "int64"), cast(y, "int64"))
    else:
        through = "float64" if whole[0] or "float64" in (base, exponent) else "float32"
        out = c.emit(op.power(cast(x, through), cast(y, through)))
    return [cast(out, base)]


def equal(c: Call) -> list[Any]:
    """Equal; booleans are compared as bytes, for LLVM has no comparison of theirs as TVM spells it."""
    x, y = c.need(0), c.need(1)
    tensors = isinstance(x.ty, relax.TensorType) and isinstance(y.ty, relax.TensorType)
    if not tensors or dtype_of(x) != "bool" or all(a is not None for a in c.arrays):
        return [by_tvm(c, "Equal")]
    return [c.emit(op.equal(c.emit(op.astype(x, "int8")), c.emit(op.astype(y, "int8"))))]


def eye_like(c: Call) -> list[Any]:
    """EyeLike: ones on diagonal `k`, of the type `dtype` where that is given."""
    x, dtype = c.need(0), dtype_of(c.need(0))
    if "dtype" in c.attrs:
        dtype = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(c.attrs["dtype"]))).name)
    # TVM's kernel takes its type from x, whatever type the operator is given, and has none for booleans.
    x = c.emit(op.astype(x, "int8")) if dtype_of(x) == "bool" else x
    eye = c.emit(op.eye_like(x, int(c.attrs.get("k", 0))))
    return [eye if dtype_of(x) == dtype else c.emit(op.astype(eye, dtype))]


ELEMENTWISE: dict[tuple[str, str], Converter] = {
    ("", "Pow"): power,
    ("", "Equal"): equal,
    ("", "EyeLike"): eye_like,
}
