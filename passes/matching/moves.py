"""Where an element of a reshaped tensor lay before, with free places kept as symbols.

A place on an axis is a number or a symbol: ``("axis", n)`` (any place of the n-th axis from the right of what was
asked about), ``("div", p, n)``, ``("mod", p, n)``, ``("ravel", places, extents)``, ``("affine", p, begin, step)``,
``("value", product)`` (read from a tensor of indices).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

Place = Any
Index = tuple[Place, ...]
#: An extent: its constant factor and its symbolic factors.
Extent = tuple[int, tuple[int, ...]]


def extent(dim: object) -> Extent | None:
    """Return a dimension as a product, None for other expressions (sums, quotients)."""
    if isinstance(dim, (int, tirx.IntImm)):
        return int(dim), ()
    if isinstance(dim, tirx.Var):
        return 1, (hash(dim),)
    if isinstance(dim, tirx.Mul):
        return _times(extent(dim.a), extent(dim.b))
    return None


def _times(a: Extent | None, b: Extent | None) -> Extent | None:
    if a is None or b is None:
        return None
    return a[0] * b[0], tuple(sorted((*a[1], *b[1])))


def reshape_index(index: Index, old: Sequence[object], new: Sequence[object]) -> Index | None:
    """Return the place in a tensor of shape ``old`` of an element of its reshape to ``new``; None where unknown.

    Axes are grouped so that each group of old axes holds the same elements as a group of new ones; within a group
    either side may be several axes.
    """
    before, after = [extent(d) for d in old], [extent(d) for d in new]
    if None in before or None in after or any(e is not None and e[0] == 0 for e in (*before, *after)):
        return None
    sides = [[(i, e) for i, e in enumerate(side) if e != (1, ())] for side in (before, after)]
    out: list[Place] = [0] * len(before)
    left, right = sides
    while left or right:
        cut = _first_common(left, right)
        if cut is None:
            return None
        (olds, left), (news, right) = (left[: cut[0]], left[cut[0] :]), (right[: cut[1]], right[cut[1] :])
        flat = ravel([index[i] for i, _ in news], [e for _, e in news])  # type: ignore[misc]
        places = unravel(flat, [e for _, e in olds])  # type: ignore[misc]
        for (i, _), place in zip(olds, places):
            out[i] = place
    return tuple(out)


def _first_common(left: list, right: list) -> tuple[int, int] | None:
    """Return how many leading axes of each side hold the same number of elements."""
    seen: dict[Extent | None, int] = {}
    total: Extent | None = (1, ())
    for n, (_, size) in enumerate(left, start=1):
        total = _times(total, size)
        seen.setdefault(total, n)
    total = (1, ())
    for n, (_, size) in enumerate(right, start=1):
        total = _times(total, size)
        if total in seen:
            return seen[total], n
    return None


def ravel(places: Sequence[Place], extents: Sequence[Extent]) -> Place:
    """Return the place on one axis of an element of several."""
    if len(places) == 1:
        return places[0]
    if all(isinstance(p, int) for p in places) and not any(e[1] for e in extents[1:]):
        flat = 0
        for place, size in zip(places, extents):
            flat = flat * size[0] + place
        return flat
    return ("ravel", tuple(places), tuple(extents))


def unravel(place: Place, extents: Sequence[Extent]) -> list[Place]:
    """Return the places on several axes of an element of one."""
    out: list[Place] = []
    for size in reversed(extents[1:]):
        if isinstance(place, tuple) and place[0] == "ravel" and place[2][-1] == size:
            out.append(place[1][-1])
            place = ravel(place[1][:-1], place[2][:-1])
            continue
        out.append(modulo(place, size))
        place = divided(place, size)
    return [place, *reversed(out)]


def divided(place: Place, size: Extent) -> Place:
    """Return ``place // size``."""
    if isinstance(place, int) and not size[1]:
        return place // size[0]
    return 0 if place == 0 else ("div", place, size)


def modulo(place: Place, size: Extent) -> Place:
    """Return ``place % size``."""
    if isinstance(place, int) and not size[1]:
        return place % size[0]
    return 0 if place == 0 else ("mod", place, size)


def affine(place: Place, begin: int, step: int) -> Place:
    """Return ``begin + step * place``."""
    if isinstance(place, int):
        return begin + step * place
    return place if (begin, step) == (0, 1) else ("affine", place, begin, step)
