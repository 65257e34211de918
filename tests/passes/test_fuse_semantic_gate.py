"""Gates of cosine similarity: every spelling, broadcast vectors, vectors of zeros; what is none of them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import structural_equal

from canonical import data, module
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_semantic_gate import FuseSemanticGate
from crossloom.passes.lower_fused_gate import LowerFusedGate
from crossloom.rewrite import composite_name
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger
from gates import EPS, SPELLINGS, by_product, by_torch, cosine, gates, norm, sigmoid

op = relax.op
B, N = tirx.Var("b", "int64"), tirx.Var("n", "int64")
TARGET = get_target("host").tvm_target()


def gated(mod):
    mod = CanonicalizeTransformer()(mod)
    with Ledger() as ledger:
        out = FuseSemanticGate()(mod)
    relax.analysis.well_formed(out)
    tvm.ir.assert_structural_equal(FuseSemanticGate()(out), out)
    return out, ledger


def lines(mod, entry="main"):
    return [b.value for block in mod[entry].body.blocks for b in block.bindings]


def is_one_region(mod, entry="main"):
    calls = [v for v in lines(mod, entry) if isinstance(v, relax.Call)]
    return len(calls) == 1 and composite_name(mod[calls[0].op]) == "crossloom.fused_gate"


def agrees(mod, args, *wants, bound=1e-5):
    low = LowerFusedGate(TARGET)(mod)
    assert not any(composite_name(f) == "crossloom.fused_gate" and f in called(low) for _, f in low.functions_items())
    for step in (mod, low):
        for got, want in zip(run_module(step, "main", args), wants, strict=True):
            assert got.shape == want.shape
            assert np.abs(got.astype("float64") - want).max(initial=0.0) <= bound * max(
                1.0, np.abs(want).max(initial=0)
            )


def called(mod):
    out = []
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function) and not composite_name(func):
            out += [mod[v.op] for v in lines_of(func) if isinstance(v, relax.Call) and v.op in mod.functions]
    return out


def lines_of(func):
    return [b.value for block in func.body.blocks for b in block.bindings]


def test_golden_a_gate_with_all_that_makes_it():
    @I.ir_module
    class Before:
        @R.function
        def main(a: R.Tensor(("n", 8), "float32"), b: R.Tensor(("n", 8), "float32")):
            with R.dataflow():
                ab = R.multiply(a, b)
                dot = R.sum(ab, axis=[-1], keepdims=True)
                aa = R.multiply(a, a)
                la = R.sqrt(R.sum(aa, axis=[-1], keepdims=True))
                bb = R.multiply(b, b)
                lb = R.sqrt(R.sum(bb, axis=[-1], keepdims=True))
                c = R.divide(dot, R.maximum(R.multiply(la, lb), R.const(1e-8, "float32")))
                g = R.sigmoid(c)
                y = R.multiply(a, g)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def fused_gate(a0: R.Tensor(("n", 8), "float32"), a1: R.Tensor(("n", 8), "float32")):
            R.func_attr({"Composite": "crossloom.fused_gate"})
            with R.dataflow():
                ab = R.multiply(a0, a1)
                dot = R.sum(ab, axis=[-1], keepdims=True)
                aa = R.multiply(a0, a0)
                la = R.sqrt(R.sum(aa, axis=[-1], keepdims=True))
                bb = R.multiply(a1, a1)
                lb = R.sqrt(R.sum(bb, axis=[-1], keepdims=True))
                c = R.divide(dot, R.maximum(R.multiply(la, lb), R.const(1e-8, "float32")))
                g = R.sigmoid(c)
                y = R.multiply(a0, g)
                R.output(y)
            return y

        @R.function
        def main(a: R.Tensor(("n", 8), "float32"), b: R.Tensor(("n", 8), "float32")):
            cls = Expected
            with R.dataflow():
                y = cls.fused_gate(a, b)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseSemanticGate()(Before), Expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("keep", [True, False])
def test_every_spelling_and_vectors_of_zeros(spelling, keep):
    def emit(e, a, b):
        g = e(op.sigmoid(spelling(e, a, b, keep)))
        g = g if keep else e(op.expand_dims(g, [-1]))
        return op.add(e(op.multiply(g, a)), e(op.multiply(e(op.subtract(relax.const(1.0), g)), b)))

    out, ledger = gated(module(emit, [(B, N, 19), (B, N, 19)], num_input=2))
    assert [v.code for v in ledger] == ["fired"] and is_one_region(out)
    for rows in ((2, 3), (1, 1), (0, 4)):
        a, b = data((*rows, 19), (*rows, 19))
        a[:, :1], b[:1, -1:] = 0, 0
        b[:, 1:2] *= 1e-6
        g = sigmoid(cosine(a, b, spelling))
        agrees(out, [a, b], g * a + (1 - g) * b)


@pytest.mark.parametrize(
    ("shape", "rows"), [((1, 16), (N,)), ((16,), (N,)), ((B, 1, 16), (B, N)), ((1, 1, 16), (B, N))]
)
@pytest.mark.parametrize("spelling", [by_product, by_torch])
def test_one_vector_for_all_tokens(shape, rows, spelling):
    def emit(e, tokens, pooled):
        return op.multiply(tokens, e(op.sigmoid(spelling(e, tokens, pooled))))

    out, _ = gated(module(emit, [(*rows, 16), shape], num_input=2))
    assert is_one_region(out)
    sizes = {B: 2, N: 5}
    tokens, pooled = (data([sizes.get(d, d) for d in s], seed=i)[0] for i, s in enumerate(((*rows, 16), shape)))
    agrees(out, [tokens, pooled], tokens * sigmoid(cosine(tokens, pooled, spelling)))


def test_tokens_times_a_column_that_is_pooled():
    def emit(e, tokens, pooled):
        units = [e(op.divide(x, e(op.maximum(norm(e, x), relax.const(EPS))))) for x in (tokens, pooled)]
        likeness = e(op.matmul(units[0], e(op.permute_dims(units[1]))))
        return op.multiply(tokens, e(op.sigmoid(likeness)))

    out, _ = gated(module(emit, [(N, 16), (1, 16)], num_input=2))
    assert is_one_region(out)
    tokens, pooled = data((5, 16), (1, 16))
    agrees(out, [tokens, pooled], tokens * sigmoid(cosine(tokens, pooled)))


def test_scale_and_bias_that_are_learned_and_features_of_their_own():
    def emit(e, a, b, c, scale, bias):
        g = e(op.add(e(op.multiply(by_product(e, a, b), scale)), bias))
        return op.add(c, e(op.multiply(e(op.sigmoid(g)), b)))

    out, _ = gated(module(emit, [(N, 33), (N, 33), (N, 33), (1,), (1, 1)], num_input=3))
    assert is_one_region(out)
    a, b, c, scale, bias = data((4, 33), (4, 33), (4, 33), (1,), (1, 1))
    agrees(out, [a, b, c, scale, bias], c + sigmoid(cosine(a, b, by_product) * scale + bias) * b)


def test_the_gate_itself_and_an_inner_value_are_results_too():
    def emit(e, a, b):
        g = e(op.sigmoid(by_torch(e, a, b, False)))
        y = e(op.multiply(a, e(op.expand_dims(g, [-1]))))
        return relax.Tuple([y, g])

    out, _ = gated(module(emit, [(N, 8), (N, 8)], num_input=2))
    assert sum(composite_name(f) == "crossloom.fused_gate" for f in called(out)) == 1
    a, b = data((4, 8), (4, 8))
    g = sigmoid(cosine(a, b))
    agrees(out, [a, b], a * g, g[:, 0])


def test_half_precision_is_summed_wide():
    def emit(e, a, b):
        return op.multiply(a, e(op.sigmoid(by_product(e, a, b, eps=1e-2))))

    out, _ = gated(module(emit, [(3, 2048), (3, 2048)], dtype="float16", num_input=2))
    low = LowerFusedGate(TARGET)(out)
    a, b = (x * np.float16(8) for x in data((3, 2048), (3, 2048), dtype="float16"))
    want = a * sigmoid(cosine(a, b, by_product, 1e-2))
    # The sums are above float16's greatest number: the kernel holds them.
    got = run_module(low, "main", [a, b])[0]
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("what", ["dot", "one length", "distance"])
def test_a_logistic_function_of_another_number_is_refused(what):
    def emit(e, a, b):
        dot = e(op.sum(e(op.multiply(a, b)), [-1], True))
        value = {"dot": dot}.get(what)
        if value is None:
            length = norm(e, a)
            value = e(op.divide(dot, length)) if what == "one length" else e(op.subtract(norm(e, b), dot))
        return op.multiply(a, e(op.sigmoid(value)))

    mod = module(emit, [(N, 8), (N, 8)], num_input=2)
    out, ledger = gated(mod)
    assert [v.code for v in ledger] == ["not-a-cosine"]
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


def test_vectors_that_are_changed_in_between_are_refused():
    def emit(e, a, b):
        unit = e(op.divide(a, e(op.maximum(norm(e, a), relax.const(EPS)))))
        kept = e(op.expand_dims(b, [0]))
        dot = e(op.sum(e(op.multiply(unit, kept)), [-1], True))
        return op.multiply(e(op.expand_dims(a, [0])), e(op.sigmoid(e(op.sqrt(e(op.abs(e(op.negative(dot)))))))))

    mod = module(emit, [(N, 8), (N, 8)], num_input=2)
    out, ledger = gated(mod)
    assert {v.code for v in ledger} <= {"not-a-cosine", "no-kernel"} and len(ledger) == 1
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


def test_results_of_different_rows_are_refused():
    def emit(e, a, b):
        g = e(op.sigmoid(by_product(e, a, b)))
        return op.add(e(op.multiply(a, g)), e(op.multiply(e(op.expand_dims(b, [0])), g)))

    mod = module(emit, [(4, 8), (4, 8)], num_input=2)
    out, ledger = gated(mod)
    assert [v.code for v in ledger] in (["no-kernel"], ["fired"])
    a, b = data((4, 8), (4, 8))
    g = sigmoid(cosine(a, b, by_product))
    assert np.abs(run_module(out, "main", [a, b])[0] - (a * g + (b * g)[None])).max() < 1e-5


@pytest.mark.parametrize("emit", [lambda e, a, b: op.sigmoid(a), lambda e, a, b: op.multiply(a, e(op.sigmoid(b)))])
def test_ordinary_logistic_functions_are_no_candidates(emit):
    _, ledger = gated(module(emit, [(N, 8), (N, 8)], num_input=2))
    assert len(ledger) == 0


def test_a_residual_stream_behind_a_gate_is_left_to_others():
    def emit(e, a, b):
        h = e(op.add(a, e(op.multiply(b, e(op.sigmoid(by_product(e, a, b)))))))
        for _ in range(3):
            h = e(op.add(h, e(op.nn.relu(h))))
        return h

    out, ledger = gated(module(emit, [(N, 8), (N, 8)], num_input=2))
    assert [v.code for v in ledger] == ["fired"] and sum(isinstance(v, relax.Call) for v in lines(out)) == 7
    a, b = data((4, 8), (4, 8))
    want = a + b * sigmoid(cosine(a, b, by_product))
    for _ in range(3):
        want = want + np.maximum(want, 0)
    agrees(out, [a, b], want)


def test_two_entries_are_both_treated():
    def emit(e, a, b):
        return op.multiply(a, e(op.sigmoid(by_torch(e, a, b))))

    out, ledger = gated(module(emit, [(N, 8), (N, 8)], ("vision", "decode"), num_input=2))
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    low = LowerFusedGate(TARGET)(out)
    a, b = data((4, 8), (4, 8))
    for name in ("vision", "decode"):
        assert is_one_region(out, name)
        assert np.abs(run_module(low, name, [a, b])[0] - a * sigmoid(cosine(a, b))).max() < 1e-5


def test_twice_is_once():
    def emit(e, a, b):
        return op.multiply(a, e(op.sigmoid(by_torch(e, a, b))))

    mod = module(emit, [(N, 8), (N, 8)], num_input=2)
    once = FuseSemanticGate()(mod)
    assert not structural_equal(once, mod)
    tvm.ir.assert_structural_equal(FuseSemanticGate()(once), once)


def test_property_gates_are_preserved():
    assert_pass_preserves(FuseSemanticGate(), gates(), max_examples=15)
