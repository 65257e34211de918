"""What a composite's body may refer to: its operands, and the sizes they carry."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossloom.passes.matching.spelling import matched, replay, replayable
from crossloom.rewrite import Graph, Rule, apply_rules
from crossloom.testing import run_module

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def module(build, shapes):
    bb = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb.emit, *params))
        bb.emit_func_output(out)
    return bb.get()


def whole(mod, names):
    """Return the match of everything behind the parameters of these positions."""
    func = mod["main"]
    graph = Graph("main", func, mod)
    return matched(graph, graph.order[-1], {f"x{i}": func.params[i] for i in names})


def test_operand_that_is_not_captured():
    mod = module(lambda e, x, y: op.add(e(op.exp(x)), y), [(N,), (N,)])
    verdict = replayable(whole(mod, [0]))
    assert (verdict.code, verdict.culprit) == ("operand-not-captured", "p1")
    assert replayable(whole(mod, [0, 1])).fired


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda e, x: op.broadcast_to(x, relax.ShapeExpr([M, N])), [(N,)]),
        (lambda e, x: op.strided_slice(x, [0], [0], [M]), [(N,)]),
        (lambda e, x: op.add(x, e(op.arange(0, M, 1, "float32"))), [(1,)]),
    ],
)
def test_size_that_no_operand_carries(build, shapes):
    mod = module(lambda e, x, other: build(e, x), [*shapes, (M,)])
    verdict = replayable(whole(mod, [0]))
    assert (verdict.code, verdict.culprit) == ("dimension-not-among-operands", "m")
    assert replayable(whole(mod, [0, 1])).fired


def test_sizes_are_renewed_in_shapes_and_ranges():
    def build(e, x, y):
        flat = e(op.reshape(x, [N * M]))
        return op.add(e(op.subtract(flat, e(op.arange(0, N * M, 1, "float32")))), y)

    mod = module(build, [(N, M), (1,)])
    rule = Rule(
        "all",
        frozenset({"relax.add"}),
        lambda graph, root: whole(mod, [0, 1]) if root in graph.escapes else None,
        lambda site: replay(site, "test.all"),
        legal=replayable,
    )
    out = apply_rules(mod, [rule])
    relax.analysis.well_formed(out)
    assert len(out.functions) == 2
    x = np.arange(6, dtype="float32").reshape(2, 3)
    (got,) = run_module(out, "main", [x, np.ones(1, "float32")])
    assert np.array_equal(got, np.ones(6))
    tvm.ir.assert_structural_equal(apply_rules(out, [rule]), out)
