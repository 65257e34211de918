"""A convolution and the steps behind it become one region."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from convolutions import convolutions
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import module
from crossloom.numerics import EXACT
from crossloom.passes.fuse_conv_epilogue import FuseConvEpilogue
from crossloom.testing import assert_pass_preserves
from crossloom.verdict import Ledger
from fused import calls, canonicalized, fused

op = relax.op
N = tirx.Var("n", "int64")
SHAPES = [(N, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1)]


def test_golden_residual_in_front_of_the_activation():
    @I.ir_module
    class Before:
        @R.function
        def vision(
            x: R.Tensor(("n", 4, 6, 6), "float32"),
            w: R.Tensor((4, 4, 3, 3), "float32"),
            b: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                c = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
                e = R.exp(x)
                s = R.add(c, b)
                t = R.add(e, s)
                y = R.nn.relu(t)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def fused_conv(
            a0: R.Tensor(("n", 4, 6, 6), "float32"),
            a1: R.Tensor((4, 4, 3, 3), "float32"),
            a2: R.Tensor((1, 4, 1, 1), "float32"),
            a3: R.Tensor(("n", 4, 6, 6), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.fused_conv"})
            with R.dataflow():
                c = R.nn.conv2d(a0, a1, padding=[1, 1, 1, 1])
                s = R.add(c, a2)
                t = R.add(a3, s)
                y = R.nn.relu(t)
                R.output(y)
            return y

        @R.function
        def vision(
            x: R.Tensor(("n", 4, 6, 6), "float32"),
            w: R.Tensor((4, 4, 3, 3), "float32"),
            b: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                e = R.exp(x)
                y = cls.fused_conv(x, w, b, e)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseConvEpilogue()(Before), Expected)


def region_of(mod, entry="vision"):
    """Return the operators of the only region of an entry."""
    assert calls(mod, entry) == ["fused_conv"]
    func = next(f for gv, f in mod.functions_items() if gv.name_hint == "fused_conv")
    return [b.value.op.name.split(".")[-1] for b in func.body.blocks[0].bindings if hasattr(b.value.op, "name")]


STEPS = {
    "nothing": (lambda emit, c, x, b: c, ["conv2d"]),
    "bias, factor": (
        lambda emit, c, x, b: emit(op.multiply(b, emit(op.add(c, b)))),
        ["conv2d", "add", "multiply"],
    ),
    "residual behind": (
        lambda emit, c, x, b: emit(op.add(emit(op.nn.relu(emit(op.add(c, b)))), x)),
        ["conv2d", "add", "relu", "add"],
    ),
    "numbers": (
        lambda emit, c, x, b: emit(
            op.divide(emit(op.subtract(c, relax.const(1.0, "float32"))), relax.const(2.0, "float32"))
        ),
        ["conv2d", "subtract", "divide"],
    ),
    "relu6": (lambda emit, c, x, b: emit(op.clip(c, 0, 6)), ["conv2d", "clip"]),
    "leaky": (lambda emit, c, x, b: emit(op.nn.leakyrelu(emit(op.tanh(c)))), ["conv2d", "tanh", "leakyrelu"]),
}


@pytest.mark.parametrize(("steps", "want"), STEPS.values(), ids=STEPS)
def test_steps_that_join(steps, want):
    def build(emit, x, w, b):
        return steps(emit, emit(op.nn.conv2d(x, w, padding=1)), x, b)

    mod, ledger = fused(module(build, SHAPES, ("vision",)), FuseConvEpilogue())
    assert region_of(mod) == want and not ledger.refused


def test_an_activation_by_what_it_computes():
    def build(emit, x, w, b):
        c = emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b))
        return emit(op.multiply(emit(op.sigmoid(c)), c))

    mod, _ = fused(module(build, SHAPES, ("vision",)), FuseConvEpilogue())
    assert calls(mod, "vision") == ["fused_conv"] and calls(mod, "fused_conv") == ["activation"]


STAYS = {
    "read twice": lambda emit, c, x, b: emit(op.add(emit(op.exp(c)), emit(op.nn.relu(c)))),
    "a sum with itself": lambda emit, c, x, b: emit(op.add(c, c)),
    "the other way round": lambda emit, c, x, b: emit(op.divide(b, c)),
    "no step": lambda emit, c, x, b: emit(op.exp(c)),
    "stretched along another axis": lambda emit, c, x, b: emit(op.add(c, emit(op.sum(x, [0, 1, 2])))),
    "another type": lambda emit, c, x, b: emit(op.astype(c, "float16")),
    "another shape": lambda emit, c, x, b: emit(op.sum(c)),
    "a moving bound": lambda emit, c, x, b: emit(op.maximum(c, b)),
}


@pytest.mark.parametrize("steps", STAYS.values(), ids=STAYS)
def test_steps_that_stay_outside(steps):
    def build(emit, x, w, b):
        return steps(emit, emit(op.nn.conv2d(x, w, padding=1)), x, b)

    mod, _ = fused(module(build, SHAPES, ("vision",)), FuseConvEpilogue())
    assert region_of(mod) == ["conv2d"]


def test_of_two_convolutions_the_later_one_takes_their_sum():
    def build(emit, x, w, b):
        first, second = emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b)), emit(op.nn.conv2d(x, w, padding=1))
        return emit(op.nn.relu(emit(op.add(first, second))))

    mod, ledger = fused(module(build, SHAPES, ("vision",)), FuseConvEpilogue())
    assert calls(mod, "vision") == ["fused_conv", "fused_conv"] and not ledger.refused
    lines = [b.value for block in mod["vision"].body.blocks for b in block.bindings]
    regions = [v for v in lines if getattr(v, "op", None) in mod.functions]
    assert len(lines) - len(regions) <= 1 and [len(v.args) for v in regions] == [3, 3]


def test_what_is_saved_is_told():
    def build(emit, x, w, b):
        return emit(op.nn.relu(emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b))))

    _, ledger = fused(module(build, [(1, 4, 6, 6), *SHAPES[1:]], ("vision",)), FuseConvEpilogue())
    assert [v.bytes_saved for v in ledger.fired] == [2 * 2 * 4 * 6 * 6 * 4]


def refusal(build, shapes, dtype="float32", num_input=1):
    before = module(build, shapes, ("vision",), dtype, num_input)
    with Ledger() as ledger:
        after = FuseConvEpilogue()(before)
    assert after.same_as(before)
    return [(v.code, v.detail) for v in ledger.refused]


M = tirx.Var("m", "int64")
KERNELS = {
    "layout": (lambda emit, x, w: emit(op.nn.conv2d(x, w, data_layout="NHWC")), [(1, 6, 6, 4), (4, 4, 3, 3)], "layout"),
    "channels": (lambda emit, x, w: emit(op.nn.conv2d(x, w)), [(1, 4, 6, 6), (M, 4, 3, 3)], "unknown size"),
    "kernel": (lambda emit, x, w: emit(op.nn.conv2d(x, w)), [(1, 4, 6, 6), (4, 4, M, 3)], "unknown size"),
    "types": (lambda emit, x, w: emit(op.nn.conv2d(x, w, out_dtype="float64")), [(1, 4, 6, 6), (4, 4, 3, 3)], "types"),
    "nothing": (lambda emit, x, w: emit(op.nn.conv2d(x, w)), [(1, 4, 6, 6), (0, 4, 3, 3)], "nothing"),
    "phases": (
        lambda emit, x, w: emit(op.nn.conv2d(x, w, strides=6)),
        [(1, 4, 20, 20), (4, 4, 7, 7)],
        "phases",
    ),
}


@pytest.mark.parametrize(("build", "shapes", "detail"), KERNELS.values(), ids=KERNELS)
def test_refused_no_kernel(build, shapes, detail):
    ((code, said),) = refusal(build, shapes)
    assert code == "no-kernel" and detail in said


def test_refused_a_weight_that_is_computed():
    def build(emit, x, w):
        return emit(op.nn.conv2d(x, emit(op.exp(w))))

    assert [code for code, _ in refusal(build, [(1, 4, 6, 6), (4, 4, 3, 3)], num_input=2)] == ["weight-is-computed"]


def test_a_weight_with_factors_is_known():
    def build(emit, x, w, b):
        return emit(op.nn.conv2d(x, emit(op.multiply(w, b))))

    mod, _ = fused(module(build, [(1, 4, 6, 6), (4, 4, 3, 3), (4, 1, 1, 1)], ("vision",)), FuseConvEpilogue())
    assert region_of(mod) == ["conv2d"]


def test_both_entries_and_running_it_twice():
    def build(emit, x, w, b):
        return emit(op.nn.relu(emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b))))

    mod = module(build, SHAPES, ("vision", "decode"))
    once, ledger = fused(mod, FuseConvEpilogue())
    assert calls(once, "vision") == calls(once, "decode") == ["fused_conv"]
    assert sorted(v.function for v in ledger.fired) == ["decode", "vision"]
    assert FuseConvEpilogue()(once).same_as(once)


def test_constants_stay_in_the_region():
    weight, bias = np.ones((4, 4, 3, 3), "float32"), np.ones((1, 4, 1, 1), "float32")

    def build(emit, x):
        return emit(op.add(emit(op.nn.conv2d(x, relax.const(weight))), relax.const(bias)))

    mod, _ = fused(module(build, [(1, 4, 6, 6)], ("vision",)), FuseConvEpilogue())
    assert region_of(mod) == ["conv2d", "add"] and len(mod["fused_conv"].params) == 1


def test_property():
    """Forming regions changes no number."""
    assert_pass_preserves(FuseConvEpilogue(), canonicalized(convolutions()), numerics=EXACT, max_examples=5)
