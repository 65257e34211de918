"""Places before a reshape, against numpy; symbolic places by filling in numbers afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from crossloom.passes.matching.moves import affine, divided, extent, modulo, reshape_index


def fill(place, values):
    """Return a symbolic place's number, free axes taken from ``values``."""
    if isinstance(place, int):
        return place
    kind, inner = place[0], place[1]
    if kind == "axis":
        return values[inner]
    if kind == "div":
        return fill(inner, values) // place[2][0]
    if kind == "mod":
        return fill(inner, values) % place[2][0]
    if kind == "ravel":
        flat = 0
        for each, size in zip(inner, place[2], strict=True):
            flat = flat * size[0] + fill(each, values)
        return flat
    assert kind == "affine"
    return place[2] + place[3] * fill(inner, values)


@st.composite
def reshapes(draw):
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))

    def grouped():
        shape, rest = [], list(factors)
        while rest:
            count = draw(st.integers(1, len(rest)))
            shape.append(int(np.prod(rest[:count])))
            rest = rest[count:]
        return shape

    return grouped(), grouped()


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(reshapes(), st.data())
def test_reshape_finds_the_element(shapes, data):
    old, new = shapes
    at = [data.draw(st.integers(0, size - 1)) for size in new]
    free = [data.draw(st.booleans()) for _ in new]
    index = tuple(("axis", n) if f and new[n] > 1 else p for n, (f, p) in enumerate(zip(free, at)))
    found = reshape_index(index, old, new)
    assert found is not None
    flat = np.ravel_multi_index(at, new)
    assert [fill(p, at) for p in found] == list(np.unravel_index(flat, old))


def test_symbolic_lengths():
    n = tirx.Var("n", "int64")
    token = ("axis", 1)
    assert reshape_index((token, 5), [n, 2, 3], [n, 6]) == (token, 1, 2)
    assert reshape_index((2, token), [2, 3, n], [6, n]) == (0, 2, token)
    flat = reshape_index((("axis", 2), token, 3), [n * 2, 4], [n, 2, 4])
    assert flat == (("ravel", (("axis", 2), token), (extent(n), extent(2))), 3)
    # Taking apart again what was put together gives the axes back.
    assert reshape_index(flat, [n, 2, 4], [n * 2, 4]) == (("axis", 2), token, 3)


@pytest.mark.parametrize("row", [0, 1, ("axis", 2)])
def test_there_and_back_gives_the_same_place(row):
    """A first row is no special case: its place compares equal to the one other rows have."""
    token = ("axis", 1)
    flat = reshape_index((row, token), [6], [3, 2])
    assert reshape_index(flat, [3, 2], [6]) == (row, token)


@pytest.mark.parametrize(
    ("old", "new"), [([0, 4], [4, 0]), ([tirx.Var("n", "int64") + 1, 2], [2, tirx.Var("n", "int64") + 1])]
)
def test_what_is_not_known_is_not_guessed(old, new):
    assert reshape_index((0, 0), old, new) is None


def test_places():
    assert (divided(7, (2, ())), modulo(7, (2, ())), affine(3, 1, 2)) == (3, 1, 7)
    assert affine(("axis", 1), 0, 1) == ("axis", 1) and affine(("axis", 1), 2, 1) == ("affine", ("axis", 1), 2, 1)
    assert divided(0, extent(tirx.Var("n", "int64"))) == 0
