"""Parts of a sequence: lookups, linear layers and values that exist, read off a graph or off a region's own body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from crossloom.rewrite import Graph, Match, composite_attrs, composite_name, region_of
from crossloom.rewrite.grouping import inputs_of
from crossloom.schedules.fused_sequence import Addend, Copy, Lookup, Part, Product
from crossloom.verdict import Verdict

from ..matching.spelling import dims, dtype, either, extents, number, same_dims, scalar
from .linear import ACTIVATIONS, LINEAR_REGION, NoKernel, Region, read_linear

_LINEAR, _EMBEDDING = "crossloom.linear", "crossloom.embedding"
_NORMS = ("crossloom.rms_norm", "crossloom.layer_norm")
VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


class Problem(Exception):
    """The graph holds a sequence that cannot be proved or computed; ``verdict`` refuses it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.code)
        self.verdict = verdict


@dataclass(frozen=True)
class Linear:
    """What a linear layer's kernel takes, in terms of the graph that was read."""

    region: Region
    names: dict[str, relax.Expr]


#: An argument of the kernel, or several of a linear layer.
Operand: TypeAlias = relax.Expr | Linear


@dataclass(frozen=True)
class Bound:
    """A piece of a kernel's description and what it takes, in the kernel's order."""

    part: Part
    operands: tuple[Operand, ...]


def row_sizes(expr: relax.Expr) -> tuple[int | tirx.Expr, ...]:
    """Return the leading axes of a value."""
    return tuple(number(d) for d in (dims(expr) or [])[:-1])


class PartReader:
    """Reads values as parts of a sequence.

    Parameters
    ----------
    graph : Graph
    blocked : frozenset of relax.Var
        Bindings that are taken as they are.
    block : int or None
        The dataflow block that is read; None reads all.

    Attributes
    ----------
    inside : set of relax.Var
        Bindings that what was read makes unnecessary.
    """

    def __init__(self, graph: Graph, blocked: frozenset[relax.Var] = frozenset(), block: int | None = None) -> None:
        self.graph, self.blocked, self.block = graph, blocked, block
        self.inside: set[relax.Var] = set()
        self.width, self.dtype = 0, ""

    # Bindings ----------------------------------------------------------------------------------------------------

    def bound(self, expr: relax.Expr) -> relax.Expr | None:
        """Return the value of a binding that may be read through."""
        graph = self.graph
        if not isinstance(expr, relax.Var) or expr not in graph.value or expr in self.blocked or expr in graph.casts:
            return None
        return graph.value[expr] if self.block is None or graph.block.get(expr) == self.block else None

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call of one of some operators that a binding is."""
        value = self.bound(expr)
        found = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in ops
        return value if found else None

    def composite(self, expr: relax.Expr, *names: str) -> tuple[dict[str, relax.Expr], dict[str, object]] | None:
        """Return operands and facts of a call of one of some composites."""
        callee = self.graph.callee(expr) if isinstance(self.bound(expr), relax.Call) else None
        if callee is None or composite_name(callee) not in names:
            return None
        return self.graph.operands(expr), composite_attrs(callee)

    def views(self, expr: relax.Expr) -> Iterator[tuple[relax.Expr, list[relax.Var]]]:
        """Yield a value and what it is a view of, as long as its last axis stays whole, with the views behind each."""
        behind: list[relax.Var] = []
        yield expr, []
        while (call := self.call(expr, *VIEWS)) is not None and self._as_wide(call.args[0]):
            behind = [*behind, expr]
            expr = call.args[0]
            yield expr, behind

    def _as_wide(self, expr: relax.Expr) -> bool:
        shape = dims(expr) or []
        return len(shape) > 1 and number(shape[-1]) == self.width

    # Parts -------------------------------------------------------------------------------------------------------

    def part(self, expr: relax.Expr, products: bool = True) -> Bound:
        """Read a value of whole rows; one that nothing is known of is copied."""
        for inner, addend in self._sums(expr):
            before = set(self.inside)
            core = self._made(inner, products)
            if core is not None and same_dims(core.part.rows, row_sizes(expr)):
                self.inside |= {expr}
                part = replace(core.part, addends=(*core.part.addends, addend[0]))
                return Bound(part, (*core.operands, *addend[1]))
            self.inside = before
        made = self._made(expr, products)
        return made or Bound(Part(row_sizes(expr), Copy(tuple(extents(expr)))), (expr,))

    def _made(self, expr: relax.Expr, products: bool) -> Bound | None:
        return self._lookup(expr) or (self._product(expr) if products else None)

    def _sums(self, expr: relax.Expr) -> Iterator[tuple[relax.Expr, tuple[Addend, tuple[Operand, ...]]]]:
        call = self.call(expr, "relax.add")
        for inner, other in either(call) if call is not None else ():
            before = set(self.inside)
            addend = self.addend(other, expr) if same_dims(dims(inner) or (), dims(expr) or (None,)) else None
            if addend is not None:
                yield inner, addend
            self.inside = before

    def addend(self, expr: relax.Expr, to: relax.Expr) -> tuple[Addend, tuple[Operand, ...]] | None:
        """Read what is added to a value: rows of a table, or a value that may be stretched."""
        shape, wide = dims(expr), extents(to)
        if shape is None or dtype(expr) != self.dtype or len(shape) > len(wide):
            return None
        own = extents(expr)
        if any(e != 1 and not same_dims([e], [w]) for e, w in zip(own, wide[len(wide) - len(own) :])):
            return None
        found = self.lookup(expr)
        if found is not None and same_dims(dims(found[1][1]) or (), shape[:-1]):
            return Addend((*own[:-1], 0), found[0]), found[1]
        return Addend(tuple(own)), (expr,)

    def _lookup(self, expr: relax.Expr) -> Bound | None:
        factor, at = 1.0, expr
        if (call := self.call(expr, "relax.multiply")) is not None:
            for inner, other in either(call):
                if (value := scalar(self.graph, other)) is not None:
                    factor, at = value, inner
        for inner, behind in self.views(at):
            if (found := self.lookup(inner)) is not None:
                self.inside |= {*behind, expr} if at is not expr else {*behind}
                return Bound(Part(row_sizes(expr), replace(found[0], scale=factor)), found[1])
        return None

    def lookup(self, expr: relax.Expr) -> tuple[Lookup, tuple[relax.Expr, ...]] | None:
        """Read a lookup in a table of fixed size: what it does, and (table, integers)."""
        found = self.composite(expr, _EMBEDDING)
        if found is None:
            return None
        table, ids, mode = found[0]["weight"], found[0]["ids"], str(found[1]["mode"])
        shape = extents(table)
        known = isinstance(shape[0], int) and shape[0] > 0 and shape[1:] == [self.width] and dtype(table) == self.dtype
        if not known or dims(ids) is None or mode not in ("clip", "fast", "wrap", "nan"):
            return None
        self.inside |= {expr}
        ids, from_end = self._counted_from_end(ids, int(shape[0]))
        lookup = Lookup(tuple(extents(ids)), int(shape[0]), dtype(ids), mode, from_end)
        return lookup, (table, ids)

    def _counted_from_end(self, ids: relax.Expr, size: int) -> tuple[relax.Expr, bool]:
        """Return the integers before those below 0 were counted from the end, and whether they were."""
        inner = self.from_end(ids, size)
        return (self.uncast(inner), True) if inner is not None else (self.uncast(ids), False)

    def uncast(self, ids: relax.Expr) -> relax.Expr:
        """Return integers before they were made wider."""
        cast = self.call(ids, "relax.astype")
        narrow = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
        if cast is None or dtype(ids) != "int64" or dtype(cast.args[0]) not in narrow:
            return ids
        self.inside |= {ids}
        return cast.args[0]

    def from_end(self, ids: relax.Expr, size: int | None) -> relax.Expr | None:
        """Return i of ``where(i < 0, i + size, i)``; any size where none is given."""
        chosen = self.call(ids, "relax.where")
        if chosen is None:
            return None
        below, counted, inner = chosen.args
        less, add = self.call(below, "relax.less"), self.call(counted, "relax.add")
        if less is None or add is None or not less.args[0].same_as(inner) or scalar(self.graph, less.args[1]) != 0:
            return None
        for index, extent in either(add):
            if index.same_as(inner) and (size is None or scalar(self.graph, extent) == size):
                self.inside |= {ids, below, counted}
                return inner
        return None

    # Linear layers -----------------------------------------------------------------------------------------------

    def _chain(self, expr: relax.Expr) -> list[relax.Var] | None:
        """Return the bindings of a linear layer, what is done to its result, and the norm in front of it."""
        out: list[relax.Var] = []
        while self.bound(expr) is not None:
            out.append(expr)
            if (layer := self.composite(expr, _LINEAR)) is not None:
                x = layer[0]["x"]
                if self._has_siblings(expr, x):
                    return None
                return [*out, x] if self.composite(x, *_NORMS) is not None and self.graph.uses(x) == 1 else out
            if (step := self.composite(expr, "crossloom.activation")) is not None:
                expr = step[0]["x"]
            elif (call := self.call(expr, *ACTIVATIONS, *VIEWS)) is not None:
                expr = call.args[0]
            elif (call := self.call(expr, "relax.multiply")) is not None:
                rest = [a for a in call.args if scalar(self.graph, a) is None]
                if len(rest) != 1:
                    return None
                expr = rest[0]
            else:
                return None
        return None

    def _has_siblings(self, layer: relax.Var, x: relax.Expr) -> bool:
        """Return whether other linear layers read the same value: they belong together."""
        users = self.graph.users.get(x, ()) if isinstance(x, relax.Var) else ()
        callees = [self.graph.callee(u) for u in users if not u.same_as(layer)]
        return any(c is not None and composite_name(c) in (_LINEAR, LINEAR_REGION) for c in callees)

    def _product(self, expr: relax.Expr) -> Bound | None:
        chain = self._chain(expr)
        # The last binding of a region's body may only rename the result.
        if chain is None or any(self.graph.uses(v) > 1 for v in chain[1:]):
            return None
        match = Match(self.graph, chain[0], {}, frozenset(chain))
        func = region_of(match, LINEAR_REGION)
        try:
            region = read_linear(Graph("", func, self.graph.mod))
        except NoKernel:
            return None
        names = {param.name: given for param, given in zip(func.params, inputs_of(match))}
        spec, output = region.spec, region.spec.outputs[0]
        rows = [index for kind, index in output.dims if kind == "row"]
        plain = not output.heads and output.gate is None and output.lanes == self.width and rows == sorted(rows)
        if len(spec.outputs) != 1 or not plain or spec.dtype != self.dtype:
            return None
        # The region has sizes of its own.
        x = region.x if not isinstance(region.x, relax.Var) else names[region.x.name]
        spec = replace(spec, rows=row_sizes(x))
        self.inside |= set(chain)
        return Bound(Part(row_sizes(expr), Product(spec)), (Linear(region, names),))

    def parts_along(self, expr: relax.Expr, axis: int, products: bool = True) -> list[Bound]:
        """Read a value as parts that follow each other along an axis."""
        call = self.call(expr, "relax.concat")
        rank = len(dims(expr) or ())
        if call is None or call.attrs.axis is None or int(call.attrs.axis) % rank != axis:
            return [self.part(expr, products)]
        self.inside |= {expr}
        fields = self.bound(call.args[0])
        if isinstance(fields, relax.Tuple):
            self.inside |= {call.args[0]}
        parts: Sequence[relax.Expr] = (fields or call.args[0]).fields
        return [self.part(field, products) for field in parts]
