"""The operator compatibility map: what every target says of one operator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import tvm

from ..errors import UsageError
from .model import Answer, Capability, Target
from .registry import list_targets


@dataclass(frozen=True)
class Compatibility:
    """One line of the map.

    Attributes
    ----------
    op, target, unit : str
    answer : {"yes", "no", "conditional", "unknown"}
        ``"conditional"``: yes, but some row forbids it under the conditions given.
    conditions : tuple of str
        When it is not, and what happens then.
    source, confidence : str
        Of the row that gives the answer; empty when no row does.
    """

    op: str
    target: str
    unit: str
    answer: str
    conditions: tuple[str, ...]
    source: str
    confidence: str


def _condition(row: Capability) -> str:
    parts = [str(row.when)] if str(row.when) else []
    parts += [f"dtype {'|'.join(row.dtypes)}"] if row.dtypes else []
    text = f"{row.supported} when {'; '.join(parts)}" if parts else row.supported
    tail = ", ".join(filter(None, (row.effect, row.note)))
    return f"{text} ({tail})" if tail else text


def _line(op: str, target: Target, unit: str) -> Compatibility:
    named = [r for r in target.capabilities if r.unit == unit and op in r.op]
    if unit == "cpu":
        named = [r for r in target.capabilities if r.unit == unit and ("*" in r.op or op in r.op)]
    plain = target.supports(op, "float32", unit=unit)
    answer: Answer | str = plain.answer
    row = plain.row if isinstance(plain.row, Capability) else None
    if answer == "unknown" and row is None and named:
        row = next((r for r in named if r.supported == "yes"), named[0])
        answer = "conditional" if row.supported == "yes" else row.supported
    elif answer == "no" and row is not None and row.dtypes and "*" in row.op:
        # Only the type asked about was at fault: say so as a condition.
        allowing = next((r for r in named if r.supported == "yes" and r.dtypes), None)
        row, answer = (allowing, "conditional") if allowing is not None else (row, answer)
    restrictions = [r for r in named if r is not row and (r.supported != answer or r.dtypes)]
    if answer == "yes" and any(r.supported != "yes" for r in restrictions):
        answer = "conditional"
    shown = ([row] if row is not None and _condition(row) != row.supported else []) + restrictions
    conditions = tuple(dict.fromkeys(_condition(r) for r in shown))
    return Compatibility(
        op,
        target.name,
        unit,
        str(answer),
        conditions,
        row.source if row else "",
        row.confidence if row else "",
    )


def compatibility(op: str, targets: Iterable[Target] | None = None) -> list[Compatibility]:
    """Return what each unit of each target says of an operator.

    Parameters
    ----------
    op : str
        Relax name; ``relax.`` and ``relax.nn.`` may be left out (``"conv2d"``).
    targets : iterable of Target, optional
        Default: all known ones.

    Raises
    ------
    UsageError
        For an operator Relax does not have, with the closest names.
    """
    known = {name for name in tvm.ir.Op.list_op_names() if name.startswith("relax.")}
    full = next((n for n in (op, f"relax.{op}", f"relax.nn.{op}", f"relax.image.{op}") if n in known), None)
    if full is None:
        close = difflib.get_close_matches(op, [*known, *(n.rsplit(".", 1)[-1] for n in known)], n=3)
        raise UsageError(
            f"Relax has no operator {op!r}",
            f"did you mean {', '.join(close)}?" if close else "e.g. relax.matmul",
        )
    chosen = list(list_targets().values() if targets is None else targets)
    return [_line(full, target, unit) for target in chosen for unit in target.units]
