"""Matchers from TVM's own pattern language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from .driver import Match
from .graph import Graph


def pattern(dfp: Any, **captures: Any) -> Callable[[Graph, relax.Var], Match | None]:
    """Return a matcher made from TVM's pattern language.

    Parameters
    ----------
    dfp : tvm.relax.dpl.DFPattern
        Pattern of the root.
    captures : tvm.relax.dpl.DFPattern
        Sub-patterns of ``dfp`` whose matched expressions are the operands.
    """

    def match(graph: Graph, root: relax.Var) -> Match | None:
        found = dfp.extract_matched_expr(graph.value[root], graph.bindings)
        if found is None:
            return None
        operands = {name: found[sub] for name, sub in captures.items()}
        interior: set[relax.Var] = {root}
        stops = [e for e in operands.values() if isinstance(e, relax.Var)]
        stack = [graph.value[root]]
        matched = {e for e in found.values() if isinstance(e, relax.Call)}
        while stack:
            expr = stack.pop()
            for arg in expr.args if isinstance(expr, relax.Call) else ():
                if isinstance(arg, relax.Var) and arg not in stops and arg not in interior:
                    value = graph.value.get(arg)
                    if value is not None and value in matched:
                        interior.add(arg)
                        stack.append(value)
        return Match(graph, root, operands, frozenset(interior))

    return match
