"""Sequences of several modalities: joined, scattered by token, with positions; what stays as it was, and why."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import structural_equal

from canonical import data, module
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_cross_modal_embedding import FuseCrossModalEmbedding
from crossloom.passes.lower_fused_sequence import LowerFusedSequence
from crossloom.testing import assert_pass_preserves, run_module
from sequences import TARGET, TOKEN, agrees, composites, entries, linear, lookup, sequence, sequences

op = relax.op
B, F, N = (tirx.Var(n, "int64") for n in ("b", "f", "n"))


def counted(e, ids):
    """Return ids with those below 0 counted from the end, as the importers write it."""
    below = e(op.less(ids, relax.const(0, "int64")))
    return e(op.where(below, e(op.add(ids, relax.const(11, "int64"))), ids))


def names(ledger, fired=True):
    return [v.rewrite for v in (ledger.fired if fired else ledger.refused)]


def refusals(ledger):
    return {v.code for v in ledger.refused}


# One behind the other ------------------------------------------------------------------------------------------------


def test_golden_projector_and_tokens_in_one_sequence():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def embedding(weight: R.Tensor((11, 8), "float32"), ids: R.Tensor((1, "m"), "int64")):
            R.func_attr({"Composite": "crossloom.embedding", "crossloom.mode": "clip"})
            with R.dataflow():
                x = R.take(weight, ids, axis=0, mode="clip")
                R.output(x)
            return x

        @R.function(private=True)
        def linear(x: R.Tensor((1, "n", 6), "float32"), weight: R.Tensor((6, 8), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def main(
            image: R.Tensor((1, "n", 6), "float32"),
            ids: R.Tensor((1, "m"), "int64"),
            w: R.Tensor((6, 8), "float32"),
            table: R.Tensor((11, 8), "float32"),
        ):
            R.func_attr({"num_input": 2})
            cls = Before
            with R.dataflow():
                v = cls.linear(image, w)
                t = cls.embedding(table, ids)
                y = R.concat((v, t), axis=1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def embedding(weight: R.Tensor((11, 8), "float32"), ids: R.Tensor((1, "m"), "int64")):
            R.func_attr({"Composite": "crossloom.embedding", "crossloom.mode": "clip"})
            with R.dataflow():
                x = R.take(weight, ids, axis=0, mode="clip")
                R.output(x)
            return x

        @R.function(private=True)
        def linear(x: R.Tensor((1, "n", 6), "float32"), weight: R.Tensor((6, 8), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_sequence(
            a0: R.Tensor((1, "n", 6), "float32"),
            a1: R.Tensor((6, 8), "float32"),
            a2: R.Tensor((11, 8), "float32"),
            a3: R.Tensor((1, "m"), "int64"),
        ):
            R.func_attr({"Composite": "crossloom.fused_sequence"})
            cls = Expected
            with R.dataflow():
                v = cls.linear(a0, a1)
                t = cls.embedding(a2, a3)
                y = R.concat((v, t), axis=1)
                R.output(y)
            return y

        @R.function
        def main(
            image: R.Tensor((1, "n", 6), "float32"),
            ids: R.Tensor((1, "m"), "int64"),
            w: R.Tensor((6, 8), "float32"),
            table: R.Tensor((11, 8), "float32"),
        ):
            R.func_attr({"num_input": 2})
            cls = Expected
            with R.dataflow():
                y = cls.fused_sequence(image, w, table, ids)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(FuseCrossModalEmbedding()(Before), Expected)


@pytest.mark.parametrize(
    ("order", "dtype"),
    [("vat", "float32"), ("tva", "float16"), ("atvta", "float64"), ("tt", "float32"), ("v", "float16")],
)
def test_any_order_and_number_of_modalities(order, dtype):
    """v: an image through its projector; a: audio features; t: tokens, some of them beyond the table."""

    def emit(e, image, audio, ids, w, b, table):
        made = {"v": lambda: linear(e, image, w, b), "a": lambda: audio, "t": lambda: lookup(e, table, counted(e, ids))}
        return op.concat([made[kind]() for kind in order], 1)

    shapes = [(1, F, 6), (1, 3, 7), ((1, N), "int64"), (6, 7), (7,), (11, 7)]
    out, ledger = sequence(module(emit, shapes, dtype=dtype, num_input=3))
    assert names(ledger) == ["sequence"] and composites(out) == {"fused_sequence": 1}
    for image_rows, tokens in ((5, 4), (1, 1), (0, 2), (2, 0)):
        image, audio, w, b, table = data((1, image_rows, 6), (1, 3, 7), (6, 7), (7,), (11, 7), dtype=dtype)
        ids = np.random.default_rng(1).integers(-14, 14, (1, tokens))
        rows = np.clip(np.where(ids < 0, ids + 11, ids), 0, 10)
        wide = {"v": image.astype("float64") @ w.astype("float64") + b, "a": audio, "t": table[rows]}
        want = np.concatenate([wide[kind] for kind in order], 1)
        agrees(out, [image, audio, ids, w, b, table], want, bound=2e-3 if dtype == "float16" else 1e-5)


def test_a_projector_with_norm_and_activation_positions_and_scaled_tokens():
    def emit(e, image, ids, places, w, b, g, table, positions):
        normed = e(op.nn.rms_norm(image, g, [-1], 1e-5))
        v = e(op.nn.gelu(linear(e, normed, w, b)))
        t = e(op.multiply(lookup(e, table, ids), relax.const(4.0, "float32")))
        t = e(op.add(t, lookup(e, positions, places)))
        return op.concat([v, t], 1)

    shapes = [(1, F, 6), ((1, N), "int64"), ((N,), "int64"), (6, 8), (8,), (6,), (11, 8), (5, 8)]
    out, _ = sequence(module(emit, shapes, num_input=3))
    assert composites(out) == {"fused_sequence": 1}
    image, w, b, g, table, positions = data((1, 9, 6), (6, 8), (8,), (6,), (11, 8), (5, 8))
    ids, places = np.array([[1, 10, 3]]), np.array([4, 0, 2])
    wide = image.astype("float64")
    h = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * g @ w + b
    h = h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2
    want = np.concatenate([h, table[ids] * 4.0 + positions[places]], 1)
    agrees(out, [image, ids, places, w, b, g, table, positions], want)


@pytest.mark.parametrize("form", ["joined", "scattered"])
def test_the_second_layer_of_a_projector_writes_to_the_sequence(form):
    def emit(e, image, ids, w1, b1, w2, b2, table):
        hidden = e(op.nn.gelu(linear(e, image, w1, b1)))
        made, text = linear(e, hidden, w2, b2), lookup(e, table, ids)
        return op.concat([made, text], 1) if form == "joined" else by_row(e, ids, made, text)

    shapes = [(1, F, 6), ((1, N), "int64"), (6, 9), (9,), (9, 8), (8,), (11, 8)]
    out, ledger = sequence(module(emit, shapes, num_input=2))
    assert names(ledger)[0] == "projector" and composites(out) == {"fused_linear": 1, "fused_sequence": 1}
    image, w1, b1, w2, b2, table = data((1, 3, 6), (6, 9), (9,), (9, 8), (8,), (11, 8))
    ids = np.array([[1, TOKEN, 2, TOKEN]])
    hidden = image.astype("float64") @ w1 + b1
    made = hidden * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2))) / 2 @ w2 + b2
    want = np.concatenate([made, table[ids]], 1) if form == "joined" else scattered(ids, made, table[ids])
    agrees(out, [image, ids, w1, b1, w2, b2, table], want)


@pytest.mark.parametrize("positions", [(5, 8), (1, 5, 8), (8,), (5, 1)])
def test_positions_added_to_the_whole_as_in_a_vision_transformer(positions):
    def emit(e, patches, cls, p, w, b):
        return op.add(e(op.concat([cls, linear(e, patches, w, b)], 1)), p)

    out, _ = sequence(module(emit, [(1, 4, 6), (1, 1, 8), positions, (6, 8), (8,)]))
    assert composites(out) == {"fused_sequence": 1}
    patches, cls, p, w, b = data((1, 4, 6), (1, 1, 8), positions, (6, 8), (8,))
    agrees(out, [patches, cls, p, w, b], np.concatenate([cls, patches @ w + b], 1) + p)


def test_batches_and_another_axis():
    def emit(e, image, ids, w, table):
        return op.concat([linear(e, image, w), lookup(e, table, ids)], 0)

    out, _ = sequence(module(emit, [(F, 2, 3, 6), ((4, 2, 3), "int64"), (6, 8), (11, 8)], num_input=2))
    assert composites(out) == {"fused_sequence": 1}
    image, w, table = data((5, 2, 3, 6), (6, 8), (11, 8))
    ids = np.random.default_rng(0).integers(0, 11, (4, 2, 3))
    agrees(out, [image, ids, w, table], np.concatenate([image @ w, table[ids]], 0))


def test_what_is_read_elsewhere_is_copied_in():
    def emit(e, image, ids, w, table):
        v = linear(e, image, w)
        return relax.Tuple([e(op.concat([v, lookup(e, table, ids)], 1)), v])

    out, _ = sequence(module(emit, [(1, F, 6), ((1, N), "int64"), (6, 8), (11, 8)], num_input=2))
    assert composites(out) == {"fused_sequence": 1, "linear": 1}


def test_projections_of_one_value_are_left_to_be_computed_side_by_side():
    def emit(e, image, ids, w, u, table):
        both = e(op.concat([linear(e, image, w), lookup(e, table, ids)], 1))
        return relax.Tuple([both, linear(e, image, u)])

    out, _ = sequence(module(emit, [(1, F, 6), ((1, N), "int64"), (6, 8), (6, 5), (11, 8)], num_input=2))
    assert composites(out) == {"fused_sequence": 1, "linear": 2}


def test_values_that_exist_alone_are_no_candidate():
    mod = module(lambda e, x, y: op.concat([x, y], 1), [(1, F, 8), (1, N, 8)])
    out, ledger = sequence(mod)
    assert len(ledger) == 0
    tvm.ir.assert_structural_equal(out, mod)


@pytest.mark.parametrize("axis", [2, -1])
def test_a_concat_of_features_is_no_sequence(axis):
    def emit(e, image, ids, w, table):
        return op.concat([linear(e, image, w), lookup(e, table, ids)], axis)

    out, ledger = sequence(module(emit, [(1, 4, 6), ((1, 4), "int64"), (6, 8), (11, 8)], num_input=2))
    assert "fused_sequence" not in composites(out) and len(ledger) == 0


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap", "nan"])
def test_what_is_outside_the_table_is_read_as_the_lookup_says(mode):
    def emit(e, x, ids, table):
        return op.concat([x, lookup(e, table, ids, mode)], 1)

    out, _ = sequence(module(emit, [(1, 2, 8), ((1, N), "int32"), (11, 8)], num_input=2))
    x, table = data((1, 2, 8), (11, 8))
    ids = np.array([[0, 10, 4] if mode == "fast" else [0, 10, 11, -1, 25, -30]], "int32")
    rows = table[np.mod(ids, 11) if mode == "wrap" else np.clip(ids, 0, 10)]
    if mode == "nan":
        rows[(ids < 0) | (ids > 10)] = np.nan
    if mode == "wrap":
        # TVM's wrap takes one table's length more, not as many as it needs.
        rows[np.fmod(np.fmod(ids, 11) + 11, 11) != np.mod(ids, 11)] = np.nan
    agrees(out, [x, ids, table], np.concatenate([x, rows], 1))


# Where a token stands ------------------------------------------------------------------------------------------------


def by_row(e, ids, source, base, dtype="int64", clip="clip"):
    """Return ``base`` with rows of ``source`` (1, f, d) where the token stands, counted by row."""
    mask = e(op.equal(ids, relax.const(TOKEN, "int64")))
    count = e(op.cumsum(e(op.astype(mask, dtype)), axis=1))
    number = e(op.reshape(e(op.subtract(count, relax.const(1, dtype))), [N]))
    flat = e(op.reshape(source, [source.ty.shape[1], 8]))
    rows = e(op.reshape(e(op.take(flat, number, axis=0, mode=clip)), [1, N, 8]))
    return op.where(e(op.expand_dims(mask, [-1])), rows, base)


def by_element(e, ids, source, base, rows=None):
    """Return what PyTorch decomposes masked_scatter into."""
    rows = list(base.ty.shape)[:-1] if rows is None else rows
    total = rows[0] * rows[1] * 8
    mask = e(op.equal(ids, relax.const(TOKEN, "int64")))
    mask = e(op.broadcast_to(e(op.expand_dims(mask, [-1])), [*rows, 8]))
    flat = e(op.reshape(mask, [total]))
    count = e(op.subtract(e(op.cumsum(e(op.astype(flat, "int64")), axis=0)), relax.const(1, "int64")))
    size = source.ty.shape[0] * source.ty.shape[1] * 8
    taken = e(op.take(e(op.reshape(source, [size])), count, axis=0, mode="clip"))
    return op.reshape(e(op.where(flat, taken, e(op.reshape(base, [total])))), [*rows, 8])


def scattered(ids, source, base, elements=False):
    """Return the reference; where the source runs out its last row is repeated, or its last element."""
    out, rows = base.astype("float64").copy(), source.reshape(-1, source.shape[-1])
    for k, at in enumerate(np.argwhere(ids == TOKEN)):
        beyond = rows[-1, -1] if elements else rows[-1]
        out[tuple(at)] = rows[k] if k < len(rows) else beyond
    return out


@pytest.mark.parametrize(
    ("spelling", "projected", "dtype"),
    [
        (by_row, True, "float32"),
        (by_row, False, "float16"),
        (by_element, True, "float16"),
        (by_element, False, "float32"),
    ],
)
def test_features_where_the_placeholder_stands(spelling, projected, dtype):
    def emit(e, image, ids, w, table):
        source = linear(e, image, w) if projected else image
        return spelling(e, counted(e, ids), source, lookup(e, table, counted(e, ids)))

    width = 6 if projected else 8
    shapes = [(1, F, width), ((1, N), "int64"), (6, 8), (11, 8)]
    out, ledger = sequence(module(emit, shapes, dtype=dtype, num_input=2))
    assert names(ledger) == ["scattered-sequence"] and composites(out) == {"fused_sequence": 1}
    # As many rows as tokens, more, fewer (the last one is repeated), no token at all, nothing but tokens.
    for image_rows, ids in (
        (3, [1, TOKEN, TOKEN, 2, TOKEN]),
        (9, [TOKEN, -1, 4, TOKEN]),
        (2, [TOKEN, TOKEN, 1, TOKEN, TOKEN]),
        (2, [1, 2, 14]),
        (7, [TOKEN] * 7),
    ):
        image, w, table = data((1, image_rows, width), (6, 8), (11, 8), dtype=dtype)
        at = np.array([ids])
        source = image.astype("float64") @ w.astype("float64") if projected else image
        rows = table[np.clip(np.where(at < 0, at + 11, at), 0, 10)]
        want = scattered(at, source, rows, spelling is by_element)
        agrees(out, [image, at, w, table], want, bound=3e-3 if dtype == "float16" else 1e-5)


def test_by_element_over_a_batch():
    def emit(e, image, ids, w, table):
        return by_element(e, ids, linear(e, image, w), lookup(e, table, ids), [B, N])

    out, _ = sequence(module(emit, [(2, F, 6), ((B, N), "int64"), (6, 8), (11, 8)], num_input=2))
    assert composites(out) == {"fused_sequence": 1}
    image, w, table = data((2, 3, 6), (6, 8), (11, 8))
    ids = np.array([[TOKEN, 1, TOKEN, 2], [5, TOKEN, TOKEN, TOKEN]])
    agrees(out, [image, ids, w, table], scattered(ids, image @ w, table[ids]))


def test_several_images_go_one_behind_the_other():
    def emit(e, first, second, ids, w, table):
        both = e(op.concat([linear(e, first, w), second, linear(e, first, w)], 1))
        return by_row(e, ids, both, lookup(e, table, ids))

    shapes = [(1, F, 6), (1, 2, 8), ((1, N), "int64"), (6, 8), (11, 8)]
    out, _ = sequence(module(emit, shapes, num_input=3))
    # Two layers of one value belong together: they stay, and are copied in.
    assert composites(out) == {"fused_sequence": 1, "linear": 2}

    def apart(e, first, second, third, ids, w, table):
        both = e(op.concat([linear(e, first, w), second, linear(e, third, w)], 1))
        return by_row(e, ids, both, lookup(e, table, ids))

    out, _ = sequence(module(apart, [(1, F, 6), (1, 2, 8), (1, B, 6), *shapes[2:]], num_input=4))
    assert composites(out) == {"fused_sequence": 1}
    for rows, tokens in (((2, 1), 5), ((3, 0), 7), ((0, 2), 3), ((1, 1), 0)):
        first, second, third, w, table = data((1, rows[0], 6), (1, 2, 8), (1, rows[1], 6), (6, 8), (11, 8))
        ids = np.array([[1, *[TOKEN] * tokens, 2]])
        source = np.concatenate([first @ w, second, third @ w], 1)
        agrees(out, [first, second, third, ids, w, table], scattered(ids, source, table[ids]))


@pytest.mark.parametrize("other", [7, TOKEN])
def test_two_modalities_with_tokens_of_their_own(other):
    """Over each other: the second is put over the first, whether their places can meet or not."""

    def emit(e, image, audio, ids, w, u, table):
        def put(token, source, base):
            mask = e(op.equal(ids, relax.const(token, "int64")))
            count = e(op.subtract(e(op.cumsum(e(op.astype(mask, "int32")), axis=1)), relax.const(1, "int32")))
            rows = e(op.take(e(op.reshape(source, [source.ty.shape[1], 8])), e(op.reshape(count, [N])), 0, mode="clip"))
            return op.where(e(op.expand_dims(mask, [2])), e(op.reshape(rows, [1, N, 8])), base)

        inner = e(put(TOKEN, linear(e, image, w), lookup(e, table, ids)))
        return put(other, linear(e, audio, u), inner)

    out, ledger = sequence(
        module(emit, [(1, F, 6), (1, B, 5), ((1, N), "int64"), (6, 8), (5, 8), (11, 8)], num_input=3)
    )
    assert names(ledger) == ["scattered-sequence"]
    # Where the places may meet, what is put below exists first: a linear layer could not leave rows out.
    assert composites(out) == ({"fused_sequence": 1} if other == 7 else {"fused_sequence": 1, "linear": 1})
    image, audio, w, u, table = data((1, 2, 6), (1, 3, 5), (6, 8), (5, 8), (11, 8))
    ids = np.array([[7, TOKEN, 1, TOKEN, 7, 7, 2]])
    want = scattered(ids, image @ w, table[ids])
    for k, at in enumerate(np.argwhere(ids == other)):
        want[tuple(at)] = (audio @ u)[0, min(k, 2)]
    agrees(out, [image, audio, ids, w, u, table], want)


def test_features_of_the_sequences_own_length():
    def emit(e, full, mask, ids, w, b, table):
        return op.where(mask, linear(e, full, w, b), lookup(e, table, ids))

    shapes = [(2, N, 6), ((2, N, 1), "bool"), ((2, N), "int64"), (6, 8), (8,), (11, 8)]
    out, _ = sequence(module(emit, shapes, num_input=3))
    assert composites(out) == {"fused_sequence": 1}
    full, w, b, table = data((2, 5, 6), (6, 8), (8,), (11, 8))
    rng = np.random.default_rng(3)
    mask, ids = rng.random((2, 5, 1)) < 0.5, rng.integers(0, 11, (2, 5))
    agrees(out, [full, mask, ids, w, b, table], np.where(mask, full @ w + b, table[ids]))


@pytest.mark.parametrize("shape", [(2, N, 8), (8,), (2, 1, 8)])
def test_a_mask_that_may_differ_along_a_row_is_refused(shape):
    def emit(e, full, mask, ids, table):
        return op.where(mask, full, lookup(e, table, ids))

    mod = module(emit, [(2, N, 8), (shape, "bool"), ((2, N), "int64"), (11, 8)], num_input=3)
    out, ledger = sequence(mod)
    assert refusals(ledger) == {"mask-differs-along-features"}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


def test_a_count_that_starts_again_with_every_batch_is_refused():
    def emit(e, image, ids, table):
        mask = e(op.equal(ids, relax.const(TOKEN, "int64")))
        count = e(op.subtract(e(op.cumsum(e(op.astype(mask, "int64")), axis=1)), relax.const(1, "int64")))
        rows = e(op.take(image, count, axis=0, mode="clip"))
        return op.where(e(op.expand_dims(mask, [-1])), rows, lookup(e, table, ids))

    mod = module(emit, [(F, 8), ((2, N), "int64"), (11, 8)], num_input=2)
    out, ledger = sequence(mod)
    assert refusals(ledger) == {"count-restarts-per-batch"}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


@pytest.mark.parametrize("mode", ["nan", "wrap"])
def test_features_that_run_out_in_another_way_are_refused(mode):
    def emit(e, image, ids, table):
        return by_row(e, ids, image, lookup(e, table, ids), clip=mode)

    mod = module(emit, [(1, F, 8), ((1, N), "int64"), (11, 8)], num_input=2)
    out, ledger = sequence(mod)
    assert refusals(ledger) == {"features-run-out-differently"}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


@pytest.mark.parametrize("wrong", ["less 2", "other token", "not counted"])
def test_another_order_is_not_taken_for_one_behind_the_other(wrong):
    def emit(e, image, ids, table):
        mask = e(op.equal(ids, relax.const(TOKEN, "int64")))
        seen = mask if wrong != "other token" else e(op.equal(ids, relax.const(5, "int64")))
        number = e(op.cumsum(e(op.astype(seen, "int64")), axis=1)) if wrong != "not counted" else ids
        less = relax.const(2 if wrong == "less 2" else 1, "int64")
        number = e(op.reshape(e(op.subtract(number, less)), [N]))
        rows = e(op.reshape(e(op.take(e(op.reshape(image, [F, 8])), number, 0, mode="clip")), [1, N, 8]))
        return op.where(e(op.expand_dims(mask, [-1])), rows, lookup(e, table, ids))

    out, _ = sequence(module(emit, [(1, F, 8), ((1, N), "int64"), (11, 8)], num_input=2))
    image, table = data((1, 4, 8), (11, 8))
    ids = np.array([[5, TOKEN, TOKEN, 2, 5, TOKEN]])
    number = {"less 2": [0, 0, 0, 0, 0, 1], "other token": [0, 0, 0, 0, 1, 1], "not counted": [3, 2, 2, 1, 3, 2]}
    taken = image[0][number[wrong]][None]
    agrees(out, [image, ids, table], np.where((ids == TOKEN)[..., None], taken, table[ids]))


# One-hot, chains -----------------------------------------------------------------------------------------------------


def hot(e, ids, classes, spelling):
    if spelling == "operator":
        return e(op.astype(e(op.one_hot(ids, 1, 0, classes)), "float32"))
    spread = e(op.expand_dims(ids, [-1]))
    return e(op.astype(e(op.equal(spread, relax.const(np.arange(classes), "int64"))), "float32"))


@pytest.mark.parametrize(
    ("layout", "spelling", "first"),
    [("in_out", "operator", True), ("out_in", "compared", True), ("in_out", "compared", False)],
)
def test_a_layer_over_features_and_one_hot_integers_becomes_product_and_lookup(layout, spelling, first):
    def emit(e, x, ids, w, b):
        columns = [x, hot(e, ids, 5, spelling)]
        joined = e(op.concat(columns if first else columns[::-1], -1))
        return op.add(e(op.matmul(joined, w if layout == "in_out" else e(op.permute_dims(w)))), b)

    weight = (9, 8) if layout == "in_out" else (8, 9)
    out, ledger = sequence(module(emit, [(1, N, 4), ((1, N), "int64"), weight, (8,)], num_input=2))
    assert names(ledger) == ["one-hot"] and composites(out) == {"linear": 1, "embedding": 1}
    assert ledger.fired[0].macs == 5 * 8
    x, w, b = data((1, 6, 4), weight, (8,))
    ids = np.array([[0, 4, 2, 7, -1, 4]])
    rows = (ids[..., None] == np.arange(5)).astype("float32")
    joined = np.concatenate([x, rows] if first else [rows, x], -1)
    agrees(out, [x, ids, w, b], joined @ (w if layout == "in_out" else w.T) + b)


@pytest.mark.parametrize("biased", [True, False])
def test_one_hot_integers_alone_are_a_lookup(biased):
    def emit(e, ids, w, b):
        y = e(op.matmul(hot(e, ids, 5, "operator"), w))
        return op.add(y, b) if biased else y

    out, _ = sequence(module(emit, [((N,), "int64"), (5, 8), (8,)]))
    assert composites(out) == {"embedding": 1}
    w, b = data((5, 8), (8,))
    ids = np.array([4, 0, 9])
    want = np.where((ids < 5)[:, None], w[np.minimum(ids, 4)], 0) + (b if biased else 0)
    agrees(out, [ids, w, b], want)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda ids: op.one_hot(ids, 2, 0, 4), "one-hot-of-other-values"),
        (lambda ids: op.one_hot(ids, 1, 1, 4), "one-hot-of-other-values"),
        (lambda ids: op.one_hot(ids, 1, 0, 4, axis=0), "one-hot-along-another-axis"),
    ],
)
def test_other_one_hot_values_are_refused(made, code):
    def emit(e, ids, w):
        return op.matmul(e(op.astype(e(made(ids)), "float32")), w)

    mod = module(emit, [((4,), "int64"), (4, 8)])
    out, ledger = sequence(mod)
    assert refusals(ledger) == {code}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


@pytest.mark.parametrize(
    ("biases", "layouts"), [((), "io"), ((1,), "oi"), ((2,), "mixed"), ((1, 2), "io"), ((1, 2), "mixed")]
)
def test_layers_with_nothing_between_them_become_one(biases, layouts):
    first, second = layouts == "oi", layouts != "io"

    def emit(e, x, w1, w2, b1, b2):
        h = linear(e, x, e(op.permute_dims(w1)) if first else w1, b1 if 1 in biases else None)
        y = op.matmul(h, e(op.permute_dims(w2)) if second else w2)
        return op.add(e(y), b2) if 2 in biases else y

    shapes = [(1, N, 6), (9, 6) if first else (6, 9), (5, 9) if second else (9, 5), (9,), (1, 5)]
    out, ledger = sequence(module(emit, shapes))
    (verdict,) = ledger.fired
    assert (verdict.rewrite, verdict.macs) == ("linear-chain", 6 * 9 + 9 * 5 - 6 * 5)
    assert verdict.detail.startswith("99 multiply-accumulates apart, 30 as one")
    assert composites(out) == {"linear": 1}
    x, w1, w2, b1, b2 = data((1, 3, 6), *shapes[1:])
    h = x @ (w1.T if first else w1) + (b1 if 1 in biases else 0)
    agrees(out, [x, w1, w2, b1, b2], h @ (w2.T if second else w2) + (b2 if 2 in biases else 0))


def test_three_layers_become_one():
    def emit(e, x, w1, w2, w3):
        return op.matmul(linear(e, linear(e, x, w1), w2), w3)

    out, ledger = sequence(module(emit, [(N, 6), (6, 8), (8, 7), (7, 6)]))
    assert names(ledger) == ["linear-chain"] * 2 and composites(out) == {"linear": 1}
    args = data((3, 6), (6, 8), (8, 7), (7, 6))
    agrees(out, args, args[0] @ args[1] @ args[2] @ args[3])


@pytest.mark.parametrize(
    ("shapes", "dtype", "code"),
    [
        ([(N, 6), (6, 2), (2, 6)], "float32", "takes-more-macs"),
        ([(N, 6), ((6, 8), "float16"), ((8, 6), "float16")], "float16", "half-precision-weights-unknown"),
        ([(N, 6), (6, B), (B, 6)], "float32", "symbolic-width"),
    ],
)
def test_layers_that_stay_apart(shapes, dtype, code):
    mod = module(lambda e, x, w1, w2: op.matmul(linear(e, x, w1), w2), shapes, dtype=dtype)
    out, ledger = sequence(mod)
    assert refusals(ledger) == {code}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


@pytest.mark.parametrize(
    ("scales", "code"),
    [((100.0, 100.0), "product-overflows-half"), ((1e-4, 1e-3), "product-loses-half"), ((1.0, 1.0), "")],
)
def test_half_precision_folds_where_the_product_is_known_to_fit(scales, code):
    w1, w2 = (w.astype("float16") for w in data((6, 64), (64, 6)))
    w1, w2 = (w1 * np.float16(scales[0]), w2 * np.float16(scales[1]))

    def emit(e, x):
        return op.matmul(linear(e, x, relax.const(w1)), relax.const(w2))

    out, ledger = sequence(module(emit, [(N, 6)], dtype="float16"))
    assert refusals(ledger) == ({code} if code else set())
    assert composites(out) == {"linear": 2 if code else 1}
    if not code:
        x = data((3, 6), dtype="float16")[0]
        want = x.astype("float64") @ w1.astype("float64") @ w2.astype("float64")
        agrees(out, [x], want, bound=5e-3)


def test_layers_of_different_types_stay_apart():
    def emit(e, x, w1, w2):
        return op.matmul(e(op.matmul(x, w1, out_dtype="float32")), w2)

    mod = module(emit, [((N, 6), "float16"), ((6, 8), "float16"), (8, 6)])
    out, ledger = sequence(mod)
    assert refusals(ledger) == {"different-dtypes"}
    tvm.ir.assert_structural_equal(out, CanonicalizeTransformer()(mod))


# All of it -----------------------------------------------------------------------------------------------------------


def test_two_entries_are_both_treated_and_share_a_kernel():
    def emit(e, image, ids, w, table):
        return op.concat([linear(e, image, w), lookup(e, table, ids)], 1)

    out, ledger = sequence(entries(emit, [(1, F, 6), ((1, N), "int64"), (6, 8), (11, 8)], 2))
    assert composites(out) == {"fused_sequence": 2} and {v.function for v in ledger.fired} == {"prefill", "decode"}
    low = LowerFusedSequence(TARGET)(out)
    assert sum(isinstance(f, tirx.PrimFunc) for _, f in low.functions_items()) == 1
    image, w, table = data((1, 2, 6), (6, 8), (11, 8))
    ids = np.array([[1, 10]])
    for name in ("prefill", "decode"):
        got = run_module(low, name, [image, ids, w, table])[0]
        assert np.abs(got - np.concatenate([image @ w, table[ids]], 1)).max() < 1e-5


def test_twice_is_once():
    def emit(e, image, ids, w, table):
        return by_row(e, ids, linear(e, image, w), lookup(e, table, ids))

    mod = CanonicalizeTransformer()(module(emit, [(1, F, 6), ((1, N), "int64"), (6, 8), (11, 8)], num_input=2))
    once = FuseCrossModalEmbedding()(mod)
    assert not structural_equal(once, mod)
    tvm.ir.assert_structural_equal(FuseCrossModalEmbedding()(once), once)


def test_property_sequences_are_preserved():
    assert_pass_preserves(FuseCrossModalEmbedding(), sequences(), max_examples=15)
