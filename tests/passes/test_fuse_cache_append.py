"""Caches of all layers grow at once where they stand in one tensor; nothing else is touched."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import canonical
from canonical import data
from crossloom.numerics import EXACT
from crossloom.passes.fuse_cache_append import FuseCacheAppend
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.verdict import Ledger

op = relax.op
P = tirx.Var("p", "int64")
module = functools.partial(canonical.module, num_input=None)


def grown(e, past, news, axis=2, order=None, stack=False):
    """Emit a stack of caches, each with something behind it."""
    layers = []
    for i, new in zip(order or range(len(news)), news):
        taken = e(op.take(past, relax.const(i, "int64"), 0))
        layers.append(e(op.concat([taken, new], axis)))
    return op.stack(layers, 0) if stack else op.concat([e(op.expand_dims(x, 0)) for x in layers], 0)


def run(mod):
    with Ledger() as ledger:
        out = FuseCacheAppend()(mod)
    relax.analysis.well_formed(out)
    return out, ledger


def operators(mod, name):
    return [b.value.op.name for block in mod[name].body.blocks for b in block.bindings if hasattr(b.value, "op")]


def test_golden_two_layers():
    @I.ir_module
    class Before:
        @R.function
        def decode(
            past: R.Tensor((2, 1, 3, "p", 4), "float32"),
            a: R.Tensor((1, 3, 1, 4), "float32"),
            b: R.Tensor((1, 3, 1, 4), "float32"),
        ):
            with R.dataflow():
                first = R.take(past, R.const(0, "int64"), axis=0)
                x = R.concat((first, a), axis=2)
                second = R.take(past, R.const(1, "int64"), axis=0)
                y = R.concat((second, b), axis=2)
                u = R.expand_dims(x, axis=[0])
                v = R.expand_dims(y, axis=[0])
                z = R.concat((u, v), axis=0)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def decode(
            past: R.Tensor((2, 1, 3, "p", 4), "float32"),
            a: R.Tensor((1, 3, 1, 4), "float32"),
            b: R.Tensor((1, 3, 1, 4), "float32"),
        ):
            with R.dataflow():
                u = R.expand_dims(a, axis=[0])
                v = R.expand_dims(b, axis=[0])
                new = R.concat((u, v), axis=0)
                z = R.concat((past, new), axis=3)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(FuseCacheAppend()(Before), Expected)


SHAPES = [(2, 1, 3, P, 4), (1, 3, 1, 4), (1, 3, 1, 4)]


@pytest.mark.parametrize("stack", [False, True])
def test_two_entries_and_running_it_twice(stack):
    mod = module(lambda e, past, *news: grown(e, past, news, stack=stack), SHAPES, ("prefill", "decode"))
    out, ledger = run(mod)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"} and not ledger.refused
    assert FuseCacheAppend()(out).same_as(out)
    past, a, b = data((2, 1, 3, 5, 4), (1, 3, 1, 4), (1, 3, 1, 4))
    want = np.concatenate([past, np.stack([a, b])], 3)
    for entry in ("prefill", "decode"):
        assert "relax.take" not in operators(out, entry)
        assert np.array_equal(run_module(out, entry, [past, a, b])[0], want)


def test_one_layer_and_a_layer_that_is_read_elsewhere():
    def build(e, past, new):
        longer = e(op.concat([e(op.take(past, relax.const(0, "int64"), 0)), new], 2))
        return relax.Tuple([e(op.concat([e(op.expand_dims(longer, 0))], 0)), longer])

    out, _ = run(module(build, [(1, 1, 3, P, 4), (1, 3, 1, 4)], ("decode",)))
    assert operators(out, "decode") == ["relax.take", "relax.concat", "relax.expand_dims", "relax.concat"]
    past, new = data((1, 1, 3, 5, 4), (1, 3, 1, 4))
    whole, layer = run_module(out, "decode", [past, new])
    assert np.array_equal(whole[0], layer) and np.array_equal(layer, np.concatenate([past[0], new], 2))


def two_tensors(e, past, a, b, other):
    first, second = (
        e(op.expand_dims(e(op.concat([e(op.take(p, relax.const(i, "int64"), 0)), x], 2)), 0))
        for i, (p, x) in enumerate(((past, a), (other, b)))
    )
    return op.concat([first, second], 0)


@pytest.mark.parametrize(
    ("build", "shapes", "code"),
    [
        (two_tensors, [*SHAPES, SHAPES[0]], "different-caches"),
        (lambda e, past, *news: grown(e, past, news, order=[1, 0]), SHAPES, "not-every-layer"),
        (lambda e, past, *news: grown(e, past, news), [(3, 1, 3, P, 4), *SHAPES[1:]], "not-every-layer"),
        (
            lambda e, past, *news: grown(e, past, news),
            [(2, 1, 3, 5, 4), (1, 3, 1, 4), (1, 3, P, 4)],
            "different-lengths",
        ),
    ],
)
def test_refused(build, shapes, code):
    mod = module(build, shapes, ("decode",))
    out, ledger = run(mod)
    assert out.same_as(mod) and {v.code for v in ledger.refused} == {code}


@st.composite
def caches(draw):
    layers, axis, stack = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.booleans())
    shape = [2, 3, 4]
    past, new = ([layers, *shape] for _ in range(2))
    past[axis + 1] = "n"
    new[axis + 1] = "m"
    inputs = [strategies.Input(tuple(past)), *[strategies.Input(tuple(new[1:]))] * layers]

    def emit(bb, p):
        return [grown(bb.emit, p[0], p[1:], axis, stack=stack)]

    def reference(x):
        return [np.concatenate([x[0], np.stack(x[1:])], axis + 1)]

    return strategies.build(draw, inputs, emit, reference, draw(st.sampled_from(["float32", "float16"])))


def test_property_results_are_preserved():
    assert_pass_preserves(FuseCacheAppend(), caches(), numerics=EXACT, max_examples=8)
