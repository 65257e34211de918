"""Feed-forward regions become one kernel each; what no kernel does stays as it is, and runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from checkout import benchmark
from crossloom.errors import UnsupportedTarget
from crossloom.importers.signature import entry_of
from crossloom.model import Model
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_feed_forward import FuseFeedForward
from crossloom.passes.lower_fused_feed_forward import LowerFusedFeedForward
from crossloom.schedules.feed_forward import CHUNK_BYTES, FeedForward, kernel
from crossloom.schedules.fused_linear import Output, Spec
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger, Verdict
from feeding import BEFORE, blocks, half
from fused import calls, fused

op = relax.op
count = benchmark("fusion_count").count
N, M = tirx.Var("n", "int64"), tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
NEON = get_target("rk3588").tvm_target()


def test_golden():
    """On NEON a group is of 16 columns, which these layers fill: their weights only change their order."""

    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 16), "float32"), weight: R.Tensor((16, 32), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def down(x: R.Tensor(("n", 32), "float32"), weight: R.Tensor((32, 16), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def first(a0: R.Tensor(("n", 16), "float32"), a1: R.Tensor((16, 32), "float32")):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Before
            with R.dataflow():
                s = cls.linear(a0, a1)
                h = R.nn.relu(s)
                R.output(h)
            return h

        @R.function(private=True)
        def fused_feed_forward(
            a0: R.Tensor(("n", 16), "float32"), a1: R.Tensor((16, 32), "float32"), a2: R.Tensor((32, 16), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_feed_forward"})
            cls = Before
            with R.dataflow():
                h = cls.first(a0, a1)
                y = cls.down(h, a2)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor(("n", 16), "float32"), u: R.Tensor((16, 32), "float32"), d: R.Tensor((32, 16), "float32")
        ):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                y = cls.fused_feed_forward(x, u, d)
                R.output(y)
            return y

    bb = relax.BlockBuilder()
    dims = (("row", 0), ("lane", 0))
    layers = (
        Spec((N,), 16, "float32", (Output(dims, (), 32, activation="relu"),)),
        Spec((N,), 32, "float32", (Output(dims, (), 16),)),
    )
    rows = relax.TensorType((M, 16), "float32")
    x, u, d = (
        relax.Var("x", rows),
        relax.Var("u", relax.TensorType((16, 32), "float32")),
        relax.Var("d", relax.TensorType((32, 16), "float32")),
    )
    gvar = bb.add_func(kernel(FeedForward(*layers), Machine.of(NEON)), "fused_feed_forward_kernel")
    with bb.function("decode", [x, u, d], {"num_input": 1}):
        with bb.dataflow():
            packed = []
            for weight, depth, columns in ((u, 16, 32), (d, 32, 16)):
                width = min(columns, 16)
                split = bb.emit(op.reshape(weight, [depth, columns // width, width]))
                packed.append(bb.emit(op.permute_dims(split, [1, 0, 2])))
            y = bb.emit_output(relax.call_tir(gvar, [x, *packed], rows))
        bb.emit_func_output(y)
    got = relax.transform.DeadCodeElimination(["decode"])(LowerFusedFeedForward(NEON)(Before))
    tvm.ir.assert_structural_equal(got, bb.get())


def plain(rows, names=("decode",), hidden=10, dtype="float32"):
    shapes = [(*rows, 6), (6, hidden), (hidden, 6)]
    return module(lambda emit, *p: emit(op.add(p[0], half(emit, p[0], "silu", *p[1:]))), shapes, names, dtype), shapes


def test_the_norms_weight_goes_into_constant_weights():
    """What is left of it is a factor of each row; a weight that is an input stays."""

    def build(emit, x, gain, up, down):
        return half(emit, emit(op.nn.rms_norm(x, gain, [-1], 1e-2)), "silu", up, down)

    shapes = [(3, 6), (6,), (6, 10), (10, 6)]
    for inputs, params in ((1, 3), (2, 4)):
        mod, _ = fused(module(build, shapes, ("decode",), num_input=inputs), *BEFORE, FuseFeedForward())
        lowered = LowerFusedFeedForward(HOST)(mod)
        (func,) = [f for f in lowered.functions.values() if isinstance(f, tirx.PrimFunc)]
        # x, (norm,) two weights and the result.
        assert len(func.params) == params + 1
        drawn = data(*shapes)
        want, got = (run_module(m, "decode", drawn)[0] for m in (module(build, shapes, ("decode",)), lowered))
        assert worst_error(want, got) < REASSOCIATES.bound("float32")


def test_two_entries_and_running_it_twice():
    mod, _ = plain((1, N), ("prefill", "decode"))
    once, _ = fused(mod, *BEFORE, FuseFeedForward(), LowerFusedFeedForward(HOST))
    assert calls(once, "prefill") == calls(once, "decode") == []
    assert LowerFusedFeedForward(HOST)(once).same_as(once)


def test_the_chunk_is_counted_as_the_kernels_own():
    """What a benchmark says of traffic includes what the kernel keeps between the layers."""
    mod, shapes = plain((2000,), ("vision",), hidden=600)
    params = dict(zip("uv", data(*shapes[1:])))
    model = Model(mod, params, {"vision": entry_of(mod["vision"], "vision", ["x"], ["y"], weights=["u", "v"])})
    (one,) = count(model, get_target("host")).entries["vision"].kernels
    two = count(model, get_target("host"), disabled=("fuse-feed-forward",)).entries["vision"]
    assert 0.9 * CHUNK_BYTES < one.inner_bytes <= CHUNK_BYTES
    assert two.traffic_bytes - (one.read_bytes + one.written_bytes + 2 * one.inner_bytes) > 2 * 1000 * 600 * 4


def region(body):
    """Return a module that calls a region with the lines of ``body`` over (3, 5) values."""
    bb = relax.BlockBuilder()
    ty = relax.TensorType((3, 5), "float32")
    a, b, x, r = (relax.Var(name, ty) for name in "abxr")
    with bb.function("fused_feed_forward", [a, b], {"Composite": "crossloom.fused_feed_forward"}, private=True):
        with bb.dataflow():
            out = bb.emit_output(body(bb, a, b))
        bb.emit_func_output(out)
    gvar = bb.get().get_global_var("fused_feed_forward")
    with bb.function("main", [x, r], {"num_input": 2}):
        with bb.dataflow():
            y = bb.emit_output(relax.Call(gvar, [x, r]))
        bb.emit_func_output(y)
    return bb.get()


@pytest.mark.parametrize(
    "body",
    [
        lambda bb, a, b: op.multiply(a, b),
        lambda bb, a, b: op.add(bb.emit(op.exp(a)), b),
    ],
)
def test_refused_regions_of_anything_else(body):
    before = region(body)
    with Ledger() as ledger:
        after = LowerFusedFeedForward(HOST)(before)
    assert after.same_as(before)
    assert [v.code for v in ledger.refused] == ["no-kernel"] and "two layers" in ledger.refused[0].detail


def test_refused_where_the_targets_table_does_not_allow_a_chain(monkeypatch):
    mod, _ = fused(plain((3,))[0], *BEFORE, FuseFeedForward())
    seen = []

    def allowed(chain, target):
        seen.append(chain)
        return Verdict(len(seen) < 2, "chain-too-long", "at most 1")

    monkeypatch.setattr("crossloom.passes.lower_fused_feed_forward.allowed", allowed)
    with Ledger() as ledger:
        after = LowerFusedFeedForward(HOST)(mod)
    assert after.same_as(mod) and [v.code for v in ledger.refused] == ["chain-too-long"]
    assert seen == [["linear", "silu"], ["linear", "residual"]]


def test_no_target_is_told():
    mod, _ = fused(plain((3,))[0], *BEFORE, FuseFeedForward())
    with pytest.raises(UnsupportedTarget, match="lower-fused-feed-forward"):
        LowerFusedFeedForward()(mod)
    with HOST:
        LowerFusedFeedForward()(mod)


def test_property():
    before = tvm.transform.Sequential([CanonicalizeTransformer(), *BEFORE, FuseFeedForward()])
    prepared = blocks().map(lambda case: replace(case, mod=before(case.mod)))
    assert_pass_preserves(LowerFusedFeedForward(HOST), prepared, numerics=REASSOCIATES, max_examples=4)
