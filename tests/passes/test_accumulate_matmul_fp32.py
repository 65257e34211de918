"""Half-precision sums are made in float32 and rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from crossloom.flow import steps
from crossloom.passes.accumulate_matmul_fp32 import AccumulateMatmulFP32
from crossloom.passes.inline_composites import InlineComposites
from crossloom.testing import assert_pass_preserves
from crossloom.verdict import Ledger

TARGET = tvm.target.Target({"kind": "llvm"})


def run(mod, args, name):
    with TARGET:
        mod = tvm.transform.Sequential([step.run for step in steps(TARGET)])(mod)
    vm = relax.VirtualMachine(tvm.compile(mod, target=TARGET), tvm.cpu())
    return vm[name](*[tvm.runtime.tensor(a) for a in args]).numpy()


def one(build, *shapes):
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float16")) for i, s in enumerate(shapes)]
    with bb.function("decode", params):
        with bb.dataflow():
            out = bb.emit_output(build(*params))
        bb.emit_func_output(out)
    return bb.get()


def test_long_sums_do_not_stall():
    x, w = np.ones((1, 4096), "float16"), np.ones((4096, 2), "float16")
    w[:, 1] = 0.5
    assert run(one(relax.op.matmul, x.shape, w.shape), [x, w], "decode").tolist() == [[4096.0, 2048.0]]
    assert run(one(lambda x: relax.op.sum(x, 1), x.shape), [x], "decode").tolist() == [4096.0]


def test_convolution_keeps_its_dtype_and_sums_wide():
    x, w = np.ones((1, 512, 3, 3), "float16"), np.ones((1, 512, 3, 3), "float16")
    out = run(one(relax.op.nn.conv2d, x.shape, w.shape), [x, w], "decode")
    assert out.dtype == np.float16 and out.item() == 4608.0


def test_a_named_half_result_is_summed_wide():
    """2048 ones and one more are 2048 in float16, wherever the sum is kept in it."""
    x = np.ones((1, 4096), "float16")
    for exclusive, last in [(False, 4096.0), (True, 4095.0)]:
        mod = one(lambda x, e=exclusive: relax.op.cumsum(x, 1, dtype="float16", exclusive=e), x.shape)
        out = run(mod, [x], "decode")
        # 4095 lies between two float16 and is rounded once, to even.
        assert out.dtype == np.float16 and out[0, -1] == np.float16(last) and out[0, 2999] == np.float16(last - 1096)
    convolutions = [
        (relax.op.nn.conv1d_transpose, (3,)),
        (relax.op.nn.conv2d_transpose, (2, 3)),
        (relax.op.nn.conv3d_transpose, (2, 2, 3)),
    ]
    for convolve, space in convolutions:
        mod = one(
            lambda x, w, f=convolve: f(x, w, strides=2, output_padding=1, out_dtype="float16"),
            (1, 4, *space),
            (4, 2, *[2] * len(space)),
        )
        before = mod["decode"].body.blocks[0].bindings[-1]
        *_, wide, narrow = AccumulateMatmulFP32()(mod)["decode"].body.blocks[0].bindings
        assert str(wide.value.attrs.out_dtype) == str(wide.var.ty.dtype) == "float32"
        assert str(narrow.var.ty.dtype) == "float16"
        tvm.ir.assert_structural_equal(wide.var.ty.shape, before.var.ty.shape)
    x, w = np.ones((1, 4096, 3), "float16"), np.ones((4096, 1, 1), "float16")
    mod = one(lambda x, w: relax.op.nn.conv1d_transpose(x, w, out_dtype="float16"), x.shape, w.shape)
    assert run(mod, [x, w], "decode").tolist() == [[[4096.0] * 3]]


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_rms_norm_beyond_the_range_of_half(scale):
    rng = np.random.default_rng(0)
    x = (scale * np.sign(rng.standard_normal((3, 64)))).astype("float16")
    g = rng.standard_normal(64).astype("float16")
    x[1] = 0
    wide = x.astype("float64")
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * g
    mod = one(lambda x, g: relax.op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5), x.shape, g.shape)
    np.testing.assert_allclose(run(mod, [x, g], "decode"), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: relax.op.nn.avg_pool1d(x, 2), [(1, 2, 8)]),
        (lambda x: relax.op.nn.adaptive_avg_pool3d(x, 2), [(1, 2, 4, 4, 4)]),
        (relax.op.nn.conv3d_transpose, [(1, 2, 4, 4, 4), (2, 3, 3, 3, 3)]),
        (relax.op.nn.attention, [(1, 5, 2, 4)] * 3),
        (relax.op.nn.attention, [*[(1, 5, 2, 4)] * 3, (1, 2, 5, 5)]),
    ],
)
def test_pools_transposed_convolutions_and_attention_sum_wide(build, shapes):
    *_, wide, narrow = AccumulateMatmulFP32()(one(build, *shapes))["decode"].body.blocks[0].bindings
    assert (str(wide.var.ty.dtype), str(narrow.var.ty.dtype)) == ("float32", "float16")
    assert narrow.value.op.name == "relax.astype"


def test_integers_and_wider_results_stay():
    for dtype, out in [("int8", "int32"), ("float16", "float32"), ("float32", None)]:
        bb = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((4, 4), dtype))
        with bb.function("vision", [x]):
            with bb.dataflow():
                y = bb.emit_output(relax.op.matmul(x, x, out_dtype=out))
            bb.emit_func_output(y)
        mod = bb.get()
        tvm.ir.assert_structural_equal(AccumulateMatmulFP32()(mod), mod)


@I.ir_module
class Before:
    @R.function
    def prefill(x: R.Tensor(("n", 4), "float16"), w: R.Tensor((4, 2), "float16")) -> R.Tensor(("n", 2), "float16"):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    @R.function(private=True)
    def softmax(x: R.Tensor(("n", 4), "float16")) -> R.Tensor(("n", 4), "float16"):
        R.func_attr({"Composite": "crossloom.softmax"})
        with R.dataflow():
            y = R.nn.softmax(x, axis=-1)
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def prefill(x: R.Tensor(("n", 4), "float16"), w: R.Tensor((4, 2), "float16")) -> R.Tensor(("n", 2), "float16"):
        with R.dataflow():
            t = R.matmul(x, w, out_dtype="float32")
            y = R.astype(t, "float16")
            R.output(y)
        return y

    @R.function(private=True)
    def softmax(x: R.Tensor(("n", 4), "float16")) -> R.Tensor(("n", 4), "float16"):
        R.func_attr({"Composite": "crossloom.softmax"})
        with R.dataflow():
            wide = R.astype(x, "float32")
            t = R.nn.softmax(wide, axis=-1)
            y = R.astype(t, "float16")
            R.output(y)
        return y


def test_golden_entries_and_composites():
    with Ledger() as ledger:
        tvm.ir.assert_structural_equal(AccumulateMatmulFP32()(Before), Expected)
    assert {(v.function, v.code, v.pass_name) for v in ledger} == {
        ("prefill", "fired", "accumulate-matmul-fp32"),
        ("softmax", "fired", "accumulate-matmul-fp32"),
    }


def test_what_a_code_generator_claimed_stays():
    claimed = Before.clone()
    gvar = claimed.get_global_var("softmax")
    claimed.update_func(gvar, claimed[gvar].with_attr("Codegen", "npu"))
    after = AccumulateMatmulFP32()(claimed)
    tvm.ir.assert_structural_equal(after["softmax"], claimed["softmax"])


def test_it_preserves_transformer_modules():
    assert_pass_preserves(AccumulateMatmulFP32(), max_examples=15)


def test_twice_is_once():
    once = AccumulateMatmulFP32()(one(relax.op.matmul, (2, 8), (8, 2)))
    tvm.ir.assert_structural_equal(AccumulateMatmulFP32()(once), once)


@I.ir_module
class Nested:
    @R.function(private=True)
    def inner(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        R.func_attr({"Composite": "crossloom.exp"})
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y

    @R.function(private=True)
    def outer(x: R.Tensor(("k", 4), "float32")) -> R.Tensor(("k", 4), "float32"):
        R.func_attr({"Composite": "crossloom.twice"})
        cls = Nested
        with R.dataflow():
            y = cls.inner(x)
            z = R.add(y, y)
            R.output(z)
        return z

    @R.function
    def prefill(x: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
        cls = Nested
        with R.dataflow():
            y = cls.outer(x)
            R.output(y)
        return y

    @R.function
    def decode(x: R.Tensor((1, 4), "float32")) -> R.Tensor((1, 4), "float32"):
        cls = Nested
        with R.dataflow():
            y = cls.inner(x)
            R.output(y)
        return y


def test_composites_are_inlined_in_every_entry():
    mod = InlineComposites()(Nested)
    assert {gv.name_hint for gv in mod.get_global_vars()} == {"prefill", "decode"}
    relax.analysis.well_formed(mod)
    x = np.arange(8, dtype="float32").reshape(2, 4) / 8
    np.testing.assert_allclose(run(Nested, [x], "prefill"), 2 * np.exp(x), rtol=1e-5)
