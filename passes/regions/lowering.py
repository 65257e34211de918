"""Regions to kernels: what every pass that lowers one kind of region does alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tvm
from tvm import relax, tirx

from crossloom.errors import UnsupportedTarget
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.schedules.machine import Machine
from crossloom.verdict import Verdict, accept, refuse

from .linear import NoKernel
from .once import read_once

Region = TypeVar("Region")
#: From a parameter of a region, or a constant in it, to what the caller has there.
Outer = Callable[[relax.Expr], relax.Expr]


def lowering_pass(
    name: str,
    composite: str,
    read: Callable[[Graph], Region],
    lower: Callable[[Site, Region, Outer, Machine], tuple[tirx.PrimFunc, Sequence[relax.Expr]]],
    target: tvm.target.Target | None,
    legal: Callable[[Region, tvm.target.Target], Verdict] = lambda region, target: accept(),
) -> tvm.transform.Pass:
    """Return a pass that puts a call of a kernel in the place of every call of a region.

    Parameters
    ----------
    name : str
        The pass's registry name; its kernels are called after it.
    composite : str
        The region's name.
    read : callable (Graph) -> Region
        Reads the region's body; raises :class:`NoKernel` where there is no kernel for it.
    lower : callable (Site, Region, Outer, Machine) -> (PrimFunc, operands)
        Writes the kernel; may emit operators on its operands.
    target : tvm.target.Target or None
        Registers and vectors are its; None takes the current target.
    legal : callable (Region, Target) -> Verdict
        What the target says of a region, where there is one.

    Notes
    -----
    The pass raises :class:`UnsupportedTarget` when it runs and there is no target.
    """

    def current() -> tvm.target.Target | None:
        return target or tvm.target.Target.current(allow_none=True)

    read_region = read_once(read)

    def match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
        callee = graph.callee(root)
        if callee is None:
            return None
        try:
            region = read_region(graph, callee)
        except NoKernel as problem:
            return refuse("no-kernel", root.name, str(problem))
        verdict = accept() if (found := current()) is None else legal(region, found)
        if not verdict.fired:
            return verdict
        return Match(graph, root, graph.operands(root), frozenset((root,)), {"region": region})

    def replace(site: Site) -> relax.Expr:
        found = current()
        if found is None:
            raise UnsupportedTarget(
                f"{name} knows no target", "pass one, or run it inside `with tvm.target.Target(...)`"
            )

        def outer(expr: relax.Expr) -> relax.Expr:
            return site[expr.name] if isinstance(expr, relax.Var) else expr

        func, operands = lower(site, site.match.facts["region"], outer, Machine.of(found))
        gvar = site.add_kernel(func, f"{composite.split('.')[-1]}_kernel")
        ty = site.match.root.ty
        return relax.call_tir(gvar, list(operands), list(ty.fields) if isinstance(ty, relax.TupleType) else ty)

    return rewrite_pass(name, [Rule(name, frozenset({composite}), match, replace)])
