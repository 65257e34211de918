"""What both shapes of attention kernels share: arguments, units of work, masks, rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..writing import argument
from .plan import Plan
from .spec import Extent, Operand, Role, Spec

Expr: TypeAlias = ir.Expr
Roles: TypeAlias = dict[Role, Extent]


@dataclass(frozen=True)
class Part:
    """A stretch of keys.

    Attributes
    ----------
    index : int
        Which of the tensors of keys and values.
    start : int or Expr
        Its first key, counted over all parts.
    first, limit : int or Expr
        The keys of it that are read at all, ``first <= key < limit``.
    """

    index: int
    start: Extent
    first: Extent
    limit: Extent


class Arguments:
    """A kernel's arguments, declared once; what is not there is None."""

    def __init__(self, spec: Spec) -> None:
        parts = range(len(spec.keys))
        self.q = self._declared("q", spec.q)
        self.k = [self._declared(f"k{i}", spec.k[i]) for i in parts]
        self.v = [self._declared(f"v{i}", spec.v[i]) for i in parts]
        self.mask = self._declared("mask", spec.mask)
        self.bias = self._declared("bias", spec.bias)
        self.layer = self._declared("layer", Operand((), (), "int64")) if spec.layered else None
        self.out = self._declared("out", spec.out)

    @staticmethod
    def _declared(name: str, operand: Operand | None) -> Any:
        return None if operand is None else argument(name, operand.shape, operand.dtype)


class Writer(ABC):
    """Emits what does not depend on the shape of work."""

    def __init__(self, spec: Spec, cut: Plan, arguments: Arguments) -> None:
        self.spec, self.cut, self.sums = spec, cut, spec.sum_dtype
        self.q, self.k, self.v, self.out = arguments.q, arguments.k, arguments.v, arguments.out
        self.mask, self.bias = arguments.mask, arguments.bias
        self.given: Roles = {} if arguments.layer is None else {"layer": T.bind(arguments.layer[()])}
        self.rows: Extent = spec.queries * spec.groups
        self.keys: Extent = sum(spec.keys[1:], spec.keys[0])

    @abstractmethod
    def write(self) -> None:
        """Emit the kernel's body."""

    # Values ------------------------------------------------------------------------------------------------------

    def number(self, value: float) -> Expr:
        """Return a constant of the sums' type."""
        return tirx.const(value, self.sums)

    @property
    def lowest(self) -> Expr:
        """The least finite number: a running maximum starts there, so that ``-inf - maximum`` is a number."""
        return self.number(float(np.finfo(self.sums).min))

    def load(self, buffer: Any, operand: Operand, roles: Mapping[Role, Extent], lanes: int = 1) -> Expr:
        """Return an element, or ``lanes`` neighbours on the last axis, in the sums' type."""
        indices = [axis.at(roles) for axis in operand.axes]
        if lanes > 1:
            indices[-1] = tirx.Ramp(indices[-1], 1, lanes)
        value = buffer[tuple(indices)]
        dtype = self.sums if lanes == 1 else f"{self.sums}x{lanes}"
        return value if str(value.ty.dtype) == dtype else value.astype(dtype)

    def scratch(self, *shape: int) -> Any:
        """Return a buffer of this thread."""
        return T.alloc_buffer(shape, self.sums, scope="local", layout=None)

    def row(self, index: Extent) -> Roles:
        """Return what a row's index stands for: the query heads of one query are neighbours."""
        groups = self.spec.groups
        if groups == 1:
            return {"query": index, "group": 0}
        return {"query": tirx.floordiv(index, groups), "group": tirx.floormod(index, groups)}

    # Work --------------------------------------------------------------------------------------------------------

    def spread(self, extent: Extent) -> AbstractContextManager[Expr]:
        """Return a loop over units of work."""
        return T.parallel(extent) if self.cut.parallel else T.serial(extent)

    @contextmanager
    def units(self, tiles: Extent) -> Iterator[tuple[Roles, Expr]]:
        """Go over (batch, head, tile); yields the roles of the first two, and the tile.

        Under a causal mask without a window later tiles cost more: short and long ones take turns, so that threads,
        which get neighbouring units, get the same amount of work.
        """
        spec = self.spec
        with self.spread(spec.batch * spec.heads * tiles) as unit:
            tile = T.bind(tirx.floormod(unit, tiles))
            if spec.causal is not None and spec.window is None:
                half = tirx.floordiv(tile, 2)
                tile = T.bind(tirx.Select(tirx.floormod(tile, 2) == 0, half, tiles - 1 - half))
            pair = T.bind(tirx.floordiv(unit, tiles))
            batch, head = tirx.floordiv(pair, spec.heads), tirx.floormod(pair, spec.heads)
            yield {"batch": T.bind(batch), "head": T.bind(head), **self.given}, tile

    def parts(self, first_query: Extent, last_query: Extent) -> list[Part]:
        """Return the parts, without keys that none of some queries in a row sees."""
        causal, window = self.spec.causal, self.spec.window
        out: list[Part] = []
        start: Extent = 0
        for index, keys in enumerate(self.spec.keys):
            first: Extent = 0
            limit = keys
            if causal is not None:
                limit = T.bind(tirx.max(tirx.min(last_query + causal + 1 - start, keys), 0))
            if causal is not None and window is not None:
                first = T.bind(tirx.min(tirx.max(first_query + causal + 1 - window - start, 0), limit))
            out.append(Part(index, start, first, limit))
            start = start + keys
        return out

    @contextmanager
    def blocks(self, part: Part) -> Iterator[tuple[Expr, Expr]]:
        """Go over a part's blocks; yields the first key of one, and how many keys it has."""
        block = self.cut.block
        with T.serial(tirx.floordiv(part.limit - part.first + (block - 1), block)) as at:
            begin = T.bind(part.first + at * block)
            yield begin, T.bind(tirx.min(part.limit - begin, block))

    def inverse(self, total: Expr) -> Expr:
        """Return what the sum of weighed values is multiplied by."""
        one, zero = self.number(1.0), self.number(0.0)
        # Where every score is minus infinity the sum is 0, and 0 / 0 is what softmax gives.
        if self.spec.zero_empty_rows:
            return tirx.Select(total == zero, zero, one / total)
        if isinstance(self.keys, int):
            return one / total if self.keys else zero
        return tirx.Select(self.keys == 0, zero, one / total)

    # Masks -------------------------------------------------------------------------------------------------------

    def masked(self, score: Expr, mask: Expr | None, bias: Expr | None) -> Expr:
        """Return a score with mask and bias, in the order in which the model applies them."""
        spec = self.spec
        if bias is not None and (spec.form == "add" or spec.bias_inside or mask is None):
            score, bias = score + bias, None
        if mask is not None and spec.form == "add":
            score = score + mask
        elif mask is not None:
            holds = mask != self.number(0.0)
            fill = self.number(spec.fill)
            score = tirx.Select(holds, score, fill) if spec.form == "keep" else tirx.Select(holds, fill, score)
        return score if bias is None else score + bias

    def added(self) -> Sequence[tuple[Any, Operand]]:
        """Return mask and bias, those that are there."""
        found = ((self.mask, self.spec.mask), (self.bias, self.spec.bias))
        return [(buffer, operand) for buffer, operand in found if operand is not None]
