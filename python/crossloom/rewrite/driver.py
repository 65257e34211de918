"""The rewriting driver: pattern -> legal -> worth -> replace over all functions of a module.

Each rule sees every binding whose operator is one of its roots; a match is checked, weighed and either becomes
a replacement or leaves a refusal in the ledger.  One index, one rewriting walk a function: linear in the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..verdict import Verdict, accept, record, refuse
from .graph import Graph, children


@dataclass(frozen=True)
class Match:
    """A place where a rule's pattern holds.

    Attributes
    ----------
    graph : Graph
    root : relax.Var
        The binding that will be replaced.
    captures : dict of str to relax.Expr
        Operands by the pattern's names; they stay.
    interior : frozenset of relax.Var
        Bindings that the replacement makes unnecessary, the root among them.
    facts : dict of str to object
        What the matcher found out (axes, epsilon, convention ...).
    """

    graph: Graph
    root: relax.Var
    captures: dict[str, relax.Expr]
    interior: frozenset[relax.Var]
    facts: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> relax.Expr:
        return self.captures[name]


class Site:
    """Where a replacement is built: the module's builder, and the captures as they are after earlier rewrites.

    A replacement may refer to captures only: what lay between them and the root is gone.

    Attributes
    ----------
    builder : relax.BlockBuilder
        Emits into the place of the root; ``add_func`` adds private functions (equal ones are shared).
    """

    def __init__(
        self,
        match: Match,
        builder: relax.BlockBuilder,
        visit: Callable[[relax.Expr], relax.Expr],
        added: dict[ir.BaseFunc, ir.GlobalVar],
    ) -> None:
        self.match, self.builder, self._visit, self._added = match, builder, visit, added

    def add_kernel(self, func: ir.BaseFunc, name: str) -> ir.GlobalVar:
        """Add a function to the module; the very same object is added once, without comparing what is in it."""
        if func not in self._added:
            self._added[func] = self.builder.add_func(func, name)
        return self._added[func]

    def __getitem__(self, name: str) -> relax.Expr:
        return self._visit(self.match.captures[name])


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes
    ----------
    name : str
        Stands in verdicts.
    roots : frozenset of str
        Operator names (or composite names) of the bindings that can be a root; ``TupleGetItem`` for results of a tuple.
    match : callable (Graph, relax.Var) -> Match, Verdict or None
        None where the pattern is not there; a refusing Verdict where it is there but cannot be proved.
    legal : callable (Match) -> Verdict
    worth : callable (Match) -> Verdict
    replace : callable (Site) -> relax.Expr
        The expression to stand in the root's place.
    shared_interior : bool
        Whether values inside the pattern may have users outside (they are then kept beside the replacement).
    """

    name: str
    roots: frozenset[str]
    match: Callable[[Graph, relax.Var], Match | Verdict | None]
    replace: Callable[[Site], relax.Expr]
    legal: Callable[[Match], Verdict] = lambda m: accept()
    worth: Callable[[Match], Verdict] = lambda m: accept()
    shared_interior: bool = False


class _Asks(Protocol):
    """What every rule has, whatever it does with a match."""

    @property
    def name(self) -> str: ...

    @property
    def roots(self) -> frozenset[str]: ...

    @property
    def match(self) -> Callable[[Graph, relax.Var], Match | Verdict | None]: ...

    @property
    def legal(self) -> Callable[[Match], Verdict]: ...

    @property
    def worth(self) -> Callable[[Match], Verdict]: ...


AnyRule = TypeVar("AnyRule", bound=_Asks)

_limit: ContextVar[Counter[tuple[str, str, str]] | None] = ContextVar("crossloom_rewrite_limit", default=None)


@contextmanager
def limit_rewrites(limits: Mapping[tuple[str, str, str], int]) -> Iterator[None]:
    """Let only so many candidates fire inside at each (rule, function, site); used to bisect.

    All others are refused with the code ``held-back``, those of rules too that find something only because another
    rewrite was held back.  A place counts over everything that runs inside: a pass may come by it more than once.
    """
    token = _limit.set(Counter(dict(limits)))
    try:
        yield
    finally:
        _limit.reset(token)


def root_name(graph: Graph, var: relax.Var) -> str:
    """Return the operator or composite that a binding calls, ``\"\"`` where it calls neither."""
    value = graph.value[var]
    if not isinstance(value, relax.Call):
        return ""
    if isinstance(value.op, ir.Op):
        return value.op.name
    return graph.composite(value.op) if isinstance(value.op, ir.GlobalVar) else ""


def _judge(rule: Rule, match: Match, claimed: set[relax.Var]) -> Verdict:
    graph = match.graph
    for var in match.interior:
        if var in claimed:
            return refuse("claimed-by-earlier-rewrite", var.name)
        if var in graph.casts:
            return refuse("crosses-a-match-cast", var.name, "what it asserts of a shape would be lost")
        if graph.scope[var] != graph.scope[match.root]:
            return refuse("crosses-a-branch", var.name)
        if not rule.shared_interior and var is not match.root:
            outside = [u for u in graph.users.get(var, ()) if u not in match.interior]
            if outside or var in graph.escapes:
                return refuse(
                    "intermediate-used-outside",
                    var.name,
                    "the value is read outside the pattern, so it has to exist anyway",
                )
    return weigh(rule, match)


def weigh(rule: AnyRule, match: Match) -> Verdict:
    """Return what a rule itself says of a match: whether it is legal, and then whether it is worth it."""
    verdict = rule.legal(match)
    if verdict.fired:
        weighed = rule.worth(match)
        if not weighed.fired or weighed.bytes_saved or weighed.macs or weighed.detail:
            verdict = weighed
    return verdict


@mutator
class _Rewriter(PyExprMutator):
    """Emits a function anew with replacements in place of their roots."""

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.todo: dict[relax.Var, tuple[Rule, Match]] = {}
        self.dead: set[relax.Var] = set()
        self.root: relax.Var | None = None
        self.added: dict[ir.BaseFunc, ir.GlobalVar] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.dead:
            return
        outer, self.root = self.root, binding.var if binding.var in self.todo else None
        super().visit_var_binding_(binding)
        self.root = outer

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        return super().visit_call_(call) if self.root is None else self._replaced()

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        return super().visit_tuple_getitem_(item) if self.root is None else self._replaced()

    def _replaced(self) -> relax.Expr:
        (rule, match), self.root = self.todo[self.root], None
        return rule.replace(Site(match, self.builder_, self.visit_expr, self.added))


def _left_unused(graph: Graph, todo: dict[relax.Var, tuple[Rule, Match]]) -> set[relax.Var]:
    """Return the dataflow bindings that only replaced roots (or each other) used.

    One walk backwards; TVM's ``remove_all_unused`` takes quadratic time.  Bindings nobody used before stay.
    """
    needed: set[relax.Var] = set(graph.escapes)
    dead: set[relax.Var] = set()
    for var in reversed(graph.order):
        if var not in needed and var in graph.users and var in graph.block and var not in todo:
            dead.add(var)
            continue
        operands = todo[var][1].captures.values() if var in todo else (graph.value[var],)
        for expr in operands:
            needed.update(leaf for leaf in children(expr) if isinstance(leaf, relax.Var))
    return dead


def may_fire(mod: ir.IRModule, rules: Sequence[_Asks]) -> bool:
    """Return whether a module holds what rules ask for; False only where all of them ask for composites it has not."""
    roots = {root for rule in rules for root in rule.roots}
    if not all(root.startswith("crossloom.") for root in roots):
        return True
    names = (func.attrs.get("Composite") for func in mod.functions.values() if func.attrs is not None)
    return any(name in roots for name in names)


def graphs_of(mod: ir.IRModule, within_composites: bool = False) -> Iterator[tuple[ir.GlobalVar, Graph]]:
    """Yield an index of every Relax function that rules may see."""
    for gvar, func in mod.functions_items():
        attrs = func.attrs or {}
        if not isinstance(func, relax.Function) or "Codegen" in attrs:
            continue
        if "Composite" not in attrs or within_composites:
            yield gvar, Graph(gvar.name_hint, func, mod)


def choose(
    graph: Graph, rules: Sequence[AnyRule], judge: Callable[[AnyRule, Match, set[relax.Var]], Verdict], pass_name: str
) -> list[tuple[AnyRule, Match]]:
    """Return what fires in a function, in the order of the rules, and record a verdict for every candidate.

    Parameters
    ----------
    graph : Graph
    rules : sequence
        With ``name``, ``roots`` and ``match`` as of :class:`Rule`.
    judge : callable (rule, Match, claimed bindings) -> Verdict
    pass_name : str
    """
    left = _limit.get()
    by_root: dict[str, list[relax.Var]] = {}
    for var in graph.order:
        name = "TupleGetItem" if isinstance(graph.value[var], relax.TupleGetItem) else root_name(graph, var)
        if name:
            by_root.setdefault(name, []).append(var)
    claimed: set[relax.Var] = set()
    chosen: list[tuple[AnyRule, Match]] = []
    for rule in rules:
        roots = sorted((v for r in rule.roots for v in by_root.get(r, ())), key=graph.position.__getitem__)
        for var in roots:
            if var in claimed:
                # It lies inside what an earlier rule has replaced: not a candidate any more.
                continue
            found = rule.match(graph, var)
            if found is None:
                continue
            verdict = found if isinstance(found, Verdict) else judge(rule, found, claimed)
            if verdict.fired and left is not None:
                place = (rule.name, graph.name, var.name)
                if left[place] > 0:
                    left[place] -= 1
                else:
                    verdict = refuse("held-back", detail="held back while bisecting")
            record(verdict.at(rule.name, graph.name, var.name, pass_name))
            if verdict.fired and isinstance(found, Match):
                claimed |= found.interior
                chosen.append((rule, found))
    return chosen


def apply_rules(
    mod: ir.IRModule, rules: Sequence[Rule], pass_name: str = "", within_composites: bool = False
) -> ir.IRModule:
    """Apply rules, in order of priority, to every Relax function but those a code generator has claimed.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    rules : sequence of Rule
        An earlier rule's replacement claims its bindings; later rules cannot match them.
    pass_name : str
        Registry name of the pass, for verdicts.
    within_composites : bool
        Whether composite functions are rewritten inside too.

    Returns
    -------
    tvm.ir.IRModule
        The same object when nothing fired.
    """
    if not may_fire(mod, rules):
        return mod
    work: list[tuple[ir.GlobalVar, Graph, dict[relax.Var, tuple[Rule, Match]]]] = []
    for gvar, graph in graphs_of(mod, within_composites):
        todo = {match.root: (rule, match) for rule, match in choose(graph, rules, _judge, pass_name)}
        if todo:
            work.append((gvar, graph, todo))
    if not work:
        return mod
    rewriter = _Rewriter(mod)
    for gvar, graph, todo in work:
        rewriter.todo, rewriter.dead = todo, _left_unused(graph, todo)
        rewriter.builder_.update_func(gvar, rewriter.visit_expr(graph.func))
    out = rewriter.builder_.get()
    return out.with_attrs(mod.attrs) if mod.attrs else out


def rewrite_pass(name: str, rules: Sequence[Rule], within_composites: bool = False) -> tvm.transform.Pass:
    """Return a TVM module pass that applies rules and checks that what comes out is well-formed.

    Parameters
    ----------
    name : str
        The pass's registry name; TVM's instruments and the ledger show it.
    rules, within_composites
        As for :func:`apply_rules`.
    """

    @tvm.transform.module_pass(opt_level=0, name=name)
    def transform(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        out = apply_rules(mod, rules, name, within_composites)
        if out is not mod:
            relax.analysis.well_formed(out)
        return out

    return transform
