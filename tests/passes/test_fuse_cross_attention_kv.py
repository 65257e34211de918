"""Keys and values of all cross-attentions in one product."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_equal

from canonical import data, module
from cross import decoder, reference, weights
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_cross_attention_kv import FuseCrossAttentionKV
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger
from fused import calls

op = relax.op
N, S = tirx.Var("n", "int64"), tirx.Var("s", "int64")
TARGET = get_target("host").tvm_target()


def fused(mod):
    mod = CanonicalizeTransformer()(mod)
    with Ledger() as ledger:
        out = FuseCrossAttentionKV()(mod)
    relax.analysis.well_formed(out)
    tvm.ir.assert_structural_equal(FuseCrossAttentionKV()(out), out)
    return out, ledger


def regions(mod):
    return [f for _, f in mod.functions_items() if composite_name(f) == "crossloom.fused_linear"]


def shapes(layers):
    return [(1, N, 8), (1, S, 6), *weights(layers)]


@pytest.mark.parametrize("layers", [1, 3])
def test_keys_and_values_of_all_layers_and_their_heads(layers):
    out, ledger = fused(module(decoder, shapes(layers), num_input=2))
    (region,) = regions(out)
    assert composite_attrs(region)["role"] == "cross_kv" and int(composite_attrs(region)["layers"]) == layers
    (fired,) = ledger.fired
    assert fired.macs == 6 * 16 * layers and "split_cross_kv" in fired.detail
    # Views to heads are results of the region: four axes each.
    assert [len(ty.shape) for ty in region.ret_ty.fields] == [4] * (2 * layers)
    low = LowerFusedLinear(TARGET)(out)
    assert "fused_linear" not in calls(low, "main")
    for sizes in ((3, 5), (1, 1)):
        args = data((1, sizes[0], 8), (1, sizes[1], 6), *weights(layers))
        want = reference(*args)
        for step in (out, low):
            got = run_module(step, "main", args)[0]
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_golden_keys_and_values_side_by_side():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def attention(
            q: R.Tensor((1, "n", 2, 4), "float32"),
            k: R.Tensor((1, "s", 2, 4), "float32"),
            v: R.Tensor((1, "s", 2, 4), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.attention"})
            with R.dataflow():
                y = R.nn.attention(q, k, v)
                R.output(y)
            return y

        @R.function(private=True)
        def linear(x: R.Tensor((1, "s", 6), "float32"), weight: R.Tensor((6, 8), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def main(
            q: R.Tensor((1, "n", 2, 4), "float32"),
            states: R.Tensor((1, "s", 6), "float32"),
            wk: R.Tensor((6, 8), "float32"),
            wv: R.Tensor((6, 8), "float32"),
        ):
            R.func_attr({"num_input": 2})
            s = T.int64()
            cls = Before
            with R.dataflow():
                k = cls.linear(states, wk)
                kh = R.reshape(k, R.shape([1, s, 2, 4]))
                v = cls.linear(states, wv)
                vh = R.reshape(v, R.shape([1, s, 2, 4]))
                y = cls.attention(q, kh, vh)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def attention(
            q: R.Tensor((1, "n", 2, 4), "float32"),
            k: R.Tensor((1, "s", 2, 4), "float32"),
            v: R.Tensor((1, "s", 2, 4), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.attention"})
            with R.dataflow():
                y = R.nn.attention(q, k, v)
                R.output(y)
            return y

        @R.function(private=True)
        def linear(x: R.Tensor((1, "s", 6), "float32"), weight: R.Tensor((6, 8), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor((1, "s", 6), "float32"), a1: R.Tensor((6, 8), "float32"), a2: R.Tensor((6, 8), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear", "crossloom.role": "cross_kv", "crossloom.layers": 1})
            s = T.int64()
            cls = Expected
            with R.dataflow():
                k = cls.linear(a0, a1)
                kh = R.reshape(k, R.shape([1, s, 2, 4]))
                v = cls.linear(a0, a2)
                vh = R.reshape(v, R.shape([1, s, 2, 4]))
                both = (kh, vh)
                R.output(both)
            return both

        @R.function
        def main(
            q: R.Tensor((1, "n", 2, 4), "float32"),
            states: R.Tensor((1, "s", 6), "float32"),
            wk: R.Tensor((6, 8), "float32"),
            wv: R.Tensor((6, 8), "float32"),
        ):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                both = cls.fused_linear(states, wk, wv)
                kh = both[0]
                vh = both[1]
                y = cls.attention(q, kh, vh)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseCrossAttentionKV()(Before), Expected)


def test_self_attention_is_left_to_its_queries():
    def emit(e, h, *given):
        return decoder(e, h, h, *given, biased=False)

    out, ledger = fused(module(emit, [(1, N, 8), (8, 8), (8, 8), (8, 8), (8, 8)]))
    assert len(ledger) == 0 and not regions(out)


@pytest.mark.parametrize("how", ["scaled", "unknown"])
@pytest.mark.parametrize("over", ["itself", "states"])
def test_queries_that_are_scaled_as_in_whisper_or_of_unknown_origin(how, over):
    def emit(e, h, states, wq, wk, wv):
        of = h if over == "itself" else states
        q, k, v = (e(op.matmul(x, w)) for x, w in ((h, wq), (of, wk), (of, wv)))
        q = e(op.multiply(q, relax.const(0.5))) if how == "scaled" else e(op.tanh(q))
        heads = [e(op.reshape(x, [1, x.ty.shape[1], 2, 4])) for x in (q, k, v)]
        return op.nn.attention(*heads)

    out, ledger = fused(module(emit, [(1, N, 8), (1, S, 8), (8, 8), (8, 8), (8, 8)], num_input=2))
    expected = ["fired"] if (how, over) == ("scaled", "states") else []
    assert [v.code for v in ledger] == expected and len(regions(out)) == len(expected)


def test_layers_of_different_types_are_refused():
    def wide(e, h, states, wq, wk, wv):
        k = e(op.matmul(states, wk, out_dtype="float32"))
        q, v = e(op.matmul(h, wq)), e(op.matmul(states, wv, out_dtype="float32"))
        heads = [e(op.reshape(x, [1, x.ty.shape[1], 2, 4])) for x in (q, k, v)]
        return op.nn.attention(*heads)

    half = [((1, S, 6), "float16"), (8, 8), ((6, 8), "float16"), ((6, 8), "float16")]
    mod = module(wide, [(1, N, 8), *half], num_input=2)
    out, ledger = fused(mod)
    assert [v.code for v in ledger] == ["different-dtypes"]
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


def test_weights_that_no_kernel_takes_are_refused():
    m = tirx.Var("m", "int64")

    def emit(e, h, states, wq, wk, wv):
        q, k, v = e(op.matmul(h, wq)), e(op.matmul(states, wk)), e(op.matmul(states, wv))
        heads = [e(op.reshape(x, [1, x.ty.shape[1], 1, x.ty.shape[2]])) for x in (q, k, v)]
        return op.nn.attention(*heads, scale=tirx.FloatImm("float32", 1.0))

    mod = module(emit, [(1, N, 8), (1, S, 6), (8, m), (6, m), (6, m)], num_input=2)
    out, ledger = fused(mod)
    assert [v.code for v in ledger] == ["no-kernel"]
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


def test_two_entries_are_both_treated():
    out, ledger = fused(module(decoder, shapes(2), ("prefill", "decode"), num_input=2))
    assert {v.function for v in ledger.fired} == {"prefill", "decode"} and len(regions(out)) == 1


def test_twice_is_once():
    mod = CanonicalizeTransformer()(module(decoder, shapes(2), num_input=2))
    once = FuseCrossAttentionKV()(mod)
    assert not structural_equal(once, mod)
    tvm.ir.assert_structural_equal(FuseCrossAttentionKV()(once), once)


@st.composite
def decoders(draw):
    """Draw a decoder of one layer or two; as many states as an encoder would give, at least one."""
    layers, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(["float32", "float16"]))

    def emit(bb, p):
        return [decoder(bb.emit, *p)]

    def want(x):
        return [reference(*x)]

    case = build(draw, [(1, "n", 8), (1, 3, 6), *weights(layers)], emit, want, dtype)
    return type(case)(CanonicalizeTransformer()(case.mod), case.sizes, dtype, case.references)


def test_property_decoders_are_preserved():
    assert_pass_preserves(FuseCrossAttentionKV(), decoders(), max_examples=15)
