"""Prove which keys an attention mask keeps, from the lines that compute it or from the constant it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from crossloom.rewrite import Graph

from .evaluate import Evaluator
from .lines import Line, Offset, Steps, combine, proved
from .spelling import dtype, number

#: A finite number that stands for minus infinity: masks of -1e9 and of the type's least value are; -1e4 is not.
MINUS_INFINITY = -1e9


@dataclass(frozen=True)
class Band:
    """A mask that keeps the keys ``j <= i + offset`` of query i; with a window ``j > i + offset - window`` only."""

    offset: Offset
    window: int | None = None


def is_minus_infinity(value: float, kind: str) -> bool:
    """Return whether a number added to a score, or put in its place, masks it out."""
    return value <= (-65504.0 if kind == "float16" else MINUS_INFINITY)


def kept(graph: Graph, mask: relax.Expr, shape: Sequence[tirx.Expr], form: str) -> Band | str:
    """Return the band where a mask is proved to keep exactly that, ``"none"`` where it keeps all, else ``"given"``.

    Parameters
    ----------
    shape : sequence of dimensions
        (queries, keys).
    form : str
        ``"add"``: added to the scores; ``"keep"`` and ``"drop"``: boolean, true where a score stays or goes.
    """
    value = Evaluator(graph).at(mask)
    return _read(value, shape, form, dtype(mask)) if isinstance(value, Steps) else "given"


def kept_within(graph: Graph, mask: relax.Expr, shape: Sequence[tirx.Expr]) -> Band | None:
    """Return the band outside of which a boolean mask is proved to keep no key, whatever it keeps inside.

    Padding is hidden so: a band, and what the model is given.
    """
    band = _read(_at_most(Evaluator(graph), mask), shape, "keep", "bool")
    return band if isinstance(band, Band) else None


def _at_most(evaluator: Evaluator, expr: relax.Expr) -> Steps:
    """Return a mask that keeps all that another keeps."""
    every, graph = Steps((1.0,)), evaluator.graph
    value = evaluator.at(expr)
    if isinstance(value, Steps):
        return value
    name, call = graph.op(expr), graph.resolve(expr)
    if name in ("relax.logical_and", "relax.bitwise_and"):
        sides = [_at_most(evaluator, side) for side in call.args]
        return combine(lambda a, b: float(bool(a) and bool(b)), sides) or every
    if name in ("relax.broadcast_to", "relax.expand_dims"):
        seen = evaluator.view(call, name, _at_most(evaluator, call.args[0]))
        return seen if isinstance(seen, Steps) else every
    return every


def _read(value: Steps, shape: Sequence[tirx.Expr], form: str, kind: str) -> Band | str:
    """Return the band, ``"none"`` or ``"given"``; kind is the mask's element type."""

    def keeps(x: float) -> bool | None:
        if form == "add":
            return True if x == 0 else False if is_minus_infinity(x, kind) else None
        return bool(x) == (form == "keep")

    if not value.lines:
        return "none" if keeps(value.values[0]) else "given"
    slopes = (0, 0, *value.lines[0].slopes)
    if slopes[-1] > 0:
        value = value.turned()
        slopes = (0, 0, *value.lines[0].slopes)
    queries, keys = map(number, shape)
    # The only query is number 0.
    single = isinstance(queries, int) and queries == 1
    if any(slopes[:-2]) or slopes[-1] != -1 or slopes[-2] not in ((0, 1) if single else (1,)):
        return "given"
    # The lines are ``i - j + offset``: what is reached first bounds keys from above.
    side = [keeps(x) for x in value.values]
    if side == [False, True]:
        return _band(value.lines[0], None, queries, keys)
    if side == [False, True, False]:
        return _band(value.lines[0], value.lines[1], queries, keys)
    if side == [True, False]:
        # No key lies behind those that the first query sees.
        return _band(Line((), keys - 1), value.lines[0], queries, keys)
    return "given"


def _band(upper: Line, lower: Line | None, queries: Offset, keys: Offset) -> Band | str:
    """Return the band between two lines; a query that sees no key is another function than masked attention."""
    offset = upper.offset
    if not proved(offset >= 0):
        return "given"
    if lower is None:
        return Band(offset)
    window = offset - lower.offset
    if not isinstance(window, int):
        window = tvm.sym.Analyzer().simplify(window)
    if not isinstance(window, (int, tirx.IntImm)) or int(window) < 1:
        return "given"
    if not proved(queries + offset - int(window) < keys):
        return "given"
    return Band(offset, int(window))
