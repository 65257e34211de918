"""compose(): chains inlined, shapes unified, weights shared, clashes and misfits named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.compose import Chain, compose
from crossloom.importers.specialize import specialize
from crossloom.model import Entry, Model, PackedWeight, TensorSpec
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


def part(build, inputs, outputs, weights=(), **bounds) -> Model:
    """A part called "run": `build` maps its variables to its result."""
    symbols: dict[str, tirx.Var] = {}
    size = lambda d: symbols.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d
    bb = relax.BlockBuilder()
    typed = [TensorSpec(*spec) for spec in inputs]
    given = [*typed, *(TensorSpec(key, array.shape, str(array.dtype)) for key, array in weights)]
    variables = [relax.Var(s.name, relax.TensorType([size(d) for d in s.shape], s.dtype)) for s in given]
    with bb.function("run", variables, attrs={"num_input": len(typed)}):
        with bb.dataflow():
            out = bb.emit_output(build(*variables))
        bb.emit_func_output(out)
    entry = Entry("run", tuple(typed), tuple(TensorSpec(*o) for o in outputs), tuple(k for k, _ in weights), **bounds)
    return Model(bb.get(), dict(weights), {"run": entry})


X, Y = ("x", ("n", 4), "float32"), ("y", ("n", 4), "float32")
A = random(3, 4)


def test_outputs_no_part_takes_are_returned_behind_the_last_parts():
    tower = linear(random(4, 6), twice=True)
    model = compose({"a": tower, "b": linear(random(6, 3, seed=1), x="y", y="same")}, {"e": ["a", "b"]})
    assert [o.name for o in model.entries["e"].outputs] == ["same", "a_same"]
    x = random(1, 2, 4)
    out = run(model, "e", x)
    hidden = np.tanh(x @ tower.params["w"])
    np.testing.assert_allclose(out[0], np.tanh(hidden @ random(6, 3, seed=1)), atol=1e-5)
    np.testing.assert_array_equal(out[1], x)


def test_chosen_outputs_may_be_intermediate():
    parts = {"a": linear(random(4, 6), y="hidden"), "b": linear(random(6, 3, seed=1))}
    model = compose(parts, {"e": Chain(("a", "b"), outputs=("y", "hidden"))})
    x = random(1, 2, 4)
    np.testing.assert_allclose(run(model, "e", x)[1], np.tanh(x @ random(4, 6)), atol=1e-5)
    only = compose(parts, {"e": Chain(("a", "b"), outputs=("hidden",))})
    assert only.entries["e"].weights == ("a.w", "b.w") and len(only.entries["e"].outputs) == 1
    with pytest.raises(UsageError, match=r"no output 'nope'.*\n.*hidden"):
        compose(parts, {"e": Chain(("a", "b"), outputs=("nope",))})


def test_tuples_within_tuples_are_flattened():
    op = relax.op
    nested = part(
        lambda x: relax.Tuple([relax.Tuple([op.negative(x), op.abs(x)]), relax.Tuple([op.add(x, x)])]),
        [X],
        [("minus", ("n", 4), "float32"), ("size", ("n", 4), "float32"), ("double", ("n", 4), "float32")],
    )
    after = part(
        lambda size: relax.Tuple([op.sqrt(size)]), [("size", ("m", 4), "float32")], [("root", ("m", 4), "float32")]
    )
    model = compose({"a": nested, "b": after}, {"e": ["a", "b"], "alone": ["a"]})
    assert [o.name for o in model.entries["e"].outputs] == ["root", "minus", "double"]
    assert model.entries["e"].outputs[0].shape == ("n", 4)
    for got, wanted in zip(run(model, "e", A), [np.sqrt(np.abs(A)), -A, 2 * A], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    for got, wanted in zip(run(model, "alone", A), [-A, np.abs(A), 2 * A], strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_bounds_of_both_sides_meet():
    op = relax.op
    first = part(op.negative, [X], [Y], upper_bounds={"n": 50}, lower_bounds={"n": 2})
    second = part(
        op.abs,
        [("x", ("m", 4), "float32")],
        [("y", ("m", 4), "float32")],
        upper_bounds={"m": 40},
        lower_bounds={"m": 3},
    )
    model = compose({"a": first, "b": second}, {"e": ["a", "b"]})
    entry = model.entries["e"]
    assert entry.upper_bounds == {"n": 40} and entry.lower_bounds == {"n": 3}
    assert dict(model.mod["e"].attrs["tir_var_lower_bound"]) == {"n": 3}
    with pytest.raises(UsageError, match=r"n = 2.*\n.*3 to 40"):
        specialize(model, {"n": 2})
    fixed = specialize(model, {"n": 5})
    assert not fixed.entries["e"].lower_bounds and "tir_var_lower_bound" not in fixed.mod["e"].attrs
    static = part(op.abs, [("x", (60, 4), "float32")], [("y", (60, 4), "float32")])
    with pytest.raises(UnsupportedModel, match="'n' of part 'a' becomes 60, outside 2 to 50"):
        compose({"a": first, "b": static}, {"e": ["a", "b"]})
    narrow = part(op.abs, [X], [Y], upper_bounds={"n": 1})
    with pytest.raises(UnsupportedModel, match="'n' of entry 'e' must be at least 2 and at most 1"):
        compose({"a": first, "b": narrow}, {"e": ["a", "b"]})


def test_bounds_are_carried_through_what_a_dimension_is_bound_to():
    """By hand: ``n = m + 1 <= 8`` is ``m <= 7``; ``4 <= 2 * m + 1 <= 8`` is ``2 <= m <= 3``."""
    op = relax.op
    one = tvm.relax.const(np.zeros((1, 4), "float32"))
    row = lambda x: op.concat([x, one], 0)
    pairs = lambda x: op.concat([x, x, one], 0)
    crossed = lambda x, z: op.concat([x, z], 0)
    m = ("x", ("m", 4), "float32")
    after = part(op.abs, [("y", ("n", 4), "float32")], [("z", ("n", 4), "float32")], upper_bounds={"n": 8})
    least = part(
        op.abs, [("y", ("n", 4), "float32")], [("z", ("n", 4), "float32")], upper_bounds={"n": 8}, lower_bounds={"n": 4}
    )
    join = lambda first, second: compose({"a": first, "b": second}, {"e": ["a", "b"]}).entries["e"]

    entry = join(part(row, [m], [("y", ("m + 1", 4), "float32")]), after)
    assert entry.upper_bounds == {"m": 7} and not entry.lower_bounds
    entry = join(part(row, [m], [("y", ("m + 1", 4), "float32")], upper_bounds={"m": 5}), least)
    assert entry.upper_bounds == {"m": 5} and entry.lower_bounds == {"m": 3}
    entry = join(part(pairs, [m], [("y", ("2 * m + 1", 4), "float32")]), least)
    assert entry.upper_bounds == {"m": 3} and entry.lower_bounds == {"m": 2}
    # A sum of two says nothing of either that an entry could state.
    two = part(crossed, [m, ("w", ("k", 4), "float32")], [("y", ("m + k", 4), "float32")])
    assert not join(two, least).upper_bounds
    with pytest.raises(UnsupportedModel, match="'m' of entry 'e' must be at least 9 and at most 7"):
        join(part(row, [m], [("y", ("m + 1", 4), "float32")], lower_bounds={"m": 9}), after)
    tall = tvm.relax.const(np.zeros((9, 4), "float32"))
    with pytest.raises(UnsupportedModel, match="'m' of entry 'e' must be at least 0 and at most -1"):
        join(part(lambda x: op.concat([x, tall], 0), [m], [("y", ("m + 9", 4), "float32")]), after)


def test_a_renamed_dimension_takes_its_bounds_along():
    op = relax.op
    first = part(op.negative, [X], [Y], upper_bounds={"n": 9})
    second = part(
        lambda x, z: relax.Tuple([x, op.abs(z)]),
        [("x", ("m", 4), "float32"), ("z", ("n", 2), "float32")],
        [("y", ("m", 4), "float32"), ("w", ("n", 2), "float32")],
        upper_bounds={"m": 8, "n": 3},
    )
    entry = compose({"a": first, "b": second}, {"e": ["a", "b"]}).entries["e"]
    assert entry.inputs[1].shape == ("b_n", 2) and entry.upper_bounds == {"n": 8, "b_n": 3}


def test_same_names_with_different_bytes_and_tied_weights():
    op = relax.op
    w, v = random(4, 4), random(4, 4, seed=1)
    tied = part(lambda x, a, b: op.matmul(op.matmul(x, a), b), [X], [Y], [("embed", w), ("head", w.copy())])
    other = part(lambda x, a: op.matmul(x, a), [X], [Y], [("embed", v)])
    model = compose({"p": tied, "q": other}, {"e": ["p", "q"]})
    assert model.entries["e"].weights == ("p.embed", "q.embed") == tuple(model.params)
    np.testing.assert_allclose(run(model, "e", A)[0], A @ w @ w @ v, atol=1e-4)


def test_half_feeds_single_and_not_the_other_way():
    op = relax.op
    half = part(op.negative, [("x", ("n", 4), "float16")], [("y", ("n", 4), "float16")])
    single = part(op.abs, [X], [Y])
    model = compose({"h": half, "s": single}, {"e": ["h", "s"]})
    (out,) = run(model, "e", A.astype("float16"))
    np.testing.assert_array_equal(out, np.abs(A.astype("float16").astype("float32")))
    with pytest.raises(UnsupportedModel, match=r"'y' float32\(n, 4\).*'s'.*'x' float16.*'h'"):
        compose({"h": half, "s": single}, {"e": ["s", "h"]})


def test_packed_weights_module_attributes_and_global_infos_survive():
    w = random(4, 4)
    packed = PackedWeight("Q8_0", (4, 4), np.arange(34, dtype="uint8"))
    first = replace(linear(w), packed={"w": packed})
    first.mod = first.mod.with_attr("vendor.key", "1")
    first.mod.update_global_info("vdevice", [relax.VDevice(tvm.target.Target({"kind": "llvm"}))])
    second = linear(random(4, 4, seed=1))
    model = compose({"a": first, "b": second}, {"e": ["a", "b"]})
    fixed = specialize(model, {"n": 2})
    for result in (model, fixed):
        assert list(result.packed) == ["a.w"] and result.packed["a.w"] is packed
        assert str(result.mod.attrs["vendor.key"]) == "1" and len(result.mod.global_infos["vdevice"]) == 1
    second.mod = second.mod.with_attr("vendor.key", "2")
    with pytest.raises(UnsupportedModel, match=r"'a' and 'b' carry different values of attribute 'vendor\.key'"):
        compose({"a": first, "b": second}, {"e": ["a", "b"]})


def test_a_part_whose_sizes_hold_conditions_is_named():
    op = relax.op
    last = lambda x: op.strided_slice(x, [0], [x.ty.shape[0] - 1], [x.ty.shape[0]])
    odd = part(last, [X], [("y", (1, 4), "float32")])
    with pytest.raises(UnsupportedModel, match=r"'run' cannot be copied.*\n.*specialize"):
        compose({"a": odd}, {"e": ["a"]})
