"""Compute at compile time what depends on weights alone.

    wt = R.permute_dims(w)        # w is a weight: a parameter after num_input
    y  = R.matmul(x, wt)
->  y  = R.matmul(x, w_folded)    # w_folded = w.T, stored in the model

Fires for permute_dims, reshape, astype, expand_dims, squeeze, concat, takes of constant indices, elementwise sums,
products, quotients and square roots, sums over axes, and matrix products that are no larger than their factors, whose
operands are weights, constants or folded themselves.
Never for a value that is only a constant (TVM's FoldConstant does those) or one with a symbolic shape.
Numerics: exact, numpy computing in the values' own dtype; sums are made in float64 and rounded once.

It works on a :class:`crossloom.model.Model`, since it changes weights; the driver runs it after
``inline-composites``, when what composites hid is plain operators again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from .model import Entry, Model
from .rewrite import Graph
from .verdict import accept, record, refuse

#: TVM exports no name for the class of constants.
_CONSTANT = type(relax.const(0.0))


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _static(ty: relax.Type) -> tuple[int, ...] | None:
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return None
    dims = list(ty.shape)
    return tuple(int(d) for d in dims) if all(isinstance(d, tirx.IntImm) for d in dims) else None


def _permute(call: relax.Call, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    axes = call.attrs.axes
    return np.transpose(x, None if axes is None else [int(a) for a in axes])


def _take(call: relax.Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    extent = x.size if axis is None else x.shape[axis]
    # What an index outside gives depends on the operator's mode: that stays in the graph.
    inside = indices.size == 0 or (indices.min() >= 0 and indices.max() < extent)
    return np.take(x, indices, axis=axis) if inside else None


def _concat(call: relax.Call, *parts: np.ndarray) -> np.ndarray:
    axis = call.attrs.axis
    return np.concatenate(parts, axis=None if axis is None else int(axis))


def _divide(call: relax.Call, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    with np.errstate(all="ignore"):
        # Quotients of integers are rounded by the operator's own rule.
        return x / y if "float" in str(x.dtype) else None


def _of_floats(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray | None]:
    def run(call: relax.Call, x: np.ndarray) -> np.ndarray | None:
        with np.errstate(all="ignore"):
            return compute(x) if "float" in str(x.dtype) else None

    return run


def _sum(call: relax.Call, x: np.ndarray) -> np.ndarray | None:
    axes = None if call.attrs.axis is None else tuple(int(a) for a in call.attrs.axis)
    return np.sum(x.astype("float64"), axis=axes) if "float" in str(x.dtype) else None


def _matmul(call: relax.Call, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    # A product that is larger than its factors (low-rank weights) is not worth storing.
    floats = "float" in str(x.dtype) and "float" in str(y.dtype)
    if not floats or not {x.ndim, y.ndim} <= {1, 2}:
        return None
    rows, columns = x.shape[0] if x.ndim == 2 else 1, y.shape[1] if y.ndim == 2 else 1
    if rows * columns > x.size + y.size:
        return None
    return np.matmul(x.astype("float64"), y.astype("float64"))


#: Operators whose other operands may be constants of the graph.
_WITH_CONSTANTS = frozenset(
    {"relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.take", "relax.concat", "relax.matmul"}
)
#: Operator -> numpy on the operands' values; the result is reshaped and cast to the call's own type.
_COMPUTE: dict[str, Callable[..., np.ndarray | None]] = {
    "relax.permute_dims": _permute,
    "relax.reshape": lambda call, x, *rest: x,
    "relax.expand_dims": lambda call, x, *rest: x,
    "relax.squeeze": lambda call, x, *rest: x,
    "relax.astype": lambda call, x: x,
    "relax.add": lambda call, x, y: x + y,
    "relax.subtract": lambda call, x, y: x - y,
    "relax.multiply": lambda call, x, y: x * y,
    "relax.divide": _divide,
    "relax.negative": lambda call, x: -x,
    "relax.sqrt": _of_floats(np.sqrt),
    "relax.rsqrt": _of_floats(lambda x: 1 / np.sqrt(x)),
    "relax.sum": _sum,
    "relax.take": _take,
    "relax.matmul": _matmul,
    "relax.concat": _concat,
}


@mutator
class _Replace(PyExprMutator):
    """Drops folded bindings and puts the new parameters in their places."""

    def __init__(self, folded: dict[relax.Var, relax.Var]) -> None:
        super().__init__(None)
        self.folded = folded

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.folded:
            super().visit_var_binding_(binding)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.folded[var] if var in self.folded else super().visit_var_(var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.folded[var] if var in self.folded else super().visit_dataflow_var_(var)


def _evaluate(graph: Graph, values: dict[relax.Var, np.ndarray]) -> dict[relax.Var, np.ndarray]:
    """Return the values of bindings that depend on weights alone (views where numpy can)."""
    out: dict[relax.Var, np.ndarray] = {}
    for var in graph.order:
        compute = _COMPUTE.get(graph.op(var))
        call = graph.value[var]
        if compute is None or not isinstance(call, relax.Call):
            continue
        operands: list[np.ndarray] = []
        weighty = False
        for arg in (f for a in call.args for f in (a.fields if isinstance(a, relax.Tuple) else (a,))):
            while isinstance(arg, relax.Var) and isinstance(graph.value.get(arg), relax.Var):
                arg = graph.value[arg]  # another name of it
            if isinstance(arg, relax.Var) and (arg in values or arg in out):
                operands.append(out[arg] if arg in out else values[arg])
                weighty = True
            elif isinstance(arg, _CONSTANT) and graph.op(var) in _WITH_CONSTANTS:
                operands.append(arg.value.numpy())
            elif not isinstance(arg, relax.ShapeExpr):
                break
        else:
            shape = _static(var.ty)
            if not weighty:
                continue
            if shape is None:
                record(refuse("symbolic-shape", var.name).at("fold-weights", graph.name, var.name))
                continue
            value = compute(call, *operands)
            if value is not None:
                out[var] = value.astype(_dtype(str(var.ty.dtype)), copy=False).reshape(shape)
    return out


def fold_weights(model: Model) -> Model:
    """Return the model with weight-only values computed, and weights nobody uses any more left out.

    Parameters
    ----------
    model : Model

    Returns
    -------
    Model
        Equal folded values are stored once, across entries; untouched arrays are shared with ``model``.
    """
    params: dict[str, np.ndarray] = {}
    by_content: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    # A weight may have such a name already, from an earlier fold or its author.
    free_names = (name for name in map("folded.{}".format, itertools.count()) if name not in model.params)
    entries: dict[str, Entry] = {}
    functions = dict(model.mod.functions_items())
    for gvar, func in model.mod.functions_items():
        entry = model.entries.get(gvar.name_hint)
        if entry is None or not isinstance(func, relax.Function):
            continue
        count = len(entry.inputs)
        inputs, weights = list(func.params[:count]), list(func.params[count:])
        graph = Graph(gvar.name_hint, func, model.mod)
        folded = _evaluate(graph, {v: model.params[k] for v, k in zip(weights, entry.weights)})
        # Only what something unfolded reads has to be stored.
        roots = [v for v in folded if v in graph.escapes or any(u not in folded for u in graph.users.get(v, ()))]
        new_vars: dict[relax.Var, relax.Var] = {}
        names: list[str] = []
        for var in roots:
            array = np.asarray(folded[var], order="C")
            key = (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest())
            if key not in by_content:
                by_content[key] = next(free_names)
                params[by_content[key]] = array
            names.append(by_content[key])
            new_vars[var] = relax.Var(f"w_{by_content[key].replace('.', '_')}", var.ty)
            record(accept(bytes_saved=array.nbytes).at("fold-weights", graph.name, var.name))
        skip = {**{v: v for v in folded}, **new_vars}
        still = [
            (v, k)
            for v, k in zip(weights, entry.weights)
            if v in graph.escapes or any(u not in folded for u in graph.users.get(v, ()))
        ]
        params.update({k: model.params[k] for _, k in still})
        if folded:
            body = _Replace(skip).visit_expr(func.body)
            new_params = [*inputs, *(v for v, _ in still), *new_vars.values()]
            functions[gvar] = relax.Function(new_params, body, func.ret_ty, func.is_pure).with_attrs(func.attrs)
            functions[gvar] = functions[gvar].with_attr("num_input", count)
        elif len(still) != len(weights):
            fresh = relax.Function([*inputs, *(v for v, _ in still)], func.body, func.ret_ty, func.is_pure)
            functions[gvar] = fresh.with_attrs(func.attrs)
        entries[gvar.name_hint] = replace(entry, weights=(*(k for _, k in still), *names))
    defaults = {k: v for k, v in model.params.items() if any(k == s.name for e in entries.values() for s in e.inputs)}
    mod = ir.IRModule(functions, attrs=model.mod.attrs)
    relax.analysis.well_formed(mod)
    kept = {**defaults, **params}
    packed = {k: v for k, v in model.packed.items() if k in kept}
    return replace(model, mod=mod, params=kept, entries={**model.entries, **entries}, packed=packed)
