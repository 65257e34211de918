"""compose(): chains inlined, shapes unified, weights shared, clashes and misfits named."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.compose import Chain, compose
from crossloom.importers.specialize import specialize
from crossloom.model import Entry, Model, TensorSpec
from crossloom.testing import run_module


def linear(weight: np.ndarray, *, rows="n", x="x", y="y", modality="", twice=False, bounds=None) -> Model:
    """Return a part ``y = tanh(x @ w)``, or ``(y, x)`` with `twice`; tanh is a private function."""
    bb = relax.BlockBuilder()
    n = tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    k, m = weight.shape
    a = relax.Var("a", relax.TensorType((1, tirx.Var("h", "int64"), m), "float32"))
    with bb.function("helper", [a], private=True):
        with bb.dataflow():
            out = bb.emit_output(relax.op.tanh(a))
        bb.emit_func_output(out)
    helper = next(gv for gv, _ in bb.get().functions_items())
    px = relax.Var(x, relax.TensorType((1, n, k), "float32"))
    pw = relax.Var("w", relax.TensorType((k, m), "float32"))
    with bb.function("run", [px, pw], attrs={"num_input": 1}):
        with bb.dataflow():
            v = bb.emit(relax.op.matmul(px, pw))
            v = bb.emit(relax.Call(helper, [v]))
            out = bb.emit_output(relax.Tuple([v, px]) if twice else v)
        bb.emit_func_output(out)
    outputs = [TensorSpec(y, (1, rows, m), "float32")] + ([TensorSpec("same", (1, rows, k), "float32")] * twice)
    entry = Entry("run", (TensorSpec(x, (1, rows, k), "float32"),), tuple(outputs), ("w",), modality, bounds or {})
    return Model(bb.finalize(), {"w": weight}, {"run": entry})


def run(model: Model, entry: str, *inputs: np.ndarray):
    return run_module(model.mod, entry, [*inputs, *model.entry_params(entry)])


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_chain_is_inlined_and_right():
    w1, w2 = random(4, 6), random(6, 3, seed=1)
    parts = {"tower": linear(w1, modality="image", bounds={"n": 50}), "projector": linear(w2)}
    model = compose(parts, {"vision": ["tower", "projector"], "alone": ["projector"]})
    assert model.modalities == {"tower": "image", "projector": ""}
    entry = model.entries["vision"]
    assert entry.modality == "image" and entry.upper_bounds == {"n": 50}
    assert entry.weights == ("tower.w", "projector.w") and entry.outputs[0].shape == (1, "n", 3)
    function = model.mod["vision"]
    assert int(function.attrs["num_input"]) == 1 and str(function.attrs["crossloom.modality"]) == "image"
    assert len(function.body.blocks) == 1, "one body: no call of the parts' own functions is left"
    calls = [getattr(b.value.op, "name", "") for b in function.body.blocks[0].bindings if hasattr(b.value, "op")]
    assert calls.count("relax.matmul") == 2
    x = random(1, 5, 4, seed=2)
    np.testing.assert_allclose(run(model, "vision", x)[0], np.tanh(np.tanh(x @ w1) @ w2), atol=1e-5)
    x = random(1, 2, 6, seed=3)
    np.testing.assert_allclose(run(model, "alone", x)[0], np.tanh(x @ w2), atol=1e-5)


def test_private_functions_do_not_clash():
    model = compose({"a": linear(random(4, 4)), "b": linear(random(4, 4, seed=1))}, {"helper": ["a", "b"]})
    names = sorted(gv.name_hint for gv, _ in model.mod.functions_items())
    assert len(names) == 3 and names.count("helper") == 1


def test_identical_weights_are_kept_once():
    w = random(4, 4)
    model = compose({"a": linear(w), "b": linear(w.copy())}, {"one": ["a", "b"], "two": ["b"]})
    assert list(model.params) == ["w"]
    assert model.entries["one"].weights == model.entries["two"].weights == ("w",)
    x = random(1, 3, 4, seed=5)
    np.testing.assert_allclose(run(model, "one", x)[0], np.tanh(np.tanh(x @ w) @ w), atol=1e-5)


def test_static_part_makes_the_chain_static():
    model = compose({"a": linear(random(4, 4)), "b": linear(random(4, 2), rows=7)}, {"e": ["a", "b"]})
    assert model.entries["e"].inputs[0].shape == (1, 7, 4)
    assert run(model, "e", random(1, 7, 4))[0].shape == (1, 7, 2)


def test_several_outputs_feed_by_name_and_last_part_returns_them():
    first = linear(random(4, 6), twice=True)
    second = linear(random(4, 3, seed=1), x="same", twice=True)
    model = compose({"a": first, "b": second}, {"e": ["a", "b"]})
    x = random(1, 2, 4, seed=4)
    out = run(model, "e", x)
    np.testing.assert_allclose(out[0], np.tanh(x @ second.params["w"]), atol=1e-5)
    np.testing.assert_array_equal(out[1], x)


def test_misfit_names_both_sides():
    with pytest.raises(UnsupportedModel, match=r"'y'.*'tower'.*'x'.*'projector'.*axis 2: 6 against 5"):
        compose({"tower": linear(random(4, 6)), "projector": linear(random(5, 3))}, {"e": ["tower", "projector"]})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"e": ["nope"]}, "unknown part 'nope'"),
        ({"e": ["a:nope"]}, "no entry 'nope'"),
        ({"e": []}, "no parts"),
        ({"e": "a"}, "write a list"),
        ({}, "no entries"),
        ({"e": Chain(("a",), upper_bounds={"q": 3})}, "unknown dimension 'q'"),
    ],
)
def test_usage_errors(entries, message):
    with pytest.raises(UsageError, match=message):
        compose({"a": linear(random(4, 4))}, entries)


def test_specialize_binds_in_every_entry():
    model = compose({"a": linear(random(4, 4)), "b": linear(random(4, 4, seed=1))}, {"x": ["a"], "y": ["b"]})
    fixed = specialize(model, {"n": 3})
    assert {e.inputs[0].shape for e in fixed.entries.values()} == {(1, 3, 4)}
    assert specialize(model, {"x.n": 3}).entries["y"].inputs[0].shape == (1, "n", 4)
    assert run(fixed, "y", random(1, 3, 4))[0].shape == (1, 3, 4)
    with pytest.raises(UsageError, match="'m'"):
        specialize(model, {"m": 3})


def test_a_dimension_named_t_keeps_its_name():
    from crossloom.importers.signature import dimension

    t = tvm.tirx.Var("T", "int64")
    assert dimension(t) == "T"
    assert dimension(t + 1) == "T + 1"
    assert dimension(tvm.tirx.max(tvm.tirx.IntImm("int64", 0), t)) in ("max(0, T)", "max(T, 0)")
