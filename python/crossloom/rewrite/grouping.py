"""The grouping driver: bindings that belong together become one region, a composite of one or more results.

Where :mod:`driver` puts an expression in the place of one binding, a group keeps its bindings as they are and only
says that they are one operation: ``q, k, v = region(x, wq, wk, wv)``.  The members need not stand side by side, and
what they make may be read in between: bindings are put in an order in which that works, and a group for which there is
none (something outside depends on one member and feeds another) is refused.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr import _update_type

from ..errors import InternalError
from ..verdict import Verdict, accept, refuse
from .composite import Attr, composite_name, fresh_params
from .driver import Match, choose, graphs_of, may_fire, weigh
from .graph import Graph, children, rebuild
from .sizes import dimensions, in_terms_of, is_size, sizes_in, translate
from .spelling import Spelling, spelling
from .splice import splice

#: Composites of this kind are opened when they join a larger group.
REGION = "crossloom.fused_"


@dataclass(frozen=True)
class GroupRule:
    """One kind of group.

    Attributes
    ----------
    name : str
        Stands in verdicts.
    roots : frozenset of str
        Operator names (or composite names) of the bindings at which a group may be found.
    match : callable (Graph, relax.Var) -> Match, Verdict or None
        A match's interior are the members; its captures are not read.
    composite : str
        Name of the region, beginning with ``crossloom.fused_``.
    attrs : callable (Match) -> mapping
        Facts to store with it.
    legal, worth : callable (Match) -> Verdict
    """

    name: str
    roots: frozenset[str]
    match: Callable[[Graph, relax.Var], Match | Verdict | None]
    composite: str
    attrs: Callable[[Match], Mapping[str, Attr]] = lambda m: {}
    legal: Callable[[Match], Verdict] = lambda m: accept()
    worth: Callable[[Match], Verdict] = lambda m: accept()


def members_of(match: Match) -> list[relax.Var]:
    """Return the bindings of a group in program order."""
    return sorted(match.interior, key=match.graph.position.__getitem__)


def inputs_of(match: Match) -> list[relax.Expr]:
    """Return the variables that members read and do not define, in the order of first use; constants stay inside."""
    out: dict[relax.Expr, None] = {}
    for var in members_of(match):
        for leaf in match.graph.leaves[var]:
            if isinstance(leaf, relax.Var) and not is_size(leaf) and leaf not in match.interior:
                out.setdefault(leaf)
    return list(out)


def outputs_of(match: Match) -> list[relax.Var]:
    """Return the members that are read outside, in program order."""
    graph, inside = match.graph, match.interior
    return [v for v in members_of(match) if v in graph.escapes or any(u not in inside for u in graph.users.get(v, ()))]


def unknown_size(match: Match) -> tirx.Expr | None:
    """Return a size that members mention and that the region could not know from what it is given, if there is one."""
    known = [(d, d) for expr in inputs_of(match) for d in dimensions(expr)]
    mentioned = (size for var in members_of(match) for size in sizes_in(match.graph.leaves[var]))
    return next((size for size in mentioned if translate(size, known) is None), None)


class _Order:
    """The groups accepted so far in one function, and whether another can be put beside them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[relax.Var, frozenset[relax.Var]] = {}
        self.casts = sorted((graph.position[v], v) for v in graph.casts)
        # Stretches of the program that groups lie in, apart from each other and in order: (first, last) positions.
        self.stretches: list[tuple[int, int]] = []

    def _stretch(self, first: int, last: int) -> tuple[int, int, int, int]:
        """Return the stretch that a group would lie in, and which of those there are (from, to) become part of it."""
        begin = bisect.bisect_left(self.stretches, first, key=lambda s: s[1])
        end = bisect.bisect_right(self.stretches, last, key=lambda s: s[0])
        if begin < end:
            first, last = min(first, self.stretches[begin][0]), max(last, self.stretches[end - 1][1])
        return first, last, begin, end

    def accept(self, members: frozenset[relax.Var]) -> None:
        """Remember a group."""
        self.of.update(dict.fromkeys(members, members))
        places = [self.graph.position[v] for v in members]
        first, last, begin, end = self._stretch(min(places), max(places))
        self.stretches[begin:end] = [(first, last)]

    def cycle(self, members: frozenset[relax.Var], claimed: set[relax.Var]) -> relax.Var | None:
        """Return a binding outside that depends on a member and on which a member depends; None where there is none.

        One behind the stretch that the members lie in cannot be: values flow forward, and back only within a group.
        """
        graph = self.graph
        places = [graph.position[v] for v in members]
        last = self._stretch(min(places), max(places))[1]
        stack = [(u, u) for v in members for u in graph.users.get(v, ()) if u not in members]
        seen: set[relax.Var] = set()
        while stack:
            var, first = stack.pop()
            # A group that was accepted and then held back (bisecting) is not claimed.
            for node in self.of[var] if var in claimed else (var,):
                if node in members:
                    return first
                if node in seen or graph.position[node] > last:
                    continue
                seen.add(node)
                stack.extend((user, first) for user in graph.users.get(node, ()))
        return None

    def judge(self, rule: GroupRule, match: Match, claimed: set[relax.Var]) -> Verdict:
        """Return whether a group may be formed; a group that may is remembered."""
        graph, members = self.graph, members_of(match)
        for var in members:
            if var in claimed:
                return refuse("claimed-by-earlier-rewrite", var.name)
            if var in graph.casts:
                return refuse("crosses-a-match-cast", var.name, "what it asserts of a shape would be lost")
            if var not in graph.block:
                return refuse("outside-a-dataflow-block", var.name, "its order against effects is fixed")
            if graph.block[var] != graph.block[match.root]:
                return refuse("crosses-a-branch", var.name)
        behind = bisect.bisect_right(self.casts, graph.position[members[0]], key=lambda c: c[0])
        if behind < len(self.casts) and self.casts[behind][0] < graph.position[members[-1]]:
            cast = self.casts[behind][1]
            return refuse("spans-a-match-cast", cast.name, "nothing is moved across what may define a size")
        if not outputs_of(match):
            return refuse("read-by-nobody", match.root.name, "the region would have no result")
        if (size := unknown_size(match)) is not None:
            return refuse("dimension-not-among-operands", str(size), "the region could not know this size")
        if (between := self.cycle(match.interior, claimed)) is not None:
            return refuse("not-convex", between.name, "it depends on one member and another member depends on it")
        verdict = weigh(rule, match)
        if verdict.fired:
            self.accept(match.interior)
        return verdict


def region_of(match: Match, composite: str, attrs: Mapping[str, Attr] | None = None) -> relax.Function:
    """Return the private function that a group's members would become; regions among them are opened.

    Parameters
    ----------
    match : Match
        Its interior are the members.
    composite : str
        Name of the region.
    attrs : mapping
        Facts to store with it.
    """
    graph, inputs = match.graph, inputs_of(match)
    params = fresh_params(inputs, [f"a{i}" for i in range(len(inputs))])
    env: dict[relax.Expr, relax.Expr] = dict(zip(inputs, params))
    known = [pair for old, new in zip(inputs, params) for pair in zip(dimensions(old), dimensions(new))]
    builder = relax.BlockBuilder()
    renew = in_terms_of(env, known)

    short = composite.split(".")[-1]
    with builder.function(short, params, attrs={"Composite": composite}, private=True):
        with builder.dataflow():
            for var in members_of(match):
                value = rebuild(graph.value[var], renew)
                callee = graph.callee(var)
                if callee is not None and composite_name(callee).startswith(REGION):
                    env[var] = splice(builder, callee, list(value.args))
                elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
                    env[var] = value.tuple_value.fields[value.index]
                elif isinstance(value, relax.Tuple):
                    env[var] = value
                else:
                    env[var] = builder.emit(value)
            outputs = [env[var] for var in outputs_of(match)]
            result = builder.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
        builder.emit_func_output(result)
    func = _without_alias(builder.get()[short]).with_attr("Composite", composite)
    for key, value in (attrs or {}).items():
        func = func.with_attr(f"crossloom.{key}", list(value) if isinstance(value, (list, tuple)) else value)
    return func


def _without_alias(func: relax.Function) -> relax.Function:
    """Return a region that names its result once: the builder binds a value first and its output name after."""
    (block,) = func.body.blocks
    *lines, last = block.bindings
    made = next((i for i, line in enumerate(lines) if line.var.same_as(last.value)), None)
    if made is None or any(leaf.same_as(last.value) for line in lines for leaf in children(line.value)):
        return func
    lines[made] = relax.VarBinding(last.var, lines[made].value)
    body = _typed(relax.SeqExpr([relax.DataflowBlock(lines)], func.body.body), func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure).with_attrs(func.attrs)


def _call(
    builder: relax.BlockBuilder, match: Match, rule: GroupRule, made: dict[Spelling, ir.GlobalVar]
) -> list[relax.Binding]:
    """Return the bindings that stand for a group: the call, and where it has several results their names.

    ``made`` are the regions of groups before; one that is spelled alike is called again.
    """
    inputs, attrs = inputs_of(match), rule.attrs(match)
    spelled = spelling(match.graph, inputs, members_of(match), outputs_of(match))
    key = None if spelled is None else (rule.composite, str(sorted(attrs.items())), spelled)
    gvar = None if key is None else made.get(key)
    if gvar is None:
        gvar = builder.add_func(region_of(match, rule.composite, attrs), rule.composite.split(".")[-1])
        if key is not None:
            made[key] = gvar
    call = builder.normalize(relax.Call(gvar, inputs))
    outputs = outputs_of(match)
    if len(outputs) == 1:
        return [relax.VarBinding(outputs[0], call)]
    whole = relax.DataflowVar(f"{match.root.name}_fused", call.ty)
    fields = [builder.normalize(relax.TupleGetItem(whole, i)) for i in range(len(outputs))]
    return [relax.VarBinding(whole, call), *(relax.VarBinding(v, item) for v, item in zip(outputs, fields))]


def _ordered(
    block: relax.DataflowBlock,
    graph: Graph,
    groups: Mapping[relax.Var, tuple[GroupRule, Match]],
    make: Callable[[GroupRule, Match], Iterable[relax.Binding]],
) -> list[relax.Binding]:
    """Return a block's bindings with each group in one place, otherwise as near to their order as that allows."""
    key: dict[relax.Var, relax.Var] = {}
    waits: dict[relax.Var, int] = {}
    feeds: dict[relax.Var, list[relax.Var]] = {}
    bindings = {binding.var: binding for binding in block.bindings}
    for var in bindings:
        key[var] = groups[var][1].root if var in groups else var
        waits.setdefault(key[var], 0)
    for var in bindings:
        for leaf in graph.leaves[var]:
            if isinstance(leaf, relax.Var) and leaf in key and key[leaf] is not key[var]:
                feeds.setdefault(key[leaf], []).append(key[var])
                waits[key[var]] += 1
    # A match_cast may bind a symbolic size that anything behind it mentions: nothing moves across one.
    fence: relax.Var | None = None
    for var in bindings:
        if fence is not None and key[var] is not fence:
            feeds.setdefault(fence, []).append(key[var])
            waits[key[var]] += 1
        fence = var if var in graph.casts else fence
    place = graph.position
    ready = [(place[var], var) for var in waits if not waits[var]]
    heapq.heapify(ready)
    out: list[relax.Binding] = []
    while ready:
        _, var = heapq.heappop(ready)
        out.extend(make(*groups[var]) if var in groups else (bindings[var],))
        for user in feeds.get(var, ()):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (place[user], user))
    if any(waits.values()):
        stuck = min((v for v in waits if waits[v]), key=place.__getitem__)
        raise InternalError(f"groups of function {graph.name} wait for each other at {stuck.name}")
    return out


def _rebuilt(
    body: relax.Expr,
    graph: Graph,
    groups: Mapping[relax.Var, tuple[GroupRule, Match]],
    make: Callable[[GroupRule, Match], Iterable[relax.Binding]],
) -> relax.Expr:
    """Return a body with every group in its block; variables stay the ones they were."""
    if not isinstance(body, relax.SeqExpr):
        return body
    blocks: list[relax.BindingBlock] = []
    for block in body.blocks:
        if isinstance(block, relax.DataflowBlock):
            inside = any(binding.var in groups for binding in block.bindings)
            blocks.append(relax.DataflowBlock(_ordered(block, graph, groups, make)) if inside else block)
            continue
        bindings = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                branches = [_rebuilt(b, graph, groups, make) for b in (value.true_branch, value.false_branch)]
                if not all(new.same_as(old) for new, old in zip(branches, (value.true_branch, value.false_branch))):
                    binding = relax.VarBinding(binding.var, _typed(relax.If(value.cond, *branches), value.ty))
            bindings.append(binding)
        same = all(new.same_as(old) for new, old in zip(bindings, block.bindings))
        blocks.append(block if same else relax.BindingBlock(bindings))
    if all(new.same_as(old) for new, old in zip(blocks, body.blocks)):
        return body
    return _typed(relax.SeqExpr(blocks, body.body), body.ty)


def _typed(expr: relax.Expr, ty: relax.Type) -> relax.Expr:
    """Return an expression built by hand with the type of the one it replaces: nothing infers it any more."""
    _update_type(expr, ty)
    return expr


def apply_groups(mod: ir.IRModule, rules: Sequence[GroupRule], pass_name: str = "") -> ir.IRModule:
    """Form groups, in order of priority of their rules, in every Relax function that is not a composite itself.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    rules : sequence of GroupRule
        An earlier rule's group claims its members.
    pass_name : str
        Registry name of the pass, for verdicts.

    Returns
    -------
    tvm.ir.IRModule
        The same object when no group was formed.
    """
    if not may_fire(mod, rules):
        return mod
    work: list[tuple[ir.GlobalVar, Graph, dict[relax.Var, tuple[GroupRule, Match]]]] = []
    for gvar, graph in graphs_of(mod):
        order = _Order(graph)
        groups = {v: pair for pair in choose(graph, rules, order.judge, pass_name) for v in pair[1].interior}
        if groups:
            work.append((gvar, graph, groups))
    if not work:
        return mod
    builder = relax.BlockBuilder(mod)
    made: dict[Spelling, ir.GlobalVar] = {}
    for gvar, graph, groups in work:
        func = graph.func
        body = _rebuilt(func.body, graph, groups, lambda rule, match: _call(builder, match, rule, made))
        builder.update_func(gvar, relax.Function(func.params, body, func.ret_ty, func.is_pure).with_attrs(func.attrs))
    out = builder.get()
    return out.with_attrs(mod.attrs) if mod.attrs else out


def group_pass(name: str, rules: Sequence[GroupRule]) -> tvm.transform.Pass:
    """Return a TVM module pass that forms groups and checks that what comes out is well-formed.

    Parameters
    ----------
    name : str
        The pass's registry name; TVM's instruments and the ledger show it.
    rules : sequence of GroupRule
    """

    @tvm.transform.module_pass(opt_level=0, name=name)
    def transform(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        out = apply_groups(mod, rules, name)
        if out is not mod:
            relax.analysis.well_formed(out)
        return out

    return transform
