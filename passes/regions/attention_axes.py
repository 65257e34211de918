"""How the operands of an attention lie: its sizes, and what each axis of each operand counts."""

from __future__ import annotations

from tvm import relax

from crossloom.rewrite import Graph, composite_attrs
from crossloom.schedules.attention import Axis, Extent, Role

from ..matching.spelling import dims, extents, same_dims
from .columns import NoKernel
from .places import Place, same


class Layouts:
    """Sizes and axes of a call of ``crossloom.attention``; NoKernel where the kernel cannot do with them."""

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

    def axes(self, name: str) -> tuple[Axis, ...]:
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

    def added(self, name: str) -> Place | None:
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
