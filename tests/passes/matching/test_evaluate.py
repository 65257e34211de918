"""What the algebra of lines says a tensor holds is what numpy makes of the same operators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from crossloom.passes.matching.evaluate import Evaluator
from crossloom.passes.matching.line_tables import of_array
from crossloom.passes.matching.lines import Line, Steps
from crossloom.rewrite import Graph

op = relax.op


def holds(value, shape):
    """Return the array that a value of the algebra stands for."""

    def line(found):
        slopes = (0,) * (len(shape) - len(found.slopes)) + found.slopes
        return found.offset + sum(s * i for s, i in zip(slopes, np.indices(shape)))

    if isinstance(value, Line):
        return np.broadcast_to(line(value), shape)
    passed = sum((line(found) >= 0).astype(int) for found in value.lines)
    return np.asarray(value.values)[np.broadcast_to(passed, shape)]


def evaluated(build, *inputs):
    """Return what the algebra finds for ``build(emit, *parameters)``."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(inputs or [(1,)])]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *(params if inputs else ())))
        builder.emit_func_output(out)
    mod = builder.get()
    graph = Graph("main", mod["main"], mod)
    return Evaluator(graph).at(mod["main"].body.body)


COMPARE = {"less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal}
JOIN = {"logical_and": np.logical_and, "logical_or": np.logical_or}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_masks_of_comparisons_and_triangles(drawn):
    draw = drawn.draw
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    numbers = st.integers(-4, 7)

    def leaf(e):
        shift = draw(numbers)
        kind = draw(st.sampled_from(["compare", "triangle", "within", "constant"]))
        if kind == "constant":
            away = row - column
            table = (away >= shift) & (away < shift + 3)
            return relax.const(table, "bool"), table
        if kind == "triangle":
            name = draw(st.sampled_from(["tril", "triu"]))
            whole = e(op.ones(relax.ShapeExpr([rows, columns]), "int32"))
            return e(op.astype(e(getattr(op, name)(whole, shift)), "bool")), getattr(np, name)(
                np.ones((rows, columns)), shift
            ).astype(bool)
        i = e(op.expand_dims(e(op.arange(0, rows, 1, "int64")), 1))
        j = e(op.expand_dims(e(op.arange(0, columns, 1, "int64")), 0))
        away = e(op.subtract(i, j))
        if kind == "within":
            bound = relax.const(shift, "int64")
            return e(op.less(e(op.abs(away)), bound)), np.abs(row - column) < shift
        name = draw(st.sampled_from(sorted(COMPARE)))
        return e(getattr(op, name)(away, relax.const(shift, "int64"))), COMPARE[name](row - column, shift)

    want = []

    def build(e):
        left, mine = leaf(e)
        right, theirs = leaf(e)
        name = draw(st.sampled_from(sorted(JOIN)))
        joined, both = e(getattr(op, name)(left, right)), JOIN[name](mine, theirs)
        fill = draw(st.sampled_from([-np.inf, -1e9]))
        want.append(np.where(both, 0.0, fill))
        return op.where(joined, relax.const(0.0, "float32"), relax.const(fill, "float32"))

    value = evaluated(build)
    # More steps than a mask of any model has remain unknown.
    if value is not None:
        assert isinstance(value, Steps)
        assert np.array_equal(holds(value, (rows, columns)), np.float32(want[0]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(-7, 7), st.integers(0, 8))
def test_constants_that_are_bands(rows, columns, first, width):
    away = np.arange(rows)[:, None] - np.arange(columns)
    table = np.where((away >= first) & (away < first + width), 0.0, -1.0)[None]
    assert np.array_equal(holds(of_array(table), table.shape), table)


@pytest.mark.parametrize("place", [(0, 1), (2, 2), (3, 0)])
def test_a_constant_that_is_almost_a_band_has_no_value(place):
    table = np.tri(5, dtype=bool) & ~np.tri(5, k=-3, dtype=bool)
    assert of_array(table) is not None
    table[place] = not table[place]
    assert of_array(table) is None


def test_positions_that_are_gathered_from_themselves():
    """As Hugging Face reads positions: wrapped, clamped, from a tensor with an element appended."""
    n = tirx.Var("n", "int64")

    def build(e, x):
        along = e(op.arange(0, n, 1, "int64"))
        size = e(op.reshape(e(op.shape_to_tensor(relax.ShapeExpr([n]))), relax.ShapeExpr([])))
        zero = relax.const(0, "int64")
        wrapped = e(op.where(e(op.less(along, zero)), e(op.add(along, size)), along))
        clamped = e(op.maximum(e(op.minimum(wrapped, e(op.subtract(size, relax.const(1, "int64"))))), zero))
        longer = e(op.concat([along, e(op.zeros(relax.ShapeExpr([1]), "int64"))], 0))
        return op.index_tensor(longer, [clamped])

    assert evaluated(build, (n,)) == Line((1,), 0)


def test_packed_sequences_of_plain_positions_are_one():
    """Where every position follows the one before, a count of the jumps is zero throughout."""

    def build(e, x):
        along = e(op.arange(0, 6, 1, "int64"))
        before = e(op.subtract(e(op.strided_slice(along, [0], [0], [1])), relax.const(1, "int64")))
        longer = e(op.concat([before, along], 0))
        step = e(op.subtract(e(op.strided_slice(longer, [0], [1], [7])), e(op.strided_slice(longer, [0], [0], [6]))))
        return op.cumsum(e(op.not_equal(step, relax.const(1, "int64"))), 0)

    assert evaluated(build, (6,)) == Steps((0.0,))


def test_joined_ranges_that_do_not_go_on_have_no_value():
    def build(e, x):
        along = e(op.arange(0, 6, 1, "int64"))
        return op.concat([along, along], 0)

    assert evaluated(build, (6,)) is None
