"""The fused convolution kernel against numpy, over shapes, strides, groups, types, steps and machines."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import tvm
from convolutions import ACTIVATIONS, convolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.schedules.fused_conv import Spec, Step, kernel, pack_weights, plan
from crossloom.schedules.fused_conv.geometry import Geometry, lines
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target

HOST = get_target("host").tvm_target()
PLAIN = tvm.target.Target({"kind": "llvm"})


def conv(
    size, channels, outputs, kernel, strides=1, padding=0, dilation=1, groups=1, batch=1, dtype="float32", steps=()
):
    """Return a convolution that is alike along all axes."""
    rank = len(size)
    kernel = kernel if isinstance(kernel, tuple) else (kernel,) * rank
    both = padding if isinstance(padding, tuple) else (padding, padding)
    return Spec(
        batch,
        channels,
        outputs,
        tuple(size),
        kernel,
        (strides,) * rank,
        (both[0],) * rank,
        (both[1],) * rank,
        (dilation,) * rank,
        dtype,
        groups,
        tuple(steps),
    )


def packed(spec, weight, machine):
    """Return the weights in the kernel's order."""
    cut, outputs = plan(spec, machine), spec.outputs // spec.groups
    taps = weight.reshape(spec.groups, outputs, *weight.shape[1:2], -1)[..., Geometry.of(spec).order(spec.kernel)]
    filled = np.zeros((spec.groups, cut.blocks * cut.block, *taps.shape[2:]), spec.sum_dtype)
    filled[:, :outputs] = taps
    blocks = filled.reshape(spec.groups, cut.blocks, cut.block, *taps.shape[2:])
    return np.ascontiguousarray(blocks.transpose(0, 1, 4, 3, 2))


@lru_cache(maxsize=4)
def built(spec, target, machine):
    func = kernel(spec, machine).with_attr("global_symbol", "main")
    return tvm.compile(tvm.ir.IRModule({"main": func}), target)["main"]


def reference(spec, x, weight, operands):
    out = convolve(x, weight, spec.strides, spec.before, spec.after, spec.dilation, spec.groups)
    rest = iter(operands)
    for step in spec.steps:
        given_ = next(rest).astype("float64") if step.takes else None
        if step.takes == "channels":
            given_ = given_.reshape(-1, *[1] * len(spec.size))
        if step.kind in ("bias", "residual"):
            out = out + given_
        elif step.kind == "factor":
            out = out * given_
        elif step.kind == "scale":
            out = out * step.numbers[0]
        elif step.kind == "shift":
            out = out + step.numbers[0]
        else:
            out = ACTIVATIONS[step.kind](out, *step.numbers)
    return out


def check(spec, batch=None, size=None, target=HOST, seed=0, machine=None):
    """Build a kernel, call it on random numbers and compare; ``batch`` and ``size`` stand for symbolic extents."""
    rng, machine = np.random.default_rng(seed), machine or Machine.of(target)
    batch, size = spec.batch if batch is None else batch, spec.size if size is None else size
    fixed = replace(spec, batch=batch, size=tuple(size))
    inner = spec.channels // spec.groups
    x = rng.standard_normal((batch, spec.channels, *size)).astype(spec.dtype)
    weight = (rng.standard_normal((spec.outputs, inner, *spec.kernel)) / np.sqrt(inner)).astype(spec.dtype)
    shape = (batch, spec.outputs, *fixed.result)
    shapes = {"channels": (spec.outputs,), "result": shape}
    operands = [rng.standard_normal(shapes[s.takes]).astype(spec.dtype) for s in spec.steps if s.takes]
    # What is not written stays visible.
    result = tvm.runtime.tensor(np.full(shape, np.nan, spec.dtype))
    built(spec, target, machine)(*map(tvm.runtime.tensor, [x, packed(spec, weight, machine), *operands]), result)
    want = reference(fixed, x, weight, operands)
    assert worst_error(want, result.numpy().astype("float64")) < REASSOCIATES.bound(spec.dtype)


ACTIVATED = [Step(kind) for kind in ("relu", "silu", "sigmoid", "tanh", "gelu")]
NUMBERED = [Step("clip", (0.0, 6.0)), Step("leaky_relu", (0.1,)), Step("scale", (0.5,)), Step("shift", (-1.0,))]
OPERANDS = [Step("bias"), Step("factor"), Step("residual")]


@st.composite
def specs(draw):
    """Draw a convolution of one to three axes, static or symbolic, and its sizes."""
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    channels, outputs = (groups * draw(st.sampled_from([1, 1, 2, 3, 4, 5, 13, 33])) for _ in range(2))
    each = [
        (
            draw(st.sampled_from([1, 2, 3, 3, 4, 5])),
            draw(st.sampled_from([1, 1, 2, 3])),
            draw(st.sampled_from([0, 1, 1, 2])),
            draw(st.sampled_from([0, 1, 1, 3])),
            draw(st.sampled_from([1, 1, 2, 3])),
        )
        for _ in range(rank)
    ]
    kernel_, strides, before, after, dilation = zip(*each)
    size = []
    for k, _, b, a, d in each:
        least = max(1, d * (k - 1) + 1 - b - a)
        size.append(least + draw(st.sampled_from([0, 1, 2, 5, 6, 13, 17, 30] if rank < 3 else [0, 1, 2, 5])))
    batch = draw(st.sampled_from([1, 1, 2, 3, 0]))
    dtype = draw(st.sampled_from(["float32", "float32", "float32", "float16", "float64"]))
    steps = tuple(draw(st.lists(st.sampled_from(ACTIVATED + NUMBERED + OPERANDS), max_size=3)))
    symbolic = [tirx.Var(f"s{i}", "int64") if draw(st.integers(0, 4)) == 0 else n for i, n in enumerate(size)]
    first = tirx.Var("n", "int64") if draw(st.booleans()) else batch
    spec = Spec(
        first, channels, outputs, tuple(symbolic), kernel_, strides, before, after, dilation, dtype, groups, steps
    )
    return spec, batch, size


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(specs())
def test_kernels_compute_what_numpy_does(drawn):
    check(*drawn)


STEPS = (Step("bias"), Step("residual"), Step("relu"))
KINDS = {
    "3x3": conv((14, 14), 20, 26, 3, padding=1, steps=STEPS),
    "3x3 stride 2": conv((15, 18), 20, 26, 3, 2, padding=1, steps=STEPS),
    "stem": conv((33, 30), 3, 13, 7, 2, padding=3, steps=STEPS),
    "pointwise": conv((14, 13), 70, 37, 1, steps=STEPS),
    "pointwise, clashing rows": conv((16, 16), 70, 37, 1, steps=STEPS),
    "pointwise, few places": conv((1, 3), 9, 5, 1, steps=STEPS),
    "pointwise, stride 2": conv((15, 15), 40, 24, 1, 2, steps=STEPS),
    "depthwise": conv((14, 15), 24, 24, 3, padding=1, groups=24, steps=STEPS),
    "depthwise, stride 2": conv((15, 17), 24, 24, 3, 2, padding=(0, 1), groups=24, steps=STEPS),
    "depthwise times 2": conv((7, 7), 12, 24, 5, padding=2, groups=12, steps=STEPS),
    "7x7, deep": conv((7, 7), 130, 48, 3, padding=1, steps=STEPS),
    "one axis": conv((61,), 40, 24, 3, padding=1, steps=STEPS),
    "one axis, stride 2": conv((61,), 40, 24, 3, 2, padding=1, steps=STEPS),
    "three axes": conv((5, 6, 7), 6, 9, 3, 2, padding=1, dilation=2, steps=STEPS),
    "patches": conv((24, 24), 3, 40, 8, 8, steps=STEPS),
    "tall": conv((20, 9), 5, 7, (5, 1), padding=0, steps=STEPS),
}


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_kinds_of_convolutions(spec):
    check(spec)


@pytest.mark.parametrize("kind", ["stem", "pointwise", "depthwise", "7x7, deep"])
def test_kinds_on_a_machine_of_narrow_vectors(kind):
    check(KINDS[kind], target=PLAIN)


@pytest.mark.parametrize("machine", [Machine(16, 32), Machine(64, 32)], ids=["neon", "avx512"])
@pytest.mark.parametrize("kind", ["3x3", "stem", "pointwise", "depthwise, stride 2", "one axis, stride 2"])
def test_kinds_cut_for_other_machines(kind, machine):
    """LLVM makes what it can of vectors that this machine has not."""
    check(KINDS[kind], machine=machine)


def test_pieces_over_all_threads_and_sums_put_down_between():
    """Large enough for threads; deep and wide enough that weights leave the cache, and that they do not."""
    machine = Machine.of(HOST)
    deep = conv((7, 7), 512, 320, 3, padding=1, steps=STEPS)
    wide = conv((28, 28), 160, 64, 3, padding=1, steps=STEPS)
    long = conv((1201,), 200, 64, 3, 2, padding=1, steps=STEPS)
    point = conv((29, 29), 300, 200, 1, steps=STEPS)
    cuts = [plan(spec, machine) for spec in (deep, wide, long, point)]
    assert all(cut.parallel for cut in cuts)
    assert cuts[0].blocks_first and cuts[0].depth < 512
    assert not cuts[1].blocks_first and cuts[1].depth < 160 and cuts[1].stretches > 1
    assert cuts[2].stretches > 1 and cuts[3].direct
    for spec in (deep, wide, long, point):
        check(spec)


N, H, W = (tirx.Var(name, "int64") for name in "nhw")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("kernel_", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_sizes_that_are_known_when_it_runs(kernel_, stride, dtype):
    two = conv((H, W), 9, 10, kernel_, stride, kernel_ // 2, batch=N, dtype=dtype, steps=STEPS)
    one = conv((W,), 9, 10, kernel_, stride, kernel_ // 2, batch=N, dtype=dtype, steps=STEPS)
    for size in ((1, 1), (3, 70), (66, 5)):
        check(two, 2, size)
    for size in ((1,), (70,)):
        check(one, 2, size)
    check(one, 0, (4,))


def test_every_step():
    """Three at a time, with what makes their order tell."""
    kinds = [*ACTIVATED, *NUMBERED, *OPERANDS]
    for first in range(0, len(kinds), 3):
        check(conv((9, 11), 4, 6, 3, steps=kinds[first : first + 3]))


def test_weights_in_the_kernels_order_by_a_models_own_operators():
    for spec in (KINDS["stem"], KINDS["depthwise times 2"], conv((9, 11), 4, 4, 3, groups=2, dtype="float16")):
        weight = np.random.default_rng(0).standard_normal((spec.outputs, spec.channels // spec.groups, *spec.kernel))
        weight, machine, builder = weight.astype(spec.dtype), Machine.of(HOST), relax.BlockBuilder()
        var = relax.Var("w", relax.TensorType(weight.shape, spec.dtype))
        with builder.function("main", [var]):
            builder.emit_func_output(pack_weights(builder, spec, plan(spec, machine), var))
        run = relax.VirtualMachine(tvm.compile(builder.get(), PLAIN), tvm.cpu())["main"]
        want = packed(spec, weight, machine)
        np.testing.assert_array_equal(run(tvm.runtime.tensor(weight)).numpy(), want)
        constant = pack_weights(builder, spec, plan(spec, machine), relax.const(weight))
        np.testing.assert_array_equal(constant.value.numpy(), want)


def test_nothing_to_compute():
    check(conv((9, 11), 4, 6, 3, batch=0, steps=STEPS))


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("taps", [1, 2, 5, 7])
def test_phases_hold_every_tap_once(taps, stride, dilation):
    """Each tap is in one line, at the place of the phase that lies where the tap reads."""
    seen = {}
    for line in lines(taps, stride, dilation):
        assert 0 <= line.phase < stride
        for i in range(line.count):
            seen[line.first + i * line.step] = (line.at + i * line.every) * stride + line.phase
    assert seen == {tap: tap * dilation for tap in range(taps)}
    spec = conv((64, 64), 1, 1, taps, stride, dilation=dilation)
    assert sorted(Geometry.of(spec).order(spec.kernel)) == list(range(taps * taps))


@pytest.mark.parametrize(
    ("mcpu", "triple", "machine"),
    [
        ("cortex-a76", "aarch64-linux-gnu", Machine(16, 32)),
        ("skylake-avx512", "x86_64-linux-gnu", Machine(64, 32)),
        ("haswell", "x86_64-linux-gnu", Machine(32, 16)),
    ],
)
def test_tiles_fill_registers_without_spilling(mcpu, triple, machine):
    """Products of the innermost loops are of whole registers, and no sum waits in memory between them."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mcpu": mcpu})
    assert Machine.of(target) == machine
    spec = conv((56, 56), 64, 64, 3, padding=1, steps=STEPS)
    cut = plan(spec, machine)
    count = cut.rows * cut.vectors
    assert 8 <= cut.block * count <= machine.registers - count - 1
    func = kernel(spec, machine).with_attr("global_symbol", "main")
    text = tvm.compile(tvm.ir.IRModule({"main": func}), target).mod.inspect_source("s")
    registers = {16: "v", 32: "%ymm", 64: "%zmm"}[machine.vector_bytes]
    products = [line for line in text.splitlines() if ("fmla" in line or "vfmadd" in line) and registers in line]
    assert len(products) >= cut.block * count
