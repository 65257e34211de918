"""Read a sequence put together of several parts: one behind the other, or put where a mask is true."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm_ffi import structural_equal

from crossloom.rewrite import Graph
from crossloom.schedules.fused_sequence import Addend, Copy, Layer, Sequence
from crossloom.verdict import refuse

from ..matching.spelling import dims, dtype, either, extents, number, same_dims, scalar
from .columns import FLOATS
from .parts import VIEWS, Bound, Linear, Operand, PartReader, Problem, row_sizes

#: The composite's name.
SEQUENCE_REGION = "crossloom.fused_sequence"


@dataclass(frozen=True)
class SequenceRegion:
    """What a region computes, and what its kernel takes, in the kernel's order."""

    spec: Sequence
    operands: tuple[Operand, ...]
    inside: frozenset[relax.Var]


@dataclass(frozen=True)
class _Mask:
    """Where rows are put: a boolean by row, or integers and the token that marks a place."""

    rows: relax.Expr
    token: int | None

    def same_as(self, other: _Mask) -> bool:
        return self.rows.same_as(other.rows) and self.token == other.token


def _without_ones(shape: Several[int | tirx.Expr]) -> list[int | tirx.Expr]:
    return [d for d in map(number, shape) if not (isinstance(d, int) and d == 1)]


def _spreads_last(inner: relax.Expr, outer: relax.Expr) -> bool:
    """Return whether a broadcast repeats values along the last axis alone."""
    before, after = (extents(e) for e in (inner, outer))
    return len(before) == len(after) and before[-1:] == [1] and same_dims(before[:-1], after[:-1])


class SequenceReader(PartReader):
    """Reads a sequence; raises :class:`Problem` where there is one that cannot be proved."""

    def read(self, root: relax.Expr) -> SequenceRegion | None:
        """Return the sequence that ``root`` is, None where it is none, or nothing would be gained."""
        while isinstance(inner := self.bound(root), relax.Var):
            root = inner
        shape = dims(root)
        width = number(shape[-1]) if shape else None
        self.dtype = dtype(root)
        if shape is None or len(shape) < 2 or not isinstance(width, int) or width == 0 or "float" not in self.dtype:
            return None
        self.width = width
        self.rows = tuple(number(d) for d in shape[:-1])
        if self.dtype not in FLOATS:
            return None
        addends: list[tuple[Addend, tuple[Operand, ...]]] = []
        core = root
        while self.call(core, "relax.add") is not None:
            found = next(((i, a) for i, a in self._sums(core) if self._is_core(i)), None)
            if found is None:
                return None
            self.inside |= {core}
            core, addends = found[0], [found[1], *addends]
        region = self._whole(core, not addends)
        if region is None:
            return None
        axis, parts, layers, masks = region
        spec = Sequence(
            self.rows,
            width,
            self.dtype,
            axis,
            tuple(bound.part for bound in parts),
            tuple(layer for layer, _ in layers),
            tuple(addend for addend, _ in addends),
        )
        operands = [o for bound in parts for o in bound.operands]
        for mask, (_, bounds) in zip(masks, layers):
            operands += [mask.rows, *(o for bound in bounds for o in bound.operands)]
        operands += [o for _, given in addends for o in given]
        return SequenceRegion(spec, tuple(operands), frozenset(self.inside))

    def _is_core(self, expr: relax.Expr) -> bool:
        return self.call(expr, "relax.concat") is not None or self._where(expr) is not None

    # One behind the other ----------------------------------------------------------------------------------------

    def _whole(
        self, core: relax.Expr, products: bool
    ) -> tuple[int, list[Bound], list[tuple[Layer, list[Bound]]], list[_Mask]] | None:
        if self._where(core) is not None:
            return self._scattered(core, products)
        call = self.call(core, "relax.concat")
        rank = len(self.rows) + 1
        if call is None or call.attrs.axis is None or int(call.attrs.axis) % rank == rank - 1:
            return None
        axis = int(call.attrs.axis) % rank
        parts = self.parts_along(core, axis)
        made = [bound for bound in parts if not isinstance(bound.part.source, Copy)]
        return (axis, parts, [], []) if made else None

    # Where a mask is true ----------------------------------------------------------------------------------------

    def _where(self, expr: relax.Expr) -> tuple[relax.Call, list[relax.Var]] | None:
        """Return the choice that a value is, flattened or not, and the bindings from it to the value."""
        call = self.call(expr, "relax.where")
        if call is not None:
            return call, [expr]
        view = self.call(expr, "relax.reshape")
        call = self.call(view.args[0], "relax.where") if view is not None else None
        if view is None or call is None or len(dims(view.args[0]) or ()) != 1:
            return None
        return call, [expr, view.args[0]]

    def _whole_of(self, expr: relax.Expr) -> relax.Expr:
        """Return a value before it was flattened to single elements."""
        view = self.call(expr, "relax.reshape") if len(dims(expr) or ()) == 1 else None
        if view is None or number((dims(view.args[0]) or [0])[-1]) != self.width:
            return expr
        self.inside |= {expr}
        return view.args[0]

    def _scattered(
        self, core: relax.Expr, products: bool
    ) -> tuple[int, list[Bound], list[tuple[Layer, list[Bound]]], list[_Mask]] | None:
        layers: list[tuple[Layer, list[Bound]]] = []
        masks: list[_Mask] = []
        expr = core
        while (found := self._where(expr)) is not None:
            call, taken = found
            condition, over, base = call.args
            base = self._whole_of(base)
            if not same_dims(dims(base) or (), dims(core) or (None,)):
                break
            before = set(self.inside)
            flat = len(dims(taken[-1]) or ()) == 1
            mask = self._mask(condition, flat)
            if mask is None:
                self.inside = before
                if not layers and self._is_promising(over, base):
                    name = getattr(condition, "name", "")
                    raise Problem(refuse("mask-differs-along-features", name, "rows are put as a whole"))
                break
            self.inside |= set(taken)
            apart = all(self._apart(mask, other) for other in masks)
            layer = self._layer(mask, over, products and apart, flat)
            if layer is None:
                self.inside = before
                break
            layers.append(layer)
            masks.append(mask)
            expr = base
        if not layers:
            return None
        parts = [self.part(expr, products)]
        made = [b for b in (*parts, *(b for _, inner in layers for b in inner)) if not isinstance(b.part.source, Copy)]
        return (0, parts, layers, masks) if made or any(layer.in_order for layer, _ in layers) else None

    def _is_promising(self, *values: relax.Expr) -> bool:
        """Return whether something that is chosen is made by a lookup or a linear layer."""
        before = set(self.inside)
        made = any(not isinstance(self.part(self._whole_of(v)).part.source, Copy) for v in values)
        self.inside = before
        return made

    @staticmethod
    def _apart(mask: _Mask, other: _Mask) -> bool:
        """Return whether two masks are never true at one row."""
        both = mask.token is not None and other.token is not None
        return both and mask.rows.same_as(other.rows) and mask.token != other.token

    def _layer(self, mask: _Mask, over: relax.Expr, products: bool, flat: bool) -> tuple[Layer, list[Bound]] | None:
        taken = self._taken_in_order(mask, over)
        if taken is not None:
            leads = [number(d) for d in (dims(taken) or [])[:-1]]
            axis = next((i for i, d in enumerate(leads) if not (isinstance(d, int) and d == 1)), 0)
            # Several values follow each other where nothing is in front of the axis.
            bounds = self.parts_along(taken, axis, products)
        else:
            whole = self._whole_of(over)
            if not same_dims(row_sizes(whole), self.rows) or number((dims(whole) or [0])[-1]) != self.width:
                return None
            bounds = [self.part(whole, products)]
        shape = tuple(extents(mask.rows))
        parts = tuple(bound.part for bound in bounds)
        in_order = taken is not None
        return Layer(shape, dtype(mask.rows), mask.token, in_order, parts, in_order and flat), bounds

    def _by_row(self, expr: relax.Expr) -> bool:
        shape = dims(expr)
        return shape is not None and same_dims(_without_ones(shape), _without_ones(self.rows))

    def _mask(self, expr: relax.Expr, flat: bool) -> _Mask | None:
        """Read a mask of rows, None where it may differ along a row."""
        shape = extents(expr)
        count = len(self.rows)
        if not flat and not (
            same_dims(shape[:-1], self.rows[count - len(shape) + 1 :]) and shape[-1] in (1, self.width)
        ):
            return None
        if not flat and any(not (isinstance(d, int) and d == 1) for d in self.rows[: count - len(shape) + 1]):
            return None
        return self._mask_rows(expr)

    def _mask_rows(self, expr: relax.Expr) -> _Mask | None:
        """Read a mask from what it was spread from: nothing but the last axis may be spread."""
        found: tuple[relax.Expr, list[relax.Expr]] | None = None
        behind: list[relax.Expr] = []
        while True:
            if self._by_row(expr):
                found = expr, list(behind)
            call = self.call(expr, *VIEWS, "relax.broadcast_to")
            if call is None or (self.graph.op(expr) == "relax.broadcast_to" and not _spreads_last(call.args[0], expr)):
                break
            behind.append(expr)
            expr = call.args[0]
        if found is None or dtype(found[0]) != "bool":
            return None
        expr = found[0]
        self.inside |= set(found[1])
        compared = self.call(expr, "relax.equal")
        for ids, token in either(compared) if compared is not None else ():
            value = scalar(self.graph, token)
            if value is not None and self._by_row(ids) and dtype(ids) in ("int32", "int64") and value == int(value):
                self.inside |= {expr}
                return _Mask(ids, int(value))
        return _Mask(expr, None)

    # The k-th true row takes row k -------------------------------------------------------------------------------

    def _taken_in_order(self, mask: _Mask, over: relax.Expr) -> relax.Expr | None:
        """Return the value whose rows are taken in order, None where the value chosen is another."""
        before = set(self.inside)
        flat = len(dims(over) or ()) == 1
        inner = over
        behind: list[relax.Var] = []
        if not flat:
            found = ((v, b) for v, b in self.views(over) if self.call(v, "relax.take") is not None)
            inner, behind = next(found, (over, behind))
        take = self.call(inner, "relax.take")
        if take is None:
            return None
        source, index = take.args[:2]
        whole = self._whole_of(source) if flat else source
        if not flat:
            shape = extents(source)
            # Whole rows: the last axis but one, and nothing in front of it.
            if (
                take.attrs.axis is None
                or int(take.attrs.axis) % len(shape) != len(shape) - 2
                or _without_ones(shape[:-2])
            ):
                self.inside = before
                return None
            whole, seen = list(self.views(source))[-1]
            self.inside |= set(seen)
        counted = self._count(index, source, mask, flat)
        if counted is None:
            self.inside = before
            return None
        if str(take.attrs.mode) == "wrap" or (str(take.attrs.mode) == "nan" and not counted):
            raise Problem(refuse("features-run-out-differently", over.name, "only the last row may be repeated"))
        self.inside |= {inner, *behind}
        return whole

    def _count(self, index: relax.Expr, source: relax.Expr, mask: _Mask, flat: bool) -> bool | None:
        """Return whether the number of a row among those where the mask is true is bounded; None for another index."""
        less_one, bounded = 0, False
        extent = next((d for d in map(number, dims(source) or ()) if not (isinstance(d, int) and d == 1)), 1)
        while True:
            if (inner := self.from_end(index, None)) is not None:
                index = inner
                continue
            call = self.call(index, *VIEWS, "relax.astype", "relax.clip", "relax.maximum", "relax.minimum")
            if call is not None and self.graph.op(index) == "relax.astype" and "int" not in dtype(call.args[0]):
                return None
            if call is not None:
                held = self._held(index, call, extent)
                if held is None:
                    return None
                bounded = bounded or held
            elif (call := self.call(index, "relax.subtract", "relax.add")) is not None:
                step = scalar(self.graph, call.args[1])
                less_one += int(step or 0) if self.graph.op(index) == "relax.subtract" else -int(step or 0)
                if step is None:
                    return None
            else:
                break
            self.inside |= {index}
            index = call.args[0]
        call = self.call(index, "relax.cumsum")
        if call is None or less_one != (0 if call.attrs.exclusive else 1):
            return None
        self.inside |= {index}
        over = call.args[0]
        cast = self.call(over, "relax.astype")
        if cast is not None:
            self.inside |= {over}
        counted = self._mask_rows(over if cast is None else cast.args[0])
        # Single elements are counted where single elements are taken.
        if counted is None or not counted.same_as(mask) or (self.width > 1 and self._by_row(over) == flat):
            return None
        axis = call.attrs.axis
        shape = extents(over)
        others = [] if axis is None else shape[: int(axis) % len(shape)] + shape[int(axis) % len(shape) + 1 :]
        if _without_ones(others):
            raise Problem(refuse("count-restarts-per-batch", index.name, "rows are counted through all of the batch"))
        return bounded

    def _held(self, index: relax.Expr, call: relax.Call, extent: int | tirx.Expr) -> bool | None:
        """Return whether a step bounds an index from above by the last row; None where by anything else."""
        op = self.graph.op(index)
        if op == "relax.maximum":
            return False if scalar(self.graph, call.args[1]) == 0 else None
        if op == "relax.clip":
            low, high = (float(getattr(a, "value", np.nan)) for a in call.args[1:3])
            return None if low > 0 or not isinstance(extent, int) or high < extent - 1 else high == extent - 1
        if op == "relax.minimum":
            return True if self._is_last(call.args[1], extent) else None
        return False

    def _is_last(self, expr: relax.Expr, extent: int | tirx.Expr) -> bool:
        """Return whether a number is ``extent - 1``."""
        if isinstance(extent, int):
            return scalar(self.graph, expr) == extent - 1
        less = self.call(expr, "relax.subtract")
        if less is None or scalar(self.graph, less.args[1]) != 1:
            return False
        size = less.args[0]
        view = self.call(size, "relax.reshape")
        whole = size if view is None else view.args[0]
        made = self.call(whole, "relax.shape_to_tensor")
        shape = self.graph.resolve(made.args[0]) if made is not None else None
        if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != 1:
            return False
        if not structural_equal(shape.values[0], extent):
            return False
        own = made.args[0] if made is not None and isinstance(made.args[0], relax.Var) else None
        self.inside |= {v for v in (expr, size, whole, own) if isinstance(v, relax.Var)}
        return True


def read_sequence(
    graph: Graph, root: relax.Expr, blocked: frozenset[relax.Var] = frozenset(), block: int | None = None
) -> SequenceRegion | None:
    """Return the sequence that a value of a graph is; see :class:`SequenceReader`."""
    while (region := SequenceReader(graph, blocked, block).read(root)) is not None:
        # What one part makes and another one reads (a lookup, and a layer of it) has to exist.
        read = _reads(region.operands) & (region.inside - blocked)
        if not read:
            break
        blocked |= read
    return region


def _reads(operands: Several[Operand]) -> set[relax.Expr]:
    """Return the values that a kernel reads."""
    plain = {o for o in operands if not isinstance(o, Linear)}
    return plain.union(*(o.names.values() for o in operands if isinstance(o, Linear)))
