"""What a fused convolution kernel computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tvm import ir, tirx

from ..activations import ACTIVATIONS, activate
from ..writing import sum_dtype

Extent: TypeAlias = int | ir.Expr


@dataclass(frozen=True)
class Step:
    """One thing done to a sum, in the order in which steps are given.

    Attributes
    ----------
    kind : str
        ``bias`` and ``factor`` (an operand with a value per output channel, added or multiplied), ``scale`` (a
        number multiplied), ``shift`` (a number added), ``residual`` (an operand of the result's shape, added), or an
        activation of :data:`crossloom.schedules.activations.ACTIVATIONS`, or one that takes numbers: ``clip`` (lowest,
        highest), ``leaky_relu`` (factor of negative values).
    numbers : tuple of float
    """

    kind: str
    numbers: tuple[float, ...] = ()

    @property
    def takes(self) -> Literal["", "channels", "result"]:
        """Of which shape the operand is that the step takes, ``""`` where it takes none."""
        return {"bias": "channels", "factor": "channels", "residual": "result"}.get(self.kind, "")  # type: ignore[return-value]

    @property
    def is_costly(self) -> bool:
        """Whether it takes more than a few operations."""
        return self.kind in ACTIVATIONS and self.kind != "relu"

    def apply(self, x: ir.Expr, operand: ir.Expr | None = None) -> ir.Expr:
        """Return what the step makes of a value; ``operand`` is of the value's type."""
        numbers = [tirx.const(n, str(x.ty.dtype)) for n in self.numbers]
        if self.kind in ("bias", "residual"):
            return x + operand
        if self.kind == "factor":
            return x * operand
        if self.kind == "scale":
            return x * numbers[0]
        if self.kind == "shift":
            return x + numbers[0]
        if self.kind == "clip":
            return tirx.max(tirx.min(x, numbers[1]), numbers[0])
        if self.kind == "leaky_relu":
            return tirx.Select(x < tirx.const(0.0, str(x.ty.dtype)), x * numbers[0], x)
        return activate(self.kind, x)


@dataclass(frozen=True)
class Spec:
    """A convolution of one to three spatial axes, ``(batch, channels, *size)`` to ``(batch, outputs, *result)``.

    Attributes
    ----------
    batch : int or tvm.tirx.Var
    channels, outputs, groups : int
        Both numbers of channels are multiples of ``groups``.
    size : tuple of int or tvm.tirx.Var
        Spatial extents of x.
    kernel, strides, dilation : tuple of int
        One per spatial axis.
    before, after : tuple of int
        Zeros in front of and behind each spatial axis.
    dtype : str
        Of x, operands and result; sums are float32 (float64 for float64).
    steps : tuple of Step
        What is done to the sums.

    Notes
    -----
    The kernel's arguments: x, packed weights (see :func:`crossloom.schedules.fused_conv.pack_weights`), the operands
    of the steps in turn, ``(outputs,)`` or of the result's shape, then the result.
    """

    batch: Extent
    channels: int
    outputs: int
    size: tuple[Extent, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: str
    groups: int = 1
    steps: tuple[Step, ...] = ()

    @property
    def sum_dtype(self) -> str:
        """The type sums are kept in."""
        return sum_dtype(self.dtype)

    @property
    def result(self) -> tuple[Extent, ...]:
        """Spatial extents of the result."""
        return tuple(self._extent(axis) for axis in range(len(self.size)))

    def _extent(self, axis: int) -> Extent:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        room = self.size[axis] + (self.before[axis] + self.after[axis] - reach)
        stride = self.strides[axis]
        if isinstance(room, int):
            return room // stride + 1
        return room + 1 if stride == 1 else tirx.floordiv(room, stride) + 1

    @property
    def is_pointwise(self) -> bool:
        """Whether every result is of one place of x, in the same order: a matrix product."""
        return set(self.kernel) | set(self.strides) == {1} and not any((*self.before, *self.after))

    def along_one_axis(self) -> Spec:
        """Return a pointwise convolution with its spatial axes taken as one; any other as it is."""
        if not self.is_pointwise:
            return self
        size = self.size[0] if len(self.size) == 1 else math.prod(self.size)
        one, none = (1,), (0,)
        return replace(self, size=(size,), kernel=one, strides=one, before=none, after=none, dilation=one)
