"""Apply what follows a convolution while its sums are still in registers: bias, activation, factors, residual sum.

    t = R.nn.conv2d(x, w); u = R.add(t, b); v = R.add(u, r); y = R.nn.relu(v)
->  y = fused_conv(x, w, b, r)

Fires for a convolution of one to three axes (``NCHW``, ``OIHW`` and their like), of any groups, strides, padding and
dilation, whose weight is known when a model is built; alone, or followed by sums and products with a value per channel
or a number, activations, and sums with a value of the result's shape: in any order, each the only reader of the value
before it.
Never over a value that is read elsewhere too.  Where two convolutions are summed up the later one takes the sum.

Numerics: reassociates (for float16 the result is rounded once, behind the last step).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, per_graph
from crossloom.verdict import Verdict, accept, refuse

from .matching.arithmetic import of_weights
from .matching.layers import CONVOLUTIONS
from .regions.columns import NoKernel
from .regions.conv import CONV_REGION, read_conv, read_step
from .regions.growth import bytes_of
from .regions.linear import kernel_takes

_NAME = "fuse-conv-epilogue"


def _steps(graph: Graph, root: relax.Var, taken: set[relax.Var]) -> list[relax.Var]:
    """Return the bindings behind a convolution that may join it, in their order."""
    out: list[relax.Var] = []
    value = root
    while True:
        users = list(dict.fromkeys(graph.users.get(value, ())))
        if len(users) != 1 or value in graph.escapes or users[0] in taken or users[0] in graph.casts:
            return out
        if graph.block.get(users[0]) != graph.block.get(root):
            return out
        try:
            read_step(graph, users[0], value)
        except NoKernel:
            return out
        value = users[0]
        out.append(value)


@per_graph
def _chains(graph: Graph) -> dict[relax.Var, list[relax.Var]]:
    """Return the steps of every convolution; the later one of two has the first choice."""
    taken: set[relax.Var] = set()
    out: dict[relax.Var, list[relax.Var]] = {}
    for var in reversed(graph.order):
        if graph.op(var) in CONVOLUTIONS and isinstance(graph.value[var], relax.Call) and var in graph.block:
            out[var] = _steps(graph, var, taken)
            taken.update(out[var])
    return out


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    steps = _chains(graph).get(root)
    if steps is None:
        return None
    weight = graph.value[root].args[1]
    if not of_weights(graph, weight):
        return refuse("weight-is-computed", root.name, "it would be put in the kernel's order at every call")
    return Match(graph, root, {}, frozenset((root, *steps)), {"steps": steps})


def _legal(m: Match) -> Verdict:
    return kernel_takes(m, CONV_REGION, read_conv)


def _worth(m: Match) -> Verdict:
    """Return what is saved: every step would have read and written the result once more."""
    return accept(bytes_saved=2 * sum(bytes_of(var.ty) for var in m.facts["steps"]))


def FuseConvEpilogue() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return group_pass(
        _NAME, [GroupRule("conv-epilogue", CONVOLUTIONS, _match, CONV_REGION, legal=_legal, worth=_worth)]
    )


PASS = PassInfo(_NAME, FuseConvEpilogue, "fuse", REASSOCIATES, doc="Bias, activation and residual join a convolution.")
