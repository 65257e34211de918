"""Replace fused gate regions by kernels.

    y = fused_gate(a, b)                          # Composite = "crossloom.fused_gate"
->  y = R.call_tir(fused_gate_kernel, (a, b), ...)

Fires for every region that :mod:`crossloom.passes.regions.gate` can read.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Site
from crossloom.schedules.machine import Machine
from crossloom.schedules.semantic_gate import kernel

from .matching.spelling import dims, number, results_of
from .regions.gate import GATE_REGION, GateRegion, read_gate
from .regions.linear import NoKernel
from .regions.lowering import Outer, lowering_pass

_NAME = "lower-fused-gate"


def _read(graph: Graph) -> GateRegion:
    results = results_of(graph)
    widths = [number((dims(r) or [0])[-1]) for r in results]
    width = max((w for w in widths if isinstance(w, int)), default=0)
    members = frozenset(v for v in graph.order if not isinstance(graph.value[v], relax.Tuple))
    region = read_gate(graph, members, results, width)
    if any(isinstance(e, relax.Var) and e in graph.value for e in region.operands):
        raise NoKernel("an operand that is made in the region")
    return region


def _lower(
    site: Site, region: GateRegion, outer: Outer, machine: Machine
) -> tuple[tirx.PrimFunc, Sequence[relax.Expr]]:
    return kernel(region.spec, machine), [outer(e) for e in region.operands]


def LowerFusedGate(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
    """Return the pass.

    Parameters
    ----------
    target : tvm.target.Target or None
        Registers and vectors are its; None takes the current target.

    Raises
    ------
    UnsupportedTarget
        When the pass runs and there is neither.
    """
    return lowering_pass(_NAME, GATE_REGION, _read, _lower, target)


PASS = PassInfo(_NAME, LowerFusedGate, "lower", REASSOCIATES, doc="Fused gate regions become kernels.")
