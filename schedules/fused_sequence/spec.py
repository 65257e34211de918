"""What a sequence kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tvm import tirx

from ..fused_linear import Spec
from ..writing import sum_dtype

Size: TypeAlias = int | tirx.Expr


@dataclass(frozen=True)
class Lookup:
    """Rows of a table by integers.

    Attributes
    ----------
    ids : tuple of int or tvm.tirx.Expr
        Shape of the integers; they are read in order, whatever leading axes the part has.
    table : int
        Rows of the table, at least 1.
    dtype : str
        Of the integers.
    mode : str
        What an integer outside of the table reads: the nearest row (``clip``; ``fast`` promises that there is none, and
        is read the same way), the row it is modulo the table (``wrap``), or NaN (``nan``).
    from_end : bool
        Whether ``-table .. -1`` count from the end.
    scale : float
        Factor of every row.
    """

    ids: tuple[Size, ...]
    table: int
    dtype: str
    mode: Literal["clip", "fast", "wrap", "nan"] = "clip"
    from_end: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Copy:
    """A value that exists.

    Attributes
    ----------
    shape : tuple of int or tvm.tirx.Expr
        Its own shape; its rows are read in order.
    """

    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Product:
    """A linear layer and what belongs to it; ``spec`` has one output, of plain columns."""

    spec: Spec


@dataclass(frozen=True)
class Addend:
    """What is added: a value, or rows of a table.

    Attributes
    ----------
    shape : tuple of int or tvm.tirx.Expr
        Of the value, or of the integers and 0 for the table's columns; aligned with the last axes of what it is added
        to, 1 where it is stretched.
    lookup : Lookup or None
    """

    shape: tuple[Size, ...]
    lookup: Lookup | None = None


@dataclass(frozen=True)
class Part:
    """A stretch of rows.

    Attributes
    ----------
    rows : tuple of int or tvm.tirx.Expr
        Its leading axes.
    source : Lookup, Copy or Product
    addends : tuple of Addend
    """

    rows: tuple[Size, ...]
    source: Lookup | Copy | Product
    addends: tuple[Addend, ...] = ()


@dataclass(frozen=True)
class Layer:
    """Rows that are put over the sequence where a mask is true.

    Attributes
    ----------
    mask : tuple of int or tvm.tirx.Expr
        Shape of the mask, or of the integers that are compared.
    dtype : str
        ``bool``, or of the integers.
    token : int or None
        Where integers have this value the mask is true; None for a mask as it is.
    in_order : bool
        The k-th true row takes row k of the parts (beyond the last one: the last, or NaN where there is none);
        otherwise row r takes row r.
    elements : bool
        Whether rows beyond the last one repeat its last element, not the row: where elements are taken one by one.
    parts : tuple of Part
        One behind the other.
    """

    mask: tuple[Size, ...]
    dtype: str
    token: int | None
    in_order: bool
    parts: tuple[Part, ...]
    elements: bool = False


@dataclass(frozen=True)
class Sequence:
    """A sequence.

    Attributes
    ----------
    rows : tuple of int or tvm.tirx.Expr
        Leading axes of the result.
    width : int
        Its last axis.
    dtype : str
        Of all values; sums are float32 (float64 for float64).
    axis : int
        Along which the parts follow each other.
    parts : tuple of Part
    layers : tuple of Layer
        The first one that is true at a row wins; one that holds a :class:`Product` is never true where one before it
        is.
    addends : tuple of Addend
        Added to the whole; none where there are layers with products.

    Notes
    -----
    The kernel's arguments: for each part, then for each layer its mask (or integers) and its parts, then for the whole:
    a copy's value; a lookup's table ``(rows, width)`` and integers; a product's arguments but its result; each followed
    by its addends'.  The result is the last one.
    """

    rows: tuple[Size, ...]
    width: int
    dtype: str
    axis: int
    parts: tuple[Part, ...]
    layers: tuple[Layer, ...] = ()
    addends: tuple[Addend, ...] = ()

    @property
    def sum_dtype(self) -> str:
        """The type sums are kept in."""
        return sum_dtype(self.dtype)
