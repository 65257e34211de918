"""Sliding windows from the model's lines to the kernel: proved, not read, and only what is seen is visited."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from attending import apart, attend, const, repeated
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

import canonical
from canonical import data
from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_attention import FuseAttention
from crossloom.passes.lower_fused_attention import LowerFusedAttention
from crossloom.rewrite import Graph, composite_attrs, composite_name
from crossloom.targets import get_target
from crossloom.testing import references, run_module
from fused import fused

op = relax.op
HOST = get_target("host").tvm_target()
N, P = (tirx.Var(name, "int64") for name in "np")
LEAST = float(np.finfo("float32").min)

module = functools.partial(canonical.module, num_input=None)


def facts(mod):
    """Return (mask, offset, window) of every attention."""
    out = CanonicalizeTransformer()(mod)
    found = [composite_attrs(f) for _, f in out.functions_items() if composite_name(f) == "crossloom.attention"]
    return [(f["mask"], f["offset"], f.get("window")) for f in found]


def lower(mod):
    """Return a module with kernels that read q, k and v alone."""
    out, ledger = fused(mod, FuseAttention(), LowerFusedAttention(HOST))
    assert not ledger.refused
    graph = Graph("main", out["main"], out)
    calls = [graph.value[v].args[1].fields for v in graph.order if graph.op(v) == "relax.call_tir"]
    assert len(calls[-1]) == 3
    return out


def seen(queries, keys, offset, window):
    ahead = np.arange(keys) - np.arange(queries)[:, None] - offset
    return (ahead <= 0) & (ahead > -window)


# spellings


def places(e, s, start=0):
    """Return the places of queries and of keys."""
    rows, columns = list(s.ty.shape)[2:]
    row = e(op.expand_dims(e(op.arange(start, start + rows, 1, "int64")), 1))
    return row, e(op.expand_dims(e(op.arange(0, columns, 1, "int64")), 0))


def keep(window, start=0, fill=-math.inf):
    """As Mistral's mask is computed: keys > query - window, and keys <= query."""

    def masked(e, s):
        row, column = places(e, s, start)
        near = e(op.greater(column, e(op.subtract(row, const(window, "int64")))))
        inside = e(op.logical_and(near, e(op.less_equal(column, row))))
        return e(op.where(inside, s, const(fill)))

    return masked


def by_distance(window):
    def masked(e, s):
        away = e(op.subtract(*places(e, s)))
        far = e(op.greater_equal(away, const(window, "int64")))
        return e(op.where(e(op.logical_or(far, e(op.less(away, const(0, "int64"))))), const(LEAST), s))

    return masked


def by_triangles(window):
    """Ones between two diagonals, times the least number where there is none."""

    def masked(e, s):
        whole = e(op.ones(relax.ShapeExpr(list(s.ty.shape)[2:]), "float32"))
        inside = e(op.multiply(e(op.tril(whole, 0)), e(op.triu(whole, 1 - window))))
        return e(op.add(s, e(op.multiply(e(op.subtract(const(1.0), inside)), const(LEAST)))))

    return masked


def by_filled_triangles(window):
    """The two triangles of what is hidden, added."""

    def masked(e, s):
        whole = e(op.full(relax.ShapeExpr(list(s.ty.shape)[2:]), const(LEAST), "float32"))
        hidden = e(op.add(e(op.triu(whole, 1)), e(op.tril(whole, -window))))
        return e(op.add(s, hidden))

    return masked


def constant(window, kind, queries=40, keys=40, offset=0):
    inside = seen(queries, keys, offset, window)[None, None]
    if kind == "bool":
        return lambda e, s: e(op.where(const(inside, "bool"), s, const(-math.inf)))
    return lambda e, s: e(op.add(s, const(np.where(inside, 0, -np.inf).astype(kind), kind)))


def around(radius):
    """Local attention: keys on both sides."""

    def masked(e, s):
        away = e(op.abs(e(op.subtract(*places(e, s)))))
        return e(op.where(e(op.less_equal(away, const(radius, "int64"))), s, const(-math.inf)))

    return masked


SPELLED = {
    "indices": (keep(5), 0, 5),
    "a finite fill": (keep(5, fill=-1e9), 0, 5),
    "distance": (by_distance(5), 0, 5),
    "triangles": (by_triangles(5), 0, 5),
    "filled triangles": (by_filled_triangles(5), 0, 5),
    "boolean constant": (constant(5, "bool"), 0, 5),
    "float constant": (constant(5, "float32"), 0, 5),
    "both sides": (around(3), 3, 7),
    "itself alone": (keep(1), 0, 1),
}


@pytest.mark.parametrize("spelling", SPELLED)
def test_windows_are_proved_and_not_read(spelling):
    mask, offset, window = SPELLED[spelling]
    shapes = [(1, 2, 40, 4)] * 3
    mod = module(lambda e, *p: attend(e, *p, mask), shapes)
    assert facts(mod) == [("window", str(offset), window)]
    args = data(*shapes)
    want = references.attention(*args, scale=0.5, keep=seen(40, 40, offset, window)).astype("float32")
    assert worst_error(want, run_module(lower(mod), "main", args)[0]) < 1e-5


def test_keys_that_are_later_only():
    """No key lies behind the first query's: a window may end there."""
    shapes = [(1, 2, 5, 4)] * 3

    def masked(e, s):
        row, column = places(e, s)
        return e(op.where(e(op.greater_equal(column, row)), s, const(-math.inf)))

    mod = module(lambda e, *p: attend(e, *p, masked), shapes)
    assert facts(mod) == [("window", "4", 5)]
    args = data(*shapes)
    want = references.attention(*args, scale=0.5, keep=np.triu(np.ones((5, 5), bool))).astype("float32")
    assert worst_error(want, run_module(lower(mod), "main", args)[0]) < 1e-5


def test_a_window_that_is_wider_than_the_keys_is_causal():
    mod = module(lambda e, *p: attend(e, *p, keep(50)), [(1, 2, 40, 4)] * 3)
    assert facts(mod) == [("causal", "0", None)]


DYNAMIC = [(keep(2), 2), (by_distance(2), 2), (by_triangles(2), 2)]


@pytest.mark.parametrize(("mask", "window"), DYNAMIC)
def test_windows_over_a_dynamic_length(mask, window):
    mod = module(lambda e, *p: attend(e, *p, mask), [(1, 2, N, 4)] * 3)
    assert facts(mod) == [("window", "0", window)]


def test_a_window_behind_a_dynamic_past():
    """Decoding and prefill: what is new sees the last keys of a cache."""

    def build(e, q, k, v, past_k, past_v):
        k, v = e(op.concat([past_k, k], 2)), e(op.concat([past_v, v], 2))
        return attend(e, q, repeated(e, k, 2), repeated(e, v, 2), keep(6, P))

    shapes = [(1, 4, N, 8), *[(1, 2, N, 8)] * 2, *[(1, 2, P, 8)] * 2]
    mod = module(build, shapes)
    assert facts(mod) == [("window", "keys-queries", 6)]
    out, ledger = fused(mod, FuseAttention(), LowerFusedAttention(HOST))
    assert not ledger.refused
    for queries, past in ((1, 0), (1, 20), (3, 5), (30, 7)):
        args = data((1, 4, queries, 8), *[(1, 2, queries, 8)] * 2, *[(1, 2, past, 8)] * 2)
        k, v = (np.concatenate([p, x], 2) for p, x in zip(args[3:], args[1:3]))
        want = references.attention(args[0], k, v, scale=0.5, keep=seen(queries, past + queries, past, 6))
        assert worst_error(want.astype("float32"), run_module(out, "main", args)[0]) < 1e-5


@pytest.mark.parametrize("past", [9, P])
def test_one_query_sees_the_last_keys(past):
    """No key is later, so that one line alone bounds the window."""
    shapes = [(1, 2, 1, 4), *[(1, 2, past + 1, 4)] * 2, (past,)]
    mod = module(lambda e, q, k, v, _: attend(e, q, k, v, keep(4, past)), shapes)
    assert facts(mod) == [("window", "9" if past == 9 else "keys-queries", 4)]
    args = data((1, 2, 1, 4), *[(1, 2, 10, 4)] * 2, (9,))
    want = references.attention(*args[:3], scale=0.5, keep=seen(1, 10, 9, 4)).astype("float32")
    assert worst_error(want, run_module(lower(mod), "main", args)[0]) < 1e-5


def holes(e, s):
    """A window, and the first key besides."""
    row, column = places(e, s)
    inside = e(
        op.logical_and(e(op.less(e(op.subtract(row, column)), const(3, "int64"))), e(op.less_equal(column, row)))
    )
    return e(op.where(e(op.logical_or(inside, e(op.equal(column, const(0, "int64"))))), s, const(-math.inf)))


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (keep(3), 5),  # the last queries see no key
        (keep(3, -1), 40),  # nor does the first
        (keep(3, fill=-1e4), 40),  # scores may differ by 1e4
        (holes, 40),
        (constant(3, "bool", offset=-2), 40),
    ],
)
def test_other_masks_are_read(mask, keys):
    shapes = [(1, 2, 40, 4), *[(1, 2, keys, 4)] * 2]
    mod = module(lambda e, *p: attend(e, *p, mask), shapes)
    assert facts(mod) == [("given", "0", None)]


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_padding_within_a_window(fill):
    """What a model is given hides more: read, but not for keys that the window hides.

    With a finite fill, a query of which every key is hidden weighs all keys alike, those outside the window too.
    """
    shapes = [(2, 2, 40, 8)] * 3

    def build(e, q, k, v, real):
        def masked(e, s):
            row, column = places(e, s)
            near = e(op.greater(column, e(op.subtract(row, const(5, "int64")))))
            inside = e(op.logical_and(near, e(op.less_equal(column, row))))
            both = e(op.logical_and(inside, e(op.expand_dims(real, [1, 2]))))
            return e(op.where(e(op.broadcast_to(both, [2, 1, 40, 40])), s, const(fill)))

        return attend(e, q, k, v, masked)

    mod = module(build, [*shapes, ((2, 40), "bool")])
    out = CanonicalizeTransformer()(mod)
    (found,) = (composite_attrs(f) for _, f in out.functions_items() if composite_name(f) == "crossloom.attention")
    assert (found["mask"], found.get("bounded"), found.get("window")) == (
        ("given", True, 5) if fill == -math.inf else ("given", None, None)
    )
    args = [*data(*shapes), np.arange(40) < np.array([[40], [30]])]
    want = run_module(mod, "main", args)[0]
    out, ledger = fused(mod, FuseAttention(), LowerFusedAttention(HOST))
    got = run_module(out, "main", args)[0]
    assert not ledger.refused and np.array_equal(np.isnan(want), np.isnan(got))
    assert worst_error(np.nan_to_num(want), np.nan_to_num(got)) < 1e-5
    pairs = int(seen(40, 40, 0, 5).sum()) if fill == -math.inf else 1600
    assert [v.macs for v in ledger.fired if v.rewrite == "attention" and v.macs] == [2 * 2 * pairs * 16]


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_a_bias_that_hides_what_a_window_keeps(fill):
    """Only minus infinity still hides the other keys from such a row: with a finite fill the mask is read."""
    shapes = [*[(1, 2, 12, 4)] * 3, (1, 1, 12, 12)]

    def build(e, q, k, v, bias):
        return attend(e, q, k, v, lambda e, s: keep(3, fill=fill)(e, e(op.add(s, bias))))

    args = data(*shapes)
    args[3][..., 4, 2:5] = -np.inf
    mod = module(build, shapes)
    out, ledger = fused(mod, FuseAttention(), LowerFusedAttention(HOST))
    assert not ledger.refused and facts(mod) == [("window", "0", 3)]
    before, after = run_module(mod, "main", args)[0], run_module(out, "main", args)[0]
    assert worst_error(before, after) < 1e-5
    assert np.isnan(after[:, :, 4]).all() == (fill == -math.inf)


def test_the_verdict_counts_what_a_window_leaves():
    """Scores and weights of all keys are saved; products remain for those that are seen."""
    _, ledger = fused(module(lambda e, *p: attend(e, *p, keep(3)), [(1, 2, 10, 4)] * 3), FuseAttention())
    (verdict,) = ledger.fired
    assert (verdict.bytes_saved, verdict.macs) == (4 * 2 * 10 * 10 * 4, 2 * int(seen(10, 10, 0, 3).sum()) * 8)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.data())
def test_property_windows(drawn):
    """Views, shared heads, a cache, a window of any width: what numpy makes of its definition."""
    draw = drawn.draw
    queries, past = draw(st.sampled_from([1, 3, 33])), draw(st.sampled_from([0, 2, 70]))
    groups, window = draw(st.sampled_from([1, 3])), draw(st.integers(1, 80))
    spell = draw(st.sampled_from([keep, constant]))
    keys = past + queries
    mask = keep(window, past) if spell is keep else constant(window, "bool", queries, keys, past)
    fill = [(1, 2, past, 8)] * 2 if past else []

    def build(e, q, k, v, *cache):
        q, k, v = apart(e, q, 2 * groups, 8), apart(e, k, 2, 8), apart(e, v, 2, 8)
        k, v = (e(op.concat([p, x], 2)) for p, x in zip(cache, (k, v))) if cache else (k, v)
        return attend(e, q, repeated(e, k, groups), repeated(e, v, groups), mask)

    shapes = [(1, queries, 16 * groups), *[(1, queries, 16)] * 2, *fill]
    mod = module(build, shapes)
    assert facts(mod)[0][0] in ("window", "causal", "causal+offset", "none")
    out, ledger = fused(mod, FuseAttention(), LowerFusedAttention(HOST))
    assert not ledger.refused
    args = data(*shapes)
    q, k, v = (x.reshape(1, queries, -1, 8).transpose(0, 2, 1, 3) for x in args[:3])
    k, v = (np.concatenate([p, x], 2) for p, x in zip(args[3:], (k, v))) if past else (k, v)
    want = references.attention(q, k, v, scale=0.5, keep=seen(queries, keys, past, window)).astype("float32")
    assert worst_error(want, run_module(out, "main", args)[0]) < 1e-5
