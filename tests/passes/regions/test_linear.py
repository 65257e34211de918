"""Whether a group of bindings would be a region that a kernel takes is told before it is formed."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from canonical import module
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.regions.linear import NoKernel, kernel_takes
from crossloom.rewrite import Graph, Match

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def group(step, *shapes):
    """Return a group of a linear layer and ``step`` behind it."""

    def build(emit, x, w, *others):
        return emit(step(emit(op.matmul(x, w)), *others))

    mod = CanonicalizeTransformer()(module(build, [(N, 4), (4, 6), *shapes], ("vision",)))
    graph = Graph("vision", mod["vision"], mod)
    members = [var for var in graph.order if not isinstance(graph.value[var], relax.Var)]
    return Match(graph, members[0], {}, frozenset(members))


def test_a_group_that_a_kernel_takes():
    assert kernel_takes(group(lambda y: op.reshape(y, [N, 2, 3]))).fired


def test_refused_a_size_that_no_operand_has():
    verdict = kernel_takes(group(lambda y, other: op.reshape(y, [M, 3]), (M, 2)))
    assert (verdict.code, verdict.culprit) == ("dimension-not-among-operands", "m")


def test_refused_a_step_that_the_kernel_does_not_have():
    verdict = kernel_takes(group(op.exp))
    assert verdict.code == "no-kernel" and "relax.exp" in verdict.detail


def test_refused_by_a_reader_of_another_kind_of_region():
    seen = []

    def read(graph):
        seen.append(graph.func.attrs["Composite"])
        raise NoKernel("never")

    verdict = kernel_takes(group(op.exp), "crossloom.fused_other", read)
    assert (verdict.code, verdict.detail, seen) == ("no-kernel", "never", ["crossloom.fused_other"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_types_are_read(dtype):
    found = group(lambda y: op.astype(y, dtype))
    assert kernel_takes(found).fired == (dtype == "float32")
