"""The feed-forward kernel against numpy in float64: every step, chunks of every size, rows of every number."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.schedules.feed_forward import CHUNK_BYTES, FeedForward, chunk_bytes, cut, kernel
from crossloom.schedules.fused_linear import Norm, Output, Rotary, Spec, Turn, pack_bias, pack_weights
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target

HOST = get_target("host").tvm_target()
MACHINE = Machine.of(HOST)
LANE = ("lane", 0)
N = tirx.Var("n", "int64")
KINDS = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2,
}
RMS = Norm("rms", 1e-3, weight=True)
LAYER = Norm("layer", 1e-3, weight=True, bias=True)


@dataclass(frozen=True)
class Form:
    """A block in the words of a model; ``rows`` are leading axes."""

    rows: tuple = (5,)
    depth: int = 12
    hidden: int = 19
    width: int = 12
    dtype: str = "float32"
    kind: str = "gelu"
    gated: bool = False
    biased: bool = True
    norm: Norm | None = None
    between: Norm | None = None
    turned: bool = False
    residual: bool = False

    @property
    def spec(self):
        dims = (*(("row", i) for i in range(len(self.rows))), LANE)
        first = Output(dims, (), self.hidden, gate=self.hidden if self.gated else None, activation=self.kind)
        second = Output(dims, (), self.width, residual=dims if self.residual else None)
        table = (("row", len(self.rows) - 1), LANE)
        turn = Turn(Rotary("half-split", self.depth, table, table), (), (), self.depth) if self.turned else None
        return FeedForward(
            Spec(self.rows, self.depth, self.dtype, (first,), self.norm, self.biased, turn),
            Spec(self.rows, self.hidden, self.dtype, (second,), self.between, self.biased),
        )

    def shapes(self, size=None):
        """Return the operands' shapes by name, in the order in which :meth:`module` takes them."""
        rows = tuple(size if isinstance(r, tirx.Var) and size is not None else r for r in self.rows)
        columns = self.hidden * (1 + self.gated)
        out = {"x": (*rows, self.depth)}
        out |= {f"norm_{p}": (self.depth,) for p in ("weight", "bias") if getattr(self.norm, p, False)}
        out |= {name: (rows[-1], self.depth) for name in ("cos", "sin") if self.turned}
        out |= {"w": (self.depth, columns)} | ({"b": (columns,)} if self.biased else {})
        out |= {f"between_{p}": (self.hidden,) for p in ("weight", "bias") if getattr(self.between, p, False)}
        out |= {"v": (self.hidden, self.width)} | ({"c": (self.width,)} if self.biased else {})
        return out | ({"r": (*rows, self.width)} if self.residual else {})

    def module(self, most_bytes, target=HOST):
        """Return a module that packs weights and calls the kernel."""
        machine, spec = Machine.of(target), self.spec
        found = cut(spec, machine, most_bytes)
        bb = relax.BlockBuilder()
        params = {name: relax.Var(name, relax.TensorType(s, self.dtype)) for name, s in self.shapes().items()}
        gvar = bb.add_func(kernel(spec, machine, most_bytes), "kernel")
        with bb.function("main", list(params.values())):
            with bb.dataflow():
                given = dict(params)
                for of, plan, weight, bias in (
                    (spec.first, found.first, "w", "b"),
                    (spec.second, found.second, "v", "c"),
                ):
                    given[weight] = pack_weights(bb, of, plan, [(params[weight], "in_out")])
                    if self.biased:
                        given[bias] = pack_bias(bb, of, plan, [(params[bias], int(params[bias].ty.shape[0]))])
                result = relax.TensorType((*self.rows, self.width), self.dtype)
                # The norm between stands in front of the second layer's weights, as in the kernel's order.
                out = bb.emit_output(relax.call_tir(gvar, list(given.values()), result))
            bb.emit_func_output(out)
        return bb.get()

    def draw(self, size=None, seed=0):
        rng = np.random.default_rng(seed)
        scale = {"w": self.depth**-0.5, "v": self.hidden**-0.5}
        drawn = {n: rng.standard_normal(s) * scale.get(n, 1) for n, s in self.shapes(size).items()}
        return {name: value.astype(self.dtype) for name, value in drawn.items()}

    def reference(self, given):
        v = {name: value.astype("float64") for name, value in given.items()}
        x = _normed(self.norm, v["x"], v, "norm")
        if self.turned:
            half = self.depth // 2
            crossed = np.concatenate([-x[..., half:], x[..., :half]], -1)
            x = x * v["cos"] + crossed * v["sin"]
        sums = x @ v["w"] + v.get("b", 0)
        act = KINDS[self.kind]
        hidden = act(sums[..., self.hidden :]) * sums[..., : self.hidden] if self.gated else act(sums)
        return _normed(self.between, hidden, v, "between") @ v["v"] + v.get("c", 0) + v.get("r", 0)


def _normed(norm, x, v, name):
    if norm is None:
        return x
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon)
    return x * v.get(f"{name}_weight", 1) + v.get(f"{name}_bias", 0)


def hold(form, sizes=(None,), most_bytes=None):
    """Hold the kernel against the reference."""
    machine = relax.VirtualMachine(tvm.compile(form.module(most_bytes), target=HOST), tvm.cpu())
    for size in sizes:
        given = form.draw(size)
        got = machine["main"](*map(tvm.runtime.tensor, given.values())).numpy()
        want = form.reference(given)
        assert got.shape == want.shape and got.dtype == form.dtype
        assert worst_error(want, got.astype("float64")) <= REASSOCIATES.bound(form.dtype)


@pytest.mark.parametrize(("kind", "gated"), [("", False), ("relu", True), ("silu", True), ("gelu", False)])
def test_activations_and_gates(kind, gated):
    hold(Form(kind=kind, gated=gated, residual=gated, biased=not gated))


@pytest.mark.parametrize(
    "form",
    [
        Form(norm=RMS, gated=True, kind="silu", residual=True, dtype="float16"),
        Form(norm=Norm("rms", 1e-3), turned=True),
        Form(turned=True, norm=LAYER, dtype="float64"),
        Form(between=LAYER, norm=RMS, dtype="float16"),
        Form(between=Norm("rms", 1e-3), residual=True),
        Form(between=RMS, hidden=40),
    ],
)
def test_norms_and_rotations_in_chunks(form):
    hold(replace(form, rows=(2, 17)), most_bytes=19 * 4 * 12)


@pytest.mark.parametrize(
    ("rows", "most_bytes"),
    [
        ((), None),
        ((0,), None),
        ((1,), 1),
        ((1, 7), 1),
        ((2, 0, 3), 1),
        ((12,), 19 * 4 * 12),
        ((13,), 19 * 4 * 12),
        ((36,), 19 * 4 * 12),
        ((2, 3, 11), None),
    ],
)
def test_rows_of_any_rank_and_chunks_of_any_size(rows, most_bytes):
    hold(Form(rows=rows, residual=True, turned=bool(rows), gated=True), most_bytes=most_bytes)


def test_any_number_of_rows_at_run_time():
    form = Form(rows=(2, N), residual=True, norm=LAYER, turned=True)
    hold(form, (*range(8), 13, 31, 64), 19 * 4 * 12)


def test_threads_share_columns_of_every_chunk():
    """Large enough that both layers go over threads, with a last chunk that is lower than the others."""
    form = Form(rows=(103,), depth=64, hidden=257, width=130, gated=True, norm=RMS, residual=False)
    found = cut(form.spec, MACHINE, 36 * 257 * 4)
    assert found.chunks == 3 and found.first.parallel and found.second.parallel
    hold(form, most_bytes=36 * 257 * 4)


def test_layers_of_tiles_of_different_heights():
    """A narrow result leaves registers for higher tiles; a chunk holds whole ones of both."""
    form = Form(rows=(50,), width=3, hidden=33)
    found = cut(form.spec, MACHINE, 24 * 33 * 4)
    assert found.first.height != cut(form.spec, MACHINE).second.height or MACHINE.vector_bytes != 32
    hold(form, most_bytes=24 * 33 * 4)


def test_chunks_are_even_and_no_larger_than_asked():
    spec = Form(rows=(1500,), depth=384, hidden=1536, width=384).spec
    found = cut(spec, MACHINE)
    assert found.chunk * 1536 * 4 <= chunk_bytes(spec) and found.chunk % found.step == 0
    assert (found.chunks - 1) * found.chunk < 1500 <= found.chunks * found.chunk
    assert 1500 / found.chunks > 0.9 * found.chunk
    # Weights are not read for a few rows only: the larger they are, the more rows there are in a chunk.
    assert chunk_bytes(Form().spec) == CHUNK_BYTES < chunk_bytes(spec)


def test_what_is_between_never_exists_as_a_whole():
    form = Form(rows=(600,), depth=16, hidden=700, width=16)
    text = kernel(form.spec, MACHINE).script(show_meta=False)
    found = cut(form.spec, MACHINE)
    assert found.chunks > 1 and f"({found.chunk}, 700)" in text and "(600, 700)" not in text


@st.composite
def forms(draw):
    """Any block, bytes of a chunk, and sizes."""
    sizes = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 17, 33, 40])
    rows = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 13]), min_size=1, max_size=2)))
    if dynamic := draw(st.booleans()):
        rows = (*rows[:-1], N)
    norms = st.sampled_from([None, None, RMS, LAYER, Norm("rms", 1e-2)])
    depth, width, norm, between = draw(sizes), draw(sizes), draw(norms), draw(norms)
    # A layer norm of two values or one is a sign: no bound holds for what is rounded.
    hidden = draw(sizes.filter(lambda n: n > 2)) if between is not None else draw(sizes)
    form = Form(
        rows,
        depth if norm is None or depth > 2 else 8,
        hidden,
        width,
        draw(st.sampled_from(["float32", "float32", "float16"])),
        draw(st.sampled_from(sorted(KINDS))),
        draw(st.booleans()),
        draw(st.booleans()),
        norm,
        replace(between, epsilon=1.0) if between is not None else None,
        False,
        draw(st.booleans()),
    )
    form = replace(form, turned=form.depth % 2 == 0 and draw(st.booleans()))
    return form, (0, 1, draw(st.integers(2, 40))) if dynamic else (None,), draw(st.sampled_from([1, 2000, None]))


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(forms())
def test_property(drawn):
    form, sizes, most_bytes = drawn
    hold(form, sizes, most_bytes)
