"""The fused linear kernel against numpy in float64: every step alone and together, over sizes of every kind."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from crossloom.model import TensorSpec
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.schedules.fused_linear import Norm, Output, Rotary, Spec, Turn, kernel, pack_bias, pack_weights, plan
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import BundleExecutor, Call, as_model
from crossloom.testing.runner import flatten

HOST = get_target("host").tvm_target()
LANE, UNIT = ("lane", 0), ("unit", 0)
ACTIVATIONS = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "gelu": lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def columns_of(spec):
    """Columns of W: as many as the outputs reach."""
    ends = [0]
    for o in spec.outputs:
        far = sum(stride * (extent - 1) for extent, stride in zip(o.heads, o.strides))
        ends += [first + far + o.lanes for first in (o.first, o.gate) if first is not None]
    return max(ends)


def operands(spec, sizes, splits=1, seed=0):
    """Random arguments by name, in the kernel's order, with W and its bias in place of the packed ones."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal([sizes.get(d, d) for d in shape]).astype(spec.dtype)

    count = columns_of(spec)
    out = {"x": draw(*spec.rows, spec.depth)}
    if spec.norm is not None:
        out |= {f"norm_{p}": draw(spec.depth) for p in ("weight", "bias") if getattr(spec.norm, p)}
    if spec.turn is not None:
        out |= {f"turn_{n}": draw(*s) for n, s in tables_of(spec, spec.turn)}
    out["W"] = draw(spec.depth, count) / np.sqrt(spec.depth).astype(spec.dtype)
    if spec.bias:
        out["b"] = draw(count)
    for i, o in enumerate(spec.outputs):
        if o.norm is not None:
            out |= {f"head_{p}{i}": draw(o.lanes) for p in ("weight", "bias") if getattr(o.norm, p)}
        if o.rotary is not None:
            out |= {f"{n}{i}": draw(*s) for n, s in tables_of(spec, o)}
        if o.residual is not None:
            out[f"residual{i}"] = draw(*spec.shape(o.residual, o))
    return out


def tables_of(spec, of):
    """Names and shapes of a rotation's tables."""
    last = of.rotary.dim // 2 if of.rotary.half else of.rotary.dim
    return [(name, (*spec.shape(getattr(of.rotary, name)[:-1], of), last)) for name in ("cos", "sin")]


def normed(norm, x, weight=1, bias=0):
    centred = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.epsilon) * weight + bias


def rotated(r, value, cos, sin):
    """The first lanes of the last axis, turned by tables with an axis for each of the value's."""
    pairs = np.arange(r.dim // 2)
    a, b = (pairs, pairs + r.dim // 2) if r.convention == "half-split" else (2 * pairs, 2 * pairs + 1)
    out = value.copy()
    ca, cb, sa, sb = (cos, cos, sin, sin) if r.half else (cos[..., a], cos[..., b], sin[..., a], sin[..., b])
    out[..., a] = value[..., a] * ca - value[..., b] * sa
    out[..., b] = value[..., b] * cb + value[..., a] * sb
    return out


def aligned(table, dims, axes):
    """A table with an axis for each of the value's, 1 where it has none."""
    kept = [d for d in dims if d != UNIT]
    table = table.reshape([n for n, d in zip(table.shape, dims) if d != UNIT])
    table = table.transpose(sorted(range(len(kept)), key=lambda n: axes.index(kept[n])))
    return table[tuple(slice(None) if axis in kept else None for axis in axes)]


def axes_of(spec, heads):
    return [*(("row", r) for r in range(len(spec.rows))), *(("head", h) for h in range(len(heads))), LANE]


def reference(spec, given):
    """The kernel's results in float64; written from the words of Spec, with whole arrays."""
    v = {name: a.astype("float64") for name, a in given.items()}
    x, norm = v["x"], spec.norm
    if norm is not None:
        x = normed(norm, x, v.get("norm_weight", 1), v.get("norm_bias", 0))
    if spec.turn is not None:
        t = spec.turn
        axes = axes_of(spec, t.heads)
        cos, sin = (aligned(v[f"turn_{n}"], getattr(t.rotary, n), axes) for n in ("cos", "sin"))
        x = rotated(t.rotary, x.reshape(*x.shape[:-1], *t.heads, t.lanes), cos, sin).reshape(x.shape)
    sums = x @ v["W"] + v.get("b", 0)
    out = []
    for i, o in enumerate(spec.outputs):

        def at(first, o=o):
            index = np.asarray(first)
            for extent, stride in zip(o.heads, o.strides):
                index = index[..., None] + stride * np.arange(extent)
            return sums[..., index[..., None] + np.arange(o.lanes)]

        axes = axes_of(spec, o.heads)
        value = ACTIVATIONS[o.activation](at(o.first if o.gate is None else o.gate))
        value = (value * at(o.first) if o.gate is not None else value) * o.scale
        if o.norm is not None:
            value = normed(o.norm, value, v.get(f"head_weight{i}", 1), v.get(f"head_bias{i}", 0))
        if o.rotary is not None:
            cos, sin = (aligned(v[f"{n}{i}"], getattr(o.rotary, n), axes) for n in ("cos", "sin"))
            value = rotated(o.rotary, value, cos, sin)
        if o.residual is not None:
            value = value + aligned(v[f"residual{i}"], o.residual, axes)
        named = [d for d in o.dims if d != UNIT]
        # Axes of extent 1 may be named by nothing.
        order = [axes.index(d) for d in named] + [i for i, axis in enumerate(axes) if axis not in named]
        shape = [1 if d == UNIT else value.shape[axes.index(d)] for d in o.dims]
        out.append(value.transpose(order).reshape(shape))
    return out


def build(spec, target, splits=1, layouts=("in_out",)):
    """A module: packs W, given in so many parts of these layouts, and calls the kernel."""
    machine = Machine.of(target)
    cut = plan(spec, machine)
    count = columns_of(spec)
    bounds = [count * i // splits for i in range(splits + 1)]
    widths = [b - a for a, b in pairwise(bounds)]
    params, names = {}, list(operands(spec, {r: 2 for r in spec.rows if not isinstance(r, int)}))

    def param(name, *shape):
        params[name] = relax.Var(name, relax.TensorType(shape, spec.dtype))

    param("x", *spec.rows, spec.depth)
    for name in names:
        if name.startswith("norm_"):
            param(name, spec.depth)
    if spec.turn is not None:
        for name, shape in tables_of(spec, spec.turn):
            param(f"turn_{name}", *shape)
    for i, width in enumerate(widths):
        turned = layouts[i % len(layouts)] == "out_in"
        param(f"W.{i}", *((width, spec.depth) if turned else (spec.depth, width)))
    for i, width in enumerate(widths if spec.bias else []):
        if i % 2 == 0:
            param(f"b.{i}", *((width,) if i % 4 else (1, width)))
    for i, o in enumerate(spec.outputs):
        for part in ("weight", "bias"):
            if o.norm is not None and getattr(o.norm, part):
                param(f"head_{part}{i}", o.lanes)
        for name, shape in tables_of(spec, o) if o.rotary is not None else ():
            param(f"{name}{i}", *shape)
        if o.residual is not None:
            param(f"residual{i}", *spec.shape(o.residual, o))
    bb = relax.BlockBuilder()
    gvar = bb.add_func(kernel(spec, machine), "kernel")
    with bb.function("main", list(params.values())):
        with bb.dataflow():
            given = [params[n] for n in params if n == "x" or n.startswith(("norm_", "turn_"))]
            weights = [(params[f"W.{i}"], layouts[i % len(layouts)]) for i in range(splits)]
            given.append(pack_weights(bb, spec, cut, weights))
            if spec.bias:
                given.append(pack_bias(bb, spec, cut, [(params.get(f"b.{i}"), w) for i, w in enumerate(widths)]))
            given += [params[n] for n in params if n[:3] in ("cos", "sin") or n.startswith(("head_", "residual"))]
            # In the kernel's order: norm, tables and residual of each output in turn.
            results = [relax.TensorType(spec.shape(o.dims, o), spec.dtype) for o in spec.outputs]
            out = bb.emit_output(relax.call_tir(gvar, given, results if len(results) > 1 else results[0]))
        bb.emit_func_output(out)
    return bb.get(), list(params), bounds


def arguments(given, names, bounds, layouts):
    """The module's arguments of the reference's; biases that a part lacks become 0 in the reference's."""
    out = []
    for name in names:
        kind, _, number = name.partition(".")
        if not number:
            out.append(given[name])
            continue
        part = given[kind][..., bounds[int(number)] : bounds[int(number) + 1]]
        if kind == "W":
            out.append(np.ascontiguousarray(part.T if layouts[int(number) % len(layouts)] == "out_in" else part))
        else:
            out.append(part.reshape(part.shape if int(number) % 4 else (1, -1)))
    if "b" in given:
        for i, (a, b) in enumerate(pairwise(bounds)):
            if f"b.{i}" not in names:
                given["b"][a:b] = 0
    return out


def hold(spec, sizes=({},), splits=1, layouts=("in_out",), target=HOST):
    """Hold the kernel against the reference at every size."""
    mod, names, bounds = build(spec, target, splits, layouts)
    machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    for size in sizes:
        given = operands(spec, size)
        inputs = arguments(given, names, bounds, layouts)
        got = list(flatten(machine["main"](*map(tvm.runtime.tensor, inputs))))
        for found, want in zip(got, reference(spec, given), strict=True):
            assert worst_error(want.astype(spec.dtype), found) <= REASSOCIATES.bound(spec.dtype)


def plain(lanes, rows=1, **kwargs):
    """One result of plain columns over leading axes."""
    return Output((*(("row", i) for i in range(rows)), LANE), (), lanes, **kwargs)


N = tirx.Var("n", "int64")
RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-3)


# Each step alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations(activation, dtype):
    hold(Spec((5,), 19, dtype, (plain(21, activation=activation, scale=0.5),), bias=True))


@pytest.mark.parametrize(
    "norm",
    [RMS, replace(RMS, weight=True), LAYER, replace(LAYER, weight=True), replace(LAYER, weight=True, bias=True)],
)
@pytest.mark.parametrize(("dtype", "depth"), [("float32", 64), ("float16", 13), ("float64", 1)])
def test_norms(norm, dtype, depth):
    if norm.kind == "layer" and depth == 1:
        norm = replace(norm, epsilon=1.0)
    hold(Spec((7,), depth, dtype, (plain(17),), norm, bias=True))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("mean", [0.0, 3.0, 7.0, 30.0, 1000.0])
def test_mean_of_rows_takes_no_part_in_sums_of_centred_weights(mean, rows):
    """A layer norm as a factor of the sums: rows stay where they are, also rows far from 0, and rows of one value."""
    spec = Spec((rows,), 64, "float32", (plain(170),), replace(LAYER, epsilon=1e-5, centred=True), bias=True)
    mod, names, _ = build(spec, HOST, 1, ("in_out",))
    assert names == ["x", "W.0", "b.0"]
    given = operands(spec, {})
    given["x"] = (given["x"] + mean).astype("float32")
    given["x"][rows // 2] = np.float32(mean)
    given["W"] = (given["W"] - given["W"].mean(0, dtype="float64")).astype("float32")
    (want,) = reference(spec, given)
    machine = relax.VirtualMachine(tvm.compile(mod, target=HOST), tvm.cpu())
    got = machine["main"](*map(tvm.runtime.tensor, (given["x"], given["W"], given["b"][None]))).numpy()
    assert worst_error(want.astype("float32"), got) <= REASSOCIATES.bound("float32")


@pytest.mark.parametrize(("activation", "lanes"), [("", 1), ("silu", 8), ("gelu", 19), ("relu", 40)])
def test_gates(activation, lanes):
    hold(Spec((3,), 12, "float32", (plain(lanes, first=lanes, gate=0, activation=activation),), bias=True))
    hold(Spec((3,), 12, "float32", (plain(lanes, first=0, gate=lanes, activation=activation, residual=(LANE,)),)))


def turning(convention, dim, half, lanes, dims, table, heads=3, **kwargs):
    return Output(dims, (heads,), lanes, 0, (lanes,), rotary=Rotary(convention, dim, table, table, half), **kwargs)


@pytest.mark.parametrize("convention", ["half-split", "interleaved"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "lanes"), [(2, 2), (16, 20), (6, 13), (64, 80)])
def test_rotations(convention, half, dim, lanes):
    dims = (("head", 0), ("row", 0), LANE)
    hold(Spec((5,), 12, "float32", (turning(convention, dim, half, lanes, dims, (("row", 0), LANE)),)))


@pytest.mark.parametrize("table", [(LANE,), (UNIT, LANE), (("row", 0), UNIT, LANE), (("row", 0), ("head", 0), LANE)])
def test_tables_follow_any_axes(table):
    dims = (("row", 0), ("head", 0), LANE)
    output = turning("half-split", 8, False, 8, dims, table, activation="tanh", scale=3.0, residual=dims)
    hold(Spec((5,), 12, "float16", (output,), replace(RMS, weight=True), bias=True))


@pytest.mark.parametrize("norm", [RMS, replace(RMS, weight=True), replace(LAYER, weight=True, bias=True)])
@pytest.mark.parametrize(("lanes", "dim", "convention"), [(1, 0, ""), (20, 8, "half-split"), (67, 66, "interleaved")])
def test_norms_of_heads(norm, lanes, dim, convention):
    """A head's lanes are normed before they turn; what stands beside them is not."""
    dims, table = (("head", 0), ("row", 0), LANE), (("row", 0), LANE)
    rotary = Rotary(convention, dim, table, table) if dim else None
    norm = replace(norm, epsilon=1.0) if lanes == 1 else norm
    query = Output(dims, (3,), lanes, 0, (lanes,), scale=0.5, norm=norm, rotary=rotary, residual=dims)
    key = Output(dims, (2,), lanes, 3 * lanes, (lanes,), norm=replace(norm, weight=False, bias=False))
    value = Output((("row", 0), LANE), (), 2 * lanes, 3 * lanes)
    for outputs in ((query, key, value), (value, query), (key,)):
        hold(Spec((N,), 12, "float32", outputs, bias=True), [{N: n} for n in (0, 1, 5, 13)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norms_of_heads_behind_a_norm_of_rows(dtype):
    output = Output((("row", 0), ("head", 0), LANE), (2,), 16, 0, (16,), norm=replace(RMS, weight=True))
    hold(Spec((9,), 40, dtype, (output,), replace(LAYER, weight=True)))


@pytest.mark.parametrize("convention", ["half-split", "interleaved"])
@pytest.mark.parametrize(("heads", "dim", "lanes"), [((), 2, 2), ((), 32, 35), ((3,), 4, 4), ((2, 3), 6, 9)])
@pytest.mark.parametrize("half", [False, True])
def test_rows_turn_before_they_are_summed(convention, heads, dim, lanes, half):
    strides = tuple(lanes * math.prod(heads[i + 1 :]) for i in range(len(heads)))
    table = (("row", 0), LANE)
    turn = Turn(Rotary(convention, dim, table, table, half), heads, strides, lanes)
    hold(Spec((5,), math.prod(heads) * lanes, "float32", (plain(19),), turn=turn))


@pytest.mark.parametrize("norm", [None, RMS, replace(RMS, weight=True), replace(LAYER, weight=True, bias=True)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("table", [(LANE,), (("row", 1), LANE), (("row", 0), ("row", 1), ("head", 0), LANE)])
def test_rows_are_normed_before_they_turn(norm, dtype, table):
    turn = Turn(Rotary("half-split", 6, table, table), (2,), (8,), 8)
    spec = Spec((2, N), 16, dtype, (plain(7, 2, activation="silu", gate=7),), norm, True, turn)
    hold(spec, [{N: n} for n in (0, 1, 3)])


ROW2 = (("row", 0), ("row", 1), LANE)


@pytest.mark.parametrize("residual", [ROW2, (("row", 1), LANE), (LANE,), (UNIT, ("row", 1), UNIT), (UNIT,), ()])
def test_residuals_broadcast(residual):
    hold(Spec((2, 3), 12, "float32", (plain(19, 2, residual=residual),)))


@pytest.mark.parametrize(
    "dims",
    [
        (("row", 0), ("row", 1), ("head", 0), LANE),
        (("row", 0), ("head", 0), ("row", 1), LANE),
        (("head", 0), ("row", 1), ("row", 0), LANE),
        (UNIT, ("row", 0), UNIT, ("head", 0), ("row", 1), LANE),
    ],
)
def test_heads_in_any_place(dims):
    hold(Spec((2, 3), 12, "float32", (Output(dims, (4,), 5, 1, (5,), residual=(("head", 0), UNIT, LANE)),)))


def test_heads_of_two_axes_with_gaps():
    """Two axes of heads that run over W in another order, with columns between that nobody takes."""
    dims = (("head", 1), ("row", 0), ("head", 0), LANE)
    hold(Spec((3,), 8, "float32", (Output(dims, (2, 3), 4, 5, (6, 20)),)))


def test_several_results_of_different_kinds():
    heads = (("head", 0), ("row", 0), LANE)
    outputs = (
        turning("half-split", 8, False, 8, heads, (("row", 0), LANE), heads=4),
        replace(turning("interleaved", 4, True, 8, heads, (LANE,), heads=2), first=32),
        Output(heads, (2,), 8, 48, (8,)),
        plain(11, first=64, gate=75, activation="silu", residual=(("row", 0), LANE)),
    )
    spec = Spec((N,), 20, "float32", outputs, replace(LAYER, weight=True, bias=True), bias=True)
    hold(spec, [{N: n} for n in (0, 1, 2, 5, 6, 7, 64)], splits=5, layouts=("in_out", "out_in"))


def test_an_axis_of_one_row_is_named_by_nothing():
    dims = (UNIT, ("head", 0), ("row", 1), LANE)
    hold(Spec((1, 5), 8, "float32", (Output(dims, (3,), 4, 0, (4,), residual=(("row", 1), LANE)),)))


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, RMS, replace(RMS, weight=True)])
def test_any_number_of_rows_at_run_time(norm):
    spec = Spec((N,), 24, "float32", (plain(33, activation="silu"),), norm, bias=True)
    hold(spec, [{N: n} for n in (*range(14), 31, 64, 257)])


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3), (1, 1), (6,), (7,), (13,), (2, 3, 5), (197,)])
def test_rows_of_any_rank(rows):
    dims = tuple(("row", i) for i in range(len(rows)))
    hold(Spec(rows, 16, "float32", (Output((*dims, LANE), (), 24, residual=(*dims, LANE)),), RMS))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_one_row_of_many_columns(dtype):
    """Neighbouring groups are summed at the same time; the last of them are not as many as the others."""
    row = (("row", 0), LANE)
    outputs = (
        turning("half-split", 16, False, 24, (("row", 0), ("head", 0), LANE), (("row", 0), UNIT, LANE), heads=9),
        plain(131, first=216, gate=347, activation="silu", residual=row),
        plain(61, first=478, scale=0.5),
    )
    spec = Spec((1,), 40, dtype, outputs, RMS, bias=True)
    cut = plan(spec, Machine.of(HOST))
    assert cut.abreast > 1 and (cut.groups % cut.abreast or dtype == "float64")
    hold(spec, splits=2)
    hold(replace(spec, outputs=(plain(512),), norm=replace(LAYER, weight=True)))


@pytest.mark.parametrize(
    ("splits", "layouts"),
    [(1, ("out_in",)), (3, ("in_out",)), (4, ("in_out", "out_in")), (3, ("out_in", "in_out", "in_out"))],
)
def test_layers_side_by_side_in_both_layouts(layouts, splits):
    hold(
        Spec((3,), 10, "float32", (plain(23, first=3), plain(9, first=26, activation="relu")), bias=True),
        ({},),
        splits,
        layouts,
    )


@st.composite
def specs(draw):
    """Any spec, and sizes to run it at."""
    sizes = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 17, 33])
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "float64"]))
    rows = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 13]), max_size=3)))
    dynamic = bool(rows) and draw(st.booleans())
    if dynamic:
        rows = (N, *rows[1:])
    depth = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 17, 31, 40, 96]))
    norm = draw(st.sampled_from([None, RMS, LAYER]))
    if norm is not None:
        norm = replace(norm, weight=draw(st.booleans()), bias=norm.kind == "layer" and draw(st.booleans()), epsilon=0.5)
    outputs, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        heads = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
        lanes = draw(sizes)
        strides = tuple(lanes * math.prod(heads[i + 1 :]) for i in range(len(heads)))
        axes = draw(
            st.permutations([*(("row", i) for i in range(len(rows))), *(("head", i) for i in range(len(heads)))])
        )
        dims = [*axes, LANE]
        width = lanes * math.prod(heads)

        def follows(keep, dims=dims):
            return tuple(d if draw(st.booleans()) or d == keep else UNIT for d in dims)

        rotary, kind = None, draw(st.sampled_from(["", "rotary", "gate"]))
        if kind == "rotary" and lanes > 1:
            dim = 2 * draw(st.integers(1, lanes // 2))
            convention = draw(st.sampled_from(["half-split", "interleaved"]))
            rotary = Rotary(convention, dim, follows(LANE), follows(LANE), draw(st.booleans()))
        outputs.append(
            Output(
                tuple(dims),
                heads,
                lanes,
                first,
                strides,
                first + width if kind == "gate" else None,
                draw(st.sampled_from(list(ACTIVATIONS))),
                draw(st.sampled_from([1.0, 0.125])),
                rotary=rotary,
                residual=follows(None) if draw(st.booleans()) else None,
            )
        )
        first += width * (2 if kind == "gate" else 1)
    spec = Spec(rows, depth, dtype, tuple(outputs), norm, draw(st.booleans()))
    return spec, [{N: n} for n in (0, 1, 4, 11)] if dynamic else [{}], draw(st.integers(1, 3))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(specs())
def test_property_any_spec(case):
    spec, sizes, splits = case
    hold(spec, sizes, min(splits, columns_of(spec)), ("in_out", "out_in"))


@pytest.mark.aarch64
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_neon_under_emulation(dtype):
    """A row of its own, and a symbolic number of rows, with all steps; on an emulated Cortex-A76."""
    target = get_target("rk3588")
    heads = (("head", 0), ("row", 0), LANE)
    outputs = (
        turning("half-split", 16, False, 24, heads, (("row", 0), LANE), heads=4),
        plain(37, first=96, gate=133, activation="silu", residual=(("row", 0), LANE)),
        plain(30, first=170, activation="gelu", scale=0.5),
    )
    for rows, norm, sizes in ((N, replace(LAYER, weight=True, bias=True), (0, 1, 6, 9)), (1, RMS, (1,))):
        spec = Spec((rows,), 20, dtype, outputs, norm, bias=True)
        mod, names, bounds = build(spec, target.tvm_target())
        given = [operands(spec, {N: n}) for n in sizes]
        shapes = [[str(d) if isinstance(d, tirx.Var) else d for d in spec.shape(o.dims, o)] for o in outputs]
        results = tuple(TensorSpec(f"y{i}", tuple(shape), dtype) for i, shape in enumerate(shapes))
        model = as_model(mod)
        model = replace(model, entries={"main": replace(model.entries["main"], outputs=results)})
        found = BundleExecutor(target)(
            model, [Call("main", tuple(arguments(g, names, bounds, ("in_out",)))) for g in given]
        )
        for got, arrays in zip(found, given, strict=True):
            for result, want in zip(got, reference(spec, arrays), strict=True):
                assert worst_error(want.astype(dtype), np.asarray(result)) <= REASSOCIATES.bound(dtype)


# The code that comes out ---------------------------------------------------------------------------------------------


def text(spec, target=HOST):
    return kernel(spec, Machine.of(target)).script()


def test_small_work_wakes_no_threads_and_large_work_does():
    def parallel(rows, depth, columns):
        return "T.parallel" in text(Spec((rows,), depth, "float32", (plain(columns),)))

    assert not parallel(1, 384, 128) and not parallel(1, 576, 384) and not parallel(0, 384, 384)
    assert parallel(1, 576, 49152) and parallel(64, 384, 384) and parallel(4096, 384, 16)
    narrow = plan(Spec((4096,), 384, "float32", (plain(16),)), Machine.of(HOST))
    assert -(-4096 // narrow.chunk) * narrow.units >= 8, "threads share rows where there are few columns"


@pytest.mark.parametrize("machine", [Machine(16, 16), Machine(16, 32), Machine(32, 16), Machine(64, 32)])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 6, 7, 13, 17, 36, 197, 512, None])
def test_a_tile_fits_the_registers_and_the_rows(machine, rows):
    spec = Spec((N if rows is None else rows,), 384, "float32", (plain(1536),))
    cut = plan(spec, machine)
    for height in (cut.height, *cut.rests):
        sums = height * cut.partial(height) * cut.registers
        assert sums + cut.registers + 1 <= machine.registers
        assert sums >= 8 or height < cut.height or cut.partial(height) > 1 or cut.registers * height >= 8
    if rows:
        tiles, rest = divmod(rows, cut.height)
        assert (rest,) == (cut.rests or (0,)) and cut.chunk % cut.height == 0
        chunks = -(-rows // cut.chunk)
        assert rows / chunks > cut.chunk - cut.height * 2, "chunks are even"
        assert tiles or rest


def test_equal_kernels_are_equal_and_a_layer_compiles_in_seconds():
    spec = Spec((N,), 576, "float32", (plain(1536, gate=1536, activation="silu"),), RMS)
    other = kernel(replace(spec, rows=(tirx.Var("m", "int64"),)), Machine.of(HOST))
    tvm.ir.assert_structural_equal(kernel(spec, Machine.of(HOST)), other)
    assert kernel(replace(spec), Machine.of(HOST)) is kernel(spec, Machine.of(HOST)), "written once"
    start = time.process_time()
    tvm.compile(tvm.ir.IRModule({"kernel": kernel(spec, Machine.of(HOST)).with_attr("global_symbol", "k")}), HOST)
    assert time.process_time() - start < 10
