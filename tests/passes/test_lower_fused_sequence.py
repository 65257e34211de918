"""Sequence regions to kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import crossloom
from canonical import data, module
from crossloom.errors import UnsupportedTarget
from crossloom.passes.lower_fused_sequence import LowerFusedSequence
from crossloom.schedules.fused_sequence import Copy, Lookup, Part, Sequence, kernel
from crossloom.schedules.machine import Machine
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.verdict import Ledger
from sequences import TARGET, composites, entries, linear, lookup, sequence, sequences

op = relax.op
F, N = (tirx.Var(n, "int64") for n in ("f", "n"))
SHAPES = [(1, F, 6), ((1, N), "int64"), (6, 8), (11, 8)]


def joined(e, image, ids, w, table):
    return op.concat([linear(e, image, w), lookup(e, table, ids)], 1)


@I.ir_module
class Region:
    @R.function(private=True)
    def embedding(weight: R.Tensor((11, 8), "float32"), ids: R.Tensor((1, 3), "int64")):
        R.func_attr({"Composite": "crossloom.embedding", "crossloom.mode": "clip"})
        with R.dataflow():
            x = R.take(weight, ids, axis=0, mode="clip")
            R.output(x)
        return x

    @R.function(private=True)
    def fused_sequence(
        a0: R.Tensor((1, 2, 8), "float32"), a1: R.Tensor((11, 8), "float32"), a2: R.Tensor((1, 3), "int64")
    ):
        R.func_attr({"Composite": "crossloom.fused_sequence"})
        cls = Region
        with R.dataflow():
            t = cls.embedding(a1, a2)
            y = R.concat((a0, t), axis=1)
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor((1, 2, 8), "float32"), ids: R.Tensor((1, 3), "int64"), table: R.Tensor((11, 8), "float32")):
        R.func_attr({"num_input": 2})
        cls = Region
        with R.dataflow():
            y = cls.fused_sequence(x, table, ids)
            R.output(y)
        return y


def test_golden_a_region_becomes_a_call_of_its_kernel():
    lookup_ = Lookup((1, 3), 11, "int64", "clip")
    spec = Sequence((1, 5), 8, "float32", 1, (Part((1, 2), Copy((1, 2, 8))), Part((1, 3), lookup_)))
    types = ((1, 2, 8), "float32"), ((1, 3), "int64"), ((11, 8), "float32")
    params = [relax.Var(n, relax.TensorType(*t)) for n, t in zip(("x", "ids", "table"), types)]
    bb = relax.BlockBuilder()
    gvar = bb.add_func(kernel(spec, Machine.of(TARGET)), "fused_sequence_kernel")
    with bb.function("main", params, attrs={"num_input": 2}):
        with bb.dataflow():
            x, ids, table = params
            call = relax.call_tir(gvar, [x, table, ids], relax.TensorType((1, 5, 8), "float32"))
            out = bb.emit_output(call)
        bb.emit_func_output(out)
    expected = bb.get()
    lowered = LowerFusedSequence(TARGET)(Region)
    tvm.ir.assert_structural_equal(lowered["main"].body, expected["main"].body, map_free_vars=True)
    tvm.ir.assert_structural_equal(lowered["fused_sequence_kernel"], expected["fused_sequence_kernel"])


def test_a_region_of_anything_else_stays():
    mod = module(lambda e, x, y: op.concat([x, y], 1), [(1, F, 8), (1, N, 8)])
    func = mod["main"].without_attr("global_symbol").with_attr("Composite", "crossloom.fused_sequence")
    bb = relax.BlockBuilder()
    gvar = bb.add_func(func, "fused_sequence")
    params = [relax.Var(n, relax.TensorType((1, s, 8), "float32")) for n, s in (("x", 2), ("y", 3))]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(relax.Call(gvar, params))
        bb.emit_func_output(out)
    whole = bb.get()
    with Ledger() as ledger:
        out = LowerFusedSequence(TARGET)(whole)
    assert {v.code for v in ledger.refused} == {"no-kernel"}
    tvm.ir.assert_structural_equal(out, whole)


def test_without_a_target_it_says_so():
    with pytest.raises(UnsupportedTarget, match="target"):
        LowerFusedSequence()(Region)
    with TARGET:
        assert composites(LowerFusedSequence()(Region)) == {}


def test_twice_is_once_and_both_entries_are_treated():
    out, _ = sequence(entries(joined, SHAPES, 2))
    once = LowerFusedSequence(TARGET)(out)
    assert LowerFusedSequence(TARGET)(once).same_as(once) and composites(once) == {}
    image, w, table = data((1, 600, 6), (6, 8), (11, 8))
    ids = np.array([[1, 10]])
    for name in ("prefill", "decode"):
        got = run_module(once, name, [image, ids, w, table])[0]
        assert np.abs(got - np.concatenate([image @ w, table[ids]], 1)).max() < 1e-5


def test_wide_rows_of_a_fixed_number_are_spread_over_threads():
    out, _ = sequence(module(joined, [(1, 300, 64), ((1, 700), "int64"), (64, 257), (1000, 257)], num_input=2))
    low = LowerFusedSequence(TARGET)(out)
    (func,) = (f for _, f in low.functions_items() if isinstance(f, tirx.PrimFunc))
    assert "T.parallel" in func.script()
    image, w, table = data((1, 300, 64), (64, 257), (1000, 257))
    ids = np.random.default_rng(0).integers(0, 1000, (1, 700))
    got = run_module(low, "main", [image, ids, w, table])[0]
    want = np.concatenate([image.astype("float64") @ w, table[ids]], 1)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_property_kernels_are_what_the_regions_were():
    assert_pass_preserves(LowerFusedSequence(TARGET), sequences(lower=True), max_examples=15)


def test_equal_layers_in_one_sequence_share_no_buffers():
    """A buffer that is made twice in one kernel cannot be compiled."""

    def build(emit, x, z, w, v):
        return emit(relax.op.concat([emit(relax.op.matmul(x, w)), emit(relax.op.matmul(z, v))], 1))

    mod = module(build, [(1, 3, 8), (1, 3, 8), (8, 16), (8, 16)], num_input=2)
    built = tvm.compile(mod, TARGET, relax_pipeline=crossloom.pipeline("host"))
    given = data((1, 3, 8), (1, 3, 8), (8, 16), (8, 16))
    got = relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, given)).numpy()
    x, z, w, v = (a.astype("float64") for a in given)
    np.testing.assert_allclose(got, np.concatenate([x @ w, z @ v], 1), rtol=1e-5, atol=1e-5)
