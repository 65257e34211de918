"""Growing a region of linear layers by what follows: as far as its kernel can take the steps behind them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from crossloom.rewrite import Graph, root_name

from .columns import NoKernel
from .reader import Reader


@dataclass(frozen=True)
class Growth:
    """What became of a region.

    Attributes
    ----------
    members : frozenset of relax.Var
        The linear layer or region, the names of its results, and the steps that join.
    tried : tuple of relax.Var
        Steps behind the layers, joined or not, in program order.
    problems : dict of relax.Var to str
        Steps that a kernel cannot do, and why.
    ends : frozenset of relax.Var
        Values that are read outside and so have to be results.
    """

    members: frozenset[relax.Var]
    tried: tuple[relax.Var, ...]
    problems: dict[relax.Var, str]
    ends: frozenset[relax.Var]


def grow(graph: Graph, producer: relax.Var, is_step: Callable[[relax.Var], bool]) -> Growth:
    """Find the steps behind a linear layer or region that may join it.

    A step joins where the kernel can do it, what it reads is read by other joining steps only, and what it makes is a
    result or read by joining steps only; steps of one value whose columns overlap stay outside, since the sums would
    be made twice.

    Parameters
    ----------
    graph : Graph
    producer : relax.Var
        Bound to a call of ``crossloom.linear`` or of a fused linear region.
    is_step : callable (relax.Var) -> bool
        Whether a binding is worth a try.
    """
    reader, problems = Reader(graph), {}
    try:
        reader.step(producer)
        if reader.rows is not None:
            reader.sizes_of_rows(reader.rows)
    except NoKernel as problem:
        return Growth(frozenset((producer,)), (), {producer: str(problem)}, frozenset((producer,)))
    steps: list[relax.Var] = []
    sources: dict[relax.Var, list[relax.Var]] = {}
    queue = [(graph.position[user], user) for user in dict.fromkeys(graph.users.get(producer, ()))]
    heapq.heapify(queue)
    while queue:
        _, var = heapq.heappop(queue)
        value = graph.value[var]
        if not isinstance(value, (relax.Call, relax.TupleGetItem)):
            continue  # another name
        inner = [leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var) and leaf in reader.values]
        if var in sources or not inner or graph.block.get(var) != graph.block.get(producer):
            continue
        if var in graph.casts or not (isinstance(value, relax.TupleGetItem) or is_step(var)):
            continue
        sources[var] = inner
        steps.append(var)
        try:
            reader.step(var)
        except NoKernel as problem:
            problems[var] = str(problem)
            continue
        for user in dict.fromkeys(graph.users.get(var, ())):
            heapq.heappush(queue, (graph.position[user], user))
    kept, ends = _kept(graph, reader, producer, [var for var in steps if var not in problems])
    members = {producer}
    for var in steps:
        if var in kept and all(source in members and source not in ends for source in sources[var]):
            members.add(var)
    return Growth(frozenset(members), tuple(steps), problems, frozenset(ends))


def _kept(
    graph: Graph, reader: Reader, producer: relax.Var, steps: list[relax.Var]
) -> tuple[set[relax.Var], set[relax.Var]]:
    """Return the steps that can be in a region, and the values behind which nothing joins; from the last one on."""
    kept: set[relax.Var] = set()
    ends: set[relax.Var] = set()
    for var in (*reversed(steps), producer):
        users = set(graph.users.get(var, ()))
        inside = bool(users) and var not in graph.escapes and users <= kept
        if inside and sum(reader.share(user) for user in users) <= reader.share(var):
            kept.add(var)
            continue
        ends.add(var)
        if reader.is_result(var):
            kept.add(var)
    return kept, ends


def with_table_views(graph: Graph, members: Collection[relax.Var]) -> frozenset[relax.Var]:
    """Return members and the axes of size 1 that are put into the tables of their rotations for them alone.

    Models put these in layer by layer; the tables themselves are made once, outside.
    """
    out = set(members)
    for var in members:
        if root_name(graph, var) != "crossloom.rotary":
            continue
        for name, table in graph.operands(var).items():
            if name == "x" or not isinstance(table, relax.Var) or graph.op(table) != "relax.expand_dims":
                continue
            if (rank := len(table.ty.shape)) - 1 in [int(axis) % rank for axis in graph.value[table].attrs.axis]:
                continue
            alone = table not in graph.escapes and set(graph.users[table]) <= out
            if alone and table in graph.value and graph.block.get(table) == graph.block.get(var):
                out.add(table)
    return frozenset(out)


def bytes_of(ty: relax.Type) -> int:
    """Return the size of a tensor or a tuple of them, 0 where a dimension is symbolic or the shape unknown."""
    if isinstance(ty, relax.TupleType):
        return sum(bytes_of(field) for field in ty.fields)
    if not isinstance(ty.shape, relax.ShapeExpr):
        return 0
    static = [int(d) if isinstance(d, tirx.IntImm) else 0 for d in ty.shape]
    return math.prod(static) * (tvm.DataType(str(ty.dtype)).bits // 8)
