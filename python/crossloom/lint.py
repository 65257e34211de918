"""Say what a target cannot take of a model, before anything is converted, with the table row that says so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from .model import Model
from .targets.model import Capability, Support, Target

#: Facts about a call that rows may ask for (``when.features``), beyond shapes, types and attributes.
FEATURES = {
    "dynamic": "some dimension of an argument or of the result is not known",
    "stepped": "a slice with a step other than one",
    "scalar-input": "a 0-dimensional input of the function",
    "runtime-indices": "indices that are not constant",
    "runtime-exponent": "a power whose exponent is a computed tensor",
    "runtime-weight": "a convolution or matmul whose second argument is computed, not a weight",
    "float-to-int": "a cast from a floating to an integer type",
    "large-kernel": "pooling over more than 13 elements along an axis",
}
_SEVERITIES = ("error", "warning", "info")
_INDEXED = {
    "relax.take",
    "relax.gather_elements",
    "relax.gather_nd",
    "relax.scatter_elements",
    "relax.scatter_nd",
}
_WEIGHTED = {"relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"}


#: A string is a dimension that is not known.
Shape = Sequence[int | str]


@dataclass(frozen=True)
class Finding:
    """One thing a target cannot take, or may not.

    Attributes
    ----------
    severity : {"error", "warning", "info"}
        error: no unit of the target can run it; warning: it stays off the NPU; info: worth knowing.
    code : str
        ``dynamic-shape``, ``op``, ``dtype``, ``rank``, ``extent``, ``disputed``, ``op-unknown``,
        ``converted``, ``flash`` or ``ram``.
    function : str
    where : str
        The binding or input it was first met at.
    op : str
        Relax operator, or empty.
    what, why, source, confidence, remedy : str
        ``source`` and ``confidence`` are those of the table's row.
    count : int
        How many places of the function it stands for.
    """

    severity: str
    code: str
    function: str
    where: str
    op: str
    what: str
    why: str
    source: str
    remedy: str
    confidence: str = ""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        remedy = f" Remedy: {self.remedy}." if self.remedy else ""
        place = f"{self.function}: {self.where}" if self.function else self.where
        return f"{self.severity}: {place}{times}: {self.what}: {self.why}.{remedy} [{self.source}]"


def _tensor(expr: Any) -> tuple[tuple[int | str, ...], str] | None:
    """Return (shape, dtype) of a tensor expression; an unknown rank gives the symbolic ``("?",)``."""
    ty = expr.ty if isinstance(expr, relax.Expr) else expr
    if not isinstance(ty, relax.TensorType):
        return None
    shape = ty.shape
    dims = ("?",) if not isinstance(shape, relax.ShapeExpr) else tuple(map(_dim, shape.values))
    return dims, str(ty.dtype)


def _dim(value: Any) -> int | str:
    return int(value) if isinstance(value, (int, tvm.tirx.IntImm)) else str(value)


def _tensors(expr: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    if isinstance(expr, relax.Tuple):
        for part in expr.fields:
            yield from _tensors(part)
        return
    found = _tensor(expr)
    if found is not None:
        yield found
    elif isinstance(expr, relax.Expr) and isinstance(expr.ty, relax.TupleType):
        for part in expr.ty.fields:
            inner = _tensor(part)
            if inner is not None:
                yield inner


def _calls(
    function: relax.Function,
) -> Iterator[tuple[str, relax.Call, set[Any]]]:
    """Yield (binding, call, what is constant) for each operator call, also in nested functions."""
    count = function.attrs.get("num_input") if function.attrs is not None else None
    fixed: set[Any] = set(function.params[int(count) :]) if count is not None else set()

    def walk(expr: Any, name: str) -> Iterator[tuple[str, relax.Call, set[Any]]]:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    inner = binding.value
                    yield from walk(inner, binding.var.name)
                    # What weights and constants alone give is folded before any tool chain sees it.
                    parts = inner.args if isinstance(inner, relax.Call) else [inner]
                    if isinstance(inner, (relax.Call, relax.Var)) and all(_constant(p, fixed) for p in parts):
                        fixed.add(binding.var)
            yield from walk(expr.body, name)
        elif isinstance(expr, relax.Call):
            if isinstance(expr.op, tvm.ir.Op):
                yield name, expr, fixed
            for arg in expr.args:
                if isinstance(arg, relax.Call):
                    yield from walk(arg, name)
        elif isinstance(expr, relax.If):
            yield from walk(expr.true_branch, name)
            yield from walk(expr.false_branch, name)
        elif isinstance(expr, relax.Function):
            yield from walk(expr.body, name)

    yield from walk(function.body, "return")


def _constant(expr: Any, fixed: set[Any]) -> bool:
    if isinstance(expr, relax.Var):
        return expr in fixed
    if isinstance(expr, relax.Tuple):
        return all(_constant(part, fixed) for part in expr.fields)
    return not isinstance(expr, (relax.Call, relax.TupleGetItem))


def _features(call: relax.Call, fixed: set[Any], result_dtype: str) -> tuple[str, ...]:
    op, args, found = call.op.name, call.args, []
    if op == "relax.strided_slice" and len(args) > 4 and isinstance(args[4], relax.Tuple):
        steps = [
            getattr(getattr(step, "value", step), "value", getattr(step, "value", step)) for step in args[4].fields
        ]
        found += ["stepped"] * any(str(step) != "1" for step in steps)
    if op in _INDEXED and len(args) > 1 and not _constant(args[1], fixed):
        found.append("runtime-indices")
    if op == "relax.power" and not _constant(args[1], fixed):
        found.append("runtime-exponent")
    if op in _WEIGHTED and not _constant(args[1], fixed):
        found.append("runtime-weight")
    if op == "relax.astype":
        source = _tensor(args[0])
        if source is not None and "float" in source[1] and "int" in result_dtype:
            found.append("float-to-int")
    pool = getattr(call.attrs, "pool_size", None) if call.attrs is not None else None
    if pool is not None and any(isinstance(d := _dim(p), int) and d > 13 for p in pool):
        found.append("large-kernel")
    return tuple(found)


def _attrs(call: relax.Call) -> Mapping[str, str]:
    if call.attrs is None:
        return {}
    names = ("method", "k", "axis", "layout", "data_layout", "mode")
    return {name: str(value) for name in names if (value := getattr(call.attrs, name, None)) is not None}


def _code(row: Capability | None) -> str:
    if row is None:
        return "op-unknown"
    if "dynamic" in row.when.features:
        return "dynamic-shape"
    if row.when.min_rank is not None or row.when.max_rank is not None:
        return "rank"
    if row.when.min_extent is not None or row.when.max_extent is not None:
        return "extent"
    return "dtype" if row.dtypes else "op"


def _judge(call: relax.Call, target: Target, unit: str, fixed: set[Any]) -> list[tuple[Support, str]]:
    """Ask the table about one call; each distinct argument type is a question of its own."""
    inputs = [t for arg in call.args for t in _tensors(arg)]
    outputs = list(_tensors(call))
    # The result's type matters where it is not decided by the arguments'.
    asked = inputs if inputs and call.op.name != "relax.astype" else inputs + outputs
    shapes = [shape for shape, _ in (*inputs, *outputs)]
    features = _features(call, fixed, outputs[0][1] if outputs else "")
    dtypes = list(dict.fromkeys(dtype for _, dtype in asked)) or ["float32"]
    if call.op.name in _INDEXED and inputs:
        # The type of the indices is not the type of the arithmetic.
        dtypes = [inputs[0][1]]
    options: dict[str, Any] = {"unit": unit, "features": features, "attrs": _attrs(call)}
    # Unknown dimensions are a finding of their own; here they must not hide what else is wrong with the call.
    fixed_shapes = [tuple(d if isinstance(d, int) else 1 for d in shape) for shape in shapes]
    answers = [(target.supports(call.op.name, dtype, *fixed_shapes, **options), dtype) for dtype in dtypes]
    if fixed_shapes != shapes:
        row = _dynamic_row(target, unit, dtypes[0], shapes)
        answers += [(Support("no", row, unit), dtypes[0])] if row is not None else []
    return answers


def _dynamic_row(target: Target, unit: str, dtype: str, shapes: Sequence[Sequence[int | str]]) -> Capability | None:
    rows = target.rows("*", dtype, shapes, unit=unit)
    return next((r for r in rows if "dynamic" in r.when.features and r.supported == "no"), None)


def _finding(support: Support, dtype: str, target: Target, op: str, where: str, name: str) -> Finding | None:
    row = support.row if isinstance(support.row, Capability) else None
    if support.answer == "yes":
        return None
    code = _code(row)
    unit = support.unit
    if code == "dynamic-shape":
        op = ""
    named = {
        "dtype": f"{op} of {dtype}",
        "op-unknown": f"{op} on the {unit}",
        "dynamic-shape": "dynamic shapes",
    }
    what = named.get(code, op)
    if support.answer == "unknown":
        severity = "info" if unit == "npu" else "warning"
        code = "op-unknown" if row is None else "disputed"
        why = f"no row of {target.name}'s table says whether the {unit} takes it" if row is None else "sources disagree"
    else:
        severity = "error" if unit == "cpu" else "warning"
        condition = f" ({row.when})" if row is not None and str(row.when) else ""
        effect = f"; {row.effect}" if row is not None and row.effect else ""
        why = f"the {unit} of {target.name} does not take it{condition}{effect}"
    if row is not None and row.note:
        why += f"; {row.note}"
    source = support.source or f"{target.name}: no row"
    confidence = row.confidence if row is not None else ""
    return Finding(severity, code, name, where, op, what, why, source, row.remedy if row else "", confidence)


def _inputs(function: relax.Function, target: Target, name: str) -> Iterator[Finding]:
    """Name each parameter whose shape the unit does not take: dynamic dimensions, scalars."""
    unit = target.units[0]
    for param in function.params:
        for shape, dtype in _tensors(param):
            loose = [f"{axis} ({d})" for axis, d in enumerate(shape) if isinstance(d, str)]
            row = _dynamic_row(target, unit, dtype, (shape,)) if loose else None
            if row is not None:
                severity = "error" if unit == "cpu" else "warning"
                what = f"input {param.name!r} is dynamic in dimension {', '.join(loose)}"
                why = f"the {unit} of {target.name} wants static shapes"
                yield Finding(
                    severity,
                    "dynamic-shape",
                    name,
                    param.name,
                    "",
                    what,
                    why,
                    row.source,
                    row.remedy,
                    row.confidence,
                )
            if shape == ():
                found = target.rows("*", dtype, (shape,), unit=unit, features=("scalar-input",))
                for row in (r for r in found if "scalar-input" in r.when.features and r.supported == "no"):
                    what = f"input {param.name!r} is a scalar"
                    why = f"the {unit} of {target.name} does not take one; {row.effect}"
                    severity = "error" if unit == "cpu" else "warning"
                    place = (name, param.name, "", what, why, row.source, row.remedy, row.confidence)
                    yield Finding(severity, "rank", *place)


def _bytes(tensor: tuple[Sequence[int | str], str]) -> int:
    shape, dtype = tensor
    bits = tvm.DataType(dtype).bits
    return (math.prod(shape) * bits + 7) // 8 if all(isinstance(d, int) for d in shape) else 0


def _memory(mod: tvm.ir.IRModule, model: Model | None, target: Target) -> Iterator[Finding]:
    """Compare weights with flash and the largest single step with RAM; both are lower bounds."""
    flash = sum(b.bytes for b in target.banks if b.kind == "flash")
    ram = sum(b.bytes for b in target.banks if b.kind == "ram")
    weights = sum(value.nbytes for value in model.params.values()) if model is not None else 0
    source = "; ".join(dict.fromkeys(b.source for b in target.banks))
    if flash and weights > flash:
        what, why = f"weights of {weights} bytes", f"{target.name} has {flash} bytes of flash"
        yield Finding("error", "flash", "", "weights", "", what, why, source, "quantize or prune the weights")
    for gvar, function in _functions(mod):
        largest, at = 0, ""
        for where, call, fixed in _calls(function):
            # Weights are read from flash; the arena holds what is computed.
            live = [t for arg in call.args if not _constant(arg, fixed) for t in _tensors(arg)]
            need = sum(map(_bytes, [*live, *_tensors(call)]))
            largest, at = max((largest, at), (need, where), key=lambda pair: pair[0])
        if ram and largest > ram:
            what = f"at least {largest} bytes of activations at once"
            why = f"{target.name} has {ram} bytes of RAM"
            yield Finding("error", "ram", gvar, at, "", what, why, source, "make the activations smaller, or use int8")


def _functions(mod: tvm.ir.IRModule) -> list[tuple[str, relax.Function]]:
    found = [(gv.name_hint, fn) for gv, fn in mod.functions.items() if isinstance(fn, relax.Function)]
    return sorted(found, key=lambda pair: pair[0])


def lint(model: Model | tvm.ir.IRModule, target: Target) -> list[Finding]:
    """Find what a target cannot take.

    Parameters
    ----------
    model : Model or IRModule
        As imported; parameters after ``num_input`` and constants count as known when the model is built.
    target : Target

    Returns
    -------
    list of Finding
        Errors first; then by function and by order of appearance.  Findings of a function that differ only in
        place are one, with a count.
    """
    mod = model.mod if isinstance(model, Model) else model
    merged: dict[tuple[Any, ...], Finding] = {}

    def add(finding: Finding) -> None:
        key = (finding.function, finding.code, finding.op, finding.what, finding.why, finding.source)
        old = merged.get(key)
        merged[key] = finding if old is None else replace(old, count=old.count + 1)

    for name, function in _functions(mod):
        for finding in _inputs(function, target, name):
            add(finding)
        converted: dict[tuple[str, str], tuple[int, str]] = {}
        for where, call, fixed in _calls(function):
            for unit in target.units:
                for support, dtype in _judge(call, target, unit, fixed):
                    found = _finding(support, dtype, target, call.op.name, where, name)
                    if found is not None:
                        add(found)
                    elif support.computed_in:
                        count, first = converted.get((dtype, support.computed_in), (0, where))
                        converted[dtype, support.computed_in] = (count + 1, first)
        for (dtype, computed), (count, first) in converted.items():
            what = f"{dtype} is computed as {computed} on the NPU"
            npu = target.npu
            source = f"{target.name}: {npu.note or npu.source}" if npu is not None else ""
            add(
                Finding(
                    "info",
                    "converted",
                    name,
                    first,
                    "",
                    what,
                    "the tool chain converts it",
                    source,
                    "",
                    "",
                    count,
                )
            )
    if target.family == "micro":
        for finding in _memory(mod, model if isinstance(model, Model) else None, target):
            add(finding)
    return sorted(merged.values(), key=lambda f: _SEVERITIES.index(f.severity))
