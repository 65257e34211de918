"""Arithmetic on weights that batch norms leave is done when a model is built."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from canonical import function
from crossloom.fold_weights import fold_weights
from crossloom.model import Entry, Model, TensorSpec
from crossloom.rewrite import Graph
from crossloom.testing import run_module

op = relax.op


def folded(lines, weight, kind="float32"):
    """Return what a weight has become, and the operators that are left."""
    mod = function(lambda emit, x, w: emit(op.add(x, lines(emit, w))), [(1,), weight.shape], "main", kind)
    entry = Entry("main", (TensorSpec("x", (1,), kind),), (TensorSpec("y", weight.shape, kind),), ("w",))
    model = fold_weights(Model(mod, {"w": weight}, {"main": entry}))
    graph = Graph("main", model.mod["main"], model.mod)
    calls = [graph.op(var) for var in graph.order if isinstance(graph.value[var], relax.Call)]
    return model.entry_params("main")[0], [name.removeprefix("relax.") for name in calls]


@pytest.mark.parametrize(
    ("lines", "numpy"),
    [
        (lambda emit, w: emit(op.sqrt(emit(op.add(w, relax.const(0.5))))), lambda w: np.sqrt(w + 0.5)),
        (lambda emit, w: emit(op.rsqrt(w)), lambda w: 1 / np.sqrt(w)),
        (lambda emit, w: emit(op.divide(relax.const(2.0), w)), lambda w: 2 / w),
        (lambda emit, w: emit(op.negative(w)), lambda w: -w),
        (lambda emit, w: emit(op.sum(w, [0, 2])), lambda w: w.sum((0, 2))),
        (lambda emit, w: emit(op.sum(w, 1, keepdims=True)), lambda w: w.sum(1, keepdims=True)),
        (lambda emit, w: emit(op.sum(w)), lambda w: w.sum()),
    ],
)
def test_it_is_numpys(lines, numpy):
    weight = np.random.default_rng(0).uniform(0.5, 2, (3, 4, 5)).astype("float32")
    got, left = folded(lines, weight)
    assert left == ["add"] and got.dtype == weight.dtype
    np.testing.assert_allclose(got, numpy(weight.astype("float64")), rtol=1e-6)


def test_quotients_of_integers_stay():
    half = lambda emit, w: emit(op.divide(w, relax.const(2, "int32")))
    assert folded(half, np.int32([3, -3]), "int32")[1] == ["divide", "add"]


def test_sums_are_rounded_once():
    weight = np.full(4096, 1 / 3, "float16")
    got, _ = folded(lambda emit, w: emit(op.sum(w)), weight, "float16")
    assert got == np.float16(weight.astype("float64").sum())


def test_resized_pictures_are_those_of_the_operator():
    weight = np.random.default_rng(0).standard_normal((1, 3, 4, 5)).astype("float32")
    resize = lambda emit, w: emit(
        op.image.resize2d(w, (6, 7), method="cubic", coordinate_transformation_mode="half_pixel")
    )
    got, left = folded(resize, weight)
    assert left == ["add"] and got.shape == (1, 3, 6, 7)
    mod = function(resize, [weight.shape], "main")
    np.testing.assert_allclose(got, run_module(mod, "main", [weight])[0], rtol=1e-6, atol=1e-6)
