"""Which positions and frequencies a constant table of cosines and sines was computed from.

Row ``m`` of a pair's columns must be ``scale * (cos(p f), sin(p f))`` with ``p`` = ``m`` (1-D), or ``m // W`` for
some pairs and ``m % W`` for the others (a grid of W columns, row by row); every entry is checked against the
recovered frequency within the rounding of the table's type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Rounding of an entry, by type; angles of a table are rounded to float32 at best.
_ENTRY = {"float16": 1e-3, "float32": 4e-6, "float64": 4e-6}
_ANGLE = 2.0**-22


def radius(cos: np.ndarray, sin: np.ndarray) -> float | None:
    """Return the common length of all pairs ``(cos, sin)``, None where they differ."""
    tolerance = _ENTRY.get(str(cos.dtype))
    if tolerance is None or cos.shape != sin.shape or not cos.size:
        return None
    lengths = np.hypot(cos.astype("float64"), sin.astype("float64"))
    mean = float(lengths.mean())
    if not np.isfinite(mean) or mean == 0 or np.abs(lengths / mean - 1).max() > 2 * tolerance:
        return None
    return 1.0 if abs(mean - 1) <= tolerance else mean


def powers(positions: np.ndarray) -> list[tuple[int, int]]:
    """Return (position, a row that holds it) for 1, 2, 4, ... as far as all are there."""
    out, at = [], 1
    while (rows := np.flatnonzero(positions == at)).size:
        out.append((at, int(rows[-1])))
        at *= 2
    return out


def frequency(
    cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, scale: float, known: Sequence[tuple[int, int]]
) -> float | None:
    """Return ``f`` (radians a position) where the columns are ``scale * (cos, sin)(positions * f)``.

    Parameters
    ----------
    cos, sin : numpy.ndarray, (rows,)
    positions : numpy.ndarray of int, (rows,)
        Not negative.
    scale : float
    known : sequence of (int, int)
        :func:`powers` of the positions, which all columns of a table share.

    Returns
    -------
    float or None
        In (-pi, pi]; None where the columns are no such table or do not determine the frequency.
    """
    tolerance = _ENTRY[str(cos.dtype)]
    c, s = cos.astype("float64") / scale, sin.astype("float64") / scale
    if not known:
        return None
    found = float(np.arctan2(s[known[0][1]], c[known[0][1]]))
    # Far rows tell the frequency more exactly, near ones which multiple of a turn the far ones have made.
    for at, row in known[1:]:
        angle = np.arctan2(s[row], c[row])
        turns = np.round((at * found - angle) / (2 * np.pi))
        found = float((angle + 2 * np.pi * turns) / at)
    bound = tolerance + np.abs(positions * found) * _ANGLE
    angles = positions * found
    fits = (np.abs(np.cos(angles) - c) <= bound) & (np.abs(np.sin(angles) - s) <= bound)
    return found if found and bool(fits.all()) else None


def recover(columns: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[int], list[float], float, int] | None:
    """Recover what the pairs of a constant table were computed from.

    Parameters
    ----------
    columns : list of (cos, sin)
        Arrays (rows,), one pair of columns a pair of lanes.

    Returns
    -------
    tuple or None
        Axis of each pair (0: the position itself or the row of the grid, 1: its column), frequency of each pair,
        scale, and the grid's width (0 for 1-D).
    """
    lengths = {radius(c, s) for c, s in columns}
    scale = next(iter(lengths))
    if scale is None or None in lengths or max(lengths) / min(lengths) > 1 + 1e-3:  # type: ignore[type-var,operator]
        return None
    rows = np.arange(len(columns[0][0]))
    known = powers(rows)
    line = [frequency(c, s, rows, scale, known) for c, s in columns]
    if None not in line:
        return [0] * len(columns), [f for f in line if f is not None], scale, 0
    for width in range(2, len(rows) // 2 + 1):
        if len(rows) % width:
            continue
        grid = [(p, powers(p)) for p in (rows // width, rows % width)]
        axes, found = [], []
        for c, s in columns:
            fits = [frequency(c, s, p, scale, known) for p, known in grid]
            which = [n for n, f in enumerate(fits) if f is not None]
            if len(which) != 1:
                break
            axes.append(which[0])
            found.append(fits[which[0]])
        if len(axes) == len(columns) and len(set(axes)) == 2:
            return axes, [f for f in found if f is not None], scale, width
    return None
