"""Which lanes turn together, and in which direction: the conventions of rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from crossloom.verdict import Verdict, refuse

from .lanes import Term


@dataclass(frozen=True)
class Rotation:
    """A rotation of known convention.

    Attributes
    ----------
    convention : str
        ``half-split`` or ``interleaved``.
    dim : int
        Lanes that turn, from the first one on.
    table : str
        ``full``: output lane n reads table lane n; ``half``: pair n reads table lane n.
    cos, sin : relax.Expr
    cos_lanes, sin_lanes : tuple of int
        Table lane of each rotated lane.
    pairs : tuple of (int, int)
    """

    convention: str
    dim: int
    table: str
    cos: relax.Expr
    sin: relax.Expr
    cos_lanes: tuple[int, ...]
    sin_lanes: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


def _lane(terms: list[Term], lane: int) -> list[tuple[float, tuple[tuple[relax.Expr, int], ...]]]:
    return [
        (float(t.coefficient[lane]), tuple((leaf, int(lanes[lane])) for leaf, lanes in t.factors))
        for t in terms
        if t.coefficient[lane] != 0
    ]


def classify(terms: list[Term], x: relax.Var, width: int) -> Rotation | Verdict | None:
    """Return the rotation that lanes make, a refusal where they turn in no known way, None for no rotation."""
    partner, sign, cos_lane, sin_lane = ([0] * width for _ in range(4))
    tables: dict[str, relax.Expr] = {}
    rotated = width
    for lane in range(width):
        parts = _lane(terms, lane)
        if len(parts) == 1 and len(parts[0][1]) == 1:
            if parts[0][0] != 1.0 or parts[0][1][0][1] != lane:
                return None
            rotated = min(rotated, lane)
            continue
        if len(parts) != 2 or any(len(p[1]) != 2 or not p[1][0][0].same_as(x) for p in parts):
            return None
        own = [p for p in parts if p[1][0][1] == lane]
        other = [p for p in parts if p[1][0][1] != lane]
        if len(own) != 1 or len(other) != 1:
            return None
        if rotated < lane:
            return refuse("rotated-lanes-not-first", str(lane), "lanes that pass through stand before rotated ones")
        if own[0][0] != 1.0 or abs(other[0][0]) != 1.0:
            return refuse("lanes-scaled", str(lane), "a lane is multiplied by more than the tables")
        for role, part, lanes in (("cos", own[0], cos_lane), ("sin", other[0], sin_lane)):
            table, lanes[lane] = part[1][1]
            if not tables.setdefault(role, table).same_as(table):
                return refuse("several-tables", getattr(table, "name", ""), f"lanes take their {role} from two values")
        partner[lane], sign[lane] = other[0][1][0][1], int(other[0][0])
    if len(tables) < 2 or rotated == 0:
        return None
    if rotated % 2:
        return refuse("unknown-convention", x.name, f"{rotated} lanes do not pair up")
    half, lanes_ = rotated // 2, np.arange(rotated)
    first = np.arange(half)
    ways = {
        "half-split": (first, first + half),
        "interleaved": (2 * first, 2 * first + 1),
    }
    for convention, (left, right) in ways.items():
        mate, turn, pair = (np.zeros(rotated, "int64") for _ in range(3))
        mate[left], mate[right] = right, left
        turn[left], turn[right] = -1, 1
        pair[left] = pair[right] = first
        if not np.array_equal(partner[:rotated], mate):
            continue
        # Two lanes fit both conventions; they are called half-split.
        if np.array_equal(sign[:rotated], -turn):
            return refuse("rotates-backwards", x.name, "pairs turn by the negative angle")
        if not np.array_equal(sign[:rotated], turn):
            return refuse("not-a-rotation", x.name, "the signs of a pair are not those of a rotation")
        for kind, want in (("full", lanes_), ("half", pair)):
            if np.array_equal(cos_lane[:rotated], want) and np.array_equal(sin_lane[:rotated], want):
                return Rotation(
                    convention,
                    rotated,
                    kind,
                    tables["cos"],
                    tables["sin"],
                    tuple(cos_lane[:rotated]),
                    tuple(sin_lane[:rotated]),
                    tuple(zip(left.tolist(), right.tolist())),
                )
        return refuse("table-lanes-in-another-order", getattr(tables["cos"], "name", ""))
    return refuse("unknown-convention", x.name, "lanes pair up in no known way")
