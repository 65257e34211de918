"""Operators become TIR, and what cannot is named."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from crossloom.errors import UnsupportedModel
from crossloom.passes.legalize_ops import LegalizeOps
from crossloom.testing import assert_pass_preserves


@I.ir_module
class Before:
    @R.function
    def vision(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
        with R.dataflow():
            y = R.abs(x)
            R.output(y)
        return y

    @R.function
    def decode(x: R.Tensor(("n", 3), "float32")) -> R.Tensor(("n", 3), "float32"):
        y = R.abs(x)
        return y


def test_golden_equals_tvms_and_leaves_no_operator():
    after = LegalizeOps()(Before)
    tvm.ir.assert_structural_equal(after, relax.transform.LegalizeOps()(Before))
    for name in ("vision", "decode"):
        (binding,) = after[name].body.blocks[0].bindings
        assert binding.value.op.name == "relax.call_tir"


def test_twice_is_once():
    once = LegalizeOps()(Before)
    tvm.ir.assert_structural_equal(LegalizeOps()(once), once)


def test_it_preserves_transformer_modules():
    assert_pass_preserves(LegalizeOps(), max_examples=10)


def test_what_tvm_raises_on_is_named():
    builder = relax.BlockBuilder()
    past, new = tirx.Var("p", "int64"), tirx.Var("s", "int64")
    q = relax.Var("q", relax.TensorType((1, new, 2, 4), "float32"))
    k = relax.Var("k", relax.TensorType((1, past + new, 2, 4), "float32"))
    with builder.function("decode", [q, k]):
        scaled = builder.emit(relax.op.multiply(q, relax.const(2.0)))
        alias = builder.emit(scaled)
        builder.emit_func_output(builder.emit(relax.op.nn.attention(alias, k, k), "mixed"))
    with pytest.raises(UnsupportedModel, match=r"relax\.nn\.attention \(binding 'mixed' of function 'decode'\)"):
        LegalizeOps()(builder.get())


def test_what_tvm_passes_over_is_named():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    with builder.function("vision", [x]):
        builder.emit_func_output(builder.emit(relax.op.abs(x), "size"))
    with pytest.raises(UnsupportedModel, match=r"relax\.abs \(binding 'size' of function 'vision'\).*unknown"):
        LegalizeOps()(builder.get())


def test_what_a_code_generator_claimed_may_keep_its_operators():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    with builder.function("npu", [x], attrs={"Codegen": "npu"}):
        builder.emit_func_output(builder.emit(relax.op.abs(x)))
    assert LegalizeOps()(builder.get())["npu"].body.blocks[0].bindings[0].value.op.name == "relax.abs"


def test_the_numbers():
    vm = relax.VirtualMachine(tvm.compile(LegalizeOps()(Before), tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    for rows in (0, 1, 4):
        x = np.linspace(-1, 1, 3 * rows, dtype="float32").reshape(rows, 3)
        np.testing.assert_array_equal(vm["decode"](tvm.runtime.tensor(x)).numpy(), np.abs(x))
