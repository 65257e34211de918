"""What is read as a sequence, and the reasons why something like one is not."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from canonical import module
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.regions.parts import Problem
from crossloom.passes.regions.sequence import read_sequence
from crossloom.rewrite import Graph
from crossloom.schedules.fused_sequence import Copy, Lookup, Product
from sequences import TOKEN, linear, lookup

op = relax.op
F, N = (tirx.Var(n, "int64") for n in ("f", "n"))


def read(build, shapes, num_input):
    mod = CanonicalizeTransformer()(module(build, shapes, num_input=num_input))
    return read_sequence(Graph("main", mod["main"], mod), mod["main"].body.body)


def marked(e, ids):
    return e(op.equal(ids, relax.const(TOKEN, "int64")))


def counted(e, mask, axis):
    return e(op.subtract(e(op.cumsum(e(op.astype(mask, "int64")), axis=axis)), relax.const(1, "int64")))


def test_parts_and_what_the_kernel_takes_for_them():
    def emit(e, image, audio, ids, w, b, table):
        return op.concat([linear(e, image, w, b), audio, lookup(e, table, ids)], 1)

    found = read(emit, [(2, F, 6), (2, 3, 8), ((2, N), "int64"), (6, 8), (8,), (11, 8)], 3)
    assert found is not None and (found.spec.axis, found.spec.width) == (1, 8)
    assert [type(p.source) for p in found.spec.parts] == [Product, Copy, Lookup]
    # A linear layer's operands stand together; the sequence is all there is.
    assert [getattr(o, "name", "linear") for o in found.operands] == ["linear", "p1", "p5", "p2"]
    assert len(found.inside) == 3


def test_a_mask_of_placeholders_is_compared_in_the_kernel():
    def emit(e, image, ids, table):
        mask = marked(e, ids)
        rows = e(op.take(image, e(op.reshape(counted(e, mask, 1), [N])), axis=0, mode="clip"))
        return op.where(e(op.expand_dims(mask, [-1])), e(op.reshape(rows, [1, N, 8])), lookup(e, table, ids))

    found = read(emit, [(F, 8), ((1, N), "int64"), (11, 8)], 2)
    (layer,) = found.spec.layers
    assert (layer.token, layer.in_order, layer.elements, layer.dtype) == (TOKEN, True, False, "int64")


@pytest.mark.parametrize(
    ("batch", "mode", "code"),
    [(2, "clip", "count-restarts-per-batch"), (1, "nan", "features-run-out-differently")],
)
def test_counts_that_mean_something_else(batch, mode, code):
    def emit(e, image, ids, table):
        mask = marked(e, ids)
        rows = e(op.take(image, counted(e, mask, 1), axis=0, mode=mode))
        return op.where(e(op.expand_dims(mask, [-1])), rows, lookup(e, table, ids))

    with pytest.raises(Problem) as problem:
        read(emit, [(F, 8), ((batch, N), "int64"), (11, 8)], 2)
    assert problem.value.verdict.code == code


def test_a_mask_by_element():
    def emit(e, image, mask, ids, table):
        return op.where(mask, image, lookup(e, table, ids))

    with pytest.raises(Problem) as problem:
        read(emit, [(1, N, 8), ((1, N, 8), "bool"), ((1, N), "int64"), (11, 8)], 3)
    assert problem.value.verdict.code == "mask-differs-along-features"


@pytest.mark.parametrize("dtype", ["int64", "bfloat16"])
def test_other_types_are_no_sequence(dtype):
    def emit(e, x, ids, table):
        return op.concat([x, lookup(e, table, ids)], 1)

    assert read(emit, [((1, F, 8), dtype), ((1, N), "int64"), ((11, 8), dtype)], 2) is None


def test_what_one_part_makes_and_another_reads_is_taken_as_it_is():
    """A lookup beside a layer of it, and a sequence that is added to itself, have to exist to be read."""

    def emit(e, image, ids, w, table):
        rows = lookup(e, table, ids)
        return op.concat([rows, lookup(e, table, ids), linear(e, rows, w)], 1)

    found = read(emit, [(1, F, 8), ((1, N), "int64"), (8, 8), (11, 8)], 2)
    assert [type(p.source) for p in found.spec.parts] == [Copy, Lookup, Product]
    assert not any(isinstance(o, relax.Var) and o in found.inside for o in found.operands)

    def doubled(e, image, ids, table):
        both = e(op.concat([image, lookup(e, table, ids)], 1))
        return op.add(both, both)

    assert read(doubled, [(1, F, 8), ((1, N), "int64"), (11, 8)], 2) is None
