"""Prove that an attention mask is causal, from the lines that compute it or from the constant it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax, tirx

from crossloom.rewrite import Graph

from .evaluate import Evaluator
from .lines import Offset, Split, proved
from .spelling import dtype

#: A finite number that stands for minus infinity: masks of -1e9 and of the type's least value are; -1e4 is not.
MINUS_INFINITY = -1e9


def is_minus_infinity(value: float, kind: str) -> bool:
    """Return whether a number added to a score, or put in its place, masks it out."""
    return value <= (-65504.0 if kind == "float16" else MINUS_INFINITY)


def causal_offset(graph: Graph, mask: relax.Expr, shape: Sequence[tirx.Expr], form: str) -> Offset | str:
    """Return c where the mask keeps exactly keys ``j <= i + c``, ``"none"`` where all, ``"given"`` if not proved.

    Parameters
    ----------
    shape : sequence of dimensions
        (queries, keys).
    form : str
        ``"add"``: added to the scores; ``"keep"`` and ``"drop"``: boolean, true where a score stays or goes.
    """
    value = Evaluator(graph).at(mask)
    if not isinstance(value, Split):
        return "given"

    def keeps(x: float) -> bool | None:
        if form == "add":
            return True if x == 0 else False if is_minus_infinity(x, dtype(mask)) else None
        return bool(x) == (form == "keep")

    hit, miss, line = keeps(value.hit), keeps(value.miss), value.line
    if line is None:
        return "none" if hit else "given"
    if {hit, miss} != {True, False}:
        return "given"
    if miss:
        line = line.times(-1)
        line = replace(line, offset=line.offset - 1)
    slopes = (0, 0, *line.slopes)
    single = isinstance(shape[0], tirx.IntImm) and int(shape[0]) == 1
    if any(slopes[:-2]) or slopes[-1] != -1 or slopes[-2] not in ((0, 1) if single else (1,)):
        return "given"
    # With a negative offset some query would keep no key: another function than causal attention.
    return line.offset if proved(line.offset >= 0) else "given"
