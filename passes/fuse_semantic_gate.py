"""Gate one modality's features by how alike another one's are, in one kernel.

    n = R.sqrt(R.sum(a * a)); m = R.sqrt(R.sum(b * b)); c = R.sum(a * b) / R.maximum(n * m, eps)
    g = R.sigmoid(c * scale + bias); y = a * g
->  y = fused_gate(a, b)                          # Composite = "crossloom.fused_gate"

Fires at a logistic function of a cosine of two vectors a row, in whatever spelling: normed first or last, squares by
product or power, ``eps`` as a bound of a norm or of their product, sums or products of a row and a column; scaled and
shifted by numbers or by operands of one element; one vector for all rows of the other; with all that reads it: products
with vectors, ``1 - gate``, sums of such and of values that exist.  What is read elsewhere too is a result of its own.
Never for a logistic function of another number, nor where vectors are changed in between by anything but a factor.

Numerics: reassociates (float32 sums for float16); a vector of zeros gives what the graph's own bounds give.
Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass
from crossloom.rewrite.grouping import outputs_of
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dims, number, scalar, sizes
from .regions.gate import GATE_REGION, read_gate
from .regions.growth import bytes_of
from .regions.likeness import cosine_of
from .regions.linear import NoKernel

_NAME = "fuse-semantic-gate"
_VIEWS = ("relax.expand_dims", "relax.squeeze", "relax.reshape", "relax.broadcast_to", "relax.astype")
_NUMBERS = (
    *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
    *("relax.power", "relax.sqrt", "relax.rsqrt", "relax.negative", "relax.abs", "relax.exp", "relax.clip"),
)
#: A spelling of a cosine has some twenty lines; a graph that goes on further is something else.
_DEEP = 64


class _Cone:
    """Collects what a gate is made of, and what is made of it."""

    def __init__(self, graph: Graph, root: relax.Var) -> None:
        self.graph, self.block = graph, graph.block[root]
        self.members: set[relax.Var] = {root}
        self.width = 0

    def _call(self, expr: relax.Expr) -> tuple[str, relax.Call] | None:
        graph = self.graph
        if not isinstance(expr, relax.Var) or graph.block.get(expr) != self.block or expr in graph.casts:
            return None
        value = graph.value[expr]
        return (value.op.name, value) if isinstance(value, relax.Call) and isinstance(value.op, ir.Op) else None

    def _is_number(self, expr: relax.Expr) -> bool:
        """Return whether a value has one element a row, as far as its shape says."""
        shape = sizes(expr)
        return scalar(self.graph, expr) is not None or shape in ([], [1]) or (shape is not None and shape[-1] == 1)

    def numbers(self, expr: relax.Expr) -> bool:
        """Take along what a number of each row is made of; whether there is a sum of products in it."""
        found = self._call(expr)
        if scalar(self.graph, expr) is not None:
            self._constant(expr)
            return False
        if found is None or len(self.members) > _DEEP:
            return False
        if expr in self.members:
            return True
        op, call = found
        if op == "relax.sum" or op == "relax.matmul":
            self.members.add(expr)
            shape = dims(call.args[0]) or [0]
            width = number(shape[-1])
            self.width = width if isinstance(width, int) else 0
            for arg in call.args:
                self.vectors(arg, products=op == "relax.sum")
            return True
        if op not in _NUMBERS and op not in _VIEWS:
            return False
        taken = [self.numbers(arg) for arg in call.args if isinstance(arg, relax.Var)]
        if any(taken):
            self.members.add(expr)
        return any(taken)

    def _constant(self, expr: relax.Expr) -> None:
        """Take along the lines that cast or spread a number."""
        while isinstance(expr, relax.Var) and self.graph.block.get(expr) == self.block:
            self.members.add(expr)
            value = self.graph.value[expr]
            expr = value.args[0] if isinstance(value, relax.Call) else value

    def vectors(self, expr: relax.Expr, products: bool) -> None:
        """Take along what stands between vectors and their products."""
        found = self._call(expr)
        if found is None or expr in self.members or len(self.members) > _DEEP:
            return
        op, call = found
        args = [a for a in call.args if isinstance(a, relax.Var)]
        if op in ("relax.multiply", "relax.divide"):
            numbers = [a for a in call.args if self._is_number(a) or self._is_spread(a)]
            if numbers and len(numbers) < 2:
                self.members.add(expr)
                for arg in args:
                    if any(arg.same_as(n) for n in numbers):
                        self.numbers(arg)
                    else:
                        self.vectors(arg, products)
            elif products and op == "relax.multiply":
                self.members.add(expr)
                for arg in args:
                    self.vectors(arg, False)
        elif op in ("relax.power", "relax.square") and products:
            self.members.add(expr)
            self.vectors(args[0], False)
        elif op in ("relax.abs", "relax.expand_dims", "relax.permute_dims"):
            self.members.add(expr)
            self.vectors(args[0], products)

    def _is_spread(self, expr: relax.Expr) -> bool:
        found = self._call(expr)
        if found is None or found[0] != "relax.broadcast_to" or not self._is_number(found[1].args[0]):
            return False
        self.members.add(expr)
        self.numbers(found[1].args[0])
        return True

    def results(self, gate: relax.Var) -> bool:
        """Take along what is made of the gate; whether a vector is."""
        gates: list[relax.Var] = [gate]
        mixed: list[relax.Var] = []
        seen: set[relax.Var] = set()
        while gates or mixed:
            of_gate = bool(gates)
            var = gates.pop() if gates else mixed.pop()
            if not of_gate and self.graph.uses(var) > 1:
                continue  # Read elsewhere too, as a residual is: the sums behind belong to others.
            for user in dict.fromkeys(self.graph.users.get(var, ())):
                found = self._call(user)
                if found is None or user in seen:
                    continue
                op, call = found
                for other in call.args:
                    if scalar(self.graph, other) is not None:
                        self._constant(other)
                wide = number((dims(user) or [0])[-1]) == self.width
                if of_gate and not wide and op in (*_VIEWS, "relax.subtract", "relax.add", "relax.negative"):
                    if all(a.same_as(var) or scalar(self.graph, a) is not None or op in _VIEWS for a in call.args):
                        gates.append(user)
                elif of_gate and wide and op == "relax.broadcast_to":
                    gates.append(user)
                elif of_gate and wide and op == "relax.subtract" and scalar(self.graph, call.args[0]) is not None:
                    gates.append(user)
                elif wide and op == ("relax.multiply" if of_gate else "relax.add"):
                    mixed.append(user)
                else:
                    continue
                seen.add(user)
        kept = {v for v in seen if number((dims(v) or [0])[-1]) == self.width}
        self.members |= seen
        return bool(kept)


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    if root not in graph.block:
        return None
    cone = _Cone(graph, root)
    if not cone.numbers(graph.value[root].args[0]) or cone.width < 2:
        return None
    gated = cone.results(root)
    match = Match(graph, root, {}, frozenset(cone.members))
    try:
        region = read_gate(graph, match.interior, outputs_of(match), cone.width)
    except NoKernel as problem:
        # Without two vectors it is any other logistic function.
        return refuse("no-kernel", root.name, str(problem)) if gated and _has_two_vectors(match) else None
    likeness = cosine_of(region.spec)
    if likeness is None:
        return None
    if not likeness:
        return refuse("not-a-cosine", root.name, "the logistic function is of another number of the two vectors")
    return match


def _has_two_vectors(match: Match) -> bool:
    """Return whether a product of two different vectors is summed, and one of a vector with itself."""
    graph, own, other = match.graph, False, False
    for var in match.interior:
        if graph.op(var) in ("relax.power", "relax.square"):
            own = True
        elif graph.op(var) == "relax.multiply" and any(graph.op(u) == "relax.sum" for u in graph.users.get(var, ())):
            left, right = graph.value[var].args
            own, other = own or left.same_as(right), other or not left.same_as(right)
        elif graph.op(var) == "relax.matmul":
            other = True
    return own and other


def _worth(m: Match) -> Verdict:
    """Return what is saved: every vector in between would have been written and read once more."""
    outside = outputs_of(m)
    between = [v for v in m.interior if not any(v.same_as(o) for o in outside)]
    saved = sum(bytes_of(v.ty) for v in between)
    return accept(bytes_saved=2 * saved)


def FuseSemanticGate() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return group_pass(
        _NAME, [GroupRule("semantic-gate", frozenset({"relax.sigmoid"}), _match, GATE_REGION, worth=_worth)]
    )


PASS = PassInfo(_NAME, FuseSemanticGate, "fuse", REASSOCIATES, doc="Gates of cosine similarity become one kernel.")
