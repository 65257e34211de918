"""Take a feed-forward block apart into two parts that can grow: all up to the product, and the layer behind it.

    y = gated_mlp(x, gate, up, down)                       # act(x @ gate) * (x @ up) @ down
->  h = fused_linear(x, gate, up); y = linear(h, down)     # fused_linear: two linear layers, activation, product
    y = mlp(x, up, down)
->  h = fused_linear(x, up); y = linear(h, down)           # fused_linear: linear layer, activation

Fires for ``crossloom.gated_mlp`` (SwiGLU, GeGLU, ReGLU; gate and up by themselves or packed into one weight) and
``crossloom.mlp``, with or without biases.  Later passes put a norm into the region and a residual behind
``linear``, and at last both into one kernel (:mod:`crossloom.passes.fuse_feed_forward`).
Never where operands or sums are of different element types, a weight is of symbolic size, or the shape of x is
unknown: the block then stays one composite.

Numerics: reassociates (for float16 the activation is rounded once).  Linear in the module's size.
Source: Shazeer 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, composite_attrs, outline, rewrite_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dims, dtype, sizes
from .regions.composites import ACTIVATION_KINDS, activation, linear
from .regions.linear import LINEAR_REGION

_NAME = "fuse-gated-mlp"
_BLOCKS = frozenset({"crossloom.gated_mlp", "crossloom.mlp"})
_WEIGHTS = ("gate", "up", "packed", "down")


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    callee, call = graph.callee(root), graph.value[root]
    if callee is None or not isinstance(call, relax.Call):
        return None
    body = Graph(graph.name, callee, graph.mod)
    products = [var for var in body.order if body.op(var) == "relax.matmul"]
    facts = {**composite_attrs(callee), "products": products}
    return Match(graph, root, graph.operands(root), frozenset((root,)), facts)


def _legal(m: Match) -> Verdict:
    kinds = {dtype(e) for e in (*m.captures.values(), *m.facts["products"], m.root)}
    if len(kinds) > 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    if m.facts["activation"] not in ACTIVATION_KINDS:
        return refuse("unknown-activation", m.root.name, str(m.facts["activation"]))
    for name in _WEIGHTS:
        if name in m.captures and None in (sizes(m[name]) or [None]):
            return refuse("weight-of-symbolic-size", getattr(m[name], "name", name))
    return accept() if dims(m["x"]) is not None else refuse("shape-unknown", getattr(m["x"], "name", "x"))


def _worth(m: Match) -> Verdict:
    """Return what is saved: the layers' results, and what the activation makes, are not written and read again."""
    products = {name: sizes(m[name]) or [] for name in _WEIGHTS if name in m.captures}
    rows = _count((sizes(m["x"]) or [])[:-1])
    inner = products["down"][0 if m.facts["down_layout"] == "in_out" else 1] or 0
    between = 3 if len(products) == 3 or "packed" in products else 1
    macs = rows * sum(_count(shape) for shape in products.values())
    return accept(bytes_saved=2 * between * rows * inner * tvm.DataType(dtype(m.root)).bits // 8, macs=macs)


def _count(shape: Sequence[int | None]) -> int:
    """Return how many values there are, 0 where a size is symbolic."""
    return math.prod(size or 0 for size in shape)


def _hidden(site: Site) -> relax.Call:
    """Return the region of everything up to the product."""
    facts = site.match.facts
    inputs = {name: site[name] for name in site.match.captures if not name.startswith("down")}

    def body(builder: relax.BlockBuilder, **operands: relax.Var) -> relax.Expr:
        def layer(name: str) -> relax.Var:
            layout, bias = facts[f"{name}_layout"], operands.get(f"{name}_bias")
            return builder.emit(linear(site, operands["x"], operands[name], bias, layout))

        kind = facts["activation"]
        if "packed" in operands:
            halves = builder.emit(relax.op.split(layer("packed"), 2, -1))
            first, second = (builder.emit(relax.TupleGetItem(halves, i)) for i in range(2))
            gate, up = (first, second) if facts["packed"] == "gate-up" else (second, first)
        elif "gate" in operands:
            gate, up = layer("gate"), layer("up")
        else:
            return activation(site, layer("up"), kind)
        return relax.op.multiply(builder.emit(activation(site, gate, kind)), up)

    return outline(site, LINEAR_REGION, inputs, body)


def _replace(site: Site) -> relax.Expr:
    hidden = site.builder.emit(_hidden(site))
    bias = site["down_bias"] if "down_bias" in site.match.captures else None
    return linear(site, hidden, site["down"], bias, site.match.facts["down_layout"])


def block_rule(name: str = "gated-mlp", chosen: Callable[[Graph, relax.Var], bool] = lambda graph, root: True) -> Rule:
    """Return the rule, for all blocks or some."""

    def match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
        return _match(graph, root) if chosen(graph, root) else None

    return Rule(name, _BLOCKS, match, _replace, _legal, _worth)


def FuseGatedMLP() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return rewrite_pass(_NAME, [block_rule()])


PASS = PassInfo(_NAME, FuseGatedMLP, "fuse", REASSOCIATES, doc="Feed-forward blocks become two regions.")
