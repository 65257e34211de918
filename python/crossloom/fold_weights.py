"""Compute at compile time what depends on weights alone.

    wt = R.permute_dims(w)        # w is a weight: a parameter after num_input
    y  = R.matmul(x, wt)
->  y  = R.matmul(x, w_folded)    # w_folded = w.T, stored in the model

Fires for permute_dims, reshape, astype, expand_dims, squeeze, concat, takes of constant indices, elementwise sums,
products, quotients and square roots, sums over axes, resized images, and matrix products that are no larger than their
factors, whose operands are weights, constants or folded themselves.
Never for a value that is only a constant (fold-constants does those) or one with a symbolic shape.
Numerics: exact, numpy computing in the values' own dtype; sums are made in float64 and rounded once.

It works on a :class:`crossloom.model.Model`, since it changes weights; the driver runs it after
``inline-composites``, when what composites hid is plain operators again.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
from tvm import ir, relax

from .known_values import evaluate
from .model import Entry, Model
from .rewrite import Graph
from .rewrite.replace import Replace
from .verdict import accept, record


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
        known = evaluate(graph, {v: model.params[k] for v, k in zip(weights, entry.weights)})
        folded = known.folded
        new_vars: dict[relax.Var, relax.Var] = {}
        names: list[str] = []
        for var, value in known.values.items():
            array = np.asarray(value, order="C")
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
            replace_folded = Replace()
            replace_folded.values = skip
            body = replace_folded.visit_expr(func.body)
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
