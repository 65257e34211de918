"""Apply what follows a linear layer while its result is still in registers: activation, factor, residual sum.

    t = linear(x, w, b); y = R.add(r, t)
->  y = fused_linear(x, w, b, r)

Fires for a linear layer or fused linear region of one result, followed by an activation, a product with a number and a
sum with a value that is made elsewhere (each optional, in this order, each the only reader of the value before it).
Never when the value between is read elsewhere too, nor when the sum stretches the layer's result to a wider shape.

Numerics: reassociates (for float16 the result is rounded once, behind the last step).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, composite_name, group_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dims, dtype, sizes
from .regions.linear import ACTIVATIONS, LINEAR_REGION, kernel_takes

_NAME = "fuse-linear-epilogue"
_STEPS = frozenset({"relax.multiply", "relax.add", *ACTIVATIONS})


def _is_step(graph: Graph, var: relax.Var) -> bool:
    callee = graph.callee(var)
    name = composite_name(callee) if callee is not None else graph.op(var)
    return name == "crossloom.activation" or name in _STEPS


def _chain(graph: Graph, root: relax.Var) -> list[relax.Var]:
    """Return the steps behind a value, nearest first, as far as each is the only reader of the one before."""
    out = [root]
    while out[-1] not in graph.escapes and len(readers := dict.fromkeys(graph.users.get(out[-1], ()))) == 1:
        (reader,) = readers
        if not _is_step(graph, reader) or graph.block.get(reader) != graph.block.get(root):
            break
        out.append(reader)
        if graph.op(reader) == "relax.add":
            break
    return out


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    if isinstance(root.ty, relax.TupleType):
        return None
    chain = _chain(graph, root)
    if len(chain) == 1 and any(_is_step(graph, reader) for reader in graph.users.get(root, ())):
        return refuse("intermediate-used-outside", root.name, "it has several readers, so it has to exist anyway")
    refusal: Verdict | None = None
    # The longest chain that a kernel takes; why the whole one is not taken is told where nothing is.
    for length in range(len(chain), 1, -1):
        found = Match(graph, root, {}, frozenset(chain[:length]), {"last": chain[length - 1]})
        verdict = kernel_takes(found)
        if verdict.fired:
            return found
        refusal = refusal or verdict
    return refusal


def _worth(m: Match) -> Verdict:
    """Return what is saved: every step would have read and written the result once more."""
    shape = sizes(m.root) or [None]
    count = 1
    for size in shape:
        count *= size or 0
    steps = len(m.interior) - 1
    return accept(bytes_saved=2 * steps * count * (tvm.DataType(dtype(m.root)).bits // 8) if dims(m.root) else 0)


def FuseLinearEpilogue() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    roots = frozenset({"crossloom.linear", LINEAR_REGION})
    return group_pass(_NAME, [GroupRule("linear-epilogue", roots, _match, LINEAR_REGION, worth=_worth)])


PASS = PassInfo(_NAME, FuseLinearEpilogue, "fuse", REASSOCIATES, doc="Activation and residual join a linear layer.")
