"""What an attention kernel computes, and where the elements of its operands lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tvm import tirx

#: What an index counts.  ``head`` is a head of keys and values, ``group`` one of the query heads that share it: query
#: head ``head * groups + group``.  ``lane`` is an element of a head; ``layer`` is one number, given to the kernel.
Role: TypeAlias = Literal["batch", "head", "group", "query", "key", "lane", "layer"]
Extent: TypeAlias = int | tirx.Expr


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: the index ``offset + sum(stride * role)``.

    Attributes
    ----------
    terms : tuple of (Role, Extent)
        Roles and their strides, none for an axis of which one index is read.
    offset : int or tvm.tirx.Expr
    """

    terms: tuple[tuple[Role, Extent], ...] = ()
    offset: Extent = 0

    def at(self, roles: Mapping[Role, Extent]) -> Extent:
        """Return the index."""
        total: Extent = self.offset
        for role, stride in self.terms:
            total = total + roles[role] * stride
        return total


@dataclass(frozen=True)
class Operand:
    """A tensor, and which of its elements are meant.

    Attributes
    ----------
    shape : tuple of int or tvm.tirx.Expr
        Of the whole tensor.
    axes : tuple of Axis
        One per dimension.
    dtype : str
    """

    shape: tuple[Extent, ...]
    axes: tuple[Axis, ...]
    dtype: str

    def has(self, role: Role) -> bool:
        """Return whether an index depends on a role."""
        return any(role == name for axis in self.axes for name, _ in axis.terms)

    def runs_along(self, role: Role) -> bool:
        """Return whether neighbours along a role are neighbours in memory."""
        last = [stride for name, stride in self.axes[-1].terms if name == role] if self.axes else []
        return last == [1] and not any(role == name for axis in self.axes[:-1] for name, _ in axis.terms)


@dataclass(frozen=True)
class Spec:
    """An attention kernel.

    Attributes
    ----------
    batch, heads, queries : int or tvm.tirx.Expr
        Heads are those of keys and values.
    groups : int
        Query heads of each head.
    keys : tuple of int or tvm.tirx.Expr
        Keys of each part: a cache and what is new stand in tensors of their own.
    lanes, value_lanes : int
        Elements of a query or key, and of a value.
    scale : float
        Factor of the scores.
    q : Operand
    k, v : tuple of Operand
        One per part; ``key`` counts within the part.
    out : Operand
    mask : Operand or None
        ``key`` counts over all parts.
    form : str
        ``add``: the mask is added; ``keep``, ``drop``: boolean, true where a score stays, or gives way to ``fill``.
    fill : float
    bias : Operand or None
        Added beside the mask.
    bias_inside : bool
        Whether ``fill`` stands in place of the sum with the bias, too (else the bias is added to it).
    causal : int, tvm.tirx.Expr or None
        Query i sees the keys j <= i + causal.
    window : int or None
        And of these the last ones only, j > i + causal - window; wants ``causal``.
    zero_empty_rows : bool
        What a query gives of which every score is minus infinity: zero, or not a number as softmax does.
        Without any key it is zero, the sum of nothing, in either case.
    layered : bool
        Whether the kernel takes a ``layer``: layers whose caches stand in one tensor share it.

    Notes
    -----
    The kernel's arguments: q, k and v of each part (all k first), mask, bias, layer (int64, of no dimension), out; what
    is not there is left out.
    Scores, weights and sums are float32 (float64 where an operand is).
    """

    batch: Extent
    heads: Extent
    groups: int
    queries: Extent
    keys: tuple[Extent, ...]
    lanes: int
    value_lanes: int
    scale: float
    q: Operand
    k: tuple[Operand, ...]
    v: tuple[Operand, ...]
    out: Operand
    mask: Operand | None = None
    form: Literal["add", "keep", "drop"] = "add"
    fill: float = 0.0
    bias: Operand | None = None
    bias_inside: bool = False
    causal: Extent | None = None
    window: int | None = None
    zero_empty_rows: bool = False
    layered: bool = False

    @property
    def sum_dtype(self) -> str:
        """The type scores and sums are kept in."""
        operands = (self.q, *self.k, *self.v, self.out, *(o for o in (self.mask, self.bias) if o is not None))
        return "float64" if any(o.dtype == "float64" for o in operands) else "float32"
