"""Views of a linear layer's columns: which reshapes, transpositions and cuts keep rows and columns apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from crossloom.passes.regions.views import UNIT, Axis, View, apply_view, columns_of, elements

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def made_of(view, sizes=None):
    """What a view is made of, as an array of (row numbers ..., column) by walking its axes; -1 for no such row."""
    extents = [int((sizes or {}).get(a.extent, a.extent)) for a in view.axes]
    rows = 1 + max((a.row for a in view.axes if a.row is not None), default=-1)
    out = np.zeros((*extents, rows + 1), int)
    out[..., rows] = view.first
    for i, axis in enumerate(view.axes):
        index = np.arange(extents[i]).reshape([-1 if j == i else 1 for j in range(len(extents))])
        if axis.row is None:
            out[..., rows] += index * axis.stride
        else:
            out[..., axis.row] += index
    return out


def numbered(*shape):
    """The same array for the columns themselves: every element says which row and column it is."""
    return np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)


def test_columns_of_a_layer():
    view = columns_of([2, 3, 4], 5)
    assert view.axes == (Axis(2, 0), Axis(3, 1), Axis(5, None, 1)) and elements(view.axes) == 5
    assert np.array_equal(made_of(view), numbered(2, 3, 5))
    assert columns_of([N, 1, 4], 5).axes == (Axis(N, 0), UNIT, Axis(5, None, 1))
    assert columns_of([4], 5).axes == (Axis(5, None, 1),)


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (2, 3, 2, 2, 5), (2, 1, 3, 20), (1, 2, 3, 1, 4, 5, 1), (2, 3, 20), (2, 3, 20, 1)]
)
def test_heads_are_cut_out_of_columns(shape):
    view = columns_of([2, 3, 8], 20).reshaped(shape)
    assert view is not None
    got = made_of(view)
    assert got.shape[:-1] == shape
    want = numbered(2, 3, 20).reshape(*shape, 3)
    units = [i for i, n in enumerate(shape) if n == 1]
    assert np.array_equal(got, want) or units


def test_heads_are_put_together_again():
    heads = columns_of([2, 3, 8], 24).reshaped([2, 3, 2, 3, 4])
    for shape in ([2, 3, 6, 4], [2, 3, 2, 12], [2, 3, 24], [2, 3, 4, 6]):
        view = heads.reshaped(shape)
        assert np.array_equal(made_of(view), numbered(2, 3, 24).reshape(*shape, 3))


@pytest.mark.parametrize("shape", [(6, 20), (3, 2, 20), (2, 60), (2, 3, 3, 7), (1, 3, 20), (2, 3, 21)])
def test_rows_are_not_mixed_with_each_other_or_with_columns(shape):
    assert columns_of([2, 3, 8], 20).reshaped(shape) is None


def test_columns_in_another_order_do_not_become_one_axis():
    turned = columns_of([3, 8], 24).reshaped([3, 4, 6]).transposed([0, 2, 1])
    assert turned.reshaped([3, 24]) is None and turned.reshaped([3, 6, 2, 2]) is not None


def test_symbolic_rows_stay_as_they_are():
    view = columns_of([N, M, 8], 20)
    assert view.reshaped([N, M, 4, 5]) is not None
    assert view.reshaped([M, N, 20]) is None and view.reshaped([N * M, 20]) is None
    assert view.reshaped([N, M, N]) is None
    sizes = {N: 2, M: 3}
    assert np.array_equal(made_of(view.transposed([1, 0, 2]), sizes), numbered(2, 3, 20).transpose(1, 0, 2, 3))


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (5, 20), (3, 4), (-4, 100), (0, 20), (-100, 2)])
def test_ranges_of_columns(begin, end):
    view = columns_of([2, 8], 20).cut(1, begin, end)
    assert np.array_equal(made_of(view), numbered(2, 20)[:, begin:end])
    assert (view.axes[1] == UNIT) == (len(range(*slice(begin, end).indices(20))) == 1)


def test_ranges_that_are_no_view():
    view = columns_of([2, 8], 20)
    assert view.cut(0, 0, 1) is None, "rows"
    assert view.cut(1, 7, 7) is None and view.cut(1, 9, 3) is None, "nothing is left"
    assert columns_of([N, 8], 20).cut(0, 0, 1) is None


def test_axes_of_one_come_and_go():
    view = columns_of([2, 1, 8], 20)
    assert view.without([1]).axes == (Axis(2, 0), Axis(20, None, 1))
    assert view.without([-2]).axes == view.without([1]).axes
    assert view.without([0]) is None
    assert view.expanded([0, -1]).axes == (UNIT, Axis(2, 0), UNIT, Axis(20, None, 1), UNIT)


def call(build, *shape):
    """A call of an operator on columns of x, and the shape of its result."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    value = builder.normalize(build(x))
    return value, list(value.ty.shape)


@st.composite
def chains(draw):
    """Operators that only move values, and what numpy makes of the numbers of rows and columns."""
    rows = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    count = draw(st.sampled_from([1, 6, 12, 24]))
    view, array = columns_of([*rows, 4], count), numbered(*rows, count)
    return view, array, draw(st.lists(st.integers(0, 2**30), min_size=1, max_size=5))


def moved(array, seed):
    """One random operator as Relax and as numpy; the last axis of numbers stays last."""
    rng, shape = np.random.default_rng(seed), list(array.shape[:-1])
    kind = rng.choice(["permute", "expand", "squeeze", "slice", "reshape"])
    if kind == "permute":
        order = [int(i) for i in rng.permutation(len(shape))]
        return "relax.permute_dims", lambda x: relax.op.permute_dims(x, order), array.transpose(*order, len(shape))
    if kind == "expand":
        at = int(rng.integers(0, len(shape) + 1))
        return "relax.expand_dims", lambda x: relax.op.expand_dims(x, at), np.expand_dims(array, at)
    if kind == "squeeze":
        ones = [i for i, n in enumerate(shape) if n == 1 and i < len(shape) - 1]
        return "relax.squeeze", lambda x: relax.op.squeeze(x, ones), np.squeeze(array, tuple(ones))
    if kind == "slice":
        axis = int(rng.integers(0, len(shape)))
        begin = int(rng.integers(0, shape[axis]))
        end = int(rng.integers(begin + 1, shape[axis] + 1))
        part = array[(slice(None),) * axis + (slice(begin, end),)]
        return "relax.strided_slice", lambda x: relax.op.strided_slice(x, [axis], [begin], [end]), part
    axis = int(rng.integers(0, len(shape)))
    divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    d = int(rng.choice(divisors))
    new = [*shape[:axis], shape[axis] // d, d, *shape[axis + 1 :]]
    if rng.random() < 0.3 and len(shape) > 1:
        at = int(rng.integers(0, len(shape) - 1))
        new = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    return "relax.reshape", lambda x: relax.op.reshape(x, new), array.reshape(*new, array.shape[-1])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chains())
def test_property_a_view_is_what_numpy_makes_of_it_or_none(case):
    view, array, seeds = case
    rows = array.shape[-1] - 1
    known = 0
    for seed in seeds:
        op, build, array_next = moved(array, seed)
        value, shape = call(build, *array.shape[:-1])
        found = apply_view(view, value, op, shape)
        if found is None:
            break
        view, array, known = found, array_next, known + 1
        got = made_of(view)
        # Rows of extent 1 are numbered 0 by both, but a view of none of them does not know how many there were.
        got = np.concatenate(
            [got[..., :-1], np.zeros((*got.shape[:-1], rows + 1 - got.shape[-1]), int), got[..., -1:]], -1
        )
        assert np.array_equal(got, array)


def test_other_operators_and_steps_are_no_views():
    view = columns_of([2, 8], 20)
    value, shape = call(lambda x: relax.op.exp(x), 2, 20)
    assert apply_view(view, value, "relax.exp", shape) is None
    value, shape = call(lambda x: relax.op.strided_slice(x, [1], [0], [20], [2]), 2, 20)
    assert apply_view(view, value, "relax.strided_slice", shape) is None
    value, shape = call(lambda x: relax.op.strided_slice(x, [0], [0], [1]), 2, 20)
    assert apply_view(view, value, "relax.strided_slice", shape) is None
    whole = View((Axis(2, 0), Axis(20, None, 1)))
    value, shape = call(lambda x: relax.op.permute_dims(x), 2, 20)
    assert apply_view(whole, value, "relax.permute_dims", shape).axes == whole.axes[::-1]
