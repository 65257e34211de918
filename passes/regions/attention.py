"""Read an attention and the views around it: what a kernel of schedules/attention has to compute, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import relax

from crossloom.rewrite import Graph, composite_attrs, composite_name
from crossloom.schedules.attention import Axis, Extent, Operand, Role, Spec

from ..matching.heads import repeated_heads
from ..matching.spelling import dims, interior, same_dims
from .columns import FLOATS, NoKernel
from .places import Place, Tracer, same
from .views import extents

#: The composites' names.
ATTENTION, ATTENTION_REGION = "crossloom.attention", "crossloom.fused_attention"


@dataclass(frozen=True)
class Attention:
    """What an attention computes.

    Attributes
    ----------
    spec : Spec
    operands : tuple of relax.Expr
        In the kernel's order, but for the result.
    result : relax.Var
        The last view of what the kernel makes.
    members : frozenset of relax.Var
        Bindings that the kernel stands for.
    inputs : dict of str to relax.Expr
        What the members read, by the names that a region gives it: also a mask that the kernel does not need.
    """

    spec: Spec
    operands: tuple[relax.Expr, ...]
    result: relax.Var
    members: frozenset[relax.Var]
    inputs: dict[str, relax.Expr]


def read_attention(graph: Graph, core: relax.Var | None = None, views: bool = True) -> Attention:
    """Read a call of ``crossloom.attention`` and what is around it.

    Parameters
    ----------
    graph : Graph
        Of the function that the call is in: a model's, or a region's own.
    core : relax.Var or None
        The call; None takes the only one.
    views : bool
        Whether what is around it is read along.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what it holds.
    """
    if core is None:
        found = [var for var in graph.order if (f := graph.callee(var)) is not None and composite_name(f) == ATTENTION]
        if len(found) != 1:
            raise NoKernel(f"{len(found)} attentions in one region")
        (core,) = found
    return _Reader(graph, core).read(views)


class _Reader:
    def __init__(self, graph: Graph, core: relax.Var) -> None:
        self.graph, self.core = graph, core
        callee = graph.callee(core)
        assert callee is not None
        self.facts = composite_attrs(callee)
        self.args = graph.operands(core)
        #: The composite's own parameters: equal dimensions are the same there, whatever they are at the call.
        self.params = {p.name: p for p in callee.params}
        self.groups = int(str(self.facts["groups"]))
        self._size()

    # Sizes -------------------------------------------------------------------------------------------------------

    def _along(self, name: str, layout: str, letter: str) -> Extent:
        value = self.core if name == "out" else self.args[name]
        return extents(value)[layout.index(letter)]

    def _layout(self, name: str) -> str:
        facts = {"q": "layout", "k": "key_layout", "v": "value_layout", "out": "out_layout"}
        return str(self.facts[facts[name]])

    def _size(self) -> None:
        """Find the extents of all roles."""
        q, out = self._layout("q"), self._layout("out")
        known = [dims(self.args[n]) for n in ("q", "k", "v")]
        if any(shape is None for shape in (*known, dims(self.core))):
            raise NoKernel(f"{self.core.name}: operands of unknown shape")
        self.queries = self._along("q", q, "s")
        self.keys = self._along("k", self._layout("k"), "s")
        lanes = [self._along("q", q, "d"), self._along("v", self._layout("v"), "d")]
        if not all(isinstance(n, int) and n > 0 for n in lanes):
            raise NoKernel(f"{self.core.name}: heads of symbolic or no size")
        self.lanes, self.value_lanes = (int(n) for n in lanes)
        if "n" in q:
            merged = self._along("q", q, "n")
            total = self._heads_in_mask(merged)
            self.batch: Extent = merged if total == 1 else int(merged) // total
        else:
            found = self._along("q", q, "h")
            if not isinstance(found, int):
                raise NoKernel(f"{self.core.name}: a symbolic number of heads")
            total = found
            self.batch = self._along("q" if "n" in out else "out", q if "n" in out else out, "b")
        if total % self.groups:
            raise NoKernel(f"{self.core.name}: {total} query heads in groups of {self.groups}")
        self.heads = total // self.groups

    def _heads_in_mask(self, merged: Extent) -> int:
        """Return how many heads are folded into the batch, where a mask tells them apart; 1 where none does."""
        for name in ("mask", "bias"):
            shape = extents(self.args[name]) if name in self.args else ()
            if len(shape) == 4 and any(d != 1 for d in shape[:2]):
                batch, heads = shape[:2]
                if not all(isinstance(n, int) for n in (batch, heads, merged)):
                    raise NoKernel(f"{self.core.name}: a mask of heads that are folded into a symbolic batch")
                return int(heads) if heads != 1 else int(merged) // max(1, int(batch))
        return 1

    # Operands ----------------------------------------------------------------------------------------------------

    def _axes(self, name: str) -> tuple[Axis, ...]:
        layout, sequence = self._layout(name), "query" if name in ("q", "out") else "key"
        grouped = name in ("q", "out") and self.groups > 1
        head: tuple[tuple[Role, Extent], ...] = (("head", self.groups), ("group", 1)) if grouped else (("head", 1),)
        total = self.heads * (self.groups if name in ("q", "out") else 1)
        axes = {
            "b": Axis((("batch", 1),)),
            "h": Axis(head),
            "n": Axis((("batch", total), *head)),
            "s": Axis(((sequence, 1),)),
            "d": Axis((("lane", 1),)),
        }
        wanted = {"b": self.batch, "h": total, "n": self.batch * total}
        wanted |= {"s": self.queries if sequence == "query" else self.keys}
        wanted |= {"d": self.lanes if name in ("q", "k") else self.value_lanes}
        out = []
        for letter, extent in zip(layout, extents(self.core if name == "out" else self.args[name]), strict=True):
            if letter in "bh" and isinstance(extent, int) and extent == 1:
                # One for all, or the only one.
                out.append(Axis())
            elif same(extent, wanted[letter]):
                out.append(axes[letter])
            else:
                raise NoKernel(f"{self.core.name}: {name} has {extent} where {wanted[letter]} are due")
        return tuple(out)

    def _added(self, name: str) -> Place | None:
        """Return a mask or bias, each of its axes following one of the scores'."""
        if name not in self.args:
            return None
        shape, q = dims(self.params[name]) or [], dims(self.params["q"]) or []
        if not 1 <= len(shape) <= 4:
            raise NoKernel(f"{self.core.name}: {name} of {len(shape)} dimensions")
        groups: tuple[tuple[Role, Extent], ...] = (("group", 1),) if self.groups > 1 else ()
        head = Axis((("head", self.groups), *groups))
        both = Axis((("batch", self.heads * self.groups), *head.terms))
        axes = [Axis((("query", 1),)), Axis((("key", 1),))]
        if len(shape) == 4:
            axes = [Axis((("batch", 1),)), head, *axes]
        elif len(shape) == 3:
            heads_apart = len(q) == 4 and same_dims(shape[:1], [q[self._layout("q").index("h")]])
            axes = [head if heads_apart else both, *axes]
        axes = axes[-len(shape) :]
        sizes = extents(self.params[name])
        return Place(self.args[name], tuple(Axis() if n == 1 else axis for n, axis in zip(sizes, axes)))

    def _repeated(self) -> None:
        """Take repeated heads back that the composite left outside."""
        if self.groups > 1 or any(self._layout(n) != "bhsd" for n in ("q", "k", "v")):
            return
        k, v = (repeated_heads(self.graph, self.args[name]) for name in ("k", "v"))
        if k is not None and v is not None and k[1] == v[1] > 1 and self.heads % k[1] == 0:
            self.args |= {"k": k[0], "v": v[0]}
            self.groups, self.heads = k[1], self.heads // k[1]

    # Masks -------------------------------------------------------------------------------------------------------

    def _causal(self) -> Extent | None:
        """Return what is added to a query's index, where the mask is proved to be causal and nothing can undo it."""
        kind, fill = str(self.facts["mask"]), str(self.facts["fill"])
        if kind not in ("causal", "causal+offset"):
            return None
        # Minus 1e9 in place of a score hides it from every other, unless a bias hides those, too.
        if self.facts["biased"] and self.facts["masked"] and (not fill or float(fill) != -math.inf):
            return None
        offset = str(self.facts["offset"])
        return self.keys - self.queries if offset == "keys-queries" else int(offset)

    # All ---------------------------------------------------------------------------------------------------------

    def read(self, views: bool) -> Attention:
        """Read everything."""
        if views:
            self._repeated()
        tracer = Tracer(self.graph, self.core, views)
        q = tracer.source(self.args["q"], self._axes("q"))
        k, v = (self._parts(tracer, name) for name in ("k", "v"))
        if len(k) != len(v) or not all(same(*sizes) for sizes in zip(*map(self._lengths, (k, v)))):
            k, v = ([tracer.source(self.args[name], self._axes(name))] for name in ("k", "v"))
        layer = _layer_of(k[0], v[0])
        if layer is not None:
            k, v = ([_layered(places[0]), *places[1:]] for places in (k, v))
        out = tracer.result(self._axes("out"))
        causal, kind = self._causal(), str(self.facts["mask"])
        mask, bias = self._added("mask"), self._added("bias")
        stops = {"mask": mask, "bias": bias}
        if kind == "none" or causal is not None:
            mask = None
        form, fill = str(self.facts["mask_form"]), str(self.facts["fill"])
        places = [q, *k, *v, *(p for p in (mask, bias) if p is not None)]
        self._types([p.operand for p in (q, *k, *v, out)], [p.operand for p in (mask, bias) if p is not None])
        spec = Spec(
            self.batch,
            self.heads,
            self.groups,
            self.queries,
            self._lengths(k),
            self.lanes,
            self.value_lanes,
            float(str(self.facts["scale"])),
            q.operand,
            tuple(p.operand for p in k),
            tuple(p.operand for p in v),
            out.operand,
            None if mask is None else mask.operand,
            form if form in ("keep", "drop") else "add",
            float(fill) if fill else 0.0,
            None if bias is None else bias.operand,
            bool(self.facts["bias_inside"]),
            causal,
            None,
            str(self.facts["empty_rows"]) == "zero",
            layer is not None,
        )
        inputs = {"q": q.value, **self._named("k", k), **self._named("v", v)}
        inputs |= {name: place.value for name, place in stops.items() if place is not None}
        result = out.value
        assert isinstance(result, relax.Var)
        members = interior(self.graph, result, list(inputs.values()))
        given = [] if layer is None else [relax.const(layer, "int64")]
        return Attention(spec, (*(p.value for p in places), *given), result, members, inputs)

    def _parts(self, tracer: Tracer, name: str) -> list[Place]:
        return tracer.parts(self.args[name], self._axes(name))

    def _lengths(self, places: list[Place]) -> tuple[Extent, ...]:
        """Return how many keys lie in each part."""
        return tuple(self.keys if place.keys is None else place.keys for place in places)

    @staticmethod
    def _named(name: str, places: list[Place]) -> dict[str, relax.Expr]:
        names = [name] if len(places) == 1 else [f"{name}_past", f"{name}_new"]
        return dict(zip(names, (p.value for p in places)))

    def _types(self, values: list[Operand], masks: list[Operand]) -> None:
        for operand in values:
            if operand.dtype not in FLOATS:
                raise NoKernel(f"{self.core.name}: values of type {operand.dtype}")
        for operand in masks:
            if operand.dtype not in FLOATS | {"bool"}:
                raise NoKernel(f"{self.core.name}: a mask of type {operand.dtype}")


def _fixed(place: Place) -> list[int]:
    """Return the axes of which one place, not the only one, is read."""
    return [i for i, (axis, n) in enumerate(zip(place.axes, extents(place.value))) if not axis.terms and n != 1]


def _layer_of(k: Place, v: Place) -> int | None:
    """Return which layer's keys and values are read, where those of several stand in one tensor."""
    at = [_fixed(place) for place in (k, v)]
    if any(len(axes) != 1 for axes in at):
        return None
    layers = [place.axes[axes[0]].offset for place, axes in zip((k, v), at)]
    return layers[0] if isinstance(layers[0], int) and layers[0] == layers[1] else None


def _layered(place: Place) -> Place:
    """Return a place whose layer is given when the kernel runs."""
    (at,) = _fixed(place)
    return replace(place, axes=(*place.axes[:at], Axis((("layer", 1),)), *place.axes[at + 1 :]))
