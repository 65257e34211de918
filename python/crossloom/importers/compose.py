"""Stitch imported parts (vision, audio, projector, embedding, decoder) into one module of several entries.

An entry is a chain of parts inlined into one function body, so that passes see across the seam between, say,
a vision tower and its projector.  Weights with the same bytes are kept once, whatever part they came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.expr import _update_type as update_type
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..errors import UnsupportedModel, UsageError
from ..model import Entry, Model, TensorSpec
from .gather import bound_gathers
from .signature import check_entry, entry_attributes, entry_of, output_types, symbolic_names
from .unify import ShapeConflict, Substitution, resolve, unify


@dataclass(frozen=True)
class Chain:
    """One entry of a composed model.

    Attributes
    ----------
    parts : tuple of str
        Names of parts, in the order they run; ``"part:entry"`` picks an entry of a part that has several.
    modality : str
        By default the first part's that has one.
    upper_bounds : mapping of str to int
        Largest value of symbolic dimensions (elements), over those the parts bring.
    """

    parts: tuple[str, ...]
    modality: str = ""
    upper_bounds: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Step:
    """One part within a chain: a private copy of its function, its entry and its weights' shared names."""

    part: str
    entry: Entry
    function: relax.Function
    weights: list[str]

    @property
    def inputs(self) -> list[relax.Var]:
        return list(self.function.params)[: len(self.entry.inputs)]


def compose(
    parts: Mapping[str, Model],
    entries: Mapping[str, Sequence[str] | Chain],
    *,
    modalities: Mapping[str, str] | None = None,
    name: str = "model",
) -> Model:
    """Stitch parts into one model.

    Each part after the first takes the outputs of the parts before it: by name where one has the name of an
    input (the nearest part wins), else by position from the part just before.  Inputs nothing feeds become
    inputs of the entry.  The entry returns what its last part returns.

    Parameters
    ----------
    parts : mapping of str to Model
    entries : mapping of str to sequence of str, or to Chain
        Entry name -> the parts it runs, in order.
    modalities : mapping of str to str, optional
        Part name -> modality, over what the parts' own entries say.
    name : str
        Name of the result.

    Returns
    -------
    Model
        Weights are named ``part.weight``; those shared between parts keep the name they have in common.

    Raises
    ------
    UsageError
        Unknown part, entry or dimension, or an empty chain.
    UnsupportedModel
        A part's output does not fit the next part's input; the message names both.
    """
    if not entries:
        raise UsageError("compose() was given no entries", "name at least one, e.g. {'main': ['part']}")
    chains = {
        key: value if isinstance(value, Chain) else Chain(tuple(_listed(key, value))) for key, value in entries.items()
    }
    picked = {key: [_pick(parts, key, item) for item in chain.parts] for key, chain in chains.items()}
    for key, items in picked.items():
        if not items:
            raise UsageError(f"entry {key!r} has no parts", f"name some of: {', '.join(sorted(parts))}")
    tags = _modalities(parts, modalities or {})
    parts = {key: replace(part, mod=bound_gathers(part.mod, from_end=False)) for key, part in parts.items()}
    shared, params = _share_weights(parts, picked)
    functions, renamed = _private_functions(parts, set(chains))

    result = Model(tvm.IRModule(functions), params, {}, tags, name)
    for key, chain in chains.items():
        steps = []
        for part, entry_name in picked[key]:
            function = _renew(renamed[part], check_entry(parts[part], entry_name, part))
            entry = parts[part].entries[entry_name]
            steps.append(_Step(part, entry, function, [shared[part, weight] for weight in entry.weights]))
        modality = chain.modality or next((tags[s.part] for s in steps if tags.get(s.part)), "")
        function, entry = _inline(key, steps, modality, chain.upper_bounds)
        result.mod[key] = function
        result.entries[key] = entry
    result.mod = relax.transform.CanonicalizeBindings()(result.mod)
    result.mod = relax.transform.DeadCodeElimination(list(chains))(result.mod)
    relax.analysis.well_formed(result.mod)
    return result


def _listed(key: str, value: Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        raise UsageError(f"entry {key!r} is the string {value!r}", f"write a list of parts: [{value!r}]")
    return value


def _pick(parts: Mapping[str, Model], key: str, item: str) -> tuple[str, str]:
    """Resolve ``part`` or ``part:entry`` for the entry `key`."""
    part, _, wanted = item.partition(":")
    if part not in parts:
        raise UsageError(f"entry {key!r} names an unknown part {part!r}", f"parts: {', '.join(sorted(parts))}")
    names = list(parts[part].entries)
    if wanted:
        if wanted not in names:
            raise UsageError(f"part {part!r} has no entry {wanted!r}", f"it has: {', '.join(names)}")
        return part, wanted
    for choice in (names[0] if len(names) == 1 else None, key, part):
        if choice in names:
            return part, str(choice)
    raise UsageError(
        f"part {part!r} has several entries and entry {key!r} does not say which",
        f"write one of: {', '.join(f'{part}:{choice}' for choice in names)}",
    )


def _modalities(parts: Mapping[str, Model], given: Mapping[str, str]) -> dict[str, str]:
    unknown = [key for key in given if key not in parts]
    if unknown:
        raise UsageError(f"modalities name an unknown part {unknown[0]!r}", f"parts: {', '.join(sorted(parts))}")
    tags = {}
    for key, model in parts.items():
        own = [entry.modality for entry in model.entries.values() if entry.modality]
        tags[key] = given.get(key) or (own[0] if own else "")
    return tags


def _share_weights(
    parts: Mapping[str, Model], picked: Mapping[str, Sequence[tuple[str, str]]]
) -> tuple[dict[tuple[str, str], str], dict[str, np.ndarray]]:
    """Name every used weight, one name for all weights with the same dtype, shape and bytes."""
    groups: dict[tuple[str, tuple[int, ...], str], list[tuple[str, str]]] = {}
    seen: set[tuple[str, str]] = set()
    digests: dict[int, str] = {}
    for chain in picked.values():
        for part, entry_name in chain:
            check_entry(parts[part], entry_name, part)
            for weight in parts[part].entries[entry_name].weights:
                if (part, weight) in seen:
                    continue
                seen.add((part, weight))
                array = parts[part].params[weight]
                if id(array) not in digests:
                    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    digests[id(array)] = hashlib.sha256(flat.tobytes()).hexdigest()
                ident = (str(array.dtype), tuple(array.shape), digests[id(array)])
                groups.setdefault(ident, []).append((part, weight))
    names: dict[tuple[str, str], str] = {}
    params: dict[str, np.ndarray] = {}
    for members in groups.values():
        owners, bases = {part for part, _ in members}, {weight for _, weight in members}
        part, weight = members[0]
        common = len(owners) > 1 and len(bases) == 1
        name = _free(weight if common or weight.startswith(f"{part}.") else f"{part}.{weight}", params)
        params[name] = parts[part].params[weight]
        names.update(dict.fromkeys(members, name))
    return names, params


def _free(name: str, taken: Mapping[str, object] | set[str]) -> str:
    """Return `name`, with a number behind it when it is taken."""
    if name not in taken:
        return name
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


@mutator
class _Renamer(PyExprMutator):
    """Replace references to global functions."""

    def __init__(self, names: Mapping[str, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self.names = names

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self.names.get(op.name_hint, op)


def _renew(names: Mapping[str, tvm.ir.GlobalVar], function: relax.Function) -> relax.Function:
    """Copy a function: new variables, references to private functions renamed."""
    copy = relax.utils.copy_with_new_vars(function)
    return _Renamer(names).visit_expr(copy) if names else copy


def _private_functions(
    parts: Mapping[str, Model], taken: set[str]
) -> tuple[dict[tvm.ir.GlobalVar, object], dict[str, dict[str, tvm.ir.GlobalVar]]]:
    """Collect what the entries call, under names free of clashes.

    Returns
    -------
    functions : dict of GlobalVar to function
    renamed : dict of str to dict of str to GlobalVar
        Part -> old name -> its function.
    """
    functions: dict[tvm.ir.GlobalVar, object] = {}
    renamed: dict[str, dict[str, tvm.ir.GlobalVar]] = {}
    used = set(taken)
    for part, model in parts.items():
        names: dict[str, tvm.ir.GlobalVar] = {}
        for gv, _ in model.mod.functions_items():
            new = _free(gv.name_hint if gv.name_hint not in used else f"{part}_{gv.name_hint}", used)
            if gv.name_hint in model.entries:
                new = _free(f"{part}_{gv.name_hint}", used)
            used.add(new)
            names[gv.name_hint] = tvm.ir.GlobalVar(new)
            update_type(names[gv.name_hint], gv.ty)
        for gv, function in model.mod.functions_items():
            target = names[gv.name_hint]
            if isinstance(function, relax.Function):
                function = _renew(names, function)
            if function.attrs and "global_symbol" in function.attrs:
                function = (
                    function.without_attr("global_symbol")
                    if gv.name_hint in model.entries
                    else function.with_attr("global_symbol", target.name_hint)
                )
            functions[target] = function
        renamed[part] = names
    return functions, renamed


def _feeds(steps: Sequence[_Step], index: int) -> dict[int, tuple[int, int]]:
    """Return input -> (step, output) for the step at `index`."""
    step = steps[index]
    found: dict[int, tuple[int, int]] = {}
    for position, spec in enumerate(step.entry.inputs):
        for earlier in reversed(range(index)):
            names = [output.name for output in steps[earlier].entry.outputs]
            if spec.name in names:
                found[position] = (earlier, names.index(spec.name))
                break
    if not found and index:
        count = min(len(steps[index - 1].entry.outputs), len(step.entry.inputs))
        found = {position: (index - 1, position) for position in range(count)}
        if not found:
            raise UsageError(
                f"part {step.part!r} takes no input that {steps[index - 1].part!r} could feed",
                "put it into an entry of its own",
            )
    return found


def _fit(producer: _Step, output: int, consumer: _Step, position: int, bound: Substitution) -> None:
    """Unify one output with one input, or say which two do not fit."""
    given, taken = output_types(producer.function)[output], consumer.inputs[position].ty
    left, right = producer.entry.outputs[output], consumer.entry.inputs[position]
    sides = (
        f"output {_told(left)} of part {producer.part!r} does not fit input {_told(right)} of part {consumer.part!r}"
    )
    if str(given.dtype) != str(taken.dtype):
        raise UnsupportedModel(f"{sides}: dtype {given.dtype} against {taken.dtype}", "export both with one dtype")
    try:
        unify(list(given.shape), list(taken.shape), bound)
    except ShapeConflict as conflict:
        raise UnsupportedModel(f"{sides}: {conflict}", "export both with the same shape") from conflict


def _told(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}({', '.join(map(str, spec.shape))})"


def _bind(target: relax.Var, value: tvm.ir.Expr) -> relax.DataflowBlock:
    return relax.DataflowBlock([relax.VarBinding(target, value)])


def _inline(
    key: str, steps: Sequence[_Step], modality: str, upper_bounds: Mapping[str, int]
) -> tuple[relax.Function, Entry]:
    """Join the steps into one function: parameters that are fed become plain bindings between the bodies."""
    bound: Substitution = {}
    blocks: list[relax.BindingBlock] = []
    inputs: list[tuple[str, relax.Var]] = []
    weights: dict[str, relax.Var] = {}
    late: list[relax.BindingBlock] = []
    for index, step in enumerate(steps):
        feeds = _feeds(steps, index)
        for position, var in enumerate(step.inputs):
            if position in feeds:
                source, output = feeds[position]
                _fit(steps[source], output, step, position, bound)
                late.append(_bind(var, _output(steps[source], output)))
            else:
                spec_name = step.entry.inputs[position].name
                taken = {name for name, _ in inputs}
                inputs.append((_free(spec_name if spec_name not in taken else f"{step.part}_{spec_name}", taken), var))
        for weight, var in zip(step.weights, list(step.function.params)[len(step.inputs) :]):
            if weight in weights:
                late.append(_bind(var, weights[weight]))
            else:
                weights[weight] = var
        blocks += [*late, *step.function.body.blocks]
        late = []
    last = steps[-1]
    params = [var for _, var in inputs] + list(weights.values())
    pure = all(bool(step.function.is_pure) for step in steps)
    bounds = _separate_symbols(steps, bound)
    # bind_symbolic_vars wants every variable defined by a parameter: shadows of the fed ones stand in
    # meanwhile.
    shadows = [relax.Var("shadow", var.ty) for step in steps for var in step.inputs] if bound else []
    body = relax.SeqExpr(blocks, last.function.body.body)
    function = relax.Function([*params, *shadows], body, last.function.ret_ty, is_pure=pure)
    if bound:
        function = function.bind_symbolic_vars(bound)
        kept = list(function.params)[: len(params)]
        function = relax.Function(kept, function.body, function.ret_ty, is_pure=pure)
    unknown = [name for name in upper_bounds if name not in symbolic_names(function)]
    if unknown:
        raise UsageError(
            f"upper_bounds of entry {key!r} name an unknown dimension {unknown[0]!r}",
            f"its dimensions: {', '.join(symbolic_names(function)) or 'all static'}",
        )
    entry = entry_of(
        function,
        key,
        [name for name, _ in inputs],
        [output.name for output in last.entry.outputs],
        weights=list(weights),
        modality=modality,
        upper_bounds={**bounds, **upper_bounds},
    )
    for attribute, value in entry_attributes(entry).items():
        function = function.with_attr(attribute, value)
    return function, entry


def _output(step: _Step, index: int) -> tvm.ir.Expr:
    body = step.function.body.body
    if len(step.entry.outputs) == 1:
        return body
    return body.fields[index] if isinstance(body, relax.Tuple) else relax.TupleGetItem(body, index)


def _separate_symbols(steps: Sequence[_Step], bound: Substitution) -> dict[str, int]:
    """Rename unbound symbolic dimensions that two parts happen to call the same; return the parts' upper
    bounds.

    Names are shared within an entry, but ``n`` of one part is not ``n`` of another unless a tensor passed
    between them says so.
    """
    taken: set[str] = set()
    bounds: dict[str, int] = {}
    fresh: Substitution = {}
    for step in steps:
        for var in relax.analysis.defined_symbolic_vars(step.function):
            limit = step.entry.upper_bounds.get(var.name)
            value = resolve(var, bound)
            if any(var.same_as(other) for other in bound):
                if limit is not None and tvm.ir.is_prim_var(value):
                    bounds[value.name] = min(limit, bounds.get(value.name, limit))
                continue
            name = _free(var.name if var.name not in taken else f"{step.part}_{var.name}", taken)
            taken.add(name)
            if limit is not None:
                bounds[name] = min(limit, bounds.get(name, limit))
            if name != var.name:
                fresh[var] = tirx.Var(name, "int64")
    for var in list(bound):
        bound[var] = resolve(bound[var], fresh)
    bound.update(fresh)
    return bounds
