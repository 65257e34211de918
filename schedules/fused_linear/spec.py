"""What a fused linear kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm import tirx

from ..writing import sum_dtype

#: One dimension of a result: a leading axis of x (``"row"``, its number), a head axis (``"head"``, its number), the
#: lanes (``"lane"``, 0), or an axis of size 1 (``"unit"``, 0).
Dim = tuple[Literal["row", "head", "lane", "unit"], int]


@dataclass(frozen=True)
class Norm:
    """A norm of every row of x.

    Attributes
    ----------
    kind : str
        ``rms`` or ``layer``.
    epsilon : float
        Added to the mean of squares, or to the variance.
    weight, bias : bool
        Whether the kernel takes one, of shape ``(depth,)``, or ``(lanes,)`` for a norm of heads.  An ``rms`` norm
        of x with neither never changes x: its factor is applied to the sums.
    dtype : str
        Of weight and bias; ``""`` for that of x.
    centred : bool
        Whether each column of W adds up to nothing, so that the mean of a row takes no part in the sums: a ``layer``
        norm of x with neither weight nor bias is then such a factor, too.
    """

    kind: Literal["rms", "layer"]
    epsilon: float
    weight: bool = False
    bias: bool = False
    dtype: str = ""
    centred: bool = False

    @property
    def scales_sums(self) -> bool:
        """Whether the norm is a factor of each row, applied behind the sum of products."""
        return (self.kind == "rms" or self.centred) and not self.weight and not self.bias


@dataclass(frozen=True)
class Rotary:
    """A rotation of pairs of lanes: ``a cos - b sin`` and ``b cos + a sin``.

    Attributes
    ----------
    convention : str
        ``half-split``: lanes i and i + dim / 2; ``interleaved``: lanes 2i and 2i + 1.
    dim : int
        Lanes turned; those behind pass through.
    cos, sin : tuple of Dim
        What each dimension of the table follows; its last one is ``("lane", 0)``.
    half : bool
        Whether tables hold a value per pair, not per lane.
    dtype : str
        Of both tables; ``""`` for that of x.
    """

    convention: Literal["half-split", "interleaved"]
    dim: int
    cos: tuple[Dim, ...]
    sin: tuple[Dim, ...]
    half: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Turn:
    """A rotation of x itself, before the sum of products.

    Attributes
    ----------
    rotary : Rotary
    heads : tuple of int
        Extents of the axes that a row of x is seen as, but for its lanes; none where a row is one head.
    strides : tuple of int
        Values of x from one head to the next, for each head axis.
    lanes : int
        Extent of the last axis; ``heads`` times ``lanes`` is the depth.
    """

    rotary: Rotary
    heads: tuple[int, ...]
    strides: tuple[int, ...]
    lanes: int


@dataclass(frozen=True)
class Output:
    """One result; the steps behind the sum are applied in the order of the attributes.

    Attributes
    ----------
    dims : tuple of Dim
        The result's axes; ``("lane", 0)`` is the last.
    heads : tuple of int
        Extents of the head axes, none for a result of plain columns.
    lanes : int
        Extent of the last axis.
    first : int
        Column of W (of all linear layers side by side) that lane 0 of head 0 is.
    strides : tuple of int
        Columns from one head to the next, for each head axis.
    gate : int or None
        Column of W of lane 0 of the other factor: the result is ``activation(gate) * value``.
    activation : str
        ``""``, ``relu``, ``silu``, ``gelu``, ``gelu_tanh``, ``quick_gelu``, ``sigmoid`` or ``tanh``; on the gate
        where there is one.
    scale : float
    norm : Norm or None
        Of the lanes of each head (query and key norms).
    rotary : Rotary or None
    residual : tuple of Dim or None
        What the dimensions of the value that is added last follow.
    """

    dims: tuple[Dim, ...]
    heads: tuple[int, ...]
    lanes: int
    first: int = 0
    strides: tuple[int, ...] = ()
    gate: int | None = None
    activation: str = ""
    scale: float = 1.0
    norm: Norm | None = None
    rotary: Rotary | None = None
    residual: tuple[Dim, ...] | None = None


@dataclass(frozen=True)
class Spec:
    """A fused linear kernel.

    Attributes
    ----------
    rows : tuple of int or tvm.tirx.Var
        Leading axes of x.
    depth : int
        Last axis of x, summed over.
    dtype : str
        Of x, weights and results; sums are float32 (float64 for float64).
    outputs : tuple of Output
    norm : Norm or None
    bias : bool
        Whether there is one packed bias.
    turn : Turn or None
        A rotation behind the norm.

    Notes
    -----
    The kernel's arguments: x, norm weight, norm bias, cos and sin of x, packed weights ``(groups, depth, width)``,
    packed bias ``(groups, width)``, then norm weight, norm bias, cos, sin and residual of each output in turn, then
    the results; what is not there is left out.
    """

    rows: tuple[int | tirx.Var, ...]
    depth: int
    dtype: str
    outputs: tuple[Output, ...]
    norm: Norm | None = None
    bias: bool = False
    turn: Turn | None = None

    @property
    def sum_dtype(self) -> str:
        """The type sums are kept in."""
        return sum_dtype(self.dtype)

    @property
    def prepares(self) -> bool:
        """Whether something is done to rows in front of the sums: also widening, which else every group would do."""
        return self.norm is not None or self.turn is not None or self.dtype != self.sum_dtype

    def shape(self, dims: tuple[Dim, ...], output: Output | Turn) -> list[int | tirx.Expr]:
        """Return the extents that dimensions stand for."""
        extents = {"unit": lambda i: 1, "row": lambda i: self.rows[i], "lane": lambda i: output.lanes}
        extents["head"] = lambda i: output.heads[i]
        return [extents[kind](index) for kind, index in dims]
