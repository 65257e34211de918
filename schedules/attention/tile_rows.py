"""A tile's rows: queries come in and results go out, turned so that rows fill the lanes between the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .lanes import turned
from .spec import Extent
from .writer import Expr, Roles, Writer


class TileRows(Writer):
    """Emits how a tile starts and how it ends.

    Attributes
    ----------
    unit : dict
        Roles that a unit of work fixes.
    first : Expr
        The tile's first row.
    queries, sum : buffer
        (lanes, rows), (value lanes, rows).
    top, total : buffer
        (rows): the greatest score so far, and the sum of weights against it.
    """

    unit: Roles
    first: Expr
    queries: Any
    sum: Any
    top: Any
    total: Any

    def across(self) -> AbstractContextManager[Expr]:
        """Return the loop over a tile's rows."""
        return T.vectorized(self.cut.width)

    def row_of(self, lane: Extent) -> Roles:
        """Return the roles of a lane's row; lanes behind the last row repeat it."""
        return {**self.unit, **self.row(tirx.min(self.first + lane, self.rows - 1))}

    def start(self) -> None:
        spec, cut = self.spec, self.cut
        scale = self.number(spec.scale)

        def one(r: Expr, e: Expr) -> None:
            value = self.load(self.q, spec.q, {**self.row_of(r), "lane": e})
            T.buffer_store(self.queries, value * scale, [e, r])

        def many(r: Expr, e: Expr) -> Expr:
            value = self.load(self.q, spec.q, {**self.row_of(r), "lane": e}, cut.lanes)
            return value * tirx.Broadcast(scale, cut.lanes)

        self.turn(spec.lanes, many if spec.q.runs_along("lane") else None, one, self.queries)
        with self.across() as v:
            T.buffer_store(self.top, self.lowest, [v])
        with self.across() as v:
            T.buffer_store(self.total, self.number(0.0), [v])
        with T.serial(spec.value_lanes) as e:
            with self.across() as v:
                T.buffer_store(self.sum, self.number(0.0), [e, v])

    def turn(
        self,
        extent: Extent,
        many: Callable[[Expr, Expr], Expr] | None,
        one: Callable[[Expr, Expr], None],
        into: Any,
    ) -> None:
        """Fill ``into[e, row]``: squares of ``many(row, e)`` in registers, what is left over by ``one(row, e)``."""
        lanes, width = self.cut.lanes, self.cut.width
        squares: Extent = 0
        if many is not None and lanes > 1:
            squares = extent // lanes if isinstance(extent, int) else tirx.floordiv(extent, lanes)
            with T.serial(width // lanes) as group, T.serial(squares) as square:
                loaded = [T.bind(many(group * lanes + i, square * lanes)) for i in range(lanes)]
                for i, column in enumerate(turned(loaded, lanes)):
                    T.buffer_store(into, column, [square * lanes + i, tirx.Ramp(group * lanes, 1, lanes)])
        with T.serial(extent - squares * lanes) as rest, T.serial(width) as r:
            one(r, squares * lanes + rest)

    def finish(self) -> None:
        """Divide by the sum of the weights, and turn the result back."""
        spec, cut, lanes = self.spec, self.cut, self.cut.lanes
        with self.across() as v:
            T.buffer_store(self.total, self.inverse(self.total[v]), [v])
        squares = spec.value_lanes // lanes if lanes > 1 and spec.out.runs_along("lane") else 0

        def store(r: Expr, e: Expr, value: Expr, count: int = 1) -> None:
            with T.If(self.first + r < self.rows), T.Then():
                roles: Roles = {**self.unit, **self.row(self.first + r), "lane": e}
                indices = [axis.at(roles) for axis in spec.out.axes]
                if count > 1:
                    indices[-1] = tirx.Ramp(indices[-1], 1, count)
                dtype = spec.out.dtype if count == 1 else f"{spec.out.dtype}x{count}"
                T.buffer_store(self.out, value if str(value.ty.dtype) == dtype else value.astype(dtype), indices)

        with T.serial(cut.width // lanes) as group:
            across = tirx.Ramp(group * lanes, 1, lanes) if lanes > 1 else group
            with T.serial(squares) as square:
                factor = T.bind(self.total[across])
                loaded = [T.bind(self.sum[square * lanes + i, across] * factor) for i in range(lanes)]
                for i, value in enumerate(turned(loaded, lanes)):
                    store(group * lanes + i, square * lanes, value, lanes)
        with T.serial(cut.width) as r, T.serial(spec.value_lanes - squares * lanes) as rest:
            e = squares * lanes + rest
            store(r, e, self.sum[e, r] * self.total[r])
