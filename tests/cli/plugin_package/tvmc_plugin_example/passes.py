"""Two passes: one rewrites ``subtract(x, x)``-free additions rightly, one wrongly, by the same rule."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Match, Rule, Site, rewrite_pass


def _match(graph: Any, root: Any) -> Match:
    call = graph.value[root]
    return Match(graph, root, {"a": call.args[0], "b": call.args[1]}, frozenset({root}))


def _swapped(site: Site) -> Any:
    return relax.op.add(site["b"], site["a"])


def _wrong_where_square(site: Site) -> Any:
    """Double the sum where its last dimension is 3: right for other shapes."""
    total = relax.op.add(site["a"], site["b"])
    if int(site.match.root.ty.shape.values[-1]) != 3:
        return total
    return relax.op.multiply(total, relax.const(2.0, "float32"))


def _factory(name: str, replace: Any) -> Any:
    rule = Rule(name, frozenset({"relax.add"}), _match, replace)

    def make() -> tvm.transform.Pass:
        return rewrite_pass(name, [rule])

    make.__qualname__ = name
    return make


PASSES = (
    PassInfo("swap-add", _factory("swap-add", _swapped), "fuse", EXACT, doc="swap the operands of additions"),
    PassInfo("break-add", _factory("break-add", _wrong_where_square), "fuse", EXACT, doc="wrong on purpose"),
)
