"""Attention kernels against numpy in float64: masks, layouts, groups, sizes of every kind, types, machines."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from crossloom.numerics import worst_error
from crossloom.schedules.attention import Axis, Operand, Spec, few_queries, kernel, plan
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target

AVX2, NEON, AVX512, SCALAR = Machine(32, 16), Machine(16, 32), Machine(64, 32), Machine(4, 16)
BOUNDS = {"float32": 1e-5, "float64": 1e-13, "float16": 2e-3}


def softmax(s):
    """Return weights over the last axis; a row of -inf gives NaN, no key gives nothing."""
    with np.errstate(invalid="ignore"):
        e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        return e / e.sum(-1, keepdims=True)


def reference(
    q,
    k,
    v,
    scale,
    *,
    hide=None,
    fill=-np.inf,
    add=None,
    bias=None,
    inside=False,
    causal=None,
    window=None,
    zero=False,
):
    """Attention over (batch, heads, seq, dim), written from its definition."""
    q, k, v = (x.astype("float64") for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = scale * (q @ k.swapaxes(-1, -2))
    extra = 0.0 if bias is None else bias.astype("float64")
    if add is not None:
        s = s + add.astype("float64")
    if hide is not None:
        s = np.where(hide, fill, s + extra) if inside else np.where(hide, fill, s) + extra
    else:
        s = s + extra
    if causal is not None:
        ahead = np.arange(s.shape[-1]) - np.arange(s.shape[-2])[:, None] - causal
        s = np.where(ahead > 0, -np.inf, s)
        s = s if window is None else np.where(ahead <= -window, -np.inf, s)
    weights = softmax(s)
    if zero:
        weights = np.where(np.isneginf(s).all(-1, keepdims=True), 0.0, weights)
    return weights @ v


@dataclass(frozen=True)
class Problem:
    """Sizes of an attention; ``keys`` by part."""

    batch: int = 1
    heads: int = 2
    groups: int = 1
    queries: int = 5
    keys: tuple = (7,)
    lanes: int = 8
    value_lanes: int = 8
    dtype: str = "float32"
    layouts: tuple = ("bhsd",) * 4

    def shape(self, layout, heads, length, lanes):
        return tuple({"b": self.batch, "h": heads, "n": self.batch * heads, "s": length, "d": lanes}[c] for c in layout)

    @property
    def shapes(self):
        """(q, all k, all v, out)."""
        every, q, k, v, o = self.heads * self.groups, *self.layouts
        return (
            self.shape(q, every, self.queries, self.lanes),
            *(self.shape(k, self.heads, n, self.lanes) for n in self.keys),
            *(self.shape(v, self.heads, n, self.value_lanes) for n in self.keys),
            self.shape(o, every, self.queries, self.value_lanes),
        )

    def operand(self, layout, shape, dtype=None, of_query=False):
        group = (("group", 1),) if of_query and self.groups > 1 else ()
        head = (("head", self.groups), *group) if of_query else (("head", 1),)
        count = self.heads * (self.groups if of_query else 1)
        axes = {
            "b": Axis((("batch", 1),)),
            "h": Axis(head),
            "n": Axis((("batch", count), *head)),
            "s": Axis((("query" if of_query else "key", 1),)),
            "d": Axis((("lane", 1),)),
        }
        return Operand(tuple(shape), tuple(axes[c] for c in layout), dtype or self.dtype)

    def spec(self, **options):
        q, *kv, out = self.shapes
        n = len(self.keys)
        return Spec(
            self.batch,
            self.heads,
            self.groups,
            self.queries,
            self.keys,
            self.lanes,
            self.value_lanes,
            options.pop("scale", 1 / math.sqrt(self.lanes)),
            self.operand(self.layouts[0], q, of_query=True),
            tuple(self.operand(self.layouts[1], s) for s in kv[:n]),
            tuple(self.operand(self.layouts[2], s) for s in kv[n:]),
            self.operand(self.layouts[3], out, of_query=True),
            **options,
        )

    def plain(self, arrays):
        """Return q, k, v as (batch, heads, seq, dim), parts joined."""
        n = len(self.keys)
        q = straight(arrays[0], self.layouts[0], self.batch)
        k = np.concatenate([straight(x, self.layouts[1], self.batch) for x in arrays[1 : 1 + n]], 2)
        v = np.concatenate([straight(x, self.layouts[2], self.batch) for x in arrays[1 + n :]], 2)
        return q, k, v

    def mask(self, shape, dtype="float32"):
        """Return the operand of a mask over (batch, query heads, queries, keys), 1 where it is the same for all."""
        head = (("head", self.groups), ("group", 1)) if self.groups > 1 else (("head", 1),)
        axes = (Axis((("batch", 1),)), Axis(head), Axis((("query", 1),)), Axis((("key", 1),)))
        return Operand(tuple(shape), tuple(Axis() if n == 1 else a for n, a in zip(shape, axes)), dtype)


def straight(x, layout, batch):
    if "n" in layout:
        x = x.reshape(batch, -1, *x.shape[1:])
        layout = "bh" + layout[1:]
    return x.transpose([layout.index(c) for c in "bhsd"])


@functools.cache
def host():
    return get_target("host").tvm_target()


def run(spec, arrays, shape, machine=AVX2):
    """Build a kernel, run it over a result full of rubbish, and return the result."""
    func = kernel(spec, machine).with_attr("global_symbol", "attend")
    built = tvm.tirx.build(tvm.IRModule({"attend": func}), target=host())
    out = tvm.runtime.tensor(np.full(shape, 77.0, spec.out.dtype))
    built["attend"](*(tvm.runtime.tensor(np.asarray(x, order="C")) for x in arrays), out)
    return out.numpy()


def draw_arrays(problem, seed=0, factor=1.0):
    rng = np.random.default_rng(seed)
    return [(factor * rng.standard_normal(s)).astype(problem.dtype) for s in problem.shapes[:-1]]


def check(problem, machine=AVX2, bound=None, arrays=None, added=(), want=None, **options):
    """Hold a kernel against the reference; ``want`` are the reference's own options."""
    arrays = draw_arrays(problem) if arrays is None else arrays
    spec = problem.spec(**options)
    got = straight(run(spec, [*arrays, *added], problem.shapes[-1], machine), problem.layouts[3], problem.batch)
    expected = reference(*problem.plain(arrays), spec.scale, **(want or {}))
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)
    error = worst_error(expected[known], got.astype("float64")[known])
    assert error <= (bound or BOUNDS[problem.dtype]), f"{error:.1e} off in mode {plan(spec, machine).mode}"
    return spec


# sizes and layouts

LAYOUTS = [
    ("bhsd",) * 4,
    ("bshd",) * 4,
    ("nsd",) * 4,
    ("bhsd", "bhds", "bhsd", "bshd"),
    ("bshd", "bshd", "bhds", "bhsd"),
    ("nsd", "nds", "nds", "nsd"),
]


@st.composite
def problems(draw):
    sizes = st.sampled_from([1, 2, 3, 7, 16, 17, 33])
    keys = tuple(draw(st.lists(st.sampled_from([1, 3, 8, 64, 67, 131]), min_size=1, max_size=2)))
    lanes = st.sampled_from([1, 2, 5, 8, 13, 16, 24])
    return Problem(
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([1, 2, 5])),
        draw(sizes),
        keys,
        draw(lanes),
        draw(lanes),
        draw(st.sampled_from(["float32", "float32", "float16", "float64"])),
        draw(st.sampled_from(LAYOUTS)),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([AVX2, NEON, AVX512, SCALAR]), st.sampled_from([None, 0, 2, 40]))
def test_sizes_layouts_types_and_machines(problem, machine, causal):
    check(problem, machine, want={"causal": causal}, causal=causal)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("machine", [AVX2, NEON, AVX512])
def test_both_shapes_of_work_at_a_decoders_sizes(queries, machine):
    spec = check(Problem(1, 3, 3, queries, (255, 1), 64, 64), machine)
    assert plan(spec, machine).mode == ("rows" if queries == 1 else "tiles")


@pytest.mark.parametrize("keys", [(5,), (64,), (131, 3)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_query_and_a_cache_that_is_handed_over_transposed(keys, groups, dtype):
    """Registers of keys, and what fills none: few keys, the end of a block, an element of a value alone."""
    problem = Problem(1, 2, groups, 1, keys, 16, 13, dtype, ("bhsd", "bhds", "bhds", "bhsd"))
    spec = check(problem)
    assert plan(spec, AVX2).mode == "rows"


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("keys", [(0,), (0, 0), (0, 3), (3, 0)])
def test_parts_without_keys(queries, keys):
    """The sum of nothing is zero, as a product over no key is."""
    check(Problem(queries=queries, keys=keys), want=None) if sum(keys) else check_zero(
        Problem(queries=queries, keys=keys)
    )


def check_zero(problem):
    for zero in (False, True):
        got = run(problem.spec(zero_empty_rows=zero), draw_arrays(problem), problem.shapes[-1])
        assert got.size and not got.any()


@pytest.mark.parametrize("change", [{"queries": 0}, {"heads": 0}, {"batch": 0}])
@pytest.mark.parametrize("queries", [1, 20])
def test_nothing_to_do(change, queries):
    problem = replace(Problem(queries=queries), **change)
    assert run(problem.spec(), draw_arrays(problem), problem.shapes[-1]).size == 0


SYMBOLIC = [(1, 1), (20, 1), (0, 5), (3, 0), (1, 67), (2, 67), (33, 70)]


@pytest.mark.parametrize("causal", [False, True])
def test_symbolic_queries_and_keys(causal):
    n, m = (tirx.Var(name, "int64") for name in "nm")
    spec = Problem(2, 2, 3, n, (m,), 16, 16).spec(causal=m - n if causal else None)
    func = kernel(spec, AVX2).with_attr("global_symbol", "attend")
    built = tvm.tirx.build(tvm.IRModule({"attend": func}), target=host())
    for queries, keys in SYMBOLIC:
        if causal and keys < queries:
            continue
        problem = Problem(2, 2, 3, queries, (keys,), 16, 16)
        arrays = draw_arrays(problem)
        out = tvm.runtime.tensor(np.full(problem.shapes[-1], 77.0, "float32"))
        built["attend"](*map(tvm.runtime.tensor, arrays), out)
        want = reference(*problem.plain(arrays), spec.scale, causal=keys - queries if causal else None)
        want = want if keys else np.zeros_like(want)
        assert worst_error(want, out.numpy().astype("float64")) < 1e-5


@pytest.mark.parametrize("groups", [1, 3])
def test_one_query_and_symbolic_keys_in_two_places(groups):
    p = tirx.Var("p", "int64")
    problem = Problem(1, 2, groups, 1, (p, 1), 16, 16)
    func = kernel(problem.spec(), AVX2).with_attr("global_symbol", "attend")
    built = tvm.tirx.build(tvm.IRModule({"attend": func}), target=host())
    for past in (0, 1, 7, 128, 300):
        sized = replace(problem, keys=(past, 1))
        arrays = draw_arrays(sized)
        out = tvm.runtime.tensor(np.full(sized.shapes[-1], 77.0, "float32"))
        built["attend"](*map(tvm.runtime.tensor, arrays), out)
        assert worst_error(reference(*sized.plain(arrays), 0.25), out.numpy().astype("float64")) < 1e-5


def test_operands_that_are_parts_of_a_tensor():
    """q, k and v out of one product, a layer's cache out of a stack of them, heads side by side in the result."""
    rng = np.random.default_rng(0)
    packed, stack = (rng.standard_normal(s).astype("float32") for s in ((1, 6, 3 * 2 * 8), (4, 1, 2, 9, 8)))

    def columns(first, role):
        return Operand(packed.shape, (Axis(), Axis(((role, 1),)), Axis((("head", 8), ("lane", 1)), first)), "float32")

    past = Operand(
        stack.shape,
        (Axis((("layer", 1),)), Axis(), Axis((("head", 1),)), Axis((("key", 1),)), Axis((("lane", 1),))),
        "float32",
    )
    out = Operand((1, 6, 16), (Axis(), Axis((("query", 1),)), Axis((("head", 8), ("lane", 1)))), "float32")
    spec = Spec(
        1,
        2,
        1,
        6,
        (9, 6),
        8,
        8,
        0.5,
        columns(0, "query"),
        (past, columns(16, "key")),
        (past, columns(32, "key")),
        out,
        layered=True,
    )
    got = run(spec, [packed, stack, packed, stack, packed, np.array(2)], (1, 6, 16))
    q, k, v = (x.reshape(1, 6, 2, 8).transpose(0, 2, 1, 3) for x in np.split(packed, 3, 2))
    k, v = (np.concatenate([stack[2], x], 2) for x in (k, v))
    assert worst_error(reference(q, k, v, 0.5).transpose(0, 2, 1, 3).reshape(1, 6, 16), got.astype("float64")) < 1e-5


# masks


def wide(problem):
    return (problem.batch, problem.heads * problem.groups, problem.queries, sum(problem.keys))


@st.composite
def broadcast(draw, shape):
    return tuple(n if draw(st.booleans()) else 1 for n in shape)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_masks_and_biases(data):
    draw = data.draw
    problem = Problem(
        draw(st.sampled_from([1, 2])),
        2,
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([1, 6, 19])),
        draw(st.sampled_from([(1,), (9,), (70,), (66, 5)])),
        16,
        draw(st.sampled_from([8, 16])),
        draw(st.sampled_from(["float32", "float16"])),
    )
    form = draw(st.sampled_from(["add", "keep", "drop"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = draw(broadcast(wide(problem)))
    options, want, added = {"form": form}, {}, []
    if form == "add":
        mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)).astype(problem.dtype)
        want["add"] = mask
    else:
        mask = rng.random(shape) < 0.4
        options["fill"] = want["fill"] = draw(st.sampled_from([-np.inf, -2.0, -1e4]))
        want["hide"] = mask if form == "drop" else ~mask
    options["mask"] = problem.mask(shape, str(mask.dtype))
    added.append(mask)
    if draw(st.booleans()):
        shape = draw(broadcast(wide(problem)))
        bias = rng.standard_normal(shape).astype(problem.dtype)
        options["bias"], want["bias"] = problem.mask(shape, problem.dtype), bias
        options["bias_inside"] = want["inside"] = draw(st.booleans())
        added.append(bias)
    options["zero_empty_rows"] = want["zero"] = draw(st.booleans())
    # A score of -1e4 takes float32's last digits from what is added to it.
    bound = 5e-3 if want.get("fill") == -1e4 and "bias" in want else None
    check(problem, draw(st.sampled_from([AVX2, NEON, AVX512])), bound, added=added, want=want, **options)


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("keys", [(5,), (140,), (70, 3)])
def test_rows_without_a_key(queries, zero, keys):
    """Nothing but -inf: zero, or not a number; a first block of nothing but -inf leaves no trace in the others."""
    problem = Problem(queries=queries, keys=keys, lanes=16, value_lanes=16)
    mask = np.zeros((1, 1, queries, sum(keys)), "float32")
    mask[..., :-1] = -np.inf
    mask[:, :, ::2] = -np.inf
    check(
        problem,
        added=[mask],
        want={"add": mask, "zero": zero},
        mask=problem.mask(mask.shape),
        zero_empty_rows=zero,
    )


@pytest.mark.parametrize("queries", [1, 20])
def test_causal_rows_that_see_nothing(queries):
    """An offset below zero leaves the first queries without a key."""
    problem = Problem(queries=queries, keys=(queries,), lanes=16, value_lanes=16)
    check(problem, want={"causal": -1, "zero": True}, causal=-1, zero_empty_rows=True)
    check(problem, want={"causal": -1}, causal=-1)


@pytest.mark.parametrize("queries", [1, 20])
def test_a_finite_mask_over_every_key_hides_none(queries):
    """Each score is the type's least number: equal weights, as softmax gives."""
    problem = Problem(queries=queries, keys=(70,), lanes=16, value_lanes=16)
    mask = np.full((1, 1, queries, 70), np.finfo("float32").min)
    check(problem, added=[mask], want={"add": mask}, mask=problem.mask(mask.shape))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_huge_scores_do_not_overflow(queries, sign, dtype):
    """Scores of +-1e4, far from those of other keys, and growing from block to block."""
    problem = Problem(queries=queries, keys=(140,), lanes=16, value_lanes=16, dtype=dtype)
    q, k, v = draw_arrays(problem)
    q[:] = 25.0
    k[:] = sign * np.linspace(0.5, 1.0, 140)[:, None] * 25.0
    k[..., 77, :] = -sign * 25.0
    check(problem, arrays=[q, k, v], scale=1.0)


@pytest.mark.parametrize("queries", [1, 20])
def test_what_is_not_a_number_stays_in_its_row(queries):
    problem = Problem(queries=queries, keys=(70,), lanes=16, value_lanes=16)
    q, k, v = draw_arrays(problem)
    q[0, 1, 0, 3] = np.nan
    check(problem, arrays=[q, k, v])


def test_half_precision_accumulates_in_float32():
    """A sum of 4096 ones, which float16 cannot count."""
    problem = Problem(1, 1, 1, 20, (4096,), 16, 16, "float16")
    q, k, v = draw_arrays(problem)
    k[:] = 0
    v[:] = 1
    got = run(problem.spec(), [q, k, v], problem.shapes[-1])
    assert np.array_equal(got, np.ones_like(got))


# windows


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_windows(data):
    """Of keys in one or several parts, those that a query sees, at their edges and where they end within a block."""
    draw = data.draw
    problem = Problem(
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([1, 2, 5, 19, 150])),
        draw(st.sampled_from([(1,), (9,), (150,), (300,), (66, 5), (130, 150), (3, 140, 10)])),
        draw(st.sampled_from([8, 13, 16])),
        16,
        draw(st.sampled_from(["float32", "float32", "float16"])),
        draw(st.sampled_from(LAYOUTS)),
    )
    causal = draw(st.sampled_from([-2, 0, 1, 64, sum(problem.keys) - problem.queries]))
    window = draw(st.sampled_from([1, 2, 7, 16, 130, 1000]))
    options = {"causal": causal, "window": window}
    zero = draw(st.booleans())
    machine = draw(st.sampled_from([AVX2, NEON, AVX512, SCALAR]))
    check(problem, machine, want={**options, "zero": zero}, zero_empty_rows=zero, **options)


@pytest.mark.parametrize("bias", [False, True])
def test_a_window_beside_a_mask_and_a_bias(bias):
    problem = Problem(2, 2, 3, 40, (70,), 16, 16)
    mask = np.random.default_rng(0).standard_normal((2, 6, 40, 70)).astype("float32")
    options = {"bias" if bias else "mask": problem.mask(mask.shape), "causal": 30, "window": 12}
    check(problem, added=[mask], want={"bias": mask, "causal": 30, "window": 12}, **options)


def test_a_window_over_symbolic_lengths():
    n, m = (tirx.Var(name, "int64") for name in "nm")
    spec = Problem(1, 2, 3, n, (m, n), 16, 16).spec(causal=m, window=20)
    func = kernel(spec, AVX2).with_attr("global_symbol", "attend")
    built = tvm.tirx.build(tvm.IRModule({"attend": func}), target=host())
    for queries, past in ((1, 0), (1, 5), (1, 300), (2, 40), (40, 0), (33, 300)):
        problem = Problem(1, 2, 3, queries, (past, queries), 16, 16)
        arrays = draw_arrays(problem)
        out = tvm.runtime.tensor(np.full(problem.shapes[-1], 77.0, "float32"))
        built["attend"](*map(tvm.runtime.tensor, arrays), out)
        want = reference(*problem.plain(arrays), spec.scale, causal=past, window=20)
        assert worst_error(want, out.numpy().astype("float64")) < 1e-5


@pytest.mark.parametrize("queries", [1, 1024])
def test_work_falls_with_the_window(queries):
    """Keys behind the window are not even read: what is not a number there would show."""
    problem = Problem(1, 1, 1, queries, (1024,), 16, 16)
    q, k, v = draw_arrays(problem)
    machine = Machine.of(host())
    options = {"causal": 1024 - queries, "window": 128}
    if queries == 1:
        k[:, :, :800], v[:, :, :800] = np.nan, np.nan
        got = run(problem.spec(**options), [q, k, v], problem.shapes[-1], machine)
        assert np.isfinite(got).all()
        return
    tensors = [tvm.runtime.tensor(x) for x in (q, k, v, np.zeros(problem.shapes[-1], "float32"))]
    times = []
    for spec in (problem.spec(causal=0), problem.spec(causal=0, window=128)):
        func = kernel(spec, machine).with_attr("global_symbol", "attend")
        built = tvm.tirx.build(tvm.IRModule({"attend": func}), target=host())
        times.append(min(built.time_evaluator("attend", tvm.cpu(), number=3, repeat=5)(*tensors).results))
    assert times[0] > 2 * times[1]


# the cut


def test_few_rows_are_done_one_by_one_and_many_together():
    decode, prefill = Problem(1, 3, 3, 1, (256,), 64, 64).spec(), Problem(1, 3, 3, 64, (64,), 64, 64).spec()
    for machine in (AVX2, NEON, AVX512):
        assert (plan(decode, machine).mode, plan(prefill, machine).mode) == ("rows", "tiles")


def test_a_symbolic_number_of_queries_takes_either_shape_of_work():
    """One query is always few; with 64 elements a head a tile pays from ten or twenty rows on."""
    n = tirx.Var("n", "int64")
    for machine in (AVX2, NEON, AVX512):
        for groups in (1, 3):
            few = few_queries(Problem(1, 3, groups, n, (256,), 64, 64).spec(), machine)
            assert few.cut.mode == "rows" and few.cut.width == groups and 1 <= few.most < 20
            assert plan(Problem(1, 3, groups, n, (256,), 64, 64).spec(), machine).mode == "tiles"
    assert few_queries(Problem(1, 3, 1, 1, (256,), 64, 64).spec(), AVX2) is None
    assert few_queries(Problem(1, 1, 32, n, (256,), 8, 8).spec(), AVX2) is None


def test_work_that_is_too_small_stays_on_one_thread():
    assert not plan(Problem().spec(), AVX2).parallel
    assert plan(Problem(1, 6, 1, 197, (197,), 64, 64).spec(), AVX2).parallel


@pytest.mark.parametrize("machine", [AVX2, NEON, AVX512, SCALAR])
def test_tiles_fit_the_registers(machine):
    for queries in (1, 5, 16, 197):
        cut = plan(Problem(1, 6, 1, queries, (197,), 64, 64).spec(), machine)
        assert cut.block % cut.height == 0
        if cut.mode == "tiles":
            vectors = cut.width // cut.lanes
            assert (cut.height + 1) * vectors + 1 <= machine.registers
