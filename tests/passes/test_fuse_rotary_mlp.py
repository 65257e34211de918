"""Features that are turned and then read by linear layers only: one region from the rotation to the activation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erf

import numpy as np
import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_norm_into_linear import FoldNormIntoLinear
from crossloom.passes.fuse_gated_mlp import FuseGatedMLP
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.fuse_rotary_mlp import FuseRotaryMLP
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from fused import calls, fused
from rotations import tables, turn, turned

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
SETTINGS = {
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


def shape(*dims):
    return relax.ShapeExpr(list(dims))


def before_it():
    return FuseGatedMLP(), FuseParallelProjections()


def test_golden():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4, 5), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def rotary(x: R.Tensor((3, 4), "float32"), cos: R.Tensor((3, 4), "float32"), sin: R.Tensor((3, 4), "float32")):
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
                high = R.negative(R.strided_slice(x, [1], [2], [4]))
                b = R.multiply(R.concat((high, R.strided_slice(x, [1], [0], [2])), axis=-1), sin)
                y = R.add(a, b)
                R.output(y)
            return y

        @R.function
        def vision(
            x: R.Tensor((3, 4), "float32"),
            cos: R.Tensor((3, 4), "float32"),
            sin: R.Tensor((3, 4), "float32"),
            w: R.Tensor((4, 5), "float32"),
        ):
            R.func_attr({"num_input": 3})
            cls = Before
            with R.dataflow():
                r = cls.rotary(x, cos, sin)
                y = cls.linear(r, w)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4, 5), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def rotary(x: R.Tensor((3, 4), "float32"), cos: R.Tensor((3, 4), "float32"), sin: R.Tensor((3, 4), "float32")):
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
                high = R.negative(R.strided_slice(x, [1], [2], [4]))
                b = R.multiply(R.concat((high, R.strided_slice(x, [1], [0], [2])), axis=-1), sin)
                y = R.add(a, b)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor((3, 4), "float32"),
            a1: R.Tensor((3, 4), "float32"),
            a2: R.Tensor((3, 4), "float32"),
            a3: R.Tensor((4, 5), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                r = cls.rotary(a0, a1, a2)
                y = cls.linear(r, a3)
                R.output(y)
            return y

        @R.function
        def vision(
            x: R.Tensor((3, 4), "float32"),
            cos: R.Tensor((3, 4), "float32"),
            sin: R.Tensor((3, 4), "float32"),
            w: R.Tensor((4, 5), "float32"),
        ):
            R.func_attr({"num_input": 3})
            cls = Expected
            with R.dataflow():
                y = cls.fused_linear(x, cos, sin, w)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseRotaryMLP()(Before), Expected)


def test_two_entries_and_running_it_twice():
    def build_(e, x, cos, sin, up, down):
        return e(op.matmul(e(op.nn.gelu(e(op.matmul(turn(e, x, cos, sin), up)))), down))

    mod = module(build_, [(1, N, 4), (N, 4), (N, 4), (4, 7), (7, 4)], ("vision", "decode"), num_input=3)
    once, ledger = fused(mod, *before_it(), FuseRotaryMLP())
    assert calls(once, "vision") == calls(once, "decode") == ["fused_linear", "linear"]
    fired = [v.function for v in ledger.fired if v.pass_name == "fuse-rotary-mlp"]
    assert sorted(fired) == ["decode", "vision"]
    tvm.ir.assert_structural_equal(FuseRotaryMLP()(once), once)


@dataclass(frozen=True)
class Block:
    """Features, turned whole or by heads with one or two positions a token, and what reads them."""

    convention: str
    half: bool
    pairs: int
    rest: int
    heads: int
    batched: bool
    two: bool
    kind: str
    hidden: int
    biased: bool
    normed: bool

    @property
    def lanes(self):
        return 2 * self.pairs + self.rest

    @property
    def depth(self):
        return self.heads * self.lanes

    @property
    def inputs(self):
        angles = (2, "n", self.pairs) if self.batched else ("n", self.pairs)
        weights = [(self.depth, self.hidden)] * (2 if self.kind == "gated" else 1)
        biases = [(self.hidden,)] if self.biased else []
        gain = [(self.depth,)] if self.normed else []
        return [(2, "n", self.depth), angles, angles, *gain, *weights, (self.hidden, 3), *biases]

    def angles(self, given, join, width):
        """Return the angles of each pair: of one position, or of the row for some pairs and the column for others."""
        rows, columns = given[1], given[2]
        if not self.two or self.pairs == 1:
            return rows
        cut = self.pairs // 2
        return join([width(rows, 0, cut), width(columns, 0, self.pairs - cut)])

    def emit(self, bb, given):
        e = bb.emit
        x, rest = given[0], given[3:]
        if self.normed:
            x, rest = e(op.nn.rms_norm(x, rest[0], [-1], 1e-2)), rest[1:]
        last = len(given[1].ty.shape) - 1
        angles = self.angles(
            given,
            lambda parts: e(op.concat(parts, -1)),
            lambda t, begin, end: e(op.strided_slice(t, [last], [begin], [end])),
        )
        cos, sin = tables(e, angles, self.convention, self.half)
        if self.heads > 1:
            lead = list(x.ty.shape)[:2]
            x = e(op.reshape(x, shape(*lead, self.heads, self.lanes)))
            cos, sin = (e(op.expand_dims(t, [last])) for t in (cos, sin))
        x = turn(e, x, cos, sin, self.convention, self.half, 2 * self.pairs)
        if self.heads > 1:
            x = e(op.reshape(x, shape(*lead, self.depth)))
        first = e(op.matmul(x, rest[0]))
        if self.biased:
            first = e(op.add(first, rest[-1]))
        if self.kind == "plain":
            hidden, down = e(op.nn.gelu(first)), rest[1]
        else:
            hidden, down = e(op.multiply(e(op.nn.silu(first)), e(op.matmul(x, rest[1])))), rest[2]
        return [e(op.matmul(hidden, down))]

    def reference(self, given):
        given = [t.astype("float64") for t in given]
        x, rest = given[0], given[3:]
        if self.normed:
            x, rest = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-2) * rest[0], rest[1:]
        angles = self.angles(given, lambda parts: np.concatenate(parts, -1), lambda t, a, b: t[..., a:b])
        x = turned(x.reshape(*x.shape[:2], self.heads, self.lanes), angles[..., None, :], self.convention)
        x = x.reshape(*x.shape[:2], self.depth)
        first = x @ rest[0] + (rest[-1] if self.biased else 0)
        if self.kind == "plain":
            return [first * (1 + np.vectorize(erf, otypes=[float])(first / np.sqrt(2))) / 2 @ rest[1]]
        return [first / (1 + np.exp(-first)) * (x @ rest[1]) @ rest[2]]


@st.composite
def blocks(draw, dtypes=("float32", "float16")):
    def choose(*options):
        return draw(st.sampled_from(options))

    form = Block(
        convention=choose("half-split", "interleaved"),
        half=choose(False, True),
        pairs=choose(1, 2, 3, 5, 8, 17),
        rest=choose(0, 0, 1, 3),
        heads=choose(1, 1, 2, 3),
        batched=choose(False, True),
        two=choose(False, True),
        kind=choose("plain", "gated"),
        hidden=choose(1, 2, 5, 8, 19),
        biased=choose(False, True),
        normed=choose(False, False, True),
    )
    return build(draw, form.inputs, form.emit, form.reference, choose(*dtypes))


@settings(max_examples=25, **SETTINGS)
@given(blocks())
def test_kernels_against_complex_numbers(case):
    mod, ledger = fused(case.mod, *before_it(), FuseRotaryMLP(), FoldNormIntoLinear())
    assert not ledger.refused
    for name in case.references:
        # A norm in front is the region's first line.
        assert calls(mod, name) == ["fused_linear", "linear"]
    lowered = LowerFusedLinear(HOST)(mod)
    for size in range(len(case.sizes)):
        inputs = case.inputs(size, size)
        for name, wanted in case.expected(inputs).items():
            for want, got in zip(wanted, run_module(lowered, name, inputs[name]), strict=True):
                assert worst_error(want, got) < 2 * REASSOCIATES.bound(case.dtype)


def test_property():
    def ready(case):
        return replace(case, mod=tvm.transform.Sequential([CanonicalizeTransformer(), *before_it()])(case.mod))

    assert_pass_preserves(FuseRotaryMLP(), blocks().map(ready), numerics=REASSOCIATES, max_examples=15)


def codes(build_, shapes, **how):
    mod = module(build_, shapes, ("vision",), **how)
    before, _ = fused(mod, *before_it())
    after, ledger = fused(mod, *before_it(), FuseRotaryMLP())
    tvm.ir.assert_structural_equal(after, before)
    return {v.code for v in ledger.refused}


def test_refused_where_something_else_reads_the_rotated_features():
    def build_(e, x, cos, sin, w):
        r = turn(e, x, cos, sin)
        return relax.Tuple([e(op.matmul(r, w)), e(op.exp(r))])

    assert codes(build_, [(3, 4), (3, 4), (3, 4), (4, 5)], num_input=3) == {"rotated-read-elsewhere"}


def test_refused_where_the_rotated_features_are_a_result():
    def build_(e, x, cos, sin, w):
        r = turn(e, x, cos, sin)
        return relax.Tuple([e(op.matmul(r, w)), r])

    assert codes(build_, [(3, 4), (3, 4), (3, 4), (4, 5)], num_input=3) == {"rotated-read-elsewhere"}


def test_refused_where_rows_are_read_in_another_order():
    def build_(e, x, cos, sin, w):
        r = e(op.permute_dims(turn(e, x, cos, sin), [1, 0, 2]))
        return e(op.matmul(r, w))

    assert codes(build_, [(2, 3, 4), (3, 4), (3, 4), (4, 5)], num_input=3) == {"no-kernel"}


def test_refused_a_size_that_no_row_has():
    def build_(e, x, cos, sin, other, w):
        r = e(op.reshape(turn(e, x, cos, sin), shape(other.ty.shape[0], 4)))
        return e(op.matmul(r, w))

    m = tirx.Var("m", "int64")
    # The size has to come with an operand of the region.
    found = codes(build_, [(1, N, 4), (N, 4), (N, 4), (m,), (4, 5)], num_input=4)
    assert found == {"dimension-not-among-operands"}


def test_layers_side_by_side_share_the_turned_rows():
    def build_(e, x, cos, sin, first, second):
        r = turn(e, x, cos, sin, "interleaved")
        return relax.Tuple([e(op.matmul(r, first)), e(op.nn.relu(e(op.matmul(r, second))))])

    mod = module(build_, [(N, 6), (N, 6), (N, 6), (6, 5), (6, 3)], ("decode",), num_input=3)
    out, _ = fused(mod, *before_it(), FuseRotaryMLP())
    assert calls(out, "decode") == ["fused_linear"]
    values = data((4, 6), (4, 6), (4, 6), (6, 5), (6, 3))
    want = run_module(mod, "decode", values)
    for a, b in zip(want, run_module(LowerFusedLinear(HOST)(out), "decode", values), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
