"""A stack of caches that every layer appends to is appended to as a whole, and holds the same."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from crossloom.numerics import EXACT
from crossloom.passes.lift_cache_stack import LiftCacheStack
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def taken(emit, past, layer):
    return emit(op.take(past, relax.const(layer, "int64"), axis=0, mode="clip"))


def sliced(emit, past, layer):
    return emit(op.squeeze(emit(op.strided_slice(past, [0], [layer], [layer + 1])), [0]))


def lines(layer_of=taken, order=None, axis=2, front=False, read=False, stacks=1):
    """Return lines that append ``news`` to the layers of ``past`` and stack them again."""

    def emit_all(emit, *values):
        pasts, news = values[:stacks], values[stacks:]
        grown = []
        for place, layer in enumerate(order or range(len(news))):
            old = layer_of(emit, pasts[place % stacks], layer)
            pair = [news[place], old] if front else [old, news[place]]
            grown.append(emit(op.concat(pair, axis=axis)))
        present = emit(op.concat([emit(op.expand_dims(k, [0])) for k in grown], axis=0))
        return relax.Tuple([present, *([emit(op.multiply(grown[0], relax.const(2.0)))] if read else [])])

    return emit_all


def module(build_lines, layers=3, new=1, names=("decode",), depth=None, stacks=1):
    builder = relax.BlockBuilder()
    for name in names:
        past = tirx.Var("P", "int64")
        shapes = [(depth or layers, 1, 2, past, 4)] * stacks + [(1, 2, new, 4)] * layers
        params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
        with builder.function(name, params, attrs={"num_input": len(params)}):
            with builder.dataflow():
                out = builder.emit_output(build_lines(builder.emit, *params))
            builder.emit_func_output(out)
    return builder.get()


def code(mod):
    with Ledger() as ledger:
        assert LiftCacheStack()(mod).same_as(mod)
    return [v.code for v in ledger]


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def decode(
            past: R.Tensor((2, 1, "P"), "float32"), a: R.Tensor((1, 1), "float32"), b: R.Tensor((1, 1), "float32")
        ) -> R.Tensor((2, 1, "P + 1"), "float32"):
            with R.dataflow():
                k0 = R.concat((R.take(past, R.const(0, "int64"), axis=0), a), axis=1)
                k1 = R.concat((R.take(past, R.const(1, "int64"), axis=0), b), axis=1)
                s = R.concat((R.expand_dims(k0, axis=[0]), R.expand_dims(k1, axis=[0])), axis=0)
                R.output(s)
            return s

    @I.ir_module
    class Expected:
        @R.function
        def decode(
            past: R.Tensor((2, 1, "P"), "float32"), a: R.Tensor((1, 1), "float32"), b: R.Tensor((1, 1), "float32")
        ) -> R.Tensor((2, 1, "P + 1"), "float32"):
            with R.dataflow():
                x = R.expand_dims(a, axis=[0])
                y = R.expand_dims(b, axis=[0])
                new = R.concat((x, y), axis=0)
                s = R.concat((past, new), axis=2)
                R.output(s)
            return s

    tvm.ir.assert_structural_equal(LiftCacheStack()(Before), Expected)


@pytest.mark.parametrize("layer_of", [taken, sliced])
@pytest.mark.parametrize("old, new", [(0, 1), (5, 1), (3, 2)])
def test_the_numbers(layer_of, old, new):
    with Ledger() as ledger:
        mod = LiftCacheStack()(module(lines(layer_of, read=True), new=new))
    assert [v.detail for v in ledger.fired] == ["3 layers"]
    rng = np.random.default_rng(0)
    past = rng.standard_normal((3, 1, 2, old, 4)).astype("float32")
    news = [rng.standard_normal((1, 2, new, 4)).astype("float32") for _ in range(3)]
    present, read = run_module(mod, "decode", [past, *news])
    wanted = np.stack([np.concatenate([past[i], news[i]], axis=2) for i in range(3)])
    np.testing.assert_array_equal(present, wanted)
    np.testing.assert_array_equal(read, 2 * wanted[0])


def test_other_orders_are_refused():
    assert code(module(lines(order=[1, 0, 2]))) == ["layers-out-of-order"]
    assert code(module(lines(), depth=4)) == ["layers-out-of-order"]


def test_layers_of_two_stacks_are_refused():
    assert code(module(lines(stacks=2), stacks=2)) == ["caches-of-several-stacks"]


def test_what_is_appended_in_front_is_none():
    assert code(module(lines(front=True))) == []


def test_prefill_and_decode_are_treated_alike_and_twice_is_once():
    with Ledger() as ledger:
        once = LiftCacheStack()(module(lines(), names=("prefill", "decode")))
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    tvm.ir.assert_structural_equal(LiftCacheStack()(once), once)


@st.composite
def stacks(draw):
    layers, heads, old, new = (draw(st.integers(low, 3)) for low in (2, 1, 1, 1))
    axis, layer_of = draw(st.integers(0, 3)), draw(st.sampled_from([taken, sliced]))
    shape = [1, heads, old, 4]
    own = list(shape)
    own[axis] = new
    whole = lines(layer_of, axis=axis)
    emit = lambda builder, p: [whole(builder.emit, *p).fields[0]]
    grown = lambda x: np.stack([np.concatenate([x[0][i], x[1 + i]], axis=axis) for i in range(layers)])
    shapes = [(layers, *shape), *[tuple(own)] * layers]
    return build(
        draw, shapes, emit, lambda x: [grown(x).astype("float64")], draw(st.sampled_from(["float32", "float16"]))
    )


def test_it_preserves_stacks():
    assert_pass_preserves(LiftCacheStack(), stacks(), numerics=EXACT, max_examples=15)


def test_slices_up_to_a_symbolic_size_are_no_layers():
    def cut(emit, past, layer):
        until = past.ty.shape[3]
        part = emit(op.strided_slice(past, [0, 3], [layer, 0], [layer + 1, until]))
        return emit(op.squeeze(part, [0]))

    assert code(module(lines(cut))) == []
