"""What constant tables of cosines and sines were computed from, and how often their positions are looked through."""

from __future__ import annotations

import numpy as np
import pytest

from crossloom.passes.matching import columns

FREQUENCIES = [1.0, 0.25, 0.03, 0.002]


def table(angles, dtype="float32", scale=1.0):
    """Return a pair of columns for each column of angles (rows, pairs)."""
    return [((scale * np.cos(a)).astype(dtype), (scale * np.sin(a)).astype(dtype)) for a in angles.T]


@pytest.mark.parametrize(
    ("dtype", "scale", "rel"), [("float32", 1.0, 1e-4), ("float32", 1.5, 1e-4), ("float16", 1.0, 2e-2)]
)
def test_a_line_of_positions(dtype, scale, rel):
    axes, found, length, width = columns.recover(table(np.outer(np.arange(50), FREQUENCIES), dtype, scale))
    assert (axes, width) == ([0] * 4, 0) and length == pytest.approx(scale, rel=1e-3)
    assert found == pytest.approx(FREQUENCIES, rel=rel)


def test_a_grid_is_looked_through_once_a_width(monkeypatch):
    seen = []
    powers = columns.powers
    monkeypatch.setattr(columns, "powers", lambda p: seen.append(len(p)) or powers(p))
    rows, across = np.divmod(np.arange(48), 8)
    pairs = table(np.stack([rows * 1.0, rows * 0.2, across * 1.0, across * 0.3], 1))
    axes, found, scale, width = columns.recover(pairs)
    assert (axes, scale, width) == ([0, 0, 1, 1], 1.0, 8)
    assert found == pytest.approx([1.0, 0.2, 1.0, 0.3], rel=1e-4)
    # The line, then rows and columns of widths 2, 3, 4, 6 and 8.
    assert len(seen) == 1 + 2 * 5


def test_powers_of_two_end_where_one_is_missing():
    assert columns.powers(np.array([0, 1, 2, 3, 4, 8])) == [(1, 1), (2, 2), (4, 4), (8, 5)]
    assert columns.powers(np.array([0, 1, 3, 4])) == [(1, 1)]
    assert columns.powers(np.array([0, 2, 4])) == []
