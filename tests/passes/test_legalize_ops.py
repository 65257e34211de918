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


def _attention_over_kept_keys(**options):
    """Return attention of s queries over p + s keys, added to a mask where it is given one."""
    builder = relax.BlockBuilder()
    past, new = tirx.Var("p", "int64"), tirx.Var("s", "int64")
    q = relax.Var("q", relax.TensorType((1, new, 2, 4), "float32"))
    k = relax.Var("k", relax.TensorType((1, past + new, 2, 4), "float32"))
    mask = relax.Var("mask", relax.TensorType((1, 1, new, past + new), "float32"))
    old = relax.Var("old", relax.TensorType((past,), "float32"))
    with builder.function("decode", [old, q, k, mask]):
        scaled = builder.emit(relax.op.multiply(q, relax.const(2.0)))
        alias = builder.emit(scaled)
        call = relax.op.nn.attention(alias, k, k, **{"bias": mask, **options})
        builder.emit_func_output(builder.emit(call, "mixed"))
    return builder.get()


@pytest.mark.parametrize("old", [0, 1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_a_composed_number_of_keys(old, masked):
    after = LegalizeOps()(_attention_over_kept_keys(**({} if masked else {"bias": None})))
    assert {gv.name_hint for gv, fn in after.functions_items() if isinstance(fn, relax.Function)} == {"decode"}
    vm = relax.VirtualMachine(tvm.compile(after, tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 2, 4)).astype("float32") for n in (3, old + 3))
    mask = rng.standard_normal((1, 1, 3, old + 3)).astype("float32")
    given = (np.zeros(old, "float32"), q, k, mask)
    got = vm["decode"](*map(tvm.runtime.tensor, given)).numpy()
    scores = 2 * np.einsum("bihd,bjhd->bhij", q.astype("float64"), k) / 2 + masked * mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), k)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_what_tvm_raises_on_is_named():
    mod = _attention_over_kept_keys(bias=None, window_size=3)
    with pytest.raises(UnsupportedModel, match=r"relax\.nn\.attention \(binding 'mixed' of function 'decode'\)"):
        LegalizeOps()(mod)


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
