"""Weight-only values are computed once, shared between entries, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx

from crossloom.fold_weights import fold_weights
from crossloom.model import Entry, Model, TensorSpec
from crossloom.testing import run_module
from crossloom.verdict import Ledger

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 4), "float32")
B = RNG.standard_normal((6,), "float32")


def model() -> Model:
    builder = relax.BlockBuilder()
    entries = {}
    for name in ("prefill", "decode"):
        rows = tirx.Var("T", "int64")
        x = relax.Var("x", relax.TensorType((rows, 4), "float32"))
        w = relax.Var("w", relax.TensorType((6, 4), "float32"))
        b = relax.Var("b", relax.TensorType((6,), "float32"))
        with builder.function(name, [x, w, b], attrs={"num_input": 1}):
            with builder.dataflow():
                y = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w))))
                half = builder.emit(relax.op.astype(builder.emit(relax.op.multiply(b, relax.const(2.0))), "float16"))
                y = builder.emit(relax.op.add(y, relax.op.astype(half, "float32")))
                out = builder.emit_output(relax.Tuple([y, w]) if name == "decode" else y)
            builder.emit_func_output(out)
        spec = TensorSpec("x", ("T", 4), "float32")
        outs = (TensorSpec("y", ("T", 6), "float32"),)
        entries[name] = Entry(name, (spec,), outs, ("w", "b"))
    return Model(builder.get(), {"w": W, "b": B}, entries)


def run(model: Model, entry: str, x: np.ndarray) -> list[np.ndarray]:
    return run_module(model.mod, entry, [x, *model.entry_params(entry)])


def test_results_stay_and_the_transpose_is_gone():
    with Ledger() as ledger:
        folded = fold_weights(model())
    assert "permute_dims" not in folded.mod.script() and "astype" not in folded.mod.script()
    assert all(v.fired for v in ledger) and len(ledger) == 4
    x = RNG.standard_normal((3, 4), "float32")
    want = x @ W.T + (B * np.float32(2)).astype("float16").astype("float32")
    for entry in ("prefill", "decode"):
        np.testing.assert_allclose(run(folded, entry, x)[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(folded, "decode", x)[1], W)


def test_equal_values_are_stored_once_and_unused_weights_are_dropped():
    folded = fold_weights(model())
    assert folded.entries["prefill"].weights == ("folded.0", "folded.1")
    assert folded.entries["decode"].weights == ("w", "folded.0", "folded.1")
    assert set(folded.params) == {"w", "folded.0", "folded.1"}
    assert int(folded.mod["decode"].attrs["num_input"]) == 1


def test_folding_twice_changes_nothing_more():
    once = fold_weights(model())
    twice = fold_weights(once)
    tvm.ir.assert_structural_equal(once.mod, twice.mod)
    assert once.entries == twice.entries


def test_the_input_model_is_left_alone():
    before = model()
    script = before.mod.script()
    fold_weights(before)
    assert before.mod.script() == script and set(before.params) == {"w", "b"}


def test_a_weight_already_called_folded_is_not_overwritten():
    """Folding a folded model, or a user's own weight of that name, must not take its place."""
    before = model()
    named = Model(
        before.mod,
        {"folded.0": W, "folded.1": B},
        {name: replace(entry, weights=("folded.0", "folded.1")) for name, entry in before.entries.items()},
    )
    folded = fold_weights(named)
    x = RNG.standard_normal((3, 4), "float32")
    product, weight = run(folded, "decode", x)
    want = x @ W.T + (B * np.float32(2)).astype("float16").astype("float32")
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(weight, W)


def test_products_of_weights_are_folded_where_they_are_no_larger_than_their_factors():
    def product(wide: bool) -> Model:
        shapes = {"x": (3, 5), "a": (5, 7 if wide else 2), "b": (7 if wide else 2, 6)}
        params = {n: relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items()}
        builder = relax.BlockBuilder()
        with builder.function("main", list(params.values()), attrs={"num_input": 1}):
            with builder.dataflow():
                both = builder.emit(relax.op.matmul(params["a"], params["b"]))
                out = builder.emit_output(relax.op.matmul(params["x"], both))
            builder.emit_func_output(out)
        spec, made = TensorSpec("x", (3, 5), "float32"), TensorSpec("y", (3, 6), "float32")
        arrays = {n: RNG.standard_normal(shapes[n], "float32") for n in "ab"}
        return Model(builder.get(), arrays, {"main": Entry("main", (spec,), (made,), ("a", "b"))})

    x = RNG.standard_normal((3, 5), "float32")
    for wide in (True, False):
        given = product(wide)
        folded = fold_weights(given)
        assert len(folded.params) == (1 if wide else 2)
        want = x.astype("float64") @ given.params["a"] @ given.params["b"]
        assert np.abs(run_module(folded.mod, "main", [x, *folded.entry_params("main")])[0] - want).max() < 1e-5
