"""Shape arithmetic of an ONNX graph, done on integers and symbolic dimensions while importing.

Exporters spell shapes as tensors: ``Shape -> Gather -> Mul -> Concat -> Reshape``.  Each such tensor is kept
here as an array of integers and expressions of symbolic dimensions, so that a Reshape at its end knows its
shape; it becomes a tensor only where something else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer

from crossloom.errors import UnsupportedModel

#: Larger integer tensors are data, not shapes.
MAX_ELEMENTS = 4096
_LIMIT = 1 << 48


class Unknown(Exception):
    """The answer depends on a symbolic dimension in a way that is left to run time."""


@dataclass(frozen=True)
class Value:
    """An integer or boolean tensor known while importing.

    Attributes
    ----------
    items : numpy.ndarray of object
        Each is an int or an int64 ``PrimExpr``.
    dtype : str
        ``"int64"``, ``"int32"`` or ``"bool"``.
    """

    items: np.ndarray
    dtype: str = "int64"

    @staticmethod
    def of(array: np.ndarray) -> Value | None:
        """Return a constant as a value; None for other dtypes and for large tensors."""
        if array.dtype.name not in ("int64", "int32", "bool") or array.size > MAX_ELEMENTS:
            return None
        return Value(boxed([int(v) for v in array.reshape(-1)], array.shape), array.dtype.name)

    @property
    def constant(self) -> bool:
        """Whether every element is a number."""
        return all(isinstance(v, int) for v in self.items.reshape(-1))

    def list(self) -> list[Any]:
        """Return the elements in row-major order."""
        return list(self.items.reshape(-1))

    def tensor(self, bb: Any) -> Any:
        """Emit the value as a Relax tensor."""
        if self.constant:
            return relax.const(np.array(self.list(), self.dtype).reshape(self.items.shape), self.dtype)
        x = bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr(self.list())))
        if self.items.ndim != 1:
            x = bb.emit(relax.op.reshape(x, list(self.items.shape)))
        return x if self.dtype == "int64" else bb.emit(relax.op.astype(x, self.dtype))


def boxed(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an object array; numpy alone would try to iterate over expressions."""
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out.reshape(shape)


class ShapeMath:
    """Arithmetic on sizes; symbolic dimensions are taken to be at least 0 and below 2**48.

    Parameters
    ----------
    lower_bounds : mapping of str to int, optional
        Least value of symbolic dimensions known to be more than 0 (elements).
    """

    def __init__(self, lower_bounds: Mapping[str, int] | None = None) -> None:
        self._lower = dict(lower_bounds or {})
        self._analyzer = Analyzer()
        self._bound: set[Any] = set()

    def simplify(self, x: Any) -> Any:
        """Return x as an int where it is one, else simplified."""
        if isinstance(x, bool | int | np.integer):
            return int(x)
        if not isinstance(x, tirx.IntImm):
            self._bind(x)
            x = self._analyzer.simplify(x)
        return int(x.value) if isinstance(x, tirx.IntImm) else x

    def proves(self, condition: Any) -> bool:
        """Tell whether a condition holds for all sizes."""
        if isinstance(condition, bool | int):
            return bool(condition)
        self._bind(condition)
        return bool(self._analyzer.can_prove(condition))

    def _bind(self, x: Any) -> None:
        for var in tirx.analysis.undefined_vars(x):
            if var not in self._bound:
                self._bound.add(var)
                self._analyzer.bind(var, tvm.ir.Range(self._lower.get(var.name, 0), _LIMIT))

    def same(self, a: Any, b: Any) -> bool | None:
        """Tell whether two sizes are equal; None when that depends on the symbols."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        difference = self.simplify(a - b)
        if isinstance(difference, int):
            return difference == 0
        if self.proves(difference > 0) or self.proves(difference < 0):
            return False
        return None

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the smaller of two sizes."""
        return self._extreme(a, b, tirx.min, min)

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger of two sizes."""
        return self._extreme(a, b, tirx.max, max)

    def _extreme(self, a: Any, b: Any, symbolic: Callable[..., Any], plain: Callable[..., Any]) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return plain(a, b)
        return self.simplify(symbolic(_expr(a), _expr(b)))

    def divide(self, a: Any, b: Any) -> Any:
        """Integer division as ONNX means it, towards zero."""
        if isinstance(b, int) and b == 0:
            raise UnsupportedModel("division by zero in shape arithmetic", "correct the model")
        if isinstance(a, int) and isinstance(b, int):
            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        if self.proves(_expr(a) >= 0) and self.proves(_expr(b) > 0):
            return self.simplify(tirx.floordiv(_expr(a), _expr(b)))
        return self.simplify(tirx.truncdiv(_expr(a), _expr(b)))

    def modulo(self, a: Any, b: Any) -> Any:
        """Return the remainder that has the divisor's sign, as ONNX's Mod of integers."""
        if isinstance(b, int) and b == 0:
            raise UnsupportedModel("modulo by zero in shape arithmetic", "correct the model")
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        return self.simplify(tirx.floormod(_expr(a), _expr(b)))

    def equal(self, a: Any, b: Any) -> Any:
        """Return 1 or 0; raise Unknown where it depends on the symbols."""
        known = self.same(a, b)
        if known is None:
            raise Unknown
        return int(known)

    def less(self, a: Any, b: Any) -> Any:
        """Return 1 or 0; raise Unknown where it depends on the symbols."""
        if isinstance(a, int) and isinstance(b, int):
            return int(a < b)
        if self.proves(_expr(a) < _expr(b)):
            return 1
        if self.proves(_expr(a) >= _expr(b)):
            return 0
        raise Unknown

    def elementwise(self, fn: Callable[..., Any], *parts: np.ndarray) -> np.ndarray:
        """Return a function of arrays broadcast against each other, element by element."""
        wide = np.broadcast_arrays(*parts)
        if wide[0].size > MAX_ELEMENTS:
            raise Unknown
        rows = zip(*(w.reshape(-1) for w in wide))
        return boxed([self.simplify(fn(*row)) for row in rows], wide[0].shape)


def _expr(x: Any) -> Any:
    return tirx.IntImm("int64", x) if isinstance(x, int) else x
