"""Both layers of a feed-forward block become one region, with what stands in front of and behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_feed_forward import FuseFeedForward
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.fuse_rotary_mlp import FuseRotaryMLP
from crossloom.passes.inline_composites import InlineComposites
from crossloom.passes.lower_fused_feed_forward import LowerFusedFeedForward
from crossloom.passes.regions.growth import grow
from crossloom.rewrite import GroupRule, Match, group_pass
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module, strategies
from feeding import BEFORE, blocks, half
from fused import calls, fused
from rotations import turn

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
SETTINGS = {"deadline": None, "derandomize": True, "database": None}


def test_golden():
    """Two regions are called by a third one; x, which both read, is given once."""

    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def linear1(x: R.Tensor(("n", 6), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def first(a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Before
            with R.dataflow():
                s = cls.linear(a0, a1)
                h = R.nn.relu(s)
                R.output(h)
            return h

        @R.function(private=True)
        def second(
            a0: R.Tensor(("n", 6), "float32"), a1: R.Tensor((6, 4), "float32"), a2: R.Tensor(("n", 4), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Before
            with R.dataflow():
                s = cls.linear1(a0, a1)
                y = R.add(a2, s)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"), up: R.Tensor((4, 6), "float32"), down: R.Tensor((6, 4), "float32")
        ):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                h = cls.first(x, up)
                y = cls.second(h, down, x)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def linear1(x: R.Tensor(("n", 6), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def first(a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                s = cls.linear(a0, a1)
                h = R.nn.relu(s)
                R.output(h)
            return h

        @R.function(private=True)
        def second(
            a0: R.Tensor(("n", 6), "float32"), a1: R.Tensor((6, 4), "float32"), a2: R.Tensor(("n", 4), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                s = cls.linear1(a0, a1)
                y = R.add(a2, s)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_feed_forward(
            a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor((4, 6), "float32"), a2: R.Tensor((6, 4), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_feed_forward"})
            cls = Expected
            with R.dataflow():
                h = cls.first(a0, a1)
                y = cls.second(h, a2, a0)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"), up: R.Tensor((4, 6), "float32"), down: R.Tensor((6, 4), "float32")
        ):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                y = cls.fused_feed_forward(x, up, down)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseFeedForward()(Before), Expected)


def gated(emit, x, gain, gate, up, down, bias):
    """A decoder layer's second half; the residual is what the norm reads."""
    normed = emit(op.nn.rms_norm(x, gain, [-1], 1e-2))
    hidden = emit(op.multiply(emit(op.nn.silu(emit(op.matmul(normed, gate)))), emit(op.matmul(normed, up))))
    return emit(op.add(x, emit(op.add(emit(op.matmul(hidden, down)), bias))))


GATED = [(6,), (6, 10), (6, 10), (10, 6), (6,)]


def test_two_entries_and_running_it_twice():
    mod = module(gated, [(1, N, 6), *GATED], ("prefill", "decode"))
    once, ledger = fused(mod, *BEFORE, FuseFeedForward())
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_feed_forward"]
    assert sorted(v.function for v in ledger.fired if v.pass_name == "fuse-feed-forward") == ["decode", "prefill"]
    assert FuseFeedForward()(once).same_as(once)


def test_every_prefix_of_the_pipeline_runs():
    """Opened again, the region is what it was made of."""
    mod = module(gated, [(2, 3, 6), *GATED], ("prefill", "decode"))
    inputs = data((2, 3, 6), *GATED)
    (want,) = run_module(mod, "decode", inputs)
    passes = (*BEFORE, FuseFeedForward(), LowerFusedFeedForward(HOST), InlineComposites())
    for count in range(len(BEFORE), len(passes) + 1):
        found, _ = fused(mod, *passes[:count])
        assert worst_error(want, run_module(found, "decode", inputs)[0]) < REASSOCIATES.bound("float32")


def test_weights_may_be_constants_and_sizes_composed():
    def build_(emit, x, y):
        weights = [relax.const(w.astype("float32")) for w in data((6, 10), (10, 6))]
        both = emit(op.concat([x, y], 0))
        return emit(op.add(both, half(emit, both, "gelu", *weights)))

    mod, _ = fused(module(build_, [(N, 6), (5, 6)], ("vision",), num_input=2), *BEFORE, FuseFeedForward())
    assert calls(mod, "vision") == ["fused_feed_forward"]
    lowered = LowerFusedFeedForward(HOST)(mod)
    assert calls(lowered, "vision") == []
    x, y = data((4, 6), (5, 6), seed=1)
    want = run_module(InlineComposites()(mod), "vision", [x, y])[0]
    assert worst_error(want, run_module(lowered, "vision", [x, y])[0]) < REASSOCIATES.bound("float32")


def test_several_results_of_the_second_layer():
    """Two layers read what is between, as one region."""

    def build_(emit, x, up, down, other):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        return emit(relax.Tuple([emit(op.matmul(hidden, down)), emit(op.matmul(hidden, other))]))

    mod = module(build_, [(N, 6), (6, 10), (10, 4), (10, 3)], ("decode",))
    passes = (FuseParallelProjections(), FuseLinearEpilogue(), FuseFeedForward())
    once, _ = fused(mod, *passes)
    assert calls(once, "decode") == ["fused_feed_forward"]
    inputs = data((5, 6), (6, 10), (10, 4), (10, 3))
    lowered = LowerFusedFeedForward(HOST)(once)
    for want, got in zip(run_module(mod, "decode", inputs), run_module(lowered, "decode", inputs), strict=True):
        assert worst_error(want, got) < REASSOCIATES.bound("float32")


def test_three_layers_are_a_block_and_a_layer():
    def build_(emit, x, a, b, c):
        first = emit(op.nn.gelu(emit(op.matmul(x, a))))
        second = emit(op.nn.gelu(emit(op.matmul(first, b))))
        return emit(op.matmul(second, c))

    mod = module(build_, [(N, 6), (6, 10), (10, 8), (8, 3)], ("decode",))
    once, ledger = fused(mod, *BEFORE, FuseFeedForward())
    assert calls(once, "decode") == ["fused_feed_forward", "linear"]
    assert "claimed-by-earlier-rewrite" in {v.code for v in ledger.refused}


def test_what_is_saved_is_told():
    def saved(rows, hidden):
        mod = module(lambda emit, *p: half(emit, p[0], "relu", *p[1:]), [(rows, 4), (4, hidden), (hidden, 4)])
        _, ledger = fused(mod, *BEFORE, FuseFeedForward())
        return [v.bytes_saved for v in ledger.fired if v.pass_name == "fuse-feed-forward"]

    # All but a chunk is neither written nor read; a block of one chunk writes and reads it all.
    assert saved(1000, 600) == [2 * (1000 * 600 * 4 - (1 << 20))]
    assert saved(10, 600) == saved(N, 600) == [0]


# Refusals ---------------------------------------------------------------------------------------------------------


def refused(mod, *passes):
    """Return the codes for which the pass refuses, having checked that it leaves a module alone."""
    before, _ = fused(mod, *passes)
    after, ledger = fused(before, FuseFeedForward())
    assert after.same_as(before) and not ledger.fired
    return [v.code for v in ledger.refused]


def test_refused_where_what_is_between_is_read_elsewhere_or_a_result():
    def read(emit, x, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        return emit(op.add(emit(op.matmul(hidden, down)), emit(op.sum(hidden, -1, keepdims=True))))

    def returned(emit, x, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        return emit(relax.Tuple([emit(op.matmul(hidden, down)), hidden]))

    for build_ in (read, returned):
        mod = module(build_, [(3, 6), (6, 10), (10, 6)], ("vision",))
        assert refused(mod, FuseLinearEpilogue()) == ["intermediate-used-outside"]


def test_refused_where_what_is_between_is_also_the_residual():
    def build_(emit, x, up, across):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        return emit(op.add(hidden, emit(op.matmul(hidden, across))))

    mod = module(build_, [(3, 6), (6, 10), (10, 10)], ("vision",))
    assert refused(mod, FuseLinearEpilogue()) == ["no-kernel"]


def test_refused_where_what_is_between_is_turned():
    """A rotation between the layers is the second one's, of what it reads."""

    def build_(emit, x, cos, sin, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        return emit(op.matmul(turn(emit, hidden, cos, sin), down))

    mod = module(build_, [(3, 6), (3, 8), (3, 8), (6, 8), (8, 6)], ("vision",), num_input=3)
    assert refused(mod, FuseLinearEpilogue(), FuseRotaryMLP()) == ["no-kernel"]


def test_refused_where_what_is_between_has_heads():
    """The first layer's results in another order than by rows."""

    def build_(emit, x, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(x, up))))
        heads = emit(op.permute_dims(emit(op.reshape(hidden, [3, 2, 5])), [1, 0, 2]))
        return emit(op.matmul(heads, down))

    mod = module(build_, [(3, 6), (6, 10), (5, 4)], ("vision",))
    before, _ = fused(mod, FuseLinearEpilogue(), grow_views())
    after, ledger = fused(before, FuseFeedForward())
    assert after.same_as(before) and [v.code for v in ledger.refused] == ["no-kernel"]


def grow_views():
    """Views join the region in front of them, as they do for projections."""

    def match(graph, root):
        return Match(graph, root, {}, grow(graph, root, lambda var: graph.op(var).startswith("relax.")).members)

    name = "crossloom.fused_linear"
    return group_pass("views", [GroupRule("views", frozenset({name}), match, name)])


def test_refused_outside_a_dataflow_block():
    """What is between would be made there all the same: nothing that may have effects is taken away."""
    mod, _ = fused(module(lambda e, *p: half(e, p[0], "gelu", *p[1:]), [(3, 6), (6, 10), (10, 6)]), *BEFORE)
    bound = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    first, second = (value for value in bound if isinstance(value, relax.Call))
    bb = relax.BlockBuilder(mod)
    params = [relax.Var(p.name, p.ty) for p in mod["main"].params]
    with bb.function("decode", params, attrs={"num_input": 1}):
        with bb.dataflow():
            hidden = bb.emit_output(relax.Call(first.op, params[:2]))
        bb.emit_func_output(bb.emit(relax.Call(second.op, [hidden, params[2]])))
    found, ledger = fused(bb.get(), FuseFeedForward())
    assert calls(found, "main") == ["fused_feed_forward"] and calls(found, "decode") == ["fused_linear", "linear"]
    assert [v.code for v in ledger.refused] == ["outside-a-dataflow-block"]


def test_layers_without_activation_between_are_no_block():
    def build_(emit, x, a, b):
        return emit(op.matmul(emit(op.add(emit(op.matmul(x, a)), relax.const(np.ones(5), "float32"))), b))

    assert refused(module(build_, [(3, 6), (6, 5), (5, 6)], ("vision",)), FuseLinearEpilogue()) == []


# Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cases", [blocks, strategies.mlp])
def test_property(cases):
    before = tvm.transform.Sequential([CanonicalizeTransformer(), *BEFORE])
    prepared = cases().map(lambda case: replace(case, mod=before(case.mod)))
    assert_pass_preserves(FuseFeedForward(), prepared, numerics=REASSOCIATES, max_examples=4)


@settings(max_examples=5, **SETTINGS)
@given(blocks())
def test_kernels_against_numpy(case):
    mod, ledger = fused(case.mod, *BEFORE, FuseFeedForward(), LowerFusedFeedForward(HOST))
    assert "fuse-feed-forward" in {v.pass_name for v in ledger.fired}
    for size in range(len(case.sizes)):
        inputs = case.inputs(size, size)
        for name, wanted in case.expected(inputs).items():
            assert calls(mod, name) == []
            for want, got in zip(wanted, run_module(mod, name, inputs[name]), strict=True):
                assert worst_error(want, got) < 2 * REASSOCIATES.bound(case.dtype)
