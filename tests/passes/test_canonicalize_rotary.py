"""Rotary embeddings are known by what they compute: convention, axes, frequencies; what is unproved is said so."""

from __future__ import annotations

import functools
import time
from importlib import resources

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import canonical
from canonical import checked
from crossloom.importers.onnx import from_onnx
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import Input, build

op = relax.op
END = 2**31 - 1


function = functools.partial(canonical.function, name="main", num_input=9)


def rotary_facts(mod):
    return [composite_attrs(f) for _, f in mod.functions_items() if composite_name(f) == "crossloom.rotary"]


def only(mod):
    out, _ = checked(mod)
    (facts,) = rotary_facts(out)
    return {k: list(v) if hasattr(v, "__len__") and not isinstance(v, str) else v for k, v in facts.items()}


def refusal(mod):
    """Return the codes of refused rotations; the module must be as it was where nothing fired."""
    out, ledger = checked(mod)
    if not ledger.fired:
        tvm.ir.assert_structural_equal(out, mod)
    return {v.code for v in ledger.refused if v.rewrite.endswith("rotary")}


def const(value, dtype="float32"):
    return relax.const(np.asarray(value, dtype), dtype)


def cut(e, x, begin, end, step=1):
    axis = len(x.ty.shape) - 1
    return e(op.strided_slice(x, [axis], [begin], [end], [step]))


def inverse(pairs, theta=10000.0):
    return (theta ** (-np.arange(pairs) / pairs)).astype("float32")


# Rotations: x (..., width), tables broadcast to it


def half_split(e, x, cos, sin, sign=1, turn=-1):
    half = int(x.ty.shape[-1]) // 2
    high = cut(e, x, half, END)
    r = e(op.concat([e(op.negative(high)) if turn < 0 else high, cut(e, x, 0, half)], -1))
    join = op.add if sign > 0 else op.subtract
    return e(join(e(op.multiply(x, cos)), e(op.multiply(r, sin))))


def joined(e, x, cos, sin, cos_high=None):
    half = int(x.ty.shape[-1]) // 2
    a, b = cut(e, x, 0, half), cut(e, x, half, END)
    low = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    return e(
        op.concat(
            [low, e(op.add(e(op.multiply(b, cos if cos_high is None else cos_high)), e(op.multiply(a, sin))))], -1
        )
    )


def stacked(e, x, cos, sin):
    """Pairs (2i, 2i + 1) by strides, per-pair tables, stacked and reshaped."""
    a, b = cut(e, x, 0, END, 2), cut(e, x, 1, END, 2)
    even = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    odd = e(op.add(e(op.multiply(a, sin)), e(op.multiply(b, cos))))
    return e(op.reshape(e(op.stack([even, odd], -1)), x.ty.shape))


def in_pairs(e, x, cos, sin):
    """Pairs on an axis of their own, which the tables get too: what llama.cpp's checkpoints are imported as."""
    *lead, lanes = list(x.ty.shape)
    pairs = e(op.reshape(x, [*lead, int(lanes) // 2, 2]))
    both = e(op.split(pairs, 2, -1))
    a, b = (e(relax.TupleGetItem(both, i)) for i in range(2))
    cos, sin = (e(op.expand_dims(table, [-1])) for table in (cos, sin))
    first = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    second = e(op.add(e(op.multiply(b, cos)), e(op.multiply(a, sin))))
    return e(op.reshape(e(op.concat([first, second], -1)), [*lead, lanes]))


def every_two(e, x, cos, sin):
    """GPT-J: x cos + rotate_every_two(x) sin, a table lane per lane."""
    rank = len(x.ty.shape)
    pairs = [e(op.expand_dims(t, rank)) for t in (e(op.negative(cut(e, x, 1, END, 2))), cut(e, x, 0, END, 2))]
    r = e(op.reshape(e(op.concat(pairs, -1)), x.ty.shape))
    return e(op.add(e(op.multiply(x, cos)), e(op.multiply(r, sin))))


# Tables: angles (tokens, pairs)


def by_multiply(e, ids, freq):
    return e(op.multiply(e(op.expand_dims(ids, 1)), const(freq)))


def by_matmul(e, ids, freq):
    wide = e(op.matmul(e(op.expand_dims(const(freq), 1)), e(op.expand_dims(ids, 0))))
    return e(op.permute_dims(wide, [1, 0]))


def by_einsum(e, ids, freq):
    return e(op.einsum((ids, const(freq)), "i,j->ij"))


def by_outer(e, ids, freq):
    return e(op.outer(ids, const(freq)))


def by_power(e, ids, freq):
    pairs = len(freq)
    exponent = e(op.divide(e(op.arange(0, 2 * pairs, 2, "float32")), const(2.0 * pairs)))
    return e(op.divide(e(op.expand_dims(ids, 1)), e(op.power(const(10000.0), exponent))))


def tables(e, angles, width=2, dtype="float32"):
    full = e(op.concat([angles] * width, -1)) if width > 1 else angles
    return e(op.astype(e(op.cos(full)), dtype)), e(op.astype(e(op.sin(full)), dtype))


def rotated(x, angles, convention):
    """Turn lane pairs one by one; x (..., lanes), angles broadcastable (..., pairs)."""
    out, pairs = x.astype("float64"), angles.shape[-1]
    given = out.copy()
    for n in range(pairs):
        a, b = (n, n + pairs) if convention == "half-split" else (2 * n, 2 * n + 1)
        c, s = np.cos(angles[..., n]), np.sin(angles[..., n])
        out[..., a] = given[..., a] * c - given[..., b] * s
        out[..., b] = given[..., b] * c + given[..., a] * s
    return out


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, "n", 4), "float32"), ids: R.Tensor(("n",), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                p = R.expand_dims(ids, axis=[1])
                f = R.multiply(p, R.const([1.0, 0.5], "float32"))
                w = R.concat((f, f), axis=-1)
                cos = R.cos(w)
                sin = R.sin(w)
                a = R.multiply(x, cos)
                high = R.strided_slice(x, [2], [2], [4])
                neg = R.negative(high)
                low = R.strided_slice(x, [2], [0], [2])
                r = R.concat((neg, low), axis=-1)
                b = R.multiply(r, sin)
                y = R.add(a, b)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def rotary(
            x: R.Tensor((2, "n", 4), "float32"), cos: R.Tensor(("n", 4), "float32"), sin: R.Tensor(("n", 4), "float32")
        ):
            R.func_attr(
                {
                    "Composite": "crossloom.rotary",
                    "crossloom.convention": "half-split",
                    "crossloom.rotary_dim": 4,
                    "crossloom.table": "full",
                    "crossloom.pair_equal": True,
                    "crossloom.axes": "1d",
                    "crossloom.sections": [2],
                    "crossloom.pair_axis": [0, 0],
                    "crossloom.scale": 1.0,
                    "crossloom.inv_freq": [1.0, 0.5],
                    "crossloom.theta": 4.0,
                }
            )
            with R.dataflow():
                a = R.multiply(x, cos)
                high = R.strided_slice(x, [2], [2], [4])
                neg = R.negative(high)
                low = R.strided_slice(x, [2], [0], [2])
                r = R.concat((neg, low), axis=-1)
                b = R.multiply(r, sin)
                y = R.add(a, b)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((2, "n", 4), "float32"), ids: R.Tensor(("n",), "float32")):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                p = R.expand_dims(ids, axis=[1])
                f = R.multiply(p, R.const([1.0, 0.5], "float32"))
                w = R.concat((f, f), axis=-1)
                cos = R.cos(w)
                sin = R.sin(w)
                y = cls.rotary(x, cos, sin)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


# What tables are made of


@pytest.mark.parametrize("angles", [by_multiply, by_matmul, by_einsum, by_outer, by_power])
@pytest.mark.parametrize(
    ("rotate", "width", "convention", "table"),
    [
        (half_split, 2, "half-split", "full"),
        (joined, 1, "half-split", "half"),
        (stacked, 1, "interleaved", "half"),
        (in_pairs, 1, "interleaved", "half"),
    ],
)
def test_one_position_a_token(angles, rotate, width, convention, table):
    freq = inverse(4)

    def build(e, x, ids):
        return op.add(rotate(e, x, *tables(e, angles(e, ids, freq), width)), const(0.0))

    n = tirx.Var("n", "int64")
    facts = only(function(build, [(2, 3, n, 8), (n,)]))
    assert (facts["convention"], facts["table"], facts["rotary_dim"]) == (convention, table, 8)
    assert (facts["axes"], facts["sections"], facts["pair_axis"]) == ("1d", [4], [0, 0, 0, 0])
    assert facts["pair_equal"] and facts["scale"] == 1.0
    assert facts["inv_freq"] == pytest.approx(freq, rel=1e-6) and facts["theta"] == pytest.approx(10000.0, rel=1e-4)


def test_pairs_on_an_axis_of_their_own_are_lanes():
    """Whole heads turn, by tables of lanes: a kernel would give every pair, a head of two lanes, a register."""

    def build(e, x, cos, sin):
        return op.add(in_pairs(e, x, cos, sin), const(0.0))

    out, _ = checked(function(build, [(2, 5, 3, 8), (5, 1, 4), (5, 1, 4)]))
    (composite,) = [f for _, f in out.functions_items() if composite_name(f) == "crossloom.rotary"]
    assert [[int(d) for d in p.ty.shape] for p in composite.params] == [[2, 5, 3, 8], [5, 1, 4], [5, 1, 4]]
    assert composite_attrs(composite)["rotary_dim"] == 8


def test_interleaved_table_by_repeat():
    def build(e, x, ids):
        t = tables(e, by_multiply(e, ids, inverse(4)), 1)
        return every_two(e, x, *(e(op.repeat(v, 2, 1)) for v in t))

    facts = only(function(build, [(2, 5, 8), (5,)]))
    assert (facts["convention"], facts["table"], facts["axes"], facts["pair_equal"]) == (
        "interleaved",
        "full",
        "1d",
        True,
    )


def test_frequencies_that_are_weights_have_axes_but_no_values():
    def build(e, x, ids, freq):
        return half_split(e, x, *tables(e, e(op.multiply(e(op.expand_dims(ids, 1)), freq))))

    facts = only(function(build, [(2, 5, 8), (5,), (4,)], num_input=2))
    assert facts["axes"] == "1d" and facts["pair_equal"] and "inv_freq" not in facts and "theta" not in facts
    # As an input the same vector may be anything, angles of another kind among it.
    assert only(function(build, [(2, 5, 8), (5,), (4,)], num_input=3))["axes"] == "given"


def test_cache_read_by_position_and_scaled():
    def build(e, x, ids):
        rows = by_multiply(e, e(op.arange(0, 64, 1, "float32")), inverse(4))
        cos, sin = (e(op.take(e(op.multiply(t, const(1.5))), ids, 0)) for t in tables(e, rows))
        return half_split(e, x, cos, sin)

    facts = only(function(build, [(2, 5, 8), ((5,), "int64")]))
    assert (facts["axes"], facts["scale"], facts["pair_equal"]) == ("1d", 1.5, True)
    assert facts["inv_freq"] == pytest.approx(inverse(4), rel=1e-6)


def test_rows_and_columns_of_a_grid():
    """ViT: row angles beside column angles, broadcast over the grid and flattened."""

    def build(e, x):
        rows = by_multiply(e, e(op.arange(0, 3, 1, "float32")), inverse(2))
        columns = by_multiply(e, e(op.arange(0, 4, 1, "float32")), inverse(2))
        rows = e(op.broadcast_to(e(op.expand_dims(rows, 1)), [3, 4, 2]))
        columns = e(op.broadcast_to(e(op.expand_dims(columns, 0)), [3, 4, 2]))
        both = e(op.reshape(e(op.concat([rows, columns], -1)), [12, 4]))
        return half_split(e, x, *tables(e, both))

    mod = function(build, [(2, 12, 8)])
    facts = only(mod)
    assert (facts["axes"], facts["sections"], facts["pair_axis"]) == ("2d", [2, 2], [0, 0, 1, 1])
    assert facts["inv_freq"] == pytest.approx([*inverse(2)] * 2) and facts["theta"] == pytest.approx(1e4, rel=1e-4)
    x = np.random.default_rng(0).standard_normal((2, 12, 8)).astype("float32")
    place = np.arange(12)
    angles = np.concatenate([np.outer(place // 4, inverse(2)), np.outer(place % 4, inverse(2))], -1)
    (got,) = run_module(checked(mod)[0], "main", [x])
    np.testing.assert_allclose(got, rotated(x, angles, "half-split"), atol=1e-5)


def test_the_same_positions_transposed_are_another_axis():
    """Rows and columns of a square grid are one vector of positions, told apart by where it is broadcast."""

    def build(e, x):
        line = by_multiply(e, e(op.arange(0, 3, 1, "float32")), inverse(2))
        rows = e(op.broadcast_to(e(op.expand_dims(line, 1)), [3, 3, 2]))
        columns = e(op.broadcast_to(e(op.expand_dims(line, 0)), [3, 3, 2]))
        both = e(op.concat([rows, columns], -1))
        return half_split(e, x, *tables(e, both))

    assert only(function(build, [(2, 3, 3, 8)]))["axes"] == "2d"


@pytest.mark.parametrize("quotient", [op.floor_divide, op.divide])
def test_grid_from_token_numbers(quotient):
    """Whole division makes rows, the remainder columns; a quotient of integers is not a scaled position."""

    def build(e, x):
        number = e(op.arange(0, 12, 1, "int64"))
        parts = [e(f(number, const(4, "int64"))) for f in (quotient, op.floor_mod)]
        angles = [by_multiply(e, e(op.astype(p, "float32")), inverse(2)) for p in parts]
        return half_split(e, x, *tables(e, e(op.concat(angles, -1))))

    facts = only(function(build, [(2, 12, 8)]))
    assert facts["axes"] == "2d" and facts["inv_freq"] == pytest.approx([*inverse(2)] * 2)


def sections(e, ids, freq, cuts, take):
    """M-RoPE: ids (3, tokens), pairs cut into sections, section n read from axis n."""
    wide = e(op.multiply(e(op.expand_dims(ids, 2)), const(freq)))
    parts = e(op.split(wide, cuts, -1))
    rows = [e(op.take(e(relax.TupleGetItem(parts, n)), const(axis, "int64"), 0)) for n, axis in enumerate(take)]
    return e(op.concat(rows, -1))


def test_sections_of_three_axes():
    freq = inverse(8, 1e6)

    def build(e, x, ids):
        return half_split(e, x, *tables(e, sections(e, ids, freq, [2, 5], [0, 1, 2])))

    n = tirx.Var("n", "int64")
    facts = only(function(build, [(1, 2, n, 16), (3, n)]))
    assert (facts["axes"], facts["sections"], facts["pair_axis"]) == ("mrope", [2, 3, 3], [0, 0, 1, 1, 1, 2, 2, 2])
    assert facts["inv_freq"] == pytest.approx(freq, rel=1e-6) and facts["theta"] == pytest.approx(1e6, rel=1e-3)


def test_sections_that_read_one_axis_are_one_dimensional():
    def build(e, x, ids):
        return half_split(e, x, *tables(e, sections(e, ids, inverse(8), [2, 5], [1, 1, 1])))

    assert only(function(build, [(1, 2, 5, 16), (3, 5)]))["axes"] == "1d"


def test_four_sources_are_not_named():
    def build(e, x, ids):
        wide = e(op.multiply(e(op.expand_dims(ids, 2)), const(inverse(2))))
        return half_split(e, x, *tables(e, e(op.reshape(wide, [5, 8]))))

    facts = only(function(build, [(2, 5, 16), (5, 4)]))
    assert facts["axes"] == "given" and facts["pair_equal"] and "sections" not in facts


# Constant tables


def constant_tables(angles, dtype="float32", scale=1.0, width=2):
    wide = np.concatenate([angles] * width, -1)
    return const(scale * np.cos(wide), dtype), const(scale * np.sin(wide), dtype)


def constant(rows, cos, sin, rotate=half_split, width=8):
    return only(function(lambda e, x: rotate(e, x, cos, sin), [((2, rows, width), str(cos.ty.dtype))]))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_constant_table_of_one_axis(dtype, scale):
    angles = np.outer(np.arange(40), inverse(4))
    facts = constant(40, *constant_tables(angles, dtype, scale))
    assert (facts["axes"], facts["sections"], facts["pair_equal"]) == ("1d", [4], True)
    assert facts["scale"] == pytest.approx(scale, rel=1e-3) and facts["inv_freq"] == pytest.approx(inverse(4), rel=2e-3)


def test_constant_table_of_a_grid():
    place = np.arange(6 * 4)
    angles = np.concatenate([np.outer(place // 4, inverse(2)), np.outer(place % 4, inverse(2))], -1)
    facts = constant(24, *constant_tables(angles))
    assert (facts["axes"], facts["pair_axis"]) == ("2d", [0, 0, 1, 1])
    assert facts["inv_freq"] == pytest.approx([*inverse(2)] * 2, rel=1e-4)


def test_slice_of_a_constant_cache():
    cos, sin = constant_tables(np.outer(np.arange(64), inverse(4)))

    def build(e, x):
        return half_split(e, x, *(e(op.strided_slice(t, [0], [0], [5])) for t in (cos, sin)))

    assert only(function(build, [(2, 5, 8)]))["axes"] == "1d"


def test_constant_cache_read_by_position():
    cos, sin = constant_tables(np.outer(np.arange(64), inverse(4)), width=1)

    def build(e, x, ids):
        return stacked(e, x, *(e(op.take(t, ids, 0)) for t in (cos, sin)))

    facts = only(function(build, [(2, 5, 8), ((5,), "int64")]))
    assert (facts["axes"], facts["convention"]) == ("1d", "interleaved")


def test_constants_that_are_no_table_of_positions_are_given():
    rng = np.random.default_rng(1)
    facts = constant(24, *constant_tables(rng.uniform(-3, 3, (24, 4))))
    assert (facts["axes"], facts["pair_equal"]) == ("given", True) and "inv_freq" not in facts
    # One entry off is enough.
    angles = np.outer(np.arange(24), inverse(4))
    angles[17, 2] += 1e-2
    assert constant(24, *constant_tables(angles))["axes"] == "given"
    # A table of unequal lengths is no rotation at all angles known.
    cos, sin = constant_tables(np.outer(np.arange(24), inverse(4)))
    assert constant(24, cos, const(2 * sin.value.numpy()))["axes"] == "given"


def test_given_tables_are_not_proved_equal():
    facts = only(function(half_split, [(2, 5, 8), (5, 8), (5, 8)]))
    assert (facts["axes"], facts["pair_equal"]) == ("given", False)
    facts = only(function(joined, [(2, 5, 8), (5, 4), (5, 4)]))
    assert (facts["axes"], facts["pair_equal"]) == ("given", True)


def test_given_angles_are_not_positions():
    def build(e, x, angles):
        return half_split(e, x, *tables(e, angles))

    for pairs in (1, 2, 3, 5):
        facts = only(function(build, [(2, 5, 2 * pairs), (5, pairs)]))
        assert (facts["axes"], facts["pair_equal"]) == ("given", True)


# Refusals


def turned(build, shapes=((2, 5, 8), (5,)), pairs=4):
    """Return a module that rotates by computed full tables."""
    return function(lambda e, x, ids: build(e, x, *tables(e, by_multiply(e, ids, inverse(pairs)))), list(shapes))


def test_rotated_lanes_not_first():
    def build(e, x, ids):
        t = tables(e, by_multiply(e, ids, inverse(2)))
        return op.concat([cut(e, x, 0, 4), half_split(e, cut(e, x, 4, 8), *t)], -1)

    assert refusal(function(build, [(2, 5, 8), (5,)])) == {"rotated-lanes-not-first"}


def test_lanes_scaled():
    def build(e, x, cos, sin):
        r = e(op.concat([e(op.negative(cut(e, x, 4, 8))), cut(e, x, 0, 4)], -1))
        doubled = [e(op.multiply(e(op.multiply(a, t)), const(2.0))) for a, t in ((x, cos), (r, sin))]
        return op.add(*doubled)

    assert refusal(turned(build)) == {"lanes-scaled"}


def test_several_tables():
    shapes = [(2, 5, 8), (5, 4), (5, 4), (5, 4)]
    assert refusal(function(lambda e, *p: joined(e, *p), shapes)) == {"several-tables"}


def test_rotates_backwards():
    assert refusal(turned(lambda e, *p: half_split(e, *p, sign=-1))) == {"rotates-backwards"}


def test_not_a_rotation():
    assert refusal(turned(lambda e, *p: half_split(e, *p, turn=1))) == {"not-a-rotation"}


def test_table_lanes_in_another_order():
    assert refusal(function(half_split, [(2, 5, 8), (5, 1), (5, 1)])) == {"table-lanes-in-another-order"}


@pytest.mark.parametrize("order", [[(2, 4, -1), (0, 2, 1), (6, 8, -1), (4, 6, 1)]])
def test_unknown_convention(order):
    def build(e, x, cos, sin):
        parts = [cut(e, x, a, b) if sign > 0 else e(op.negative(cut(e, x, a, b))) for a, b, sign in order]
        return op.add(e(op.multiply(x, cos)), e(op.multiply(e(op.concat(parts, -1)), sin)))

    assert refusal(function(build, [(2, 5, 8), (5, 8), (5, 8)])) == {"unknown-convention"}


def test_tables_exchanged():
    assert refusal(turned(lambda e, x, cos, sin: half_split(e, x, sin, cos))) == {"tables-exchanged"}


def test_table_halves_differ():
    """Tables laid out for interleaved pairs under a half-split rotation: a well-known porting mistake."""

    def build(e, x, ids):
        t = tables(e, by_multiply(e, ids, inverse(4)), 1)
        return half_split(e, x, *(e(op.repeat(v, 2, 1)) for v in t))

    assert refusal(function(build, [(2, 5, 8), (5,)])) == {"table-halves-differ"}
    cos, sin = (const(np.repeat(f(np.outer(np.arange(9), inverse(4))), 2, 1)) for f in (np.cos, np.sin))
    assert refusal(function(lambda e, x: half_split(e, x, cos, sin), [(2, 9, 8)])) == {"table-halves-differ"}


def test_tables_of_different_angles():
    def build(e, x, ids):
        cos, _ = tables(e, by_multiply(e, ids, inverse(4)))
        _, sin = tables(e, by_multiply(e, ids, 2 * inverse(4)))
        return half_split(e, x, cos, sin)

    assert refusal(function(build, [(2, 5, 8), (5,)])) == {"tables-of-different-angles"}


def test_tables_folded_apart_are_of_one_angle():
    """The last bit of a frequency makes no other angle; the frequencies told are the cosine's."""

    def build(e, x, ids):
        cos, _ = tables(e, by_multiply(e, ids, inverse(4)))
        _, sin = tables(e, by_multiply(e, ids, np.nextafter(inverse(4), np.float32(2))))
        return half_split(e, x, cos, sin)

    facts = only(function(build, [(2, 5, 8), (5,)]))
    assert (facts["axes"], facts["pair_equal"]) == ("1d", True)
    assert facts["inv_freq"] == pytest.approx([1, 0.1, 0.01, 0.001])


def test_value_read_elsewhere_is_refused():
    def build(e, x, ids):
        cos, sin = tables(e, by_multiply(e, ids, inverse(4)))
        left = e(op.multiply(x, cos))
        r = e(op.concat([e(op.negative(cut(e, x, 4, 8))), cut(e, x, 0, 4)], -1))
        return relax.Tuple([e(op.add(left, e(op.multiply(r, sin)))), left])

    assert refusal(function(build, [(2, 5, 8), (5,)])) == {"intermediate-used-outside"}


# Modules


def test_every_entry_is_treated():
    bb = relax.BlockBuilder()
    one = lambda e, x, ids: half_split(e, x, *tables(e, by_multiply(e, ids, inverse(4))))
    n = tirx.Var("n", "int64")
    function(one, [(2, n, 8), (n,)], name="prefill", builder=bb)
    mod = function(one, [(2, 1, 8), (1,)], name="decode", builder=bb)
    out, ledger = checked(mod)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    # One token: the position is an input, though it has no axis to vary along.
    assert [f["axes"] for f in rotary_facts(out)] == ["1d", "1d"]
    rng = np.random.default_rng(0)
    for name, length in (("prefill", 3), ("decode", 1)):
        x, ids = rng.standard_normal((2, length, 8)).astype("float32"), np.arange(7, 7 + length).astype("float32")
        (got,) = run_module(out, name, [x, ids])
        np.testing.assert_allclose(got, rotated(x, np.outer(ids, inverse(4)), "half-split"), atol=1e-5)


@pytest.mark.parametrize(
    ("part", "axes", "pair_equal"), [("prefill", "1d", True), ("decode", "1d", True), ("vision", "2d", True)]
)
def test_reference_model(part, axes, pair_equal):
    """shapes3: positions are inputs of the decoder; the vision tower turns by row and column, its tables constants."""
    with resources.as_file(resources.files("crossloom.models") / "shapes3") as models:
        out, _ = checked(from_onnx(models / f"{part}.onnx").mod)
    found = rotary_facts(out)
    assert found and {(f["axes"], f["pair_equal"], f["convention"]) for f in found} == {
        (axes, pair_equal, "half-split")
    }


def test_twice_is_once():
    mod = turned(half_split)
    once = CanonicalizeTransformer()(mod)
    assert not once.same_as(mod)
    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(once), once)


def test_chains_of_rotations_take_linear_time():
    def chain(count):
        def build(e, x, ids):
            cos, sin = tables(e, by_multiply(e, ids, inverse(8)))
            for _ in range(count):
                x = half_split(e, x, cos, sin)
            return op.add(x, x)

        return function(build, [(2, 5, 16), (5,)])

    def seconds(mod):
        start = time.process_time()
        CanonicalizeTransformer()(mod)
        return time.process_time() - start

    small, large = chain(8), chain(64)
    seconds(small)
    assert seconds(large) < 8 * 4 * max(seconds(small), 0.02)


ROTATE = {"half-split": half_split, "joined": joined, "stacked": stacked, "every-two": every_two, "in-pairs": in_pairs}


@st.composite
def rotations(draw):
    """A rotation of any convention, axes, rank, type and length, with its facts: (Case, facts)."""
    spelling, axes = draw(st.sampled_from(sorted(ROTATE))), draw(st.sampled_from(["1d", "2d", "mrope", "given"]))
    rest, rank = draw(st.sampled_from([0, 3])), draw(st.sampled_from([3, 4]))
    dtype = draw(st.sampled_from(["float32", "float16"]))
    convention = "half-split" if spelling in ("half-split", "joined") else "interleaved"
    pairs, width = 4, 8
    freq = inverse(pairs) if axes != "2d" else inverse(pairs // 2)

    def emit(bb, operands):
        e, (x, ids) = bb.emit, operands
        if axes == "1d":
            angles = by_multiply(e, ids, freq)
        elif axes == "2d":
            each = e(op.multiply(e(op.expand_dims(ids, 2)), const(freq)))
            angles = e(op.reshape(each, relax.ShapeExpr([ids.ty.shape[0], pairs])))
        elif axes == "mrope":
            angles = sections(e, ids, freq, [1, 2], [0, 1, 2])
        else:
            angles = ids
        if spelling == "every-two":
            angles = e(op.repeat(angles, 2, 1))
        cos, sin = tables(e, angles, 2 if spelling == "half-split" else 1, dtype)
        if rank == 3:
            cos, sin = e(op.expand_dims(cos, 1)), e(op.expand_dims(sin, 1))
        y = ROTATE[spelling](e, cut(e, x, 0, width) if rest else x, cos, sin)
        return [op.concat([y, cut(e, x, width, END)], -1) if rest else op.add(y, const(0.0, dtype))]

    def reference(values):
        x, ids, wide = values[0], values[1].astype("float64"), freq.astype("float64")
        angles = {
            "1d": lambda: ids[:, None] * wide,
            "2d": lambda: np.concatenate([ids[:, :1] * wide, ids[:, 1:] * wide], -1),
            "mrope": lambda: np.stack([ids[a] * f for a, f in zip((0, 1, 2, 2), wide)], -1),
            "given": lambda: ids,
        }[axes]()
        angles = angles[:, None] if rank == 3 else angles
        return [np.concatenate([rotated(x[..., :width], angles, convention), x[..., width:]], -1)]

    shape = ("n", 3, width + rest) if rank == 3 else (2, 3, "n", width + rest)
    positions = {"1d": ("n",), "2d": ("n", 2), "mrope": (3, "n"), "given": ("n", pairs)}[axes]
    case = build(draw, [Input(shape, dtype), Input(positions, "float32")], emit, reference, dtype)
    return case, {"axes": axes, "convention": convention, "rotary_dim": width, "pair_equal": True}


@settings(max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(rotations())
def test_any_rotation_is_recognised_and_computes_the_reference(drawn):
    case, facts = drawn
    out, ledger = checked(case.mod)
    assert len([v for v in ledger.fired if v.rewrite.endswith("rotary")]) == len(case.references)
    for attrs in rotary_facts(out):
        assert {key: attrs[key] for key in facts} == facts
    for size in range(len(case.sizes)):
        inputs = case.inputs(1, size)
        for entry, wanted in case.expected(inputs).items():
            for have, want in zip(run_module(out, entry, inputs[entry]), wanted, strict=True):
                np.testing.assert_allclose(have, want, atol=1e-5 if case.dtype == "float32" else 1e-2)


def test_any_rotation_is_preserved():
    assert_pass_preserves(CanonicalizeTransformer(), rotations().map(lambda drawn: drawn[0]), max_examples=12)


@pytest.mark.parametrize("rotate", [joined, stacked])
def test_a_partial_rotation_that_is_joined_twice_is_taken_whole(rotate):
    """ChatGLM: the pairs are stacked, flattened, and put in front of the lanes that pass through."""

    def build(e, x, cos, sin):
        return e(op.concat([rotate(e, cut(e, x, 0, 4), cos, sin), cut(e, x, 4, 7)], -1))

    facts = only(function(build, [(2, 3, 7), (3, 2), (3, 2)]))
    assert (facts["rotary_dim"], facts["table"]) == (4, "half")
