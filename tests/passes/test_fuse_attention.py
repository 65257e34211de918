"""Attention and what only moves its operands become one region, whoever else reads them; refusals change nothing."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import tvm
from attending import apart, attend, cached, const, repeated, together
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import canonical
from canonical import data
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_attention import FuseAttention
from crossloom.testing import assert_pass_preserves, references, run_module, strategies
from crossloom.verdict import Ledger
from fused import calls, canonicalized, fused

op = relax.op
N, P = (tirx.Var(name, "int64") for name in "np")
QKV = [(1, 2, 5, 4)] * 3

module = functools.partial(canonical.module, num_input=None)


def fuse(build, shapes, names=("main",), dtype="float32"):
    return fused(module(build, shapes, names, dtype), FuseAttention())


def region(mod, number=0):
    """Return a region by its number."""
    found = [f for g, f in mod.functions_items() if g.name_hint.startswith("fused_attention")]
    return found[number]


def operators(mod, name="main"):
    """Return what a function calls: operators, and composites by their names."""
    out = []
    for block in mod[name].body.blocks:
        for binding in block.bindings:
            called = getattr(binding.value, "op", None)
            if called is not None:
                out.append(getattr(called, "name", getattr(called, "name_hint", "")))
    return out


def test_golden_views_around_attention():
    facts = {
        "Composite": "crossloom.attention",
        "crossloom.scale": 0.5,
        "crossloom.groups": 1,
        "crossloom.layout": "bhsd",
        "crossloom.key_layout": "bhsd",
        "crossloom.value_layout": "bhsd",
        "crossloom.out_layout": "bhsd",
        "crossloom.masked": False,
        "crossloom.mask_form": "none",
        "crossloom.biased": False,
        "crossloom.mask": "none",
        "crossloom.offset": "0",
        "crossloom.fill": "",
        "crossloom.bias_inside": False,
        "crossloom.empty_rows": "softmax",
    }

    @I.ir_module
    class Before:
        @R.function(private=True)
        def attention(
            q: R.Tensor((1, 2, "n", 4), "float32"),
            k: R.Tensor((1, 2, "m", 4), "float32"),
            v: R.Tensor((1, 2, "m", 4), "float32"),
        ):
            R.func_attr(facts)
            with R.dataflow():
                s = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                p = R.nn.softmax(R.multiply(s, R.const(0.5, "float32")), axis=-1)
                y = R.matmul(p, v)
                R.output(y)
            return y

        @R.function
        def main(
            x: R.Tensor((1, "n", 8), "float32"),
            k: R.Tensor((1, 2, "m", 4), "float32"),
            v: R.Tensor((1, 2, "m", 4), "float32"),
        ):
            n = T.int64()
            cls = Before
            with R.dataflow():
                a = R.reshape(x, R.shape([1, n, 2, 4]))
                q = R.permute_dims(a, axes=[0, 2, 1, 3])
                o = cls.attention(q, k, v)
                t = R.permute_dims(o, axes=[0, 2, 1, 3])
                y = R.reshape(t, R.shape([1, n, 8]))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def attention(
            q: R.Tensor((1, 2, "n", 4), "float32"),
            k: R.Tensor((1, 2, "m", 4), "float32"),
            v: R.Tensor((1, 2, "m", 4), "float32"),
        ):
            R.func_attr(facts)
            with R.dataflow():
                s = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                p = R.nn.softmax(R.multiply(s, R.const(0.5, "float32")), axis=-1)
                y = R.matmul(p, v)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_attention(
            x: R.Tensor((1, "n", 8), "float32"),
            k: R.Tensor((1, 2, "m", 4), "float32"),
            v: R.Tensor((1, 2, "m", 4), "float32"),
        ):
            n = T.int64()
            R.func_attr({"Composite": "crossloom.fused_attention"})
            cls = Expected
            with R.dataflow():
                a = R.reshape(x, R.shape([1, n, 2, 4]))
                q = R.permute_dims(a, axes=[0, 2, 1, 3])
                o = cls.attention(q, k, v)
                t = R.permute_dims(o, axes=[0, 2, 1, 3])
                y = R.reshape(t, R.shape([1, n, 8]))
                R.output(y)
            return y

        @R.function
        def main(
            x: R.Tensor((1, "n", 8), "float32"),
            k: R.Tensor((1, 2, "m", 4), "float32"),
            v: R.Tensor((1, 2, "m", 4), "float32"),
        ):
            cls = Expected
            with R.dataflow():
                y = cls.fused_attention(x, k, v)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseAttention()(Before), Expected)


def test_two_entries_and_running_it_twice():
    def build(e, q, k, v):
        return together(e, attend(e, apart(e, q, 2, 4), apart(e, k, 2, 4), apart(e, v, 2, 4)))

    shapes = [(1, N, 8), (1, P, 8), (1, P, 8)]
    out, ledger = fuse(build, shapes, ("prefill", "decode"))
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    assert calls(out, "prefill") == calls(out, "decode") == ["fused_attention"]
    assert FuseAttention()(out).same_as(out)
    q, k, v = data((1, 1, 8), (1, 6, 8), (1, 6, 8))
    want = references.attention(*(x.reshape(1, -1, 2, 4).transpose(0, 2, 1, 3) for x in (q, k, v)), scale=0.5)
    want = want.transpose(0, 2, 1, 3).reshape(1, 1, 8).astype("float32")
    for entry in ("prefill", "decode"):
        assert worst_error(want, run_module(out, entry, [q, k, v])[0]) < 1e-5


def packed_in_slices(e, x):
    """(1, s, 24) -> q, k, v by a transposition and slices, as vision transformers do."""
    seq = x.ty.shape[1]
    turned = e(op.permute_dims(e(op.reshape(x, [1, seq, 3, 2, 4])), [2, 0, 3, 1, 4]))
    return [e(op.squeeze(e(op.strided_slice(turned, [0], [i], [i + 1])), [0])) for i in range(3)]


def packed_in_takes(e, x):
    seq = x.ty.shape[1]
    turned = e(op.permute_dims(e(op.reshape(x, [1, seq, 3, 2, 4])), [2, 0, 3, 1, 4]))
    return [e(op.take(turned, const(i, "int64"), 0)) for i in range(3)]


def packed_in_a_split(e, x):
    parts = e(op.split(x, 3, 2))
    return [apart(e, e(relax.TupleGetItem(parts, i)), 2, 4) for i in range(3)]


@pytest.mark.parametrize("unpack", [packed_in_slices, packed_in_takes, packed_in_a_split])
def test_operands_out_of_one_tensor(unpack):
    out, _ = fuse(lambda e, x: together(e, attend(e, *unpack(e, x))), [(1, N, 24)])
    assert operators(out) == ["fused_attention"]
    assert len(region(out).params) == 1
    (x,) = data((1, 5, 24))
    q, k, v = (t.reshape(1, 5, 2, 4).transpose(0, 2, 1, 3) for t in np.split(x, 3, 2))
    want = references.attention(q, k, v, scale=0.5).transpose(0, 2, 1, 3).reshape(1, 5, 8).astype("float32")
    assert worst_error(want, run_module(out, "main", [x])[0]) < 1e-5


def test_a_cache_and_what_is_appended_are_read_where_they_are():
    """One layer's cache out of a stack; the new stack is a result, and made beside the kernel."""

    def build(e, q, k, v, past_k, past_v, mask):
        at = const(2, "int64")
        k, v = (e(op.concat([e(op.take(p, at, 0)), apart(e, x, 2, 4)], 2)) for p, x in ((past_k, k), (past_v, v)))
        out = attend(e, apart(e, q, 4, 4), repeated(e, k, 2), repeated(e, v, 2), lambda e, s: e(op.add(s, mask)))
        return relax.Tuple([e(together(e, out)), e(op.expand_dims(k, 0)), e(op.expand_dims(v, 0))])

    shapes = [(1, 1, 16), (1, 1, 8), (1, 1, 8), (3, 1, 2, P, 4), (3, 1, 2, P, 4), (1, 1, 1, P + 1)]
    out, _ = fuse(build, shapes, ("decode",))
    names = [p.name for p in region(out).params]
    assert sorted(names) == ["k_new", "k_past", "mask", "q", "v_new", "v_past"]
    assert operators(out, "decode").count("relax.concat") == 2 and "relax.repeat" not in operators(out, "decode")
    args = data((1, 1, 16), (1, 1, 8), (1, 1, 8), (3, 1, 2, 6, 4), (3, 1, 2, 6, 4), (1, 1, 1, 7))
    q, k, v = (x.reshape(1, 1, -1, 4).transpose(0, 2, 1, 3) for x in args[:3])
    k, v = (np.concatenate([p[2], x], 2) for p, x in ((args[3], k), (args[4], v)))
    want = references.attention(q, k, v, args[5], scale=0.5).reshape(1, 1, 16).astype("float32")
    got = run_module(out, "decode", args)
    assert worst_error(want, got[0]) < 1e-5
    assert np.array_equal(got[1][0], k) and np.array_equal(got[2][0], v)


def test_caches_that_grow_by_different_lengths_are_read_as_they_are_joined():
    def build(e, q, k, v, a, b):
        return attend(e, q, e(op.concat([k, a], 2)), e(op.concat([v, b], 2)))

    out, _ = fuse(build, [(1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 2, 4), (1, 2, 4, 4), (1, 2, 5, 4)])
    assert operators(out) == ["relax.concat", "relax.concat", "fused_attention"]


def test_repeated_heads_that_are_read_elsewhere_are_not_read_by_the_kernel():
    def build(e, q, k, v):
        k, v = repeated(e, k, 3), repeated(e, v, 3)
        return relax.Tuple([e(attend(e, q, k, v)), k, v])

    shapes = [(1, 6, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)]
    out, _ = fuse(build, shapes)
    assert [tuple(map(int, p.ty.shape)) for p in region(out).params] == shapes
    args = data(*shapes)
    got = run_module(out, "main", args)
    assert worst_error(references.attention(*args, scale=0.5).astype("float32"), got[0]) < 1e-5
    assert np.array_equal(got[1], np.repeat(args[1], 3, 1))


def test_a_view_that_is_read_elsewhere_stays_beside_the_region():
    def build(e, q, k, v):
        q = apart(e, q, 2, 4)
        out = e(attend(e, q, k, v))
        return relax.Tuple([e(op.reshape(out, [1, 10, 4])), out, q])

    out, _ = fuse(build, [(1, 5, 8), (1, 2, 5, 4), (1, 2, 5, 4)])
    assert operators(out) == ["relax.reshape", "relax.permute_dims", "fused_attention", "relax.reshape"]


def test_views_that_take_lanes_apart_stay_outside():
    """A result whose elements of a head are no neighbours is better moved by who reads it."""
    out, _ = fuse(lambda e, *p: op.permute_dims(e(attend(e, *p)), [0, 1, 3, 2]), QKV)
    assert operators(out) == ["fused_attention", "relax.permute_dims"]


def test_a_view_in_front_of_a_branch_stays_there():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 5, 8), "float32"),
            k: R.Tensor((1, 2, 5, 4), "float32"),
            v: R.Tensor((1, 2, 5, 4), "float32"),
            c: R.Tensor((), "bool"),
        ) -> R.Tensor((1, 2, 5, 4), "float32"):
            a = R.reshape(x, R.shape([1, 5, 2, 4]))
            q = R.permute_dims(a, axes=[0, 2, 1, 3])
            if c:
                t = R.permute_dims(k, axes=[0, 1, 3, 2])
                s = R.matmul(q, t)
                z = R.multiply(s, R.const(0.5, "float32"))
                p = R.nn.softmax(z, axis=-1)
                y = R.matmul(p, v)
            else:
                y = R.add(q, v)
            return y

    out, ledger = fused(Before, FuseAttention())
    assert [v.fired for v in ledger.verdicts] == [True]
    assert [tuple(map(int, p.ty.shape)) for p in region(out).params] == QKV


def test_a_size_from_elsewhere_keeps_views_outside():
    """Operands (2 n, 5, 4) are told apart into n and 2: a region of these alone would not know n."""

    def build(e, q, k, v, n):
        return attend(e, *(e(op.reshape(x, [N, 2, 5, 4])) for x in (q, k, v)))

    shapes = [*[(2 * N, 5, 4)] * 3, (N,)]
    out, ledger = fuse(build, shapes)
    assert operators(out) == ["relax.reshape"] * 3 + ["fused_attention"]
    assert not {v.code for v in ledger.refused} & {"dimension-not-among-operands", "operand-not-captured"}
    args = data(*[(6, 5, 4)] * 3, (3,))
    want = references.attention(*(x.reshape(3, 2, 5, 4) for x in args[:3]), scale=0.5).astype("float32")
    assert worst_error(want, run_module(out, "main", args)[0]) < 1e-5


# refusals


@pytest.mark.parametrize(
    ("shapes", "dtype", "says"),
    [
        (QKV, "bfloat16", "bfloat16"),
        ([(1, N, 5, 4)] * 3, "float32", "number of heads"),
        ([(1, 2, 5, N)] * 3, "float32", "size"),
        ([(1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 3, 0)], "float32", "size"),
    ],
)
def test_refused_where_there_is_no_kernel(shapes, dtype, says):
    mod = CanonicalizeTransformer()(module(lambda e, *p: attend(e, *p), shapes, dtype=dtype))
    assert calls(mod, "main") == ["attention"]
    with Ledger() as ledger:
        assert FuseAttention()(mod).same_as(mod)
    (verdict,) = ledger.refused
    assert verdict.code == "no-kernel" and says in verdict.detail


def test_the_verdict_says_what_is_saved():
    _, ledger = fuse(lambda e, *p: attend(e, *p), [(1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)])
    (verdict,) = ledger.fired
    assert (verdict.bytes_saved, verdict.macs) == (4 * 2 * 5 * 7 * 4, 2 * 5 * 7 * 8)


# all


@pytest.mark.timeout(300)
def test_time_grows_linearly():
    def seconds(layers):
        def build(e, q, k, v):
            for _ in range(layers):
                q = e(attend(e, q, k, v))
            return op.add(q, q)

        mod = CanonicalizeTransformer()(module(build, QKV))
        start = time.process_time()
        with Ledger() as ledger:
            FuseAttention()(mod)
        assert len(ledger.fired) == layers
        return time.process_time() - start

    seconds(5)
    small, large = seconds(30), seconds(300)
    assert large < 25 * max(small, 0.01)


@pytest.mark.parametrize("cases", [strategies.attention, cached])
def test_property_results_are_preserved(cases):
    assert_pass_preserves(FuseAttention(), canonicalized(cases()), numerics=REASSOCIATES, max_examples=5)
