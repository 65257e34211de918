"""Factors of a linear layer's outputs become part of its weights."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from canonical import function
from crossloom.numerics import REASSOCIATES
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_scale_into_linear import FoldScaleIntoLinear
from crossloom.rewrite import composite_name
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def lines(biased=True, transposed=False, front=False, read=False):
    """Return lines that scale a linear layer's outputs; the factor is the last operand."""

    def emit_all(emit, x, w, *rest):
        y = emit(op.matmul(x, emit(op.permute_dims(w)) if transposed else w))
        y = emit(op.add(y, rest[0])) if biased else y
        z = emit(op.multiply(*((rest[-1], y) if front else (y, rest[-1]))))
        return emit(op.add(z, y)) if read else z

    return emit_all


def module(whole, scale=(6,), rows=5, transposed=False, biased=True, names=("vision",), dtype="float32", factor=None):
    builder = relax.BlockBuilder()
    shapes = [(1, rows, 4), (6, 4) if transposed else (4, 6), *([(6,)] if biased else [])]
    for name in names:
        function(whole, [*shapes, (scale, factor or dtype)], name, dtype, builder)
    return CanonicalizeTransformer()(builder.get())


def code(mod):
    with Ledger() as ledger:
        assert FoldScaleIntoLinear()(mod).same_as(mod)
    return [v.code for v in ledger]


def test_golden():
    after = FoldScaleIntoLinear()(module(lines()))
    calls = [b.value for b in after["vision"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    (linear,) = [call for call in calls if isinstance(call.op, tvm.ir.GlobalVar)]
    assert [call.op.name for call in calls if isinstance(call.op, tvm.ir.Op)].count("relax.multiply") == 2
    plain = function(lambda emit, x, w, b: emit(op.add(emit(op.matmul(x, w)), b)), [(1, 5, 4), (4, 6), (6,)], "vision")
    wanted = next(f for f in CanonicalizeTransformer()(plain).functions.values() if composite_name(f))
    clean = lambda func: relax.transform.CanonicalizeBindings()(tvm.IRModule({"f": func}))["f"]
    tvm.ir.assert_structural_equal(clean(after[linear.op]), clean(wanted))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [(6,), (1, 1, 6)])
def test_the_numbers(biased, transposed, scale):
    mod = module(lines(biased, transposed, front=True), scale, tirx.Var("T", "int64"), transposed, biased)
    with Ledger() as ledger:
        mod = FoldScaleIntoLinear()(mod)
    assert [v.code for v in ledger] == ["fired"]
    rng = np.random.default_rng(0)
    for rows in (0, 1, 7):
        shapes = [(1, rows, 4), (6, 4) if transposed else (4, 6), *([(6,)] if biased else []), scale]
        given = [rng.standard_normal(s).astype("float32") for s in shapes]
        x, w, s = given[0].astype("float64"), given[1], given[-1]
        wanted = (x @ (w.T if transposed else w) + (given[2] if biased else 0)) * s
        (got,) = run_module(mod, "vision", given)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_factor_by_row_is_refused():
    assert code(module(lines(), (1, 5, 6))) == ["not-one-per-output"]


def test_another_type_is_refused():
    def wide(emit, x, w, s):
        return emit(op.multiply(emit(op.matmul(x, w, out_dtype="float32")), s))

    typed = [((1, 5, 4), "float16"), ((4, 6), "float16"), ((6,), "float32")]
    assert code(CanonicalizeTransformer()(function(wide, typed, "vision"))) == ["different-dtypes"]


def test_what_is_read_elsewhere_is_refused():
    assert code(module(lines(read=True))) == ["intermediate-used-outside"]


def test_a_single_number_and_an_input_are_no_such_factors():
    assert code(module(lines(), (1,))) == []
    given = function(
        lambda emit, s, x, w: emit(op.multiply(emit(op.matmul(x, w)), s)), [(6,), (5, 4), (4, 6)], num_input=2
    )
    assert code(CanonicalizeTransformer()(given)) == []


def test_vision_and_decode_are_treated_alike_and_twice_is_once():
    before = module(lines(), names=("vision", "decode"))
    with Ledger() as ledger:
        once = FoldScaleIntoLinear()(before)
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    tvm.ir.assert_structural_equal(FoldScaleIntoLinear()(once), once)


@st.composite
def scaled(draw):
    depth, count, biased, turned = (
        draw(s) for s in (st.integers(1, 5), st.integers(2, 7), st.booleans(), st.booleans())
    )
    whole = lines(biased, turned)
    shapes = [("n", depth), (count, depth) if turned else (depth, count), *([(count,)] if biased else []), (count,)]
    emit = lambda builder, p: [whole(builder.emit, *p)]

    def reference(values):
        x, w, *rest = (v.astype("float64") for v in values)
        return [(x @ (w.T if turned else w) + (rest[0] if biased else 0)) * rest[-1]]

    return build(draw, shapes, emit, reference, "float32")


def test_it_preserves_scaled_layers():
    passes = tvm.transform.Sequential([CanonicalizeTransformer(), FoldScaleIntoLinear()], name="fold-scale")
    assert_pass_preserves(passes, scaled(), numerics=REASSOCIATES, max_examples=15)


def test_outputs_of_symbolic_number_are_refused():
    count = tirx.Var("m", "int64")
    given = function(
        lambda emit, x, w, s: emit(op.multiply(emit(op.matmul(x, w)), s)), [(5, 4), (4, count), (count,)], "vision"
    )
    assert code(CanonicalizeTransformer()(given)) == ["outputs-of-symbolic-number"]


@pytest.mark.parametrize(("factor", "codes"), [(0.5, ["fired"]), (1e-5, ["half-precision-factor-unknown"])])
def test_float16_weights_keep_their_bits(factor, codes):
    known = relax.const(np.full((6,), factor), "float16")
    lines_of = lambda emit, x, w: emit(op.multiply(emit(op.matmul(x, w)), known))
    given = CanonicalizeTransformer()(function(lines_of, [(5, 4), (4, 6)], "vision", "float16"))
    with Ledger() as ledger:
        FoldScaleIntoLinear()(given)
    assert [v.code for v in ledger] == codes


def test_a_float16_factor_that_is_not_known_is_refused():
    assert code(module(lines(), dtype="float16")) == ["half-precision-factor-unknown"]
