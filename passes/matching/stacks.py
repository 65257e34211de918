"""Find stacks of layers: chains of residual sums, ``x = x + branch(x)``, and what each branch is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvm import relax

from crossloom.rewrite import Graph, children, root_name
from crossloom.verdict import Verdict, refuse

from .spelling import dims, same_dims

#: A branch of more bindings than this is not walked: the time stays linear.
LONGEST_BRANCH = 2048
ATTENTION = "crossloom.attention"
_WEIGHTY = ("crossloom.linear", "crossloom.mlp", "crossloom.gated_mlp", "relax.nn.conv2d", "relax.nn.conv1d")


@dataclass(frozen=True)
class Branch:
    """One residual sum.

    Attributes
    ----------
    start, end : relax.Var
        The value that is kept, and the sum.
    bindings : frozenset of relax.Var
        What lies between, the sum included.
    attends, crosses : bool
        Whether there is attention in it, and whether its keys come from elsewhere than ``start``.
    """

    start: relax.Var
    end: relax.Var
    bindings: frozenset[relax.Var]
    attends: bool = False
    crosses: bool = False


@dataclass
class Layer:
    """Residual branches that follow each other, up to the next one that attends to itself."""

    branches: list[Branch] = field(default_factory=list)

    @property
    def attentions(self) -> int:
        """How many of its branches hold attention."""
        return sum(branch.attends for branch in self.branches)


@dataclass
class Stack:
    """Layers that follow each other."""

    layers: list[Layer] = field(default_factory=list)

    @property
    def attends(self) -> bool:
        """Whether any of its layers attends."""
        return any(layer.attentions for layer in self.layers)

    @property
    def start(self) -> relax.Var:
        """The value the first layer begins with."""
        return self.layers[0].branches[0].start

    @property
    def end(self) -> relax.Var:
        """The last layer's sum."""
        return self.layers[-1].branches[-1].end


def leaves(graph: Graph, var: relax.Var) -> Iterable[relax.Var]:
    """Return the bound variables that a binding reads."""
    return (leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var) and leaf in graph.value)


def _between(graph: Graph, start: relax.Var, end: relax.Var) -> set[relax.Var] | Verdict | None:
    """Return the bindings on the way from ``end`` back to ``start``; None where there is no way."""
    first = graph.position.get(start, -1)
    found, stack, reached = {end}, [end], False
    while stack:
        at = stack.pop()
        value = graph.value[at]
        for leaf in children(value):
            if not isinstance(leaf, relax.Var):
                continue
            if leaf.same_as(start):
                reached = True
            elif leaf not in found and graph.position.get(leaf, -1) > first:
                found.add(leaf)
                stack.append(leaf)
        if len(found) > LONGEST_BRANCH:
            return refuse("branch-too-long", end.name, f"more than {LONGEST_BRANCH} bindings")
    return found if reached else None


def _branch(graph: Graph, end: relax.Var) -> Branch | Verdict | None:
    """Return the branch that a sum closes."""
    args = graph.value[end].args
    refusal: Verdict | None = None
    for kept, other in ((args[0], args[1]), (args[1], args[0])):
        if not isinstance(kept, relax.Var) or not isinstance(other, relax.Var) or other not in graph.value:
            continue
        if not same_dims(dims(kept) or (), dims(other) or (None,)):
            continue
        inside = _between(graph, kept, other)
        if isinstance(inside, Verdict):
            refusal = refusal or inside
        elif inside is not None and any(root_name(graph, v) in _WEIGHTY for v in inside):
            attention = [v for v in inside if root_name(graph, v) == ATTENTION]
            crosses = any(not _reads(graph, _key(graph, v), kept, inside) for v in attention)
            return Branch(kept, end, frozenset((*inside, end)), bool(attention), crosses)
    return refusal


def _key(graph: Graph, attention: relax.Var) -> relax.Expr:
    """Return the keys of an attention composite."""
    return graph.operands(attention).get("k", graph.value[attention].args[1])


def _reads(graph: Graph, value: relax.Expr, start: relax.Var, inside: set[relax.Var]) -> bool:
    """Return whether a value is made from ``start`` by bindings of the branch."""
    todo, seen = [value], set()
    while todo:
        at = todo.pop()
        if at.same_as(start):
            return True
        if isinstance(at, relax.Var) and at in inside and at not in seen:
            seen.add(at)
            todo.extend(graph.leaves[at])
    return False


def find_stacks(graph: Graph) -> tuple[list[Stack], list[Verdict]]:
    """Return a function's stacks in program order, and refusals of sums whose branch could not be walked."""
    refused: list[Verdict] = []
    chains: list[list[Branch]] = []
    ends: dict[relax.Var, list[Branch]] = {}
    for var in graph.order:
        if root_name(graph, var) != "relax.add":
            continue
        found = _branch(graph, var)
        if isinstance(found, Verdict):
            refused.append(found.at("residual-branch", graph.name, var.name))
        elif found is not None:
            chain = ends.pop(_origin(graph, found.start), None)
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(found)
            ends[var] = chain
    return [_stack(chain) for chain in chains], refused


def _origin(graph: Graph, start: relax.Var) -> relax.Var:
    """Return the sum that a start is, or is the norm (or a view) of."""
    for _ in range(3):
        if graph.op(start) == "relax.add" or start not in graph.value:
            return start
        name, value = root_name(graph, start), graph.value[start]
        kept = name.endswith("_norm") or name in ("relax.reshape", "relax.astype")
        if not kept or not isinstance(value, relax.Call) or not isinstance(value.args[0], relax.Var):
            return start
        start = value.args[0]
    return start


def _stack(chain: Sequence[Branch]) -> Stack:
    """Group branches into layers: one begins at every branch that attends to itself, or everywhere without any."""
    attending = any(b.attends for b in chain)
    layers: list[Layer] = []
    for branch in chain:
        if not layers or not attending or (branch.attends and not branch.crosses):
            layers.append(Layer())
        layers[-1].branches.append(branch)
    return Stack(layers)
