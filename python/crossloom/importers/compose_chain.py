"""Join the functions of a chain of parts into one: shapes unified, outputs passed on, the rest returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.sym.pattern import detect_linear_equation

from ..errors import UnsupportedModel, UsageError
from ..model import Entry, TensorSpec
from .compose_weights import free_name
from .signature import entry_attributes, entry_of, output_types, symbolic_names
from .unify import ShapeConflict, Substitution, resolve, unify

#: A float may be passed on as a wider one: every value stays what it is.
_WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}


@dataclass
class Step:
    """One part within a chain: a private copy of its function, its entry and its weights' shared names."""

    part: str
    entry: Entry
    function: relax.Function
    weights: list[str]

    @property
    def inputs(self) -> list[relax.Var]:
        """The function's parameters before its weights."""
        return list(self.function.params)[: len(self.entry.inputs)]


def _feeds(steps: Sequence[Step], index: int) -> dict[int, tuple[int, int]]:
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


def _fit(producer: Step, output: int, consumer: Step, position: int, bound: Substitution) -> str:
    """Unify one output with one input, or say which two do not fit; return the dtype to cast to, if any."""
    given, taken = output_types(producer.function)[output], consumer.inputs[position].ty
    left, right = producer.entry.outputs[output], consumer.entry.inputs[position]
    sides = (
        f"output {_told(left)} of part {producer.part!r} does not fit input {_told(right)} of part {consumer.part!r}"
    )
    have, want = str(given.dtype), str(taken.dtype)
    if have != want and want not in _WIDER.get(have, ()):
        raise UnsupportedModel(f"{sides}: dtype {have} against {want}", "export both with one dtype")
    try:
        unify(list(given.shape), list(taken.shape), bound)
    except ShapeConflict as conflict:
        raise UnsupportedModel(f"{sides}: {conflict}", "export both with the same shape") from conflict
    return want if have != want else ""


def _told(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}({', '.join(map(str, spec.shape))})"


class _Joint:
    """The function under construction: its blocks in order, and the outputs every step has left behind."""

    def __init__(self) -> None:
        self.bound: Substitution = {}
        self.blocks: list[relax.BindingBlock] = []
        self.inputs: list[tuple[str, relax.Var]] = []
        self.weights: dict[str, relax.Var] = {}
        self.outputs: list[list[relax.Expr]] = []
        self.read: set[tuple[int, int]] = set()

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        """Put a binding behind what is there."""
        self.blocks.append(relax.DataflowBlock([relax.VarBinding(var, value)]))

    def leaves(self, value: relax.Expr, ty: tvm.ir.Type) -> list[relax.Expr]:
        """Take a result apart, tuples within tuples included, depth first."""
        if not isinstance(ty, relax.TupleType):
            return [value]
        out: list[relax.Expr] = []
        for index, field in enumerate(ty.fields):
            if isinstance(value, relax.Tuple):
                part = value.fields[index]
            else:
                part = relax.Var("part", field)
                self.bind(part, relax.TupleGetItem(value, index))
            out += self.leaves(part, field)
        return out

    def append(self, steps: Sequence[Step], index: int) -> None:
        """Put the body of one step behind what is there."""
        step = steps[index]
        feeds = _feeds(steps, index)
        for position, var in enumerate(step.inputs):
            if position in feeds:
                source, output = feeds[position]
                self.read.add((source, output))
                cast = _fit(steps[source], output, step, position, self.bound)
                value = self.outputs[source][output]
                self.bind(var, relax.op.astype(value, cast) if cast else value)
            else:
                name, taken = step.entry.inputs[position].name, {key for key, _ in self.inputs}
                self.inputs.append((free_name(name if name not in taken else f"{step.part}_{name}", taken), var))
        for weight, var in zip(step.weights, list(step.function.params)[len(step.inputs) :]):
            if weight in self.weights:
                self.bind(var, self.weights[weight])
            else:
                self.weights[weight] = var
        self.blocks += list(step.function.body.blocks)
        self.outputs.append(self.leaves(step.function.body.body, step.function.ret_ty))

    def returned(self, key: str, steps: Sequence[Step], wanted: Sequence[str]) -> list[tuple[str, int, int]]:
        """Choose what the function returns: name, step, output."""
        last = len(steps) - 1
        every = [(i, j) for i in [last, *range(last)] for j in range(len(steps[i].entry.outputs))]
        if wanted:
            nearest = {spec.name: (i, j) for i, step in enumerate(steps) for j, spec in enumerate(step.entry.outputs)}
            unknown = [name for name in wanted if name not in nearest]
            if unknown:
                raise UsageError(
                    f"entry {key!r} has no output {unknown[0]!r} to return", f"its parts' outputs: {', '.join(nearest)}"
                )
            return [(name, *nearest[name]) for name in wanted]
        chosen: list[tuple[str, int, int]] = []
        for i, j in every:
            if i == last or (i, j) not in self.read:
                name, taken = steps[i].entry.outputs[j].name, {other for other, _, _ in chosen}
                if i != last and name in taken:
                    name = free_name(f"{steps[i].part}_{name}", taken)
                chosen.append((name, i, j))
        return chosen


def join(
    key: str,
    steps: Sequence[Step],
    modality: str,
    upper_bounds: Mapping[str, int],
    outputs: Sequence[str] = (),
) -> tuple[relax.Function, Entry]:
    """Join the steps into one function: parameters that are fed become plain bindings between the bodies.

    Parameters
    ----------
    key : str
        Name of the entry.
    steps : sequence of Step
    modality : str
    upper_bounds : mapping of str to int
        Over those of the parts (elements).
    outputs : sequence of str
        What to return; by default what no step reads.

    Returns
    -------
    function : relax.Function
    entry : Entry
    """
    joint = _Joint()
    for index in range(len(steps)):
        joint.append(steps, index)
    chosen = joint.returned(key, steps, outputs)
    types = [output_types(steps[i].function)[j] for _, i, j in chosen]
    values = [joint.outputs[i][j] for _, i, j in chosen]
    params = [var for _, var in joint.inputs] + list(joint.weights.values())
    pure = all(bool(step.function.is_pure) for step in steps)
    upper, lower = _separate_symbols(steps, joint.bound)
    # bind_symbolic_vars wants every variable defined by a parameter: shadows of the fed ones stand in
    # meanwhile.
    shadows = [relax.Var("shadow", var.ty) for step in steps for var in step.inputs] if joint.bound else []
    body = relax.SeqExpr(joint.blocks, values[0] if len(values) == 1 else relax.Tuple(values))
    returned = types[0] if len(types) == 1 else relax.TupleType(types)
    function = relax.Function([*params, *shadows], body, returned, is_pure=pure)
    if joint.bound:
        function = function.bind_symbolic_vars(joint.bound)
        kept = list(function.params)[: len(params)]
        function = relax.Function(kept, function.body, function.ret_ty, is_pure=pure)
    unknown = [name for name in upper_bounds if name not in symbolic_names(function)]
    if unknown:
        raise UsageError(
            f"upper_bounds of entry {key!r} name an unknown dimension {unknown[0]!r}",
            f"its dimensions: {', '.join(symbolic_names(function)) or 'all static'}",
        )
    upper = {**upper, **upper_bounds}
    for name, most in upper.items():
        if lower.get(name, 0) > most:
            raise UnsupportedModel(
                f"dimension {name!r} of entry {key!r} must be at least {lower.get(name, 0)} and at most {most}",
                "export the parts with ranges that overlap",
            )
    entry = entry_of(
        function,
        key,
        [name for name, _ in joint.inputs],
        [name for name, _, _ in chosen],
        weights=list(joint.weights),
        modality=modality,
        upper_bounds=upper,
        lower_bounds=lower,
    )
    for attribute, value in entry_attributes(entry).items():
        function = function.with_attr(attribute, value)
    return function, entry


def _separate_symbols(steps: Sequence[Step], bound: Substitution) -> tuple[dict[str, int], dict[str, int]]:
    """Rename unbound symbolic dimensions that two parts happen to call the same; return the parts' bounds.

    Names are shared within an entry, but ``n`` of one part is not ``n`` of another unless a tensor passed
    between them says so.  Where one says ``n = 2 * m + 1``, the bounds of ``n`` become bounds of ``m``; those of
    a dimension bound to an expression of several variables, or to one that is not linear, are not kept.
    """
    taken: set[str] = set()
    upper: dict[str, int] = {}
    lower: dict[str, int] = {}
    fresh: Substitution = {}
    limits: list[tuple[str, int | None, int]] = []
    # What a dimension is bound to may be renamed after the bound one was met: names are settled first.
    for step in steps:
        for var in relax.analysis.defined_symbolic_vars(step.function):
            if any(var.same_as(other) for other in bound):
                continue
            name = free_name(var.name if var.name not in taken else f"{step.part}_{var.name}", taken)
            taken.add(name)
            if name != var.name:
                fresh[var] = tirx.Var(name, "int64")
    for var in list(bound):
        bound[var] = resolve(bound[var], fresh)
    for step in steps:
        for var in relax.analysis.defined_symbolic_vars(step.function):
            limit, least = step.entry.upper_bounds.get(var.name), step.entry.lower_bounds.get(var.name, 0)
            value = resolve(var, {**fresh, **bound})
            if isinstance(value, tirx.IntImm):
                _check_fixed(step, var.name, int(value.value), least, limit)
            else:
                limits += _carried(value, least, limit)
    for name, limit, least in limits:
        if limit is not None:
            upper[name] = min(limit, upper.get(name, limit))
        if least:
            lower[name] = max(least, lower.get(name, least))
    bound.update(fresh)
    return upper, lower


def _carried(value: tvm.ir.Expr, least: int, limit: int | None) -> list[tuple[str, int | None, int]]:
    """Return what ``least <= value <= limit`` says of the one variable of a linear `value`: name, largest, least."""
    variables = tirx.analysis.undefined_vars(value)
    linear = detect_linear_equation(value, variables) if len(variables) == 1 else []
    if len(linear) != 2 or not all(isinstance(number, tirx.IntImm) for number in linear):
        return []
    factor, offset = (int(number.value) for number in linear)
    if factor == 0:
        return []
    # Integers: the upper quotient is rounded down, the lower one up.
    ends = [None if end is None else end - offset for end in (least, limit)]
    if factor < 0:
        ends, factor = [None if end is None else -end for end in reversed(ends)], -factor
    low, high = ends
    return [
        (variables[0].name, None if high is None else high // factor, 0 if low is None else max(0, -(-low // factor)))
    ]


def _check_fixed(step: Step, name: str, size: int, least: int, limit: int | None) -> None:
    if size < least or (limit is not None and size > limit):
        raise UnsupportedModel(
            f"dimension {name!r} of part {step.part!r} becomes {size}, outside "
            f"{least} to {'any' if limit is None else limit}",
            "export the parts with sizes that agree",
        )
