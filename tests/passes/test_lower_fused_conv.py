"""Fused convolution regions become one kernel each, from a model's own lines to what runs."""

from __future__ import annotations

import pytest
import tvm
from convolutions import ACTIVATIONS, convolutions, convolve
from hypothesis import given, settings
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.errors import UnsupportedTarget
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.fuse_conv_epilogue import FuseConvEpilogue
from crossloom.passes.lower_fused_conv import LowerFusedConv
from crossloom.schedules.fused_conv import Spec, Step, kernel
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger
from fused import canonicalized, fused

op = relax.op
N, H = tirx.Var("n", "int64"), tirx.Var("h", "int64")
HOST = get_target("host").tvm_target()
LOWERED = (FuseConvEpilogue(), LowerFusedConv(HOST))
SHAPES = [(N, 4, H, 7), (4, 4, 3, 3), (1, 4, 1, 1)]


def block(emit, x, w, b):
    """ResNet's: the residual in front of the activation, over two convolutions."""
    first = emit(op.nn.relu(emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b))))
    second = emit(op.add(emit(op.nn.conv2d(first, w, padding=1)), b))
    return emit(op.nn.relu(emit(op.add(second, x))))


def answer(x, w, b):
    def conv(x):
        return convolve(x, w, (1, 1), (1, 1), (1, 1), (1, 1), 1) + b.astype("float64")

    return ACTIVATIONS["relu"](conv(ACTIVATIONS["relu"](conv(x))) + x)


def kernels(mod, entry):
    lines = [b.value for part in mod[entry].body.blocks for b in part.bindings]
    return [v for v in lines if isinstance(v, relax.Call) and v.op == tvm.ir.Op.get("relax.call_tir")]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_whole_way(dtype):
    mod, ledger = fused(module(block, SHAPES, ("vision", "decode"), dtype), *LOWERED)
    assert not ledger.refused and len(kernels(mod, "vision")) == len(kernels(mod, "decode")) == 2
    # Those of both entries are the same two.
    assert sum(isinstance(func, tirx.PrimFunc) for func in mod.functions.values()) == 2
    for n, h in ((2, 5), (1, 1), (0, 3)):
        x, w, b = data((n, 4, h, 7), *SHAPES[1:], dtype=dtype, seed=n)
        (got,) = run_module(mod, "decode", [x, w, b])
        assert got.dtype == dtype
        assert worst_error(answer(x, w, b), got.astype("float64")) < REASSOCIATES.bound(dtype)


def test_sizes_that_are_composed():
    """Behind a stride the height is ``(h - 1) // 2 + 1``: a variable of its own in the next kernel."""

    def build(emit, x, w, b):
        return emit(op.nn.conv2d(emit(op.nn.conv2d(x, w, strides=2, padding=1)), w, strides=2, padding=1))

    mod, ledger = fused(module(build, SHAPES, ("vision",)), *LOWERED)
    assert not ledger.refused and len(kernels(mod, "vision")) == 2
    for h in (1, 2, 9):
        x, w, b = data((2, 4, h, 7), *SHAPES[1:], seed=h)
        once = convolve(x, w, (2, 2), (1, 1), (1, 1), (1, 1), 1)
        want = convolve(once, w, (2, 2), (1, 1), (1, 1), (1, 1), 1)
        assert worst_error(want, run_module(mod, "vision", [x, w, b])[0].astype("float64")) < 1e-5


def test_the_pipeline_keeps_the_kernel_and_folds_the_weights_order():
    weight, bias = data((4, 4, 3, 3), (1, 4, 1, 1))

    def build(emit, x):
        return emit(op.nn.relu(emit(op.add(emit(op.nn.conv2d(x, relax.const(weight))), relax.const(bias)))))

    mod = module(build, [(1, 4, 9, 9)], ("vision",))
    with HOST:
        for step in steps(HOST):
            mod = step.run(mod)
    lines = [b.value for part in mod["vision"].body.blocks for b in part.bindings]
    assert sum(isinstance(v, relax.Call) for v in lines) == 1
    (x,) = data((1, 4, 9, 9), seed=1)
    want = convolve(x, weight, (1, 1), (0, 0), (0, 0), (1, 1), 1) + bias
    assert worst_error(ACTIVATIONS["relu"](want), run_module(mod, "vision", [x])[0].astype("float64")) < 1e-5


def test_golden_call_of_the_kernel():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def fused_conv(
            a0: R.Tensor(("n", 3, 9), "float32"), a1: R.Tensor((4, 3, 1), "float32"), a2: R.Tensor((4, 1), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_conv"})
            with R.dataflow():
                c = R.nn.conv1d(a0, a1)
                y = R.add(c, a2)
                R.output(y)
            return y

        @R.function
        def audio(
            x: R.Tensor(("n", 3, 9), "float32"), w: R.Tensor((4, 3, 1), "float32"), b: R.Tensor((4, 1), "float32")
        ):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                y = cls.fused_conv(x, w, b)
                R.output(y)
            return y

    bb = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    spec = Spec(n, 3, 4, (9,), (1,), (1,), (0,), (0,), (1,), "float32", 1, (Step("bias"),))
    shapes = {"x": (N, 3, 9), "w": (4, 3, 1), "b": (4, 1)}
    x, w, b = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    gvar = bb.add_func(kernel(spec, Machine(32, 16)), "fused_conv_kernel")
    with bb.function("audio", [x, w, b], {"num_input": 1}):
        with bb.dataflow():
            # One group of one block of four channels.
            blocks = bb.emit(op.reshape(w, [1, 1, 4, 3, 1]))
            packed = bb.emit(op.permute_dims(blocks, [0, 1, 4, 3, 2]))
            bias = bb.emit(op.reshape(b, [4]))
            result = relax.TensorType((N, 4, 9), "float32")
            y = bb.emit_output(relax.call_tir(gvar, [x, packed, bias], result))
        bb.emit_func_output(y)
    target = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
    got = relax.transform.DeadCodeElimination(["audio"])(LowerFusedConv(target)(Before))
    tvm.ir.assert_structural_equal(got, bb.get())


def region(body):
    """Return a module that calls a region with the lines of ``body`` over values of one shape."""
    bb = relax.BlockBuilder()
    ty, of_weight = relax.TensorType((1, 3, 9), "float32"), relax.TensorType((3, 3, 1), "float32")
    a, b, x, w = (relax.Var(name, kind) for name, kind in zip("abxw", (ty, of_weight) * 2))
    with bb.function("fused_conv", [a, b], {"Composite": "crossloom.fused_conv"}, private=True):
        with bb.dataflow():
            out = bb.emit_output(body(bb.emit, a, b))
        bb.emit_func_output(out)
    gvar = bb.get().get_global_var("fused_conv")
    with bb.function("main", [x, w], {"num_input": 1}):
        with bb.dataflow():
            y = bb.emit_output(relax.Call(gvar, [x, w]))
        bb.emit_func_output(y)
    return bb.get()


def two(emit, x, w):
    c = emit(op.nn.conv1d(x, w))
    return relax.Tuple([c, emit(op.nn.relu(c))])


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (lambda emit, x, w: op.nn.relu(x), "no convolution"),
        (lambda emit, x, w: op.exp(emit(op.nn.conv1d(x, w))), "no step"),
        (lambda emit, x, w: op.nn.conv1d(emit(op.nn.relu(x)), w), "no step"),
        (two, "no step"),
        (lambda emit, x, w: op.add(emit(op.nn.conv1d(x, w)), emit(op.nn.conv1d(x, w))), "no step"),
    ],
)
def test_refused_regions_of_anything_else(body, detail):
    before = region(body)
    with Ledger() as ledger:
        after = LowerFusedConv(HOST)(before)
    assert after.same_as(before)
    assert [v.code for v in ledger.refused] == ["no-kernel"] and detail in ledger.refused[0].detail


def test_refused_on_a_target_without_vectors():
    before, _ = fused(module(block, SHAPES, ("vision",)), FuseConvEpilogue())
    with Ledger() as ledger:
        after = LowerFusedConv(tvm.target.Target({"kind": "c"}))(before)
    assert after.same_as(before) and {v.code for v in ledger.refused} == {"no-vectors"}


@pytest.mark.parametrize(("size", "groups", "fires"), [(2, 1, False), (3, 1, True), (5, 4, False), (6, 4, True)])
def test_refused_few_places(size, groups, fires):
    """Less than a register of places, four for a channel by itself: 8 and 32 floats where vectors are of 32 bytes."""

    def build(emit, x, w):
        return emit(op.nn.conv2d(x, w, padding=1, groups=groups))

    target = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
    shapes = [(N, 4, size, size), (4, 4 // groups, 3, 3)]
    _, ledger = fused(module(build, shapes, ("vision",)), FuseConvEpilogue(), LowerFusedConv(target))
    assert [v.code for v in ledger.refused] == ([] if fires else ["few-places"])


def test_no_target_is_told():
    mod, _ = fused(module(block, SHAPES, ("vision",)), FuseConvEpilogue())
    with pytest.raises(UnsupportedTarget, match="lower-fused-conv"):
        LowerFusedConv()(mod)
    with HOST:
        LowerFusedConv()(mod)


def test_running_it_twice():
    once, _ = fused(module(block, SHAPES, ("vision",)), *LOWERED)
    assert LowerFusedConv(HOST)(once).same_as(once)


def test_property():
    run = tvm.transform.Sequential(list(LOWERED))
    assert_pass_preserves(run, canonicalized(convolutions(("float32",))), numerics=REASSOCIATES, max_examples=6)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(convolutions())
def test_property_against_numpy(case):
    mod, _ = fused(case.mod, *LOWERED)
    for size in range(len(case.sizes)):
        inputs = case.inputs(size=size)
        for entry, want in case.expected(inputs).items():
            for got, exact in zip(run_module(mod, entry, inputs[entry]), want, strict=True):
                assert worst_error(exact, got) < REASSOCIATES.bound(case.dtype)
