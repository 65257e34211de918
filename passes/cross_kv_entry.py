"""Give cross-attention's keys and values an entry of their own, which is called once for each input.

    decode(ids, cache, states) -> logits
->  cross_kv(states) -> key_0, value_0, key_1, value_1, ...
    decode(ids, cache, key_0, value_0, ...) -> logits

All that depends on the states' inputs alone moves: projections, views, and the encoder itself where the entry holds it.
What is not moved still finds the states among its inputs.  Keys and values stay one tensor a layer: cut from a stack,
each would be copied in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.signature import tensor_spec
from crossloom.model import Entry, Model
from crossloom.rewrite import Graph, rebuild
from crossloom.verdict import Ledger, accept, record, refuse

from .canonicalize_transformer import CanonicalizeTransformer
from .matching.cross_attention import linear_behind, operands_of
from .matching.spelling import sizes

_NAME = "split-cross-kv"


@mutator
class _Parameters(PyExprMutator):
    """Drops bindings, and puts parameters in the places of those that are read."""

    def __init__(self, dropped: frozenset[relax.Var], given: dict[relax.Var, relax.Var]) -> None:
        super().__init__(None)
        self.dropped, self.given = dropped, given

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.dropped:
            super().visit_var_binding_(binding)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.given[var] if var in self.given else super().visit_var_(var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.given[var] if var in self.given else super().visit_dataflow_var_(var)


def _inputs_behind(graph: Graph, inputs: Sequence[relax.Var]) -> dict[relax.Var, frozenset[relax.Var]]:
    """Return for each binding, and each parameter, the inputs that it depends on."""
    out = {param: frozenset[relax.Var]() for param in graph.func.params}
    out |= {param: frozenset((param,)) for param in inputs}
    for var in graph.order:
        found: frozenset[relax.Var] = frozenset()
        for leaf in graph.leaves[var]:
            found |= out.get(leaf, frozenset()) if isinstance(leaf, relax.Var) else frozenset()
        out[var] = found
    return out


def _moved(
    graph: Graph, inputs: Sequence[relax.Var]
) -> tuple[frozenset[relax.Var], frozenset[relax.Var], dict[relax.Var, str]]:
    """Return the states' inputs, the bindings that depend on them alone, and the names of those that others read."""
    behind = _inputs_behind(graph, inputs)
    states: frozenset[relax.Var] = frozenset()
    wanted: dict[relax.Var, str] = {}
    layer = 0
    for var in graph.order:
        operands = operands_of(graph, var)
        if operands is None or not isinstance(operands["q"], relax.Var):
            continue
        asked = behind[operands["q"]]
        sides = {r: operands[r] for r in ("k", "v") if linear_behind(graph, operands[r]) is not None}
        other = {r: e for r, e in sides.items() if behind[e] and not asked <= behind[e]}
        if other:
            for role, expr in other.items():
                states |= behind[expr]
                wanted.setdefault(expr, f"{'key' if role == 'k' else 'value'}_{layer}")
            layer += 1
    alone = frozenset(
        v for v in graph.order if behind[v] and behind[v] <= states and v in graph.block and not graph.scope[v]
    )
    if any(v not in alone for v in wanted):
        wanted = {}
    outputs: dict[relax.Var, str] = {}
    for var in graph.order:
        read = any(u not in alone for u in graph.users.get(var, ())) or var in graph.escapes
        if wanted and var in alone and read:
            outputs[var] = wanted.get(var) or f"state_{len(outputs)}"
    return states, alone, outputs


def split_cross_kv(model: Model, entry: str = "decode", name: str = "cross_kv") -> Model:
    """Return the model with one more entry, which makes the keys and values that another one took states for.

    Parameters
    ----------
    model : Model
    entry : str
        The entry that is called for every token; its attentions are recognised whatever their spelling.
    name : str
        The new entry's.

    Returns
    -------
    Model
        ``name`` takes the states (and what else keys and values are made of) and returns them; ``entry`` takes its
        outputs, under their names, in place of inputs that nothing else reads.  The same object where the entry has no
        cross-attention over its own inputs; the ledger says so.

    Raises
    ------
    UsageError
        Where there is no such entry, or one of the new one's name.
    UnsupportedModel
        Where a size that the entry needs is known from the states alone.
    """
    if entry not in model.entries or name in model.entries:
        known = ", ".join(sorted(model.entries))
        problem = f"no entry {entry!r}" if entry not in model.entries else f"there is an entry {name!r} already"
        raise UsageError(f"{model.name}: {problem}", f"entries: {known}")
    was = model.entries[entry]
    # What is recognised is told when the model is compiled.
    with Ledger():
        mod = CanonicalizeTransformer()(model.mod)
    gvar = next(g for g, _ in mod.functions_items() if g.name_hint == entry)
    graph = Graph(entry, mod[gvar], mod)
    params = list(graph.func.params)
    inputs, weights = params[: len(was.inputs)], params[len(was.inputs) :]
    states, alone, outputs = _moved(graph, inputs)
    if not outputs:
        record(
            refuse("no-cross-attention", entry, "no keys are made of other inputs than queries").at(_NAME, entry, "")
        )
        return model
    names = dict(zip(params, [*(spec.name for spec in was.inputs), *was.weights]))
    by_name = {spec.name: spec for spec in was.inputs}

    # What is computed once.
    first = [p for p in inputs if p in states]
    first_weights = [w for w in weights if any(u in alone for u in graph.users.get(w, ()))]
    block = relax.DataflowBlock([relax.VarBinding(v, graph.value[v]) for v in graph.order if v in alone])
    result = relax.Tuple(list(outputs)) if len(outputs) > 1 else next(iter(outputs))
    once = _function(name, [*first, *first_weights], [block], result, len(first), graph.func)

    # What is computed in every step.
    given = {v: relax.Var(label, v.ty) for v, label in outputs.items()}
    rest = [v for v in graph.order if v not in alone]
    read = {leaf for v in rest for leaf in graph.leaves[v]} | graph.escapes
    second = [p for p in inputs if p not in states or p in read]
    second_weights = [w for w in weights if w in read]
    body = _Parameters(alone, given).visit_expr(graph.func.body)
    every = relax.Function(
        [*second, *given.values(), *second_weights], body, graph.func.ret_ty, graph.func.is_pure
    ).with_attrs(graph.func.attrs)
    every = every.with_attr("num_input", len(second) + len(given))

    functions = {g: f for g, f in mod.functions_items() if g.name_hint != entry}
    functions |= {ir.GlobalVar(name): relax.utils.copy_with_new_vars(once), gvar: every}
    out = ir.IRModule(functions, attrs=mod.attrs)
    try:
        relax.analysis.well_formed(out)
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        raise UnsupportedModel(
            f"{entry}: what is left does not know a size of the states: {last}", "make that size an input"
        ) from error
    made = tuple(tensor_spec(label, v.ty) for v, label in outputs.items())
    macs = sum((sizes(v) or [0])[-1] or 0 for v in outputs)
    record(accept(detail=f"{len(made)} values move to {name}", macs=macs).at(_NAME, entry, next(iter(outputs)).name))
    new = Entry(
        name,
        tuple(by_name[names[p]] for p in first),
        made,
        tuple(names[w] for w in first_weights),
        was.modality,
        was.upper_bounds,
        was.lower_bounds,
    )
    old = replace(
        was,
        inputs=(*(by_name[names[p]] for p in second), *made),
        weights=tuple(names[w] for w in second_weights),
    )
    return replace(model, mod=out, entries={**model.entries, name: new, entry: old})


def _function(
    name: str,
    params: Sequence[relax.Var],
    blocks: Sequence[relax.BindingBlock],
    result: relax.Expr,
    inputs: int,
    like: relax.Function,
) -> relax.Function:
    """Return a function of some of another one's bindings."""
    builder = relax.BlockBuilder()
    with builder.function(name, list(params), attrs={"num_input": inputs}):
        renamed: dict[relax.Var, relax.Expr] = {}
        with builder.dataflow():
            for binding in (b for block in blocks for b in block.bindings):
                renamed[binding.var] = builder.emit(_renamed(binding.value, renamed))
            out = builder.emit_output(_renamed(result, renamed))
        builder.emit_func_output(out)
    func = builder.get()[name]
    bounds = {k: v for k, v in (like.attrs or {}).items() if k.startswith("tir_var")}
    return func.with_attrs(bounds) if bounds else func


def _renamed(value: relax.Expr, names: dict[relax.Var, relax.Expr]) -> relax.Expr:
    return rebuild(value, lambda leaf: names.get(leaf, leaf) if isinstance(leaf, relax.Var) else leaf)
