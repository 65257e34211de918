"""What the tables of a rotation hold: which positions turn which pairs, how fast, and whether that is proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossloom.verdict import Verdict, refuse

from .columns import recover
from .elements import Elements
from .products import Product

Facts = dict[str, Any]
Lanes = Sequence[Product]
_NAMES = {1: "1d", 2: "2d", 3: "mrope"}
_CASTS = ("float16", "bfloat16", "float32")
#: Further apart than any rounding, and as near as rounding brings equal numbers (relative).
_DIFFERENT = 1e-3
_ROUNDING = 1e-6


@dataclass(frozen=True)
class _Turn:
    """One lane: ``scale`` times the ``kind`` of an angle, or a constant's column."""

    kind: str = ""
    scale: float = 1.0
    angle: Product | None = None
    column: int = -1


def _read(elements: Elements, lane: Product) -> _Turn:
    scale = lane.number
    while len(lane.factors) == 1:
        (name,) = lane.factors
        factor = elements.factors.of[name]
        if factor.kind in ("cos", "sin"):
            return _Turn(factor.kind, scale, factor.args[0])  # type: ignore[arg-type]
        if factor.kind == "column":
            return _Turn("column", scale, column=name)
        if factor.kind not in _CASTS:
            break
        lane = factor.args[0]  # type: ignore[assignment]
        scale *= lane.number
    return _Turn()


def _differ(elements: Elements, a: Product, b: Product) -> bool:
    """Return whether two lanes are proved to differ (unequal spelling alone proves nothing)."""
    left, right = _read(elements, a), _read(elements, b)
    if left.kind != right.kind or not left.kind:
        return False
    if left.kind == "column":
        (one, at), (other, there) = (elements.factors.columns[t.column] for t in (left, right))
        if at != there or one.shape != other.shape:
            return False
        gap = np.abs(left.scale * one.astype("float64") - right.scale * other.astype("float64"))
        return bool(gap.size and gap.max() > _DIFFERENT)
    if left.angle is None or right.angle is None or not left.angle.factors:
        return False
    return left.angle.factors == right.angle.factors and not _near(left.angle, right.angle, _DIFFERENT)


def _near(a: Product, b: Product, tolerance: float) -> bool:
    """Return whether two products are of the same factors and their numbers near each other."""
    return a.factors == b.factors and bool(np.isclose(a.number, b.number, rtol=tolerance, atol=0))


def table_facts(elements: Elements, cos: Lanes, sin: Lanes, pairs: Sequence[tuple[int, int]]) -> Facts | Verdict:
    """Classify a rotation's tables.

    Parameters
    ----------
    elements : Elements
    cos, sin : sequence of Product
        What each rotated lane is multiplied by.
    pairs : sequence of (int, int)
        Lanes that turn together.

    Returns
    -------
    dict or Verdict
        ``pair_equal``, ``axes``, and where proved ``sections``, ``pair_axis``, ``inv_freq``, ``theta``, ``scale``
        (see :mod:`crossloom.passes.canonicalize_rotary`); a refusal where the tables are proved not to rotate.
    """
    turns = [(_read(elements, cos[a]), _read(elements, sin[a])) for a, _ in pairs]
    if any(c.kind == "sin" or s.kind == "cos" for c, s in turns):
        return refuse("tables-exchanged", detail="the sine stands where the cosine has to be")
    for a, b in pairs:
        if _differ(elements, cos[a], cos[b]) or _differ(elements, sin[a], sin[b]):
            return refuse("table-halves-differ", f"{a}, {b}", "the two lanes of a pair turn by different angles")
    for (a, _), (c, s) in zip(pairs, turns):
        if c.angle and s.angle and c.angle.factors == s.angle.factors and not _near(c.angle, s.angle, _DIFFERENT):
            return refuse("tables-of-different-angles", str(a), "cos and sin are not of the same angle")
    equal = all(cos[a] == cos[b] and sin[a] == sin[b] for a, b in pairs)
    known = None
    if equal and all(c.kind == "cos" and s.kind == "sin" for c, s in turns):
        known = _computed(elements, turns)
    elif equal and all(c.kind == "column" == s.kind for c, s in turns):
        known = _constant(elements, turns)
    return {"axes": "given", **(known or {}), "pair_equal": equal}


def _computed(elements: Elements, turns: list[tuple[_Turn, _Turn]]) -> Facts | None:
    """Angles are products: what is given or varies by token is the position, the rest the frequency."""
    scales = [t.scale for pair in turns for t in pair]
    if not np.allclose(scales, scales[0], rtol=_ROUNDING, atol=0):
        return None
    if any(c.angle is None or s.angle is None or not _near(c.angle, s.angle, _ROUNDING) for c, s in turns):
        return None
    sources, speeds, fixed = [], [], True
    for turn, _ in turns:
        angle = turn.angle or Product(0.0)
        given = tuple(f for f in angle.factors if elements.factors.of[f].varies)
        if not given:
            return None
        sources.append(given)
        speeds.append(angle.number)
        fixed = fixed and len(given) == len(angle.factors)
    order = list(dict.fromkeys(sources))
    return _facts([order.index(s) for s in sources], speeds if fixed else None, scales[0])


def _constant(elements: Elements, turns: list[tuple[_Turn, _Turn]]) -> Facts | None:
    """Columns are read as numbers; the one free place that selects the row is the position."""
    columns = []
    places = set()
    for pair in turns:
        arrays = []
        for turn in pair:
            array, at = elements.factors.columns[turn.column]
            places.add(at)
            arrays.append(array * np.asarray(turn.scale, array.dtype))
        columns.append((arrays[0], arrays[1]))
    if len(places) != 1 or columns[0][0].ndim != 1 or not elements.factors.of[turns[0][0].column].varies:
        return None
    found = recover(columns)
    return None if found is None else _facts(found[0], found[1], found[2])


def _facts(pair_axis: list[int], inv_freq: list[float] | None, scale: float) -> Facts | None:
    """Return the facts; as many sources as pairs are given angles, not positions."""
    count = max(pair_axis) + 1
    if count not in _NAMES or len(pair_axis) <= count:
        return None
    facts: Facts = {
        "axes": _NAMES[count],
        "sections": [pair_axis.count(n) for n in range(count)],
        "pair_axis": pair_axis,
        "scale": float(scale),
    }
    if inv_freq is not None:
        facts["inv_freq"] = [float(f) for f in inv_freq]
        theta = base(inv_freq, pair_axis)
        if theta is not None:
            facts["theta"] = theta
    return facts


def base(inv_freq: Sequence[float], pair_axis: Sequence[int]) -> float | None:
    """Return ``theta`` where frequencies are ``theta ** (-k / pairs)``, ``k`` running over all pairs or each axis."""
    split = [[f for f, n in zip(inv_freq, pair_axis) if n == axis] for axis in range(max(pair_axis) + 1)]
    for runs in ([list(inv_freq)], split):
        size, last = len(runs[0]), runs[0][-1]
        if size < 2 or last <= 0 or any(len(run) != size for run in runs):
            continue
        theta = float(last ** (-size / (size - 1)))
        if all(np.allclose(run, theta ** (-np.arange(size) / size), rtol=_DIFFERENT, atol=0) for run in runs):
            return theta
    return None
