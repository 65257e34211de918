"""Gate regions to kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from canonical import data, module
from crossloom.errors import UnsupportedTarget
from crossloom.passes.fuse_semantic_gate import FuseSemanticGate
from crossloom.passes.lower_fused_gate import LowerFusedGate
from crossloom.schedules.machine import Machine
from crossloom.schedules.semantic_gate import Apply, Dot, Gate, Number, Operand, Result, kernel
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger
from gates import by_product, cosine, gates, sigmoid

op = relax.op
N = tirx.Var("n", "int64")
TARGET = get_target("host").tvm_target()


def gate(e, a, b):
    return op.multiply(a, e(op.sigmoid(by_product(e, a, b))))


def regions(shape=(4, 8), names=("main",)):
    return FuseSemanticGate()(module(gate, [shape, shape], names, num_input=2))


def test_golden_a_region_becomes_a_call_of_its_kernel():
    lengths = [Apply("sqrt", (Dot(i, i),)) for i in (0, 1)]
    least = Apply("maximum", (Apply("multiply", tuple(lengths)), Number(float(np.float32(1e-8)))))
    likeness = Apply("divide", (Dot(0, 1), least))
    rows = Operand((4, 8), (0,))
    spec = Gate((4,), 8, "float32", (rows, rows), (), (Result(((0, Apply("sigmoid", (likeness,))),)),))
    bb = relax.BlockBuilder()
    gvar = bb.add_func(kernel(spec, Machine.of(TARGET)), "fused_gate_kernel")
    params = [relax.Var(n, relax.TensorType((4, 8), "float32")) for n in ("p0", "p1")]
    with bb.function("main", params, attrs={"num_input": 2}):
        with bb.dataflow():
            out = bb.emit_output(relax.call_tir(gvar, params, relax.TensorType((4, 8), "float32")))
        bb.emit_func_output(out)
    lowered = LowerFusedGate(TARGET)(regions())
    tvm.ir.assert_structural_equal(lowered["main"].body, bb.get()["main"].body, map_free_vars=True)
    tvm.ir.assert_structural_equal(lowered["fused_gate_kernel"], bb.get()["fused_gate_kernel"])


def test_a_region_of_anything_else_stays():
    func = module(lambda e, x, y: op.matmul(x, y), [(4, 8), (8, 4)])["main"].without_attr("global_symbol")
    bb = relax.BlockBuilder()
    gvar = bb.add_func(func.with_attr("Composite", "crossloom.fused_gate"), "fused_gate")
    params = [relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", (4, 8)), ("y", (8, 4)))]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(relax.Call(gvar, params))
        bb.emit_func_output(out)
    whole = bb.get()
    with Ledger() as ledger:
        out = LowerFusedGate(TARGET)(whole)
    assert {v.code for v in ledger.refused} == {"no-kernel"}
    tvm.ir.assert_structural_equal(out, whole)


def test_without_a_target_it_says_so():
    with pytest.raises(UnsupportedTarget, match="target"):
        LowerFusedGate()(regions())


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (0, 8), (3, 7), (700, 513)])
def test_sizes_of_all_kinds_and_many_rows_over_threads(rows, width):
    low = LowerFusedGate(TARGET)(regions((rows, width)))
    (func,) = (f for _, f in low.functions_items() if isinstance(f, tirx.PrimFunc))
    assert ("T.parallel" in func.script()) == (rows == 700)
    a, b = data((rows, width), (rows, width))
    got = run_module(low, "main", [a, b])[0]
    assert np.abs(got - a * sigmoid(cosine(a, b, by_product))).max(initial=0.0) < 1e-5


def test_twice_is_once_and_both_entries_are_treated():
    once = LowerFusedGate(TARGET)(regions((N, 8), ("vision", "decode")))
    assert LowerFusedGate(TARGET)(once).same_as(once)
    a, b = data((3, 8), (3, 8))
    for name in ("vision", "decode"):
        assert np.abs(run_module(once, name, [a, b])[0] - a * sigmoid(cosine(a, b, by_product))).max() < 1e-5


def test_property_kernels_are_what_the_regions_were():
    assert_pass_preserves(LowerFusedGate(TARGET), gates(FuseSemanticGate()), max_examples=15)
