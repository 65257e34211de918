"""Sizes that only the data decides become symbolic dimensions, and such modules compile and run."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import crossloom
from crossloom.errors import UnsupportedModel
from crossloom.passes.match_data_dependent_shapes import MatchDataDependentShapes
from crossloom.testing import assert_pass_preserves
from crossloom.testing.strategies import Case
from crossloom.verdict import Ledger

TARGET = tvm.target.Target({"kind": "llvm"})


@I.ir_module
class Before:
    @R.function
    def vision(x: R.Tensor((4,), "float32")) -> R.Tensor("int64", ndim=2):
        with R.dataflow():
            found = R.nonzero(x)
            y = R.multiply(found, R.const(2, "int64"))
            R.output(y)
        return y

    @R.function
    def decode(x: R.Tensor(("n", 3), "float32")) -> R.Tensor("int64", ndim=2):
        y = R.nonzero(x)
        return y


@I.ir_module
class Expected:
    @R.function
    def vision(x: R.Tensor((4,), "float32")) -> R.Tensor("int64", ndim=2):
        a = T.int64()
        b = T.int64()
        with R.dataflow():
            found: R.Tensor("int64", ndim=2) = R.nonzero(x)
            sized: R.Tensor((a, b), "int64") = R.match_cast(found, R.Tensor((a, b), "int64"))
            y: R.Tensor((a, b), "int64") = R.multiply(sized, R.const(2, "int64"))
            R.output(y)
        return y

    @R.function
    def decode(x: R.Tensor(("n", 3), "float32")) -> R.Tensor("int64", ndim=2):
        a = T.int64()
        b = T.int64()
        found: R.Tensor("int64", ndim=2) = R.nonzero(x)
        y: R.Tensor((a, b), "int64") = R.match_cast(found, R.Tensor((a, b), "int64"))
        return y


def unique(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Var:
    call = relax.op.unique(x, sorted=True, return_index=False, return_inverse=False, return_counts=False, axis=None)
    return builder.emit(call)


def module(body) -> tvm.ir.IRModule:
    builder = relax.BlockBuilder()
    for name in ("prefill", "decode"):
        x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"),), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                out = builder.emit_output(body(builder, x))
            builder.emit_func_output(out)
    return builder.get()


def test_golden_in_every_function():
    with Ledger() as ledger:
        tvm.ir.assert_structural_equal(MatchDataDependentShapes()(Before), Expected)
    assert {(v.function, v.code) for v in ledger} == {("vision", "fired"), ("decode", "fired")}


def test_twice_is_once():
    once = MatchDataDependentShapes()(Before)
    assert MatchDataDependentShapes()(once).same_as(once)


def test_a_module_of_known_shapes_is_returned_as_it_is():
    mod = module(lambda builder, x: relax.op.abs(x))
    assert MatchDataDependentShapes()(mod).same_as(mod)


def test_the_flow_compiles_what_tvm_alone_cannot():
    vm = relax.VirtualMachine(
        tvm.compile(module(lambda b, x: relax.op.nn.relu(unique(b, x))), TARGET, relax_pipeline="crossloom"), tvm.cpu()
    )
    for entry in ("prefill", "decode"):
        for values in ([1, -2, 2, 1, -2], [-1], []):
            x = np.array(values, "float32")
            got = vm[entry](tvm.runtime.tensor(x)).numpy()
            np.testing.assert_array_equal(got, np.maximum(np.unique(x), 0))


def test_two_sizes_that_nothing_proves_equal_are_refused_and_the_flow_says_where():
    mod = module(lambda b, x: relax.op.add(unique(b, x), unique(b, b.emit(relax.op.abs(x)))))
    with Ledger() as ledger:
        MatchDataDependentShapes()(mod)
    assert [v.code for v in ledger if v.function == "decode"] == ["fired", "fired", "shape-not-inferred"]
    with pytest.raises(UnsupportedModel, match=r"relax\.add .*function 'decode'.*shape in it is unknown"):
        with TARGET:
            crossloom.pipeline(TARGET)(mod)


def test_an_unknown_rank_is_refused():
    def body(builder, x):
        return relax.op.call_pure_packed("any.function", x, ty_args=relax.TensorType(dtype="float32"))

    with Ledger() as ledger:
        MatchDataDependentShapes()(module(body))
    assert {v.code for v in ledger} == {"unknown-rank"}


@st.composite
def cases(draw) -> Case:
    rank, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = (length, *(draw(st.sampled_from([1, 2, 5])) for _ in range(rank - 1)))
    threshold = draw(st.sampled_from([-9.0, 0.0, 9.0]))
    builder = relax.BlockBuilder()
    for name in ("main", "decode"):
        x = relax.Var("x", relax.TensorType(shape, "float32"))
        with builder.function(name, [x], attrs={"num_input": 1}):
            with builder.dataflow():
                # No operator reads the size: TVM alone can run it too, and be compared with.
                out = builder.emit_output(relax.op.nonzero(builder.emit(relax.op.greater(x, relax.const(threshold)))))
            builder.emit_func_output(relax.Tuple([out, out]))

    def reference(arrays):
        return [np.array(np.nonzero(arrays[0] > threshold))] * 2

    return Case(builder.get(), ({},), "int64", {"main": reference, "decode": reference})


def test_it_keeps_every_number():
    assert_pass_preserves(MatchDataDependentShapes(), cases(), max_examples=10)


def test_the_numbers_are_numpys():
    vm = relax.VirtualMachine(tvm.compile(Before, TARGET, relax_pipeline="crossloom"), tvm.cpu())
    for values in ([0, 0, 0, 0], [1, 0, 2, 0], [1, 1, 1, 1]):
        x = np.array(values, "float32")
        np.testing.assert_array_equal(vm["vision"](tvm.runtime.tensor(x)).numpy(), 2 * np.array(np.nonzero(x)))
