"""Projections with heads, their norms and rotary behind them become one region and one kernel, in every spelling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from canonical import data, module
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.fuse_rotary_projection import FuseRotaryProjection
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger
from fused import calls, fused
from rotations import tables, turn, turned

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
EPS = 1e-2


def passes():
    return FuseParallelProjections(), FuseRotaryProjection()


def shape(*dims):
    return relax.ShapeExpr(list(dims))


def heads(e, t, count, dim, layout="bhsd"):
    """Emit (b, s, count * dim) as heads."""
    b, s = list(t.ty.shape)[:2]
    t = e(op.reshape(t, shape(b, s, count, dim)))
    return e(op.permute_dims(t, [0, 2, 1, 3])) if layout == "bhsd" else t


def test_golden():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor((1, "n", 3), "float32"), weight: R.Tensor((8, 3), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def rotary(
            x: R.Tensor((1, 2, "n", 4), "float32"),
            cos: R.Tensor(("n", 4), "float32"),
            sin: R.Tensor(("n", 4), "float32"),
        ):
            R.func_attr(
                {
                    "Composite": "crossloom.rotary",
                    "crossloom.convention": "half-split",
                    "crossloom.rotary_dim": 4,
                    "crossloom.table": "full",
                }
            )
            with R.dataflow():
                a = R.multiply(x, cos)
                high = R.negative(R.strided_slice(x, [3], [2], [4]))
                b = R.multiply(R.concat((high, R.strided_slice(x, [3], [0], [2])), axis=-1), sin)
                y = R.add(a, b)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor((1, "n", 3), "float32"),
            cos: R.Tensor(("n", 4), "float32"),
            sin: R.Tensor(("n", 4), "float32"),
            w: R.Tensor((8, 3), "float32"),
        ):
            n = T.int64()
            R.func_attr({"num_input": 3})
            cls = Before
            with R.dataflow():
                t = cls.linear(x, w)
                h = R.reshape(t, R.shape([1, n, 2, 4]))
                p = R.permute_dims(h, axes=[0, 2, 1, 3])
                y = cls.rotary(p, cos, sin)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor((1, "n", 3), "float32"), weight: R.Tensor((8, 3), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def rotary(
            x: R.Tensor((1, 2, "n", 4), "float32"),
            cos: R.Tensor(("n", 4), "float32"),
            sin: R.Tensor(("n", 4), "float32"),
        ):
            R.func_attr(
                {
                    "Composite": "crossloom.rotary",
                    "crossloom.convention": "half-split",
                    "crossloom.rotary_dim": 4,
                    "crossloom.table": "full",
                }
            )
            with R.dataflow():
                a = R.multiply(x, cos)
                high = R.negative(R.strided_slice(x, [3], [2], [4]))
                b = R.multiply(R.concat((high, R.strided_slice(x, [3], [0], [2])), axis=-1), sin)
                y = R.add(a, b)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor((1, "n", 3), "float32"),
            a1: R.Tensor((8, 3), "float32"),
            a2: R.Tensor(("n", 4), "float32"),
            a3: R.Tensor(("n", 4), "float32"),
        ):
            n = T.int64()
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                t = cls.linear(a0, a1)
                h = R.reshape(t, R.shape([1, n, 2, 4]))
                p = R.permute_dims(h, axes=[0, 2, 1, 3])
                y = cls.rotary(p, a2, a3)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor((1, "n", 3), "float32"),
            cos: R.Tensor(("n", 4), "float32"),
            sin: R.Tensor(("n", 4), "float32"),
            w: R.Tensor((8, 3), "float32"),
        ):
            R.func_attr({"num_input": 3})
            cls = Expected
            with R.dataflow():
                y = cls.fused_linear(x, w, cos, sin)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseRotaryProjection()(Before), Expected)


def qkv(e, x, cos, sin, wq, wk, wv):
    """Emit three projections to heads of 4 lanes, q and k turned."""
    q, k, v = (heads(e, e(op.matmul(x, w)), int(w.ty.shape[1]) // 4, 4) for w in (wq, wk, wv))
    return relax.Tuple([turn(e, q, cos, sin), turn(e, k, cos, sin), v])


SHAPES = [(1, N, 3), (N, 4), (N, 4), (3, 8), (3, 4), (3, 4)]


def test_two_entries_and_running_it_twice():
    mod = module(qkv, SHAPES, ("prefill", "decode"), num_input=3)
    once, ledger = fused(mod, *passes())
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_linear"]
    fired = [v.function for v in ledger.fired if v.pass_name == "fuse-rotary-projection"]
    assert sorted(fired) == ["decode", "prefill"]
    tvm.ir.assert_structural_equal(FuseRotaryProjection()(once), once)


# Every convention, layout and table, against complex numbers


@dataclass(frozen=True)
class Attention:
    """Projections of one attention block as some architecture spells them."""

    convention: str
    half: bool
    pairs: int
    rest: int
    key_heads: int
    ratio: int
    batch: int
    depth: int
    layout: str
    batched: bool
    unit_axes: int
    packed: str
    biases: tuple[bool, bool, bool]
    normed: bool

    @property
    def dim(self):
        return 2 * self.pairs + self.rest

    @property
    def counts(self):
        return (self.key_heads * self.ratio, self.key_heads, self.key_heads)

    @property
    def inputs(self):
        widths = [count * self.dim for count in self.counts]
        if self.packed:
            widths = [sum(widths)]
        angles = (self.batch, "n", self.pairs) if self.batched else ("n", self.pairs)
        weights = [(self.depth, width) for width in widths]
        biases = [(width,) for width, there in zip(widths, self.biases) if there]
        return [(self.batch, "n", self.depth), angles, *weights, *biases, *([(self.dim,)] * 2 if self.normed else [])]

    def layers(self, given, linear):
        """Return results of the layers, and what operands are left over."""
        count = 1 if self.packed else 3
        weights, rest = given[2 : 2 + count], given[2 + count :]
        out = []
        for weight, there in zip(weights, self.biases):
            bias, rest = (rest[0], rest[1:]) if there else (None, rest)
            out.append(linear(given[0], weight, bias))
        return out, rest

    def emit(self, bb, given):
        e = bb.emit
        results, norms = self.layers(
            given, lambda x, w, b: e(op.matmul(x, w)) if b is None else e(op.add(e(op.matmul(x, w)), b))
        )
        q, k, v = (
            self.split(e, results[0])
            if self.packed
            else (heads(e, t, count, self.dim, self.layout) for t, count in zip(results, self.counts))
        )
        if self.normed:
            q, k = (e(op.nn.rms_norm(t, g, [-1], EPS)) for t, g in zip((q, k), norms))
        cos, sin = (self.table(e, t) for t in tables(e, given[1], self.convention, self.half))
        q, k = (turn(e, t, cos, sin, self.convention, self.half, 2 * self.pairs) for t in (q, k))
        return [q, k, v]

    def table(self, e, t):
        """Emit a table (n, lanes) or (batch, n, lanes) in a form that broadcasts to q."""
        rank = len(t.ty.shape)
        if self.layout == "bshd":
            return (
                e(op.expand_dims(t, [rank - 1]))
                if self.batched or not self.unit_axes
                else e(op.expand_dims(t, [0, rank]))
            )
        if self.batched:
            return e(op.expand_dims(t, [1]))
        return e(op.expand_dims(t, list(range(self.unit_axes)))) if self.unit_axes else t

    def split(self, e, t):
        """Emit q, k, v of a packed layer."""
        b, s = list(t.ty.shape)[:2]
        h, d = self.key_heads, self.dim
        order = [2, 0, 3, 1, 4] if self.layout == "bhsd" else [2, 0, 1, 3, 4]
        if self.packed == "h3d":
            t = e(op.reshape(t, shape(b, s, h, 3, d)))
            t = e(op.permute_dims(t, [{2: 3, 3: 2}.get(i, i) for i in order]))
            return [e(op.take(t, relax.const(i, "int64"), axis=0)) for i in range(3)]
        if self.packed == "split":
            parts = e(op.split(t, 3, -1))
            return [heads(e, e(relax.TupleGetItem(parts, i)), h, d, self.layout) for i in range(3)]
        t = e(op.permute_dims(e(op.reshape(t, shape(b, s, 3, h, d))), order))
        return [e(op.squeeze(e(op.strided_slice(t, [0], [i], [i + 1])), [0])) for i in range(3)]

    def reference(self, given):
        given = [t.astype("float64") for t in given]
        results, norms = self.layers(given, lambda x, w, b: x @ w + (0 if b is None else b))
        b, s = given[0].shape[:2]
        if self.packed == "h3d":
            q, k, v = np.moveaxis(results[0].reshape(b, s, self.key_heads, 3, self.dim), 3, 0)
        else:
            parts = results if not self.packed else np.split(results[0], 3, -1)
            q, k, v = (t.reshape(b, s, count, self.dim) for t, count in zip(parts, self.counts))
        if self.normed:
            q, k = (t / np.sqrt((t * t).mean(-1, keepdims=True) + EPS) * g for t, g in zip((q, k), norms))
        angles = given[1][:, :, None] if self.batched else given[1][:, None]
        out = [turned(q, angles, self.convention), turned(k, angles, self.convention), v]
        return [t.swapaxes(1, 2) for t in out] if self.layout == "bhsd" else out


@st.composite
def projections(draw, dtypes=("float32", "float16")):
    choose = lambda *options: draw(st.sampled_from(options))
    packed = choose("", "", "3hd", "h3d", "split")
    form = Attention(
        convention=choose("half-split", "interleaved"),
        half=choose(False, True),
        pairs=choose(1, 2, 3, 4, 5, 8, 16),
        rest=choose(0, 0, 1, 3),
        key_heads=choose(1, 2, 3),
        ratio=1 if packed else choose(1, 2),
        batch=choose(1, 2),
        depth=choose(1, 2, 5, 7, 17),
        layout=choose("bhsd", "bshd"),
        batched=choose(False, True),
        unit_axes=choose(0, 1, 2),
        packed=packed,
        biases=(choose(False, True), False, choose(False, True)),
        normed=choose(False, False, True),
    )
    return build(draw, form.inputs, form.emit, form.reference, choose(*dtypes))


SETTINGS = {
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=25, **SETTINGS)
@given(projections())
def test_kernels_against_complex_numbers(case):
    mod, ledger = fused(case.mod, *passes())
    assert {v.code for v in ledger.refused} == set()
    for name in case.references:
        assert calls(mod, name) == ["fused_linear"]
    lowered = LowerFusedLinear(HOST)(mod)
    for name in case.references:
        assert calls(lowered, name) == []
    for size in range(len(case.sizes)):
        inputs = case.inputs(size, size)
        for name, wanted in case.expected(inputs).items():
            for want, got in zip(wanted, run_module(lowered, name, inputs[name]), strict=True):
                assert worst_error(want, got) < REASSOCIATES.bound(case.dtype)


def test_property():
    ready = projections().map(
        lambda case: replace(case, mod=FuseParallelProjections()(CanonicalizeTransformer()(case.mod)))
    )
    assert_pass_preserves(FuseRotaryProjection(), ready, numerics=REASSOCIATES, max_examples=15)


def codes(build_, shapes, **how):
    """Return the codes of refusals of a module that the pass leaves as it is."""
    mod = module(build_, shapes, ("vision",), **how)
    before = FuseParallelProjections()(CanonicalizeTransformer()(mod))
    with Ledger() as ledger:
        after = FuseRotaryProjection()(before)
    tvm.ir.assert_structural_equal(after, before)
    return {v.code for v in ledger.refused}


def test_refused_what_no_linear_layer_makes():
    assert codes(lambda e, x, cos, sin: turn(e, x, cos, sin), [(1, 3, 4), (3, 4), (3, 4)]) == {"not-a-projection"}


def test_refused_where_heads_are_read_before_they_turn():
    def build_(e, x, cos, sin, w):
        q = heads(e, e(op.matmul(x, w)), 2, 4)
        return relax.Tuple([turn(e, q, cos, sin), e(op.exp(q))])

    # The views do join: it is the rotation that is left.
    mod = module(build_, [(1, 3, 5), (3, 4), (3, 4), (5, 8)], ("vision",), num_input=3)
    out, ledger = fused(mod, *passes())
    assert {v.code for v in ledger.refused} == {"intermediate-used-outside"}
    assert calls(out, "vision") == ["fused_linear", "rotary"]


def test_refused_where_the_projection_itself_is_a_result():
    def build_(e, x, cos, sin, w):
        t = e(op.matmul(x, w))
        return relax.Tuple([turn(e, heads(e, t, 2, 4), cos, sin), t])

    assert codes(build_, [(1, 3, 5), (3, 4), (3, 4), (5, 8)], num_input=3) == {"intermediate-used-outside"}


def test_refused_views_that_mix_rows_with_columns():
    def build_(e, x, cos, sin, w):
        t = e(op.reshape(e(op.matmul(x, w)), shape(2, 3, 2, 4)))
        return turn(e, t, cos, sin)

    assert codes(build_, [(1, 3, 5), (2, 4), (2, 4), (5, 16)], num_input=3) == {"no-kernel"}


def test_refused_a_norm_over_all_heads():
    """OLMo 2 norms the whole projection: its sum runs over what a kernel keeps apart."""

    def build_(e, x, cos, sin, w, g):
        t = e(op.nn.rms_norm(e(op.matmul(x, w)), g, [-1], EPS))
        return turn(e, heads(e, t, 2, 4), cos, sin)

    mod = module(build_, [(1, 3, 5), (3, 4), (3, 4), (5, 8), (8,)], ("vision",), num_input=3)
    _, ledger = fused(mod, *passes())
    assert {v.code for v in ledger.refused} == {"no-kernel"}


def test_refused_a_size_that_the_layer_does_not_have():
    k = tirx.Var("k", "int64")

    def build_(e, x, cos, sin, other, w):
        t = e(op.reshape(e(op.matmul(x, w)), shape(other.ty.shape[0], 1, 2, 4)))
        return turn(e, t, cos, sin)

    found = codes(build_, [(N, 5), (1, 4), (1, 4), (k,), (5, 8)], num_input=4)
    # The reader sees it first; "dimension-not-among-operands" is for sizes that no operand has.
    assert found == {"no-kernel"}


# What leaves the region, and what stands behind it


def run(mod, *values, entry="decode"):
    return run_module(LowerFusedLinear(HOST)(mod), entry, list(values))


def test_keys_that_are_also_a_result_stay_one_kernel():
    """A cache reads the turned keys besides attention does."""

    def build_(e, x, cos, sin, wq, wk, wv, past):
        q, k, v = qkv(e, x, cos, sin, wq, wk, wv).fields
        return relax.Tuple([e(op.concat([past, k], 2)), k, q, v])

    shapes = [*SHAPES, (1, 1, 2, 4)]
    out, _ = fused(module(build_, shapes, ("decode",), num_input=3), *passes())
    assert calls(out, "decode") == ["fused_linear"]
    values = data((1, 5, 3), (5, 4), (5, 4), (3, 8), (3, 4), (3, 4), (1, 1, 2, 4))
    want = run_module(module(build_, shapes, ("decode",), num_input=3), "decode", values)
    for a, b in zip(want, run(out, *values), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
def test_wide_tables_of_narrow_projections(normed):
    """Qwen2-VL turns in float32 whatever the model's type is."""

    def build_(e, x, angles, w, g):
        q = heads(e, e(op.matmul(x, w)), 2, 6, "bshd")
        if normed:
            q = e(op.nn.rms_norm(q, g, [-1], EPS))
        cos, sin = (e(op.expand_dims(t, 1)) for t in tables(e, angles, "half-split", False))
        t = turn(e, e(op.astype(q, "float32")), cos, sin)
        return e(op.permute_dims(e(op.astype(t, "float16")), [0, 2, 1, 3]))

    shapes = [((1, N, 16), "float16"), ((N, 3), "float32"), ((16, 12), "float16"), ((6,), "float16")]
    out, ledger = fused(module(build_, shapes, ("vision",), num_input=2), *passes())
    assert calls(out, "vision") == ["fused_linear"] and not ledger.refused
    x, w, g = data((1, 7, 16), (16, 12), (6,), dtype="float16")
    (angles,) = data((7, 3))
    q = (x.astype("float64") @ w.astype("float64")).reshape(1, 7, 2, 6)
    if normed:
        q = q / np.sqrt((q * q).mean(-1, keepdims=True) + EPS) * g.astype("float64")
    want = turned(q, angles[:, None], "half-split").swapaxes(1, 2).astype("float16")
    (got,) = run(out, x, angles, w, g, entry="vision")
    assert worst_error(want, got) < REASSOCIATES.bound("float16")


def test_a_wide_result_of_a_narrow_projection_stays_outside():
    """It would be rounded in another place, which float32's bound does not allow."""

    def build_(e, x, cos, sin, w):
        return turn(e, e(op.astype(heads(e, e(op.matmul(x, w)), 2, 4), "float32")), cos, sin)

    shapes = [((1, 3, 5), "float16"), (3, 4), (3, 4), ((5, 8), "float16")]
    out, ledger = fused(module(build_, shapes, ("vision",), num_input=3), *passes())
    assert calls(out, "vision") == ["fused_linear", "rotary"]
    assert {v.code for v in ledger.refused} == {"intermediate-used-outside"}


def test_several_rotations_of_one_projection():
    """Queries of two positions' tables (a cut in two of one packed layer), each with its own convention."""

    def build_(e, x, a, b, w):
        t = e(op.reshape(e(op.matmul(x, w)), shape(1, x.ty.shape[1], 4, 4)))
        parts = e(op.split(e(op.permute_dims(t, [0, 2, 1, 3])), [1, 3], 1))
        first, second, third = (e(relax.TupleGetItem(parts, i)) for i in range(3))
        return relax.Tuple(
            [
                turn(e, first, *tables(e, a, "half-split", True), "half-split", True),
                turn(e, second, *tables(e, b, "interleaved", False), "interleaved"),
                third,
            ]
        )

    out, ledger = fused(module(build_, [(1, N, 5), (N, 2), (N, 2), (5, 16)], ("decode",), num_input=3), *passes())
    assert calls(out, "decode") == ["fused_linear"] and not ledger.refused
    x, a, b, w = data((1, 6, 5), (6, 2), (6, 2), (5, 16))
    t = (x.astype("float64") @ w).reshape(1, 6, 4, 4).swapaxes(1, 2)
    want = [turned(t[:, :1], a, "half-split"), turned(t[:, 1:3], b, "interleaved"), t[:, 3:]]
    for p, q in zip(want, run(out, x, a, b, w), strict=True):
        np.testing.assert_allclose(q, p, rtol=1e-5, atol=1e-6)


def test_heads_without_a_rotation_are_written_where_attention_reads_them():
    def build_(e, x, wq, wk):
        return relax.Tuple([heads(e, e(op.matmul(x, w)), 2, 4) for w in (wq, wk)])

    out, _ = fused(module(build_, [(2, N, 5), (5, 8), (5, 8)], ("audio",)), *passes())
    assert calls(out, "audio") == ["fused_linear"] and len(out["audio"].body.blocks[0].bindings) == 4
    x, wq, wk = data((2, 3, 5), (5, 8), (5, 8))
    for w, got in zip((wq, wk), run(out, x, wq, wk, entry="audio"), strict=True):
        np.testing.assert_allclose(got, (x @ w).reshape(2, 3, 2, 4).swapaxes(1, 2), rtol=1e-5, atol=1e-6)


def test_views_that_copy_nothing_stay():
    out, ledger = fused(
        module(lambda e, x, w: e(op.reshape(e(op.matmul(x, w)), shape(3, 2, 4))), [(3, 5), (5, 8)], ("vision",)),
        *passes(),
    )
    assert calls(out, "vision") == ["linear"]
    assert not [v for v in ledger.verdicts if v.pass_name == "fuse-rotary-projection"]


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_tables_are_made_once_for_all_layers(layer_by_layer):
    """cos and sin of dynamic positions stay outside the regions, which share them; what is put in front joins."""

    def build_(e, x, angles, *weights):
        made = tables(e, angles, "half-split", False)
        cos, sin = made if layer_by_layer else (e(op.expand_dims(t, [0, 1])) for t in made)
        for w in weights:
            if layer_by_layer:
                cos, sin = (e(op.expand_dims(t, [0, 1])) for t in made)
            q = turn(e, heads(e, e(op.matmul(x, w)), 2, 4), cos, sin)
            x = e(op.reshape(e(op.permute_dims(q, [0, 2, 1, 3])), shape(1, x.ty.shape[1], 8)))
        return x

    mod = module(build_, [(1, N, 8), (N, 2), *[(8, 8)] * 3], ("prefill", "decode"), num_input=2)
    out, _ = fused(mod, *passes())
    for name in ("prefill", "decode"):
        ops = [str(getattr(getattr(b.value, "op", None), "name", "")) for b in out[name].body.blocks[0].bindings]
        assert ops.count("relax.cos") == ops.count("relax.sin") == 1
        assert ops.count("relax.expand_dims") == (0 if layer_by_layer else 2)
        assert calls(out, name) == ["fused_linear"] * 3
    values = data((1, 3, 8), (3, 2), *[(8, 8)] * 3)
    np.testing.assert_allclose(run(out, *values)[0], run_module(mod, "decode", values)[0], rtol=1e-4, atol=1e-4)


def test_tables_of_static_positions_are_computed_when_the_model_is_built():
    def build_(e, x, w):
        positions = e(op.expand_dims(e(op.arange(0, 5, 1, "float32")), 1))
        angles = e(op.multiply(positions, relax.const(np.array([1.0, 0.1], "float32"))))
        return turn(e, heads(e, e(op.matmul(x, w)), 2, 4), *tables(e, angles, "half-split", False))

    mod = module(build_, [(1, 5, 3), (3, 8)], ("vision",))
    with HOST:
        for step in steps(HOST):
            mod = step.run(mod)
    kernels = [v.args[0].name_hint for v in called(mod["vision"]) if getattr(v.op, "name", "") == "relax.call_tir"]
    # Besides the kernel there are views of the weight, which is an input of this module.
    assert [k for k in kernels if k.startswith("fused_linear")] == kernels[-1:]
    assert not [k for k in kernels if "cos" in k or "sin" in k or "arange" in k]
    values = data((1, 5, 3), (3, 8))
    q = (values[0].astype("float64") @ values[1]).reshape(1, 5, 2, 4).swapaxes(1, 2)
    want = turned(q, np.arange(5)[:, None] * np.array([1.0, 0.1]), "half-split")
    np.testing.assert_allclose(run_module(mod, "vision", values)[0], want, rtol=1e-5, atol=1e-6)


def called(func):
    """Return the calls that a function binds."""
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    return [value for value in values if isinstance(value, relax.Call)]
