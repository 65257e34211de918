"""An index of one Relax function: who defines what, who uses it, in which order; built in one walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tvm import ir, relax

Found = TypeVar("Found")


def _operands(call: relax.Call) -> list[relax.Expr]:
    return [*call.args, call.op] if isinstance(call.op, relax.Var) else list(call.args)


#: What is no leaf, and what is in it.  By exact type: TVM's expressions are abstract base classes to Python, whose
#: ``isinstance`` is slow where the answer is no, and most operands are leaves.
_PARTS: dict[type, Callable[[Any], list[relax.Expr]]] = {
    relax.Call: _operands,
    relax.Tuple: lambda expr: list(expr.fields),
    relax.TupleGetItem: lambda expr: [expr.tuple_value],
    relax.If: lambda expr: [expr.cond],
}


def children(value: relax.Expr) -> Iterator[relax.Expr]:
    """Yield the leaf operands of a normalized binding value, tuples and nested calls opened."""
    stack = [value]
    while stack:
        expr = stack.pop()
        parts = _PARTS.get(type(expr))
        if parts is None:
            yield expr
        else:
            stack.extend(reversed(parts(expr)))


def rebuild(expr: relax.Expr, leaf: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Return a binding value with each leaf operand (variable, shape, constant ...) replaced by ``leaf`` of it."""
    kind = type(expr)
    if kind is relax.Call:
        return relax.Call(expr.op, [rebuild(arg, leaf) for arg in expr.args], expr.attrs, expr.ty_args)
    if kind is relax.Tuple:
        return relax.Tuple([rebuild(field, leaf) for field in expr.fields])
    if kind is relax.TupleGetItem:
        return relax.TupleGetItem(rebuild(expr.tuple_value, leaf), expr.index)
    return leaf(expr)


class Graph:
    """Definitions, users and order of a function's bindings, nested blocks (``if`` branches) included.

    Attributes
    ----------
    name : str
        The function's name in its module.
    func : relax.Function
    mod : tvm.ir.IRModule
        The module the function is in, for following calls.
    order : list of relax.Var
        Bound variables in program order.
    value : dict of relax.Var to relax.Expr
    leaves : dict of relax.Var to tuple of relax.Expr
        The leaf operands of a variable's value, see :func:`children`; the same variable is the same Python object.
    users : dict of relax.Var to list of relax.Var
        Variables whose values use it; the function's or a branch's result does not appear here.
    escapes : set of relax.Var
        Variables used by a result (of the function, of a branch, of an inner function).
    block : dict of relax.Var to int
        The dataflow block a variable is bound in; those bound outside of one are missing.
    casts : set of relax.Var
        Variables bound by a ``match_cast``, which asserts a shape; their value is what is cast.
    """

    def __init__(self, name: str, func: relax.Function, mod: ir.IRModule) -> None:
        self.name, self.func, self.mod = name, func, mod
        self.order: list[relax.Var] = []
        self.position: dict[relax.Var, int] = {}
        self.value: dict[relax.Var, relax.Expr] = {}
        self.leaves: dict[relax.Var, tuple[relax.Expr, ...]] = {}
        # TVM makes a new Python object of every operand that is read, and comparing two of them is slow.
        self._own: dict[relax.Expr, relax.Expr] = {}
        self._composites: dict[ir.GlobalVar, str] = {}
        self.users: dict[relax.Var, list[relax.Var]] = {}
        self.escapes: set[relax.Var] = set()
        self.scope: dict[relax.Var, int] = {}
        self.block: dict[relax.Var, int] = {}
        self.casts: set[relax.Var] = set()
        self._scopes = self._blocks = 0
        self._map: object | None = None
        self._walk(func.body)

    @property
    def bindings(self) -> object:
        """The TVM map from variable to value, for TVM's own pattern matcher."""
        if self._map is None:
            self._map = relax.analysis.get_var2val(self.func)
        return self._map

    @cached_property
    def weights(self) -> frozenset[relax.Var]:
        """The parameters behind the inputs; all of them where the attribute ``num_input`` is absent."""
        attrs = self.func.attrs
        first = int(attrs["num_input"]) if attrs is not None and "num_input" in attrs else 0
        return frozenset(list(self.func.params)[first:])

    def _walk(self, body: relax.Expr) -> None:
        scope = self._scopes
        self._scopes += 1
        if not isinstance(body, relax.SeqExpr):
            self._escape(body)
            return
        for block in body.blocks:
            number = self._blocks
            self._blocks += 1
            for binding in block.bindings:
                self._bind(binding.var, binding.value, scope)
                if isinstance(block, relax.DataflowBlock):
                    self.block[binding.var] = number
                if isinstance(binding, relax.MatchCast):
                    self.casts.add(binding.var)
        self._escape(body.body)

    def _escape(self, expr: relax.Expr) -> None:
        for leaf in children(expr):
            if isinstance(leaf, relax.Var):
                self.escapes.add(leaf)

    def _bind(self, var: relax.Var, value: relax.Expr, scope: int) -> None:
        self.position[var] = len(self.order)
        self.order.append(var)
        self.value[var], self.scope[var] = value, scope
        self._own[var] = var
        self.leaves[var] = tuple(self._own.setdefault(leaf, leaf) for leaf in children(value))
        for leaf in self.leaves[var]:
            if isinstance(leaf, relax.Var):
                self.users.setdefault(leaf, []).append(var)
        if isinstance(value, relax.If):
            self._walk(value.true_branch)
            self._walk(value.false_branch)
        elif isinstance(value, relax.Function):
            self._walk(value.body)
            self.escapes.update(relax.analysis.free_vars(value))

    def resolve(self, expr: relax.Expr) -> relax.Expr:
        """Return what ``expr`` was bound to (through plain ``a = b``), or ``expr`` itself for a parameter."""
        while isinstance(expr, relax.Var) and expr in self.value:
            expr = self.value[expr]
        return expr

    def op(self, expr: relax.Expr) -> str:
        """Return the operator name of the call ``expr`` is bound to, ``""`` when it is not an operator call."""
        call = self.resolve(expr)
        return call.op.name if isinstance(call, relax.Call) and isinstance(call.op, ir.Op) else ""

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call that ``expr`` is bound to when its operator is one of ``ops``."""
        return self.resolve(expr) if self.op(expr) in ops else None

    def callee(self, expr: relax.Expr) -> relax.Function | None:
        """Return the private Relax function that ``expr`` is the result of calling, if it is one."""
        call = self.resolve(expr)
        if isinstance(call, relax.Call) and isinstance(call.op, ir.GlobalVar) and call.op in self.mod.functions:
            func = self.mod[call.op]
            return func if isinstance(func, relax.Function) else None
        return None

    def composite(self, gvar: ir.GlobalVar) -> str:
        """Return the composite that a function of the module is, ``""`` where it is none."""
        if gvar not in self._composites:
            func = self.mod.functions.get(gvar)
            attrs = None if func is None else func.attrs
            self._composites[gvar] = str(attrs["Composite"]) if attrs is not None and "Composite" in attrs else ""
        return self._composites[gvar]

    def operands(self, expr: relax.Expr) -> dict[str, relax.Expr]:
        """Return the arguments of the call of a private function that ``expr`` is bound to, by parameter."""
        callee = self.callee(expr)
        return {} if callee is None else {p.name: arg for p, arg in zip(callee.params, self.resolve(expr).args)}

    def uses(self, var: relax.Var) -> int:
        """Return how many binding values use ``var``, plus one if it escapes."""
        return len(set(self.users.get(var, ()))) + (var in self.escapes)


def per_graph(compute: Callable[[Graph], Found]) -> Callable[[Graph], Found]:
    """Return a function that looks for something once in each graph, and forgets it with the graph.

    What it finds must not hold the graph itself, but through a weak reference.
    """
    known: WeakKeyDictionary[Graph, Found] = WeakKeyDictionary()

    @wraps(compute)
    def found(graph: Graph) -> Found:
        if graph not in known:
            known[graph] = compute(graph)
        return known[graph]

    return found
