"""Residual norm regions become one kernel, from a model's own lines to what runs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.errors import UnsupportedTarget
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.fuse_residual_norm import FuseResidualNorm
from crossloom.passes.lower_fused_residual_norm import LowerFusedResidualNorm
from crossloom.schedules.fused_linear import Norm
from crossloom.schedules.machine import Machine
from crossloom.schedules.residual_norm import ResidualNorm, kernel
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.verdict import Ledger
from fused import canonicalized, fused
from residual import layer, reference, residual_norms, rms

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
HOST = get_target("host").tvm_target()
LOWERED = (FuseResidualNorm(), LowerFusedResidualNorm(HOST))


def lowered(mod, entry="decode"):
    """Return a module with its regions lowered, having checked that there is one kernel and nothing was refused."""
    out, ledger = fused(mod, *LOWERED)
    assert not ledger.refused
    lines = [b.value for block in out[entry].body.blocks for b in block.bindings]
    kernels = [v for v in lines if isinstance(v, relax.Call) and v.op == tvm.ir.Op.get("relax.call_tir")]
    assert len(kernels) == 1
    return out


def both(emit, x, r, g, b):
    """Pre-norm: the sum is a result too."""
    s = emit(op.add(x, r))
    return emit(relax.Tuple([layer(emit, s, g, b), s]))


def post(emit, x, r, g, b):
    return layer(emit, emit(op.add(r, x)), g, b)


def side_by_side(emit, x, r, g, b):
    s = emit(op.add(x, r))
    return emit(relax.Tuple([rms(emit, s, g), s, layer(emit, s, g, b), rms(emit, s)]))


def alone(emit, x, r, g, b):
    """Norms of a value that is no sum."""
    return emit(relax.Tuple([layer(emit, x, g, b), rms(emit, x)]))


def answers(build, values):
    x, r, g, b = (v.astype("float64") for v in values)
    if build is alone:
        return [reference(x, "layer", g, b), reference(x, "rms")]
    s = (x + r).astype(values[0].dtype).astype("float64")
    normed = reference(s, "layer", g, b)
    return {
        both: [normed, s],
        post: [normed],
        side_by_side: [reference(s, "rms", g), s, normed, reference(s, "rms")],
    }[build]


SHAPES = {
    "rows": ((5, 33), (5, 33)),
    "one row": ((1, 1, 7), (1, 1, 7)),
    "a vector": ((13,), (13,)),
    "no rows": ((0, 8), (0, 8)),
    "symbolic": ((M, N, 17), (M, N, 17)),
    "position embedding": ((M, N, 17), (1, N, 17)),
    "bias": ((2, N, 40), (40,)),
    "per row": ((2, N, 40), (2, N, 1)),
    "outer": ((2, 1, 9), (1, 3, 9)),
}


@pytest.mark.parametrize("build", [both, post, side_by_side, alone])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_whole_way(build, shapes, dtype):
    depth = shapes[0][-1]
    mod = lowered(module(build, [*shapes, (depth,), (depth,)], ("decode",), dtype, num_input=2))
    for n in (0, 1, 6) if any(isinstance(d, tirx.Var) for s in shapes for d in s) else (3,):
        fixed = [[{"n": n, "m": 3}[d.name] if isinstance(d, tirx.Var) else d for d in s] for s in shapes]
        values = data(*fixed, (depth,), (depth,), dtype=dtype, seed=n)
        for got, want in zip(run_module(mod, "decode", values), answers(build, values), strict=True):
            assert got.dtype == dtype and got.shape == want.shape
            assert worst_error(want, got.astype("float64")) < REASSOCIATES.bound(dtype)


def test_entries_of_one_shape_share_a_kernel():
    mod, ledger = fused(module(both, [(N, 8), (N, 8), (8,), (8,)], ("prefill", "decode"), num_input=2), *LOWERED)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    assert sum(isinstance(func, tirx.PrimFunc) for func in mod.functions.values()) == 1


def test_weights_behind_axes_of_one_and_constants():
    table = np.random.default_rng(2).standard_normal((1, 4, 6)).astype("float32")

    def build(emit, x, r, g, b):
        return layer(emit, emit(op.add(x, relax.const(table))), emit(op.reshape(g, [6])), b)

    def spelled(emit, x, r, g, b):
        s = emit(op.add(x, relax.const(table)))
        return emit(op.add(emit(op.multiply(rms(emit, s), g)), emit(op.multiply(b, b))))

    for build_one in (build, spelled):
        shapes = [(2, 4, 6), (1,), (1, 1, 6), (6,)]
        mod = module(build_one, shapes, ("decode",), num_input=2)
        x, r, g, b = data(*shapes)
        s = (x + table).astype("float64")
        want = reference(s, "layer", g, b) if build_one is build else reference(s, "rms", g) + b * b
        got = run_module(lowered(mod), "decode", [x, r, g, b])[0]
        assert worst_error(want, got.astype("float64")) < 1e-5


def test_a_value_added_to_itself():
    """Both terms are one operand of the region; the kernel reads it twice."""
    mod = lowered(module(lambda emit, x, g: rms(emit, emit(op.add(x, x)), g), [(N, 9), (9,)], ("decode",)))
    x, g = data((3, 9), (9,))
    want = reference(2.0 * x.astype("float64"), "rms", g)
    assert worst_error(want, run_module(mod, "decode", [x, g])[0].astype("float64")) < 1e-5


@pytest.mark.parametrize("cast", [True, False])
def test_a_norm_in_float32_of_a_float16_sum(cast):
    """Gemma's: the weight is float32; the result is rounded once, or stays float32."""

    def build(emit, x, r, g, b):
        normed = emit(op.multiply(rms(emit, emit(op.add(x, r)), wide=True), g))
        return emit(op.astype(normed, "float16")) if cast else normed

    shapes = [((N, 40), "float16"), ((N, 40), "float16"), ((40,), "float32"), ((40,), "float32")]
    mod = lowered(module(build, shapes, ("decode",), num_input=2))
    x, r = data((3, 40), (3, 40), dtype="float16")
    g, b = data((40,), (40,), seed=1)
    (got,) = run_module(mod, "decode", [x, r, g, b])
    want = reference((x + r).astype("float64"), "rms", g)
    assert str(got.dtype) == ("float16" if cast else "float32")
    assert worst_error(want, got.astype("float64")) < REASSOCIATES.bound(str(got.dtype))


def test_the_pipeline_makes_one_kernel_of_it():
    """Behind the lowering nothing opens the region again, and the schedule rules leave its kernel as it is."""
    mod, _ = fused(module(post, [(N, 8), (N, 8), (8,), (8,)], ("decode",), num_input=2), *LOWERED)
    with HOST:
        for step in steps(HOST):
            mod = step.run(mod)
    assert [func.attrs.get("tirx.is_scheduled") for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    lines = [b.value for block in mod["decode"].body.blocks for b in block.bindings]
    assert sum(isinstance(v, relax.Call) for v in lines) == 1
    x, r, g, b = data((5, 8), (5, 8), (8,), (8,))
    want = reference((x + r).astype("float64"), "layer", g, b)
    assert worst_error(want, run_module(mod, "decode", [x, r, g, b])[0].astype("float64")) < 1e-5


def test_golden_call_of_the_kernel():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def rms_norm(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4,), "float32")):
            R.func_attr({"Composite": "crossloom.rms_norm", "crossloom.axes": [-1], "crossloom.epsilon": 1e-5})
            with R.dataflow():
                y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_residual_norm(
            a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor(("n", 4), "float32"), a2: R.Tensor((4,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_residual_norm"})
            cls = Before
            with R.dataflow():
                s = R.add(a0, a1)
                t = cls.rms_norm(s, a2)
                pair = (s, t)
                R.output(pair)
            return pair

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), r: R.Tensor(("n", 4), "float32"), g: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                pair = cls.fused_residual_norm(x, r, g)
                R.output(pair)
            return pair

    bb = relax.BlockBuilder()
    spec = ResidualNorm((N,), 4, "float32", ((0, 1), (0, 1)), (Norm("rms", 1e-5, True, dtype="float32"),), True)
    rows = relax.TensorType((M, 4), "float32")
    x, r, g = relax.Var("x", rows), relax.Var("r", rows), relax.Var("g", relax.TensorType((4,), "float32"))
    gvar = bb.add_func(kernel(spec, Machine.of(HOST)), "fused_residual_norm_kernel")
    with bb.function("decode", [x, r, g], {"num_input": 2}):
        with bb.dataflow():
            pair = bb.emit_output(relax.call_tir(gvar, [x, r, g], [rows, rows]))
        bb.emit_func_output(pair)
    got = relax.transform.DeadCodeElimination(["decode"])(LowerFusedResidualNorm(HOST)(Before))
    tvm.ir.assert_structural_equal(got, bb.get())


def region(body):
    """Return a module that calls a region with the lines of ``body`` over (3, 5) values."""
    bb = relax.BlockBuilder()
    ty = relax.TensorType((3, 5), "float32")
    a, b, x, r = (relax.Var(name, ty) for name in "abxr")
    with bb.function("fused_residual_norm", [a, b], {"Composite": "crossloom.fused_residual_norm"}, private=True):
        with bb.dataflow():
            out = bb.emit_output(body(bb, a, b))
        bb.emit_func_output(out)
    gvar = bb.get().get_global_var("fused_residual_norm")
    with bb.function("main", [x, r], {"num_input": 2}):
        with bb.dataflow():
            y = bb.emit_output(relax.Call(gvar, [x, r]))
        bb.emit_func_output(y)
    return bb.get()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (lambda bb, a, b: op.multiply(a, b), "neither a sum nor a norm"),
        (lambda bb, a, b: op.add(a, b), "no norm"),
        (lambda bb, a, b: op.exp(bb.emit(op.add(a, b))), "not a norm"),
    ],
)
def test_refused_regions_of_anything_else(body, detail):
    before = region(body)
    with Ledger() as ledger:
        after = LowerFusedResidualNorm(HOST)(before)
    assert after.same_as(before)
    assert [v.code for v in ledger.refused] == ["no-kernel"] and detail in ledger.refused[0].detail


def test_no_target_is_told():
    mod, _ = fused(module(post, [(3, 8), (3, 8), (8,), (8,)], ("decode",), num_input=2), FuseResidualNorm())
    with pytest.raises(UnsupportedTarget, match="lower-fused-residual-norm"):
        LowerFusedResidualNorm()(mod)
    with HOST:
        LowerFusedResidualNorm()(mod)


def test_running_it_twice():
    once, _ = fused(module(side_by_side, [(N, 8), (N, 8), (8,), (8,)], ("decode",), num_input=2), *LOWERED)
    assert LowerFusedResidualNorm(HOST)(once).same_as(once)


@pytest.mark.parametrize("cases", [residual_norms, strategies.residual_norm])
def test_property(cases):
    run = tvm.transform.Sequential(list(LOWERED))
    assert_pass_preserves(run, canonicalized(cases()), numerics=REASSOCIATES, max_examples=15)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(residual_norms())
def test_property_against_numpy(case):
    mod, _ = fused(case.mod, *LOWERED)
    for size in range(len(case.sizes)):
        inputs = case.inputs(size=size)
        for entry, want in case.expected(inputs).items():
            for got, exact in zip(run_module(mod, entry, inputs[entry]), want, strict=True):
                assert worst_error(exact, got) < REASSOCIATES.bound(case.dtype)
