"""Apply what follows a linear layer while its result is still in registers: activation, factor, residual sum.

    t = linear(x, w, b); y = R.add(r, t)
->  y = fused_linear(x, w, b, r)

Fires for a linear layer, or a result of a fused linear region, followed by an activation, a product with a number and a
sum with a value that is made elsewhere (each optional, in this order, each the only reader of the value before it).
Never when the value between is read elsewhere too, nor when the sum stretches the layer's result to a wider shape.

Numerics: reassociates (for float16 the result is rounded once, behind the last step).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
from crossloom.verdict import Verdict, accept, refuse

from .regions.growth import bytes_of, grow
from .regions.linear import ACTIVATIONS, LINEAR_REGION

_NAME = "fuse-linear-epilogue"
_STEPS = frozenset({"relax.multiply", "relax.add", "crossloom.activation", *ACTIVATIONS})


def _is_step(graph: Graph, var: relax.Var) -> bool:
    return root_name(graph, var) in _STEPS


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = grow(graph, root, lambda var: _is_step(graph, var))
    steps = [var for var in found.tried if not isinstance(graph.value[var], relax.TupleGetItem)]
    joined = [var for var in steps if var in found.members]
    if joined:
        return Match(graph, root, {}, found.members, {"steps": joined})
    if not steps:
        return None
    if steps[0] in found.problems:
        return refuse("no-kernel", steps[0].name, found.problems[steps[0]])
    return refuse("intermediate-used-outside", root.name, "it has several readers, so it has to exist anyway")


def _worth(m: Match) -> Verdict:
    """Return what is saved: every step would have read and written the result once more."""
    return accept(bytes_saved=2 * sum(bytes_of(var.ty) for var in m.facts["steps"]))


def FuseLinearEpilogue() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    roots = frozenset({"crossloom.linear", LINEAR_REGION})
    return group_pass(_NAME, [GroupRule("linear-epilogue", roots, _match, LINEAR_REGION, worth=_worth)])


PASS = PassInfo(_NAME, FuseLinearEpilogue, "fuse", REASSOCIATES, doc="Activation and residual join a linear layer.")
