"""Ask a target's table about one call or one parameter, and word the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import relax

from .lint_calls import INDEXED, attrs_of, features_of, tensors
from .lint_finding import Finding
from .targets.model import Capability, Support, Target


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


def judge(call: relax.Call, target: Target, unit: str, fixed: set[Any]) -> list[tuple[Support, str]]:
    """Ask the table about one call; each distinct argument type is a question of its own."""
    inputs = [t for arg in call.args for t in tensors(arg)]
    outputs = list(tensors(call))
    # The result's type matters where it is not decided by the arguments'.
    asked = inputs if inputs and call.op.name != "relax.astype" else inputs + outputs
    shapes = [shape for shape, _ in (*inputs, *outputs)]
    features = features_of(call, fixed, outputs[0][1] if outputs else "")
    dtypes = list(dict.fromkeys(dtype for _, dtype in asked)) or ["float32"]
    if call.op.name in INDEXED and inputs:
        # The type of the indices is not the type of the arithmetic.
        dtypes = [inputs[0][1]]
    options: dict[str, Any] = {"unit": unit, "features": features, "attrs": attrs_of(call)}
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


def judge_support(support: Support, dtype: str, target: Target, op: str, where: str, name: str) -> Finding | None:
    """Return the finding an answer makes: None where it is yes."""
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


def judge_inputs(function: relax.Function, target: Target, name: str) -> Iterator[Finding]:
    """Name each parameter whose shape the unit does not take: dynamic dimensions, scalars."""
    unit = target.units[0]
    for param in function.params:
        for shape, dtype in tensors(param):
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
