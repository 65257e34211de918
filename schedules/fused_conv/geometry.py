"""Where a convolution's taps read a padded copy of x: phases of a stride apart, each a picture of its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from .spec import Spec

#: Each phase that several taps read is code of its own: with more than this, compiling takes long.
MOST_PHASES = 32


@dataclass(frozen=True)
class Line:
    """Taps along one axis that read the same phase: taps ``first + i * step``, at ``at + i * every`` of the phase.

    Attributes
    ----------
    phase : int
        Places of x that are the phase: those whose distance from the first (padded) one leaves this over the stride.
    first, step, at, every, count : int
    """

    phase: int
    first: int
    step: int
    at: int
    every: int
    count: int


def lines(kernel: int, stride: int, dilation: int) -> tuple[Line, ...]:
    """Return the taps of one axis by phases: tap k of output o reads place ``o * stride + k * dilation``."""
    common = math.gcd(stride, dilation)
    step, every = stride // common, dilation // common
    out = []
    for first in range(min(step, kernel)):
        at, phase = divmod(first * dilation, stride)
        out.append(Line(phase, first, step, at, every, -(-(kernel - first) // step)))
    return tuple(out)


@dataclass(frozen=True)
class Geometry:
    """A convolution's taps.

    Attributes
    ----------
    lines : tuple of tuple of Line
        Of each axis.
    reach : tuple of int
        Of each axis: how much further than the result a phase goes.
    """

    lines: tuple[tuple[Line, ...], ...]
    reach: tuple[int, ...]

    @staticmethod
    def of(spec: Spec) -> Geometry:
        """Return that of a convolution."""
        found = tuple(lines(*axis) for axis in zip(spec.kernel, spec.strides, spec.dilation))
        return Geometry(found, tuple(max(line.at + line.every * (line.count - 1) for line in axis) for axis in found))

    @property
    def is_patches(self) -> bool:
        """Whether every phase is read by one tap, at its beginning: patches beside one another."""
        return all(line.count == 1 and line.at == 0 for axis in self.lines for line in axis)

    @property
    def phases(self) -> tuple[int, ...]:
        """Number of phases of each axis that are read."""
        return tuple(len(axis) for axis in self.lines)

    def order(self, kernel: tuple[int, ...]) -> list[int]:
        """Return the taps' numbers in the order in which a kernel goes over them: by phases, then in rows."""
        out: list[int] = []
        for classes in itertools.product(*self.lines):
            for places in itertools.product(*(range(line.count) for line in classes)):
                number = 0
                for extent, line, i in zip(kernel, classes, places):
                    number = number * extent + line.first + i * line.step
                out.append(number)
        return out
