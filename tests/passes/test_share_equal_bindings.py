"""What is computed twice from the same operands is computed once."""

from __future__ import annotations

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from canonical import function
from crossloom.numerics import EXACT
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.share_equal_bindings import ShareEqualBindings
from crossloom.testing import assert_pass_preserves
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def twice(emit, x, table):
    """Return rows of a table that are looked up by the same places twice."""
    places = emit(op.astype(x, "int64"))
    first, second = (emit(op.take(table, places, axis=0)) for _ in range(2))
    return emit(op.add(first, emit(op.multiply(second, second))))


def shared(mod):
    """Return what the pass makes of a module, and the bindings that became names of others."""
    with Ledger() as ledger:
        out = ShareEqualBindings()(mod)
    assert relax.analysis.check_well_formed(out)
    assert ShareEqualBindings()(out).same_as(out)
    if not ledger.fired:
        assert out.same_as(mod)
    return out, [v.detail for v in ledger.fired]


def test_golden():
    def once(emit, x, table):
        places = emit(op.astype(x, "int64"))
        first = emit(op.take(table, places, axis=0))
        return emit(op.add(first, emit(op.multiply(first, first))))

    shapes = [(tirx.Var("T", "int64"),), (8, 4)]
    out, seen = shared(function(twice, shapes, "vision"))
    assert len(seen) == 1 and seen[0].startswith("equal to ")
    tidy = relax.transform.CanonicalizeBindings()
    shapes = [(tirx.Var("T", "int64"),), (8, 4)]
    tvm.ir.assert_structural_equal(tidy(out), tidy(function(once, shapes, "vision")))


def test_composites_are_shared_as_operators_are():
    def lines(emit, x, w):
        left, right = (emit(op.matmul(x, emit(op.permute_dims(w)))) for _ in range(2))
        return emit(op.multiply(left, right))

    assert len(shared(CanonicalizeTransformer()(function(lines, [(3, 4), (6, 4)], "vision")))[1]) == 1


def test_other_attributes_and_operands_are_other_values():
    def lines(emit, x, y):
        a, b, c = emit(op.sum(x, 0)), emit(op.sum(x, 1)), emit(op.sum(y, 0))
        return emit(op.add(emit(op.add(a, b)), c))

    assert shared(function(lines, [(4, 4), (4, 4)], "vision"))[1] == []


def test_what_has_effects_stays():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    call = lambda: relax.Call(relax.ExternFunc("noise"), [x], None, [x.ty])
    with builder.function("vision", [x], attrs={"num_input": 1}, pure=False):
        first, second = builder.emit(call()), builder.emit(call())
        builder.emit_func_output(builder.emit(op.subtract(first, second)))
    assert shared(builder.get())[1] == []


def test_vision_and_decode_are_treated_alike_and_twice_is_once():
    builder = relax.BlockBuilder()
    for name in ("vision", "decode"):
        function(twice, [(3,), (8, 4)], name, "float32", builder)
    with Ledger() as ledger:
        once = ShareEqualBindings()(builder.get())
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    assert ShareEqualBindings()(once).same_as(once)


@st.composite
def repeats(draw):
    names = [draw(st.sampled_from(["exp", "negative", "tanh"])) for _ in range(4)]
    shape = ("n", draw(st.integers(1, 4)))

    def emit(builder, p):
        values = [builder.emit(getattr(op, name)(p[0])) for name in names]
        return [builder.emit(op.add(values[0], values[1])), builder.emit(op.multiply(values[2], values[3]))]

    def reference(values):
        a, b, c, d = (getattr(np, name)(values[0].astype("float64")) for name in names)
        return [a + b, c * d]

    return build(draw, [shape], emit, reference, "float32")


def test_it_preserves_repeats():
    assert_pass_preserves(ShareEqualBindings(), repeats(), numerics=EXACT, max_examples=10)
