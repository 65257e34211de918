"""Read an attention and the views around it: what a kernel of schedules/attention has to compute, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import relax

from crossloom.rewrite import Graph, composite_name
from crossloom.schedules.attention import Axis, Extent, Operand, Spec

from ..matching.heads import repeated_heads
from ..matching.spelling import extents, interior
from .attention_axes import Layouts
from .columns import FLOATS, NoKernel
from .places import Place, Tracer, same

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


class _Reader(Layouts):
    def _repeated(self) -> None:
        """Take repeated heads back that the composite left outside."""
        if self.groups > 1 or any(self._layout(n) != "bhsd" for n in ("q", "k", "v")):
            return
        k, v = (repeated_heads(self.graph, self.args[name]) for name in ("k", "v"))
        if k is not None and v is not None and k[1] == v[1] > 1 and self.heads % k[1] == 0:
            self.args |= {"k": k[0], "v": v[0]}
            self.groups, self.heads = k[1], self.heads // k[1]

    # Masks -------------------------------------------------------------------------------------------------------

    def _band(self) -> tuple[Extent | None, int | None]:
        """Return what is added to a query's index for the last key it sees, and how many keys it sees.

        Where the mask is proved to be such a band, or to hide what is outside of it, and nothing can undo it.
        """
        kind, fill = str(self.facts["mask"]), str(self.facts["fill"])
        if kind not in ("causal", "causal+offset", "window") and not self.facts.get("bounded"):
            return None, None
        # Minus 1e9 in place of a score hides it from every other, unless a bias hides those, too.
        if self.facts["biased"] and self.facts["masked"] and (not fill or float(fill) != -math.inf):
            return None, None
        offset = str(self.facts["offset"])
        return (
            self.keys - self.queries if offset == "keys-queries" else int(offset),
            int(str(self.facts["window"])) if "window" in self.facts else None,
        )

    # All ---------------------------------------------------------------------------------------------------------

    def read(self, views: bool) -> Attention:
        """Read everything."""
        if views:
            self._repeated()
        tracer = Tracer(self.graph, self.core, views)
        q = tracer.source(self.args["q"], self.axes("q"))
        k, v = (self._parts(tracer, name) for name in ("k", "v"))
        if len(k) != len(v) or not all(same(*sizes) for sizes in zip(*map(self._lengths, (k, v)))):
            k, v = ([tracer.source(self.args[name], self.axes(name))] for name in ("k", "v"))
        layer = _layer_of(k[0], v[0])
        if layer is not None:
            k, v = ([_layered(places[0]), *places[1:]] for places in (k, v))
        out = tracer.result(self.axes("out"))
        (causal, window), kind = self._band(), str(self.facts["mask"])
        mask, bias = self.added("mask"), self.added("bias")
        stops = {"mask": mask, "bias": bias}
        if kind == "none" or (causal is not None and kind != "given"):
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
            window,
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
        return tracer.parts(self.args[name], self.axes(name))

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
