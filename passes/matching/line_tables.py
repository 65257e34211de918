"""Constants in the algebra of ``lines``."""

from __future__ import annotations

import numpy as np

from .lines import MOST_STEPS, Line, Steps, Value


def of_array(array: np.ndarray) -> Value | None:
    """Return what a constant holds: one number, a range of integers, or a few values parted by diagonals."""
    if array.size == 0 or array.dtype.kind not in "biuf":
        return None
    values = np.unique(array)
    if len(values) == 1:
        return Steps((float(values[0]),))
    if array.dtype.kind in "iu" and (line := _ramp(array)) is not None:
        return line
    if len(values) > MOST_STEPS + 1 or array.ndim < 1:
        return None
    table = array.reshape(-1, *array.shape[-2:]) if array.ndim > 1 else array[None, None]
    if not (table == table[:1]).all() or not (table[0, 1:, 1:] == table[0, :-1, :-1]).all():
        return None
    # Each diagonal holds one value, from the last column's to the first column's.
    diagonals = np.concatenate([table[0, 0, ::-1], table[0, 1:, 0]])
    (changes,) = np.nonzero(diagonals[1:] != diagonals[:-1])
    if len(changes) > MOST_STEPS:
        return None
    slopes = (*(0,) * (array.ndim - 2), 1, -1)[-array.ndim :]
    lines = tuple(Line(slopes, table.shape[2] - 2 - int(n)) for n in changes)
    return Steps(tuple(float(diagonals[n]) for n in (*changes, -1)), lines)


def _ramp(array: np.ndarray) -> Line | None:
    origin = array[(0,) * array.ndim]
    slopes = []
    for axis, size in enumerate(array.shape):
        step = np.take(array, 1, axis).flat[0] - origin if size > 1 else 0
        slopes.append(int(step))
    want = np.full(array.shape, int(origin), dtype="int64")
    for axis, (size, slope) in enumerate(zip(array.shape, slopes)):
        want = want + (np.arange(size) * slope).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    return Line(tuple(slopes), int(origin)) if np.array_equal(want, array.astype("int64")) else None
