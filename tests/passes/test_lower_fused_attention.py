"""Attention's regions become kernels that give what the models' own lines give, masks of every spelling included."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import tvm
from attending import apart, attend, cached, causal, const, keys_up_to, repeated, together
from tvm import relax, tirx

import canonical
from canonical import data
from crossloom.errors import UnsupportedTarget
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_attention import FuseAttention
from crossloom.passes.lower_fused_attention import LowerFusedAttention
from crossloom.rewrite import Graph
from crossloom.schedules.attention import Axis, Operand, Spec, kernel
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, references, run_module, strategies
from crossloom.verdict import Ledger
from fused import calls, canonicalized, fused

op = relax.op
HOST = get_target("host").tvm_target()
N, M, P = (tirx.Var(name, "int64") for name in "nmp")
QKV = [(1, 2, 5, 4)] * 3

module = functools.partial(canonical.module, num_input=None)


def lower(build, shapes, names=("main",), dtype="float32"):
    """Return the module with kernels; every attention has become one."""
    out, ledger = fused(module(build, shapes, names, dtype), FuseAttention(), LowerFusedAttention(HOST))
    assert not ledger.refused
    assert not [n for name in names for n in calls(out, name)]
    return out


def operands(mod, name="main"):
    """Return how many tensors each kernel reads."""
    graph = Graph(name, mod[name], mod)
    return [len(graph.value[v].args[1].fields) for v in graph.order if graph.op(v) == "relax.call_tir"]


def check(build, shapes, args, want, dtype="float32", bound=None):
    """Hold a module's kernels against float64 numpy; return the module."""
    out = lower(build, shapes, dtype=dtype)
    got = run_module(out, "main", args)[0]
    assert worst_error(want.astype(dtype), got) < (bound or REASSOCIATES.bound(dtype))
    return out


def test_golden_region_becomes_a_kernel():
    before, _ = fused(module(lambda e, *p: attend(e, *p), [(2, 6, N, 4)] * 3), FuseAttention())
    axes = tuple(Axis(((role, 1),)) for role in ("batch", "head", "query", "lane"))
    n = tirx.Var("n", "int64")
    keys = (*axes[:2], Axis((("key", 1),)), axes[3])
    q, k = Operand((2, 6, n, 4), axes, "float32"), Operand((2, 6, n, 4), keys, "float32")
    spec = Spec(2, 6, 1, n, (n,), 4, 4, 0.5, q, (k,), (k,), q)
    builder = relax.BlockBuilder()
    gvar = builder.add_func(kernel(spec, Machine.of(HOST)), "fused_attention_kernel")
    params = [relax.Var(f"p{i}", relax.TensorType((2, 6, N, 4), "float32")) for i in range(3)]
    with builder.function("main", params, attrs={"num_input": 3}):
        with builder.dataflow():
            out = builder.emit_output(relax.call_tir(gvar, params, relax.TensorType((2, 6, N, 4), "float32")))
        builder.emit_func_output(out)
    after = LowerFusedAttention(HOST)(before)
    kept = {g: f for g, f in after.functions_items() if g.name_hint in ("main", "fused_attention_kernel")}
    tvm.ir.assert_structural_equal(tvm.IRModule(kept), builder.get())


def test_two_entries_and_running_it_twice():
    def build(e, q, k, v):
        return together(e, attend(e, apart(e, q, 2, 4), apart(e, k, 2, 4), apart(e, v, 2, 4)))

    out = lower(build, [(1, N, 8), (1, M, 8), (1, M, 8)], ("prefill", "decode"))
    assert operands(out, "prefill") == operands(out, "decode") == [3]
    assert LowerFusedAttention(HOST)(out).same_as(out)
    for queries, keys in ((1, 6), (0, 3), (3, 0), (33, 70)):
        args = data((1, queries, 8), (1, keys, 8), (1, keys, 8))
        q, k, v = (x.reshape(1, -1, 2, 4).transpose(0, 2, 1, 3) for x in args)
        want = references.attention(q, k, v, scale=0.5) if keys else np.zeros(q.shape)
        want = want.transpose(0, 2, 1, 3).reshape(1, queries, 8).astype("float32")
        for entry in ("prefill", "decode"):
            assert worst_error(want, run_module(out, entry, args)[0]) < 1e-5


def test_without_a_target_it_says_so():
    mod, _ = fused(module(lambda e, *p: attend(e, *p), QKV), FuseAttention())
    with pytest.raises(UnsupportedTarget, match="lower-fused-attention"):
        LowerFusedAttention()(mod)
    with HOST:
        tvm.ir.assert_structural_equal(LowerFusedAttention()(mod), LowerFusedAttention(HOST)(mod))


def test_refused_a_region_of_two_attentions():
    mod = CanonicalizeTransformer()(module(lambda e, q, k, v: attend(e, e(attend(e, q, k, v)), k, v), QKV))
    whole = mod["main"].with_attrs({"Composite": "crossloom.fused_attention"}).without_attr("global_symbol")
    builder = relax.BlockBuilder(tvm.IRModule({g: f for g, f in mod.functions_items() if g.name_hint != "main"}))
    gvar = builder.add_func(whole, "fused_attention")
    params = [relax.Var(f"x{i}", p.ty) for i, p in enumerate(whole.params)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.Call(gvar, params))
        builder.emit_func_output(out)
    mod = builder.get()
    with Ledger() as ledger:
        assert LowerFusedAttention(HOST)(mod).same_as(mod)
    assert [v.code for v in ledger.refused] == ["no-kernel"]


def test_layers_whose_caches_are_stacked_share_a_kernel():
    def build(e, q, k, v, past_k, past_v):
        outs = []
        for layer in range(3):
            at = const(layer, "int64")
            mine = [e(op.concat([e(op.take(p, at, 0)), x], 2)) for p, x in ((past_k, k), (past_v, v))]
            outs.append(e(attend(e, q, *(repeated(e, x, 2) for x in mine))))
        return relax.Tuple(outs)

    out = lower(build, [(1, 4, 1, 8), *[(1, 2, 1, 8)] * 2, *[(3, 1, 2, P, 8)] * 2], ("decode",))
    assert sum(isinstance(f, tirx.PrimFunc) for f in out.functions.values()) == 1
    args = data((1, 4, 1, 8), *[(1, 2, 1, 8)] * 2, *[(3, 1, 2, 6, 8)] * 2)
    for layer, got in enumerate(run_module(out, "decode", args)):
        k, v = (np.concatenate([past[layer], x], 2) for past, x in zip(args[3:], args[1:3]))
        assert worst_error(references.attention(args[0], k, v, scale=0.5).astype("float32"), got) < 1e-5


# masks


def test_a_mask_that_is_proved_causal_is_not_read():
    def build(e, q, k, v):
        return attend(e, q, k, v, lambda e, s: causal(e, s, offset=2))

    args = data((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4))
    out = check(build, [a.shape for a in args], args, references.attention(*args, causal=True, scale=0.5))
    assert operands(out)[-1] == 3


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
@pytest.mark.parametrize("over", [False, True])
def test_a_bias_that_hides_what_a_causal_mask_keeps(fill, over):
    """Rows whose kept keys a bias hides: only with -inf does the mask hide the others from them still."""

    def build(e, q, k, v, bias):
        def masked(e, s):
            return e(op.add(causal(e, s, fill), bias)) if over else causal(e, e(op.add(s, bias)), fill)

        return attend(e, q, k, v, masked)

    args = [*data(*QKV), np.zeros((1, 1, 5, 5), "float32")]
    args[3][..., 1, :2] = -np.inf
    out = lower(build, [a.shape for a in args])
    assert operands(out)[-1] == (4 if fill == -math.inf else 5)
    mod = module(build, [a.shape for a in args])
    before, after = run_module(mod, "main", args)[0], run_module(out, "main", args)[0]
    assert worst_error(before, after) < 1e-5
    assert np.isnan(after[:, :, 1]).all() == (fill == -math.inf)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_boolean_masks_of_every_rank(rank):
    shape = {2: (5, 7), 3: (2, 5, 7), 4: (2, 1, 1, 7)}[rank]
    args = [*data((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), np.random.default_rng(0).random(shape) < 0.6]
    args[3][..., 0] = True

    def build(e, q, k, v, keep):
        return attend(e, q, k, v, lambda e, s: e(op.where(keep, s, const(-math.inf))))

    want = references.attention(*args[:3], scale=0.5, keep=args[3])
    check(build, [*(a.shape for a in args[:3]), (shape, "bool")], args, want)


def folded(e, q, k, v, *mask, before=True):
    """Heads folded into the batch by the model, the mask added with or without them told apart."""
    q, k, v = (e(op.reshape(x, [6, x.ty.shape[2], 4])) for x in (q, k, v))
    rows, columns = q.ty.shape[1], k.ty.shape[1]
    s = e(op.matmul(e(op.multiply(q, const(0.5))), e(op.permute_dims(k, [0, 2, 1]))))
    if mask and before:
        s = e(op.reshape(s, [2, 3, rows, columns]))
        s = e(op.reshape(e(op.add(s, mask[0])), [6, rows, columns]))
    elif mask:
        s = e(op.add(s, mask[0]))
    return op.reshape(e(op.matmul(e(op.nn.softmax(s, -1)), v)), [2, 3, rows, 4])


@pytest.mark.parametrize("shape", [None, (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7), (6, 5, 7), (6, 1, 7), (1, 5, 7)])
def test_heads_folded_into_the_batch(shape):
    shapes = [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), *([shape] if shape else [])]
    args = data(*shapes)
    mask = args[3] if shape else None
    if shape and len(shape) == 3:
        mask = np.broadcast_to(mask, (6, 5, 7)).reshape(2, 3, 5, 7)
    want = references.attention(*args[:3], mask, scale=0.5)
    check(functools.partial(folded, before=shape is None or len(shape) == 4), shapes, args, want)


@pytest.mark.parametrize("shape", [None, (6, 5, 7), (1, 1, 7)])
def test_attention_of_rank_three(shape):
    shapes = [(6, 5, 4), (6, 7, 4), (6, 7, 4), *([shape] if shape else [])]

    def build(e, q, k, v, *mask):
        s = e(op.divide(e(op.matmul(q, e(op.permute_dims(k, [0, 2, 1])))), const(2.0)))
        s = e(op.add(s, mask[0])) if mask else s
        return op.matmul(e(op.nn.softmax(s, -1)), v)

    args = data(*shapes)
    want = references.attention(*(a[None] for a in args[:3]), args[3][None] if shape else None, scale=0.5)[0]
    check(build, shapes, args, want)


@pytest.mark.parametrize("options", [{}, {"causal_mask": "BottomRight"}])
@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_and_its_own_mask(options, biased):
    shapes = [(2, 5, 2, 4), (2, 7, 2, 4), (2, 7, 2, 4), *([(2, 2, 5, 7)] if biased else [])]

    def build(e, q, k, v, *bias):
        return op.nn.attention(q, k, v, bias=bias[0] if bias else None, scale=tirx.FloatImm("float32", 0.25), **options)

    args = data(*shapes)
    q, k, v = (a.transpose(0, 2, 1, 3) for a in args[:3])
    want = references.attention(q, k, v, args[3] if biased else None, bool(options), 0.25).transpose(0, 2, 1, 3)
    check(build, shapes, args, want)


def test_one_key_head_for_all_query_heads():
    args = data((2, 4, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4))
    check(lambda e, *p: attend(e, *p), [a.shape for a in args], args, references.attention(*args, scale=0.5))


def guarded(e, s):
    """A softmax that gives zero for a row of -inf, as torch's decomposition spells it."""
    dropped = e(op.equal(s, const(-math.inf)))
    some = e(op.max(e(op.astype(e(op.logical_not(dropped)), "int8")), [-1], True))
    nothing = e(op.logical_not(e(op.astype(some, "bool"))))
    p = e(op.nn.softmax(s, -1))
    return e(op.where(nothing, e(op.full_like(p, const(0.0))), p))


@pytest.mark.parametrize("zero", [False, True])
def test_rows_without_a_key_give_what_the_model_gives(zero):
    def build(e, q, k, v, keep):
        s = e(op.multiply(e(op.matmul(q, e(op.permute_dims(k, [0, 1, 3, 2])))), const(0.5)))
        s = e(op.where(keep, s, const(-math.inf)))
        return op.matmul(guarded(e, s) if zero else e(op.nn.softmax(s, -1)), v)

    args = [*data(*QKV), np.ones((5, 5), bool)]
    args[3][2] = False
    shapes = [*QKV, ((5, 5), "bool")]
    got = run_module(lower(build, shapes), "main", args)[0]
    before = run_module(module(build, shapes), "main", args)[0]
    assert worst_error(before, got) < 1e-5
    assert np.isnan(got[:, :, 2]).all() != zero and (not zero or not got[:, :, 2].any())


def test_half_precision_with_a_mask_of_its_least_number():
    def build(e, q, k, v):
        def masked(e, s):
            hidden = e(op.logical_not(keys_up_to(e, s)))
            return e(op.where(hidden, const(-65504.0, "float16"), s))

        return attend(e, q, repeated(e, k, 2), repeated(e, v, 2), masked)

    args = data((1, 4, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16), dtype="float16")
    want = references.attention(*args, causal=True, scale=0.5)
    out = check(build, [a.shape for a in args], args, want, "float16")
    assert operands(out)[-1] == 3


# all


def both(mod, _):
    return LowerFusedAttention(HOST)(FuseAttention()(mod))


@pytest.mark.parametrize("cases", [strategies.attention, cached])
def test_property_results_are_preserved(cases):
    run = tvm.transform.module_pass(both, opt_level=0, name="lower-fused-attention")
    assert_pass_preserves(run, canonicalized(cases()), numerics=REASSOCIATES, max_examples=6)
