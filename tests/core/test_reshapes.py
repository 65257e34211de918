"""Views are found in modules that hold kernels of plain loops; such a kernel of one operand compiles."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import crossloom
from canonical import data, function
from crossloom.reshapes import rewrite_reshapes
from crossloom.targets import get_target

op = relax.op


def rms(emit, x, eps=1e-5):
    square = emit(op.mean(emit(op.multiply(x, x)), -1, keepdims=True))
    return emit(op.multiply(x, emit(op.rsqrt(emit(op.add(square, relax.const(eps, "float32")))))))


def test_a_norm_without_a_weight_compiles():
    def build(emit, x):
        return emit(relax.Tuple([emit(op.exp(rms(emit, x))), emit(op.reshape(x, (20,)))]))

    mod = function(build, [(5, 4)])
    built = tvm.compile(mod, get_target("host").tvm_target(), relax_pipeline=crossloom.pipeline("host"))
    (x,) = data((5, 4))
    normed, flat = relax.VirtualMachine(built, tvm.cpu())["decode"](tvm.runtime.tensor(x))
    wide = x.astype("float64")
    want = np.exp(wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5))
    np.testing.assert_allclose(normed.numpy(), want, rtol=1e-5)
    np.testing.assert_array_equal(flat.numpy(), x.reshape(20))


@I.ir_module
class Module:
    @T.prim_func(private=True)
    def doubled(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.call_tir(Module.doubled, (x,), out_ty=R.Tensor((4,), "float32"))
            R.output(y)
        return y


def test_kernels_of_plain_loops_stay_what_they_are():
    tvm.ir.assert_structural_equal(rewrite_reshapes()(Module), Module)


def test_views_beside_them_are_found():
    function(
        lambda emit, x: emit(op.exp(emit(op.reshape(x, (2, 2))))), [(4,)], "other", builder=(b := relax.BlockBuilder())
    )
    beside = relax.transform.LegalizeOps()(b.get())
    mod = tvm.ir.IRModule({**dict(Module.functions_items()), **dict(beside.functions_items())})
    entry = next(f for g, f in rewrite_reshapes()(mod).functions_items() if g.name_hint == "other")
    first = entry.body.blocks[0].bindings[0].value
    assert isinstance(first.op, tvm.ir.Op) and first.op.name == "relax.reshape"
    assert any(isinstance(f, tirx.PrimFunc) for _, f in mod.functions_items())
