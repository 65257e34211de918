"""A linear layer that nothing else joins is a region of its own.

    y = linear(x, w, b)
->  y = fused_linear(x, w, b)        # weights in the kernel's order, products of a tile in registers

Fires for layers that all other passes left alone: heads of language models, projectors, patch embeddings.
Never where the kernel cannot do the layer (rows of symbolic length, weights of another type), nor for few columns: they
leave its registers empty.

Numerics: reassociates (float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import sizes
from .regions.linear import LINEAR_REGION, kernel_takes

_NAME = "fuse-single-linear"
_LINEAR = "crossloom.linear"


@dataclass(frozen=True)
class Options:
    """What the pass weighs.

    Attributes
    ----------
    least_columns : int
        Columns from which the kernel is as fast as a scheduled product: two registers of AVX2 (float32).
    """

    least_columns: int = 16


def _match(graph: Graph, root: relax.Var) -> Match:
    return Match(graph, root, {}, frozenset((root,)))


def _weigh(m: Match, least_columns: int) -> Verdict:
    made = sizes(m.root) or [0]
    if (made[-1] or 0) < least_columns:
        return refuse("few-columns", m.root.name, f"{made[-1]} columns")
    depth = (sizes(m.graph.value[m.root].args[0]) or [0])[-1] or 0
    return accept(macs=depth * math.prod(size or 1 for size in made))


def FuseSingleLinear(least_columns: int = Options.least_columns) -> tvm.transform.Pass:
    """Return the pass; see the module's docstring and :class:`Options`."""
    worth = partial(_weigh, least_columns=least_columns)
    rule = GroupRule("single-linear", frozenset({_LINEAR}), _match, LINEAR_REGION, legal=kernel_takes, worth=worth)
    return group_pass(_NAME, [rule])


PASS = PassInfo(
    _NAME, FuseSingleLinear, "fuse", REASSOCIATES, Options, doc="Linear layers that nothing joins get the kernel."
)
