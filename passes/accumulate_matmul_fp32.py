"""Sum half-precision products in float32 and round once.

Before: ``y = R.matmul(x, w)`` with x, w and y float16 (TVM accumulates in float16: 4096 ones give 2048).
After: ``t = R.matmul(x, w, out_dtype="float32"); y = R.astype(t, "float16")``, which FuseOps makes one kernel.

Fires when the operator sums (matmul, convolutions, einsum, sum, mean, variance, std, softmax, norms) and its
operands are float16 or bfloat16.
Never when the result is already wider than the operands, or for integers (int8 products keep int32).

Numerics: lowers no precision; results differ from TVM's by the rounding TVM makes in float16.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.numerics import lowers_precision
from crossloom.registry import PassInfo

_HALF = ("float16", "bfloat16")
#: Operators with ``out_dtype``: the kernel reads half precision and writes float32.
_OUT_DTYPE = ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")
_CONV_ATTRS = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
#: Operators whose operands are widened first.
_WIDEN = (
    "relax.einsum",
    "relax.sum",
    "relax.mean",
    "relax.variance",
    "relax.std",
    "relax.prod",
    "relax.cumsum",
    "relax.nn.softmax",
    "relax.nn.log_softmax",
    "relax.nn.layer_norm",
    "relax.nn.rms_norm",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.avg_pool2d",
    "relax.nn.adaptive_avg_pool2d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
)


def _half(expr: relax.Expr) -> bool:
    ty = expr.ty
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in _HALF


@mutator
class _Widen(PyExprMutator):
    def run(self, mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
        for gv, func in mod.functions_items():
            # An external codegen has its own arithmetic.
            if isinstance(func, relax.Function) and not (func.attrs and "Codegen" in func.attrs):
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def _float32(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._float32(field) for field in expr.fields])
        return self.builder_.emit(relax.op.astype(expr, "float32")) if _half(expr) else expr

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        result_type = call.ty
        call = super().visit_call_(call)
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
        if name not in _OUT_DTYPE and name not in _WIDEN:
            return call
        if not isinstance(result_type, relax.TensorType) or str(result_type.dtype) not in _HALF:
            return call
        dtype = str(result_type.dtype)
        if name == "relax.matmul":
            wide = relax.op.matmul(call.args[0], call.args[1], out_dtype="float32")
        elif name in _OUT_DTYPE:
            convolve = getattr(relax.op.nn, name.rsplit(".", 1)[-1])
            attrs = {key: getattr(call.attrs, key) for key in _CONV_ATTRS}
            wide = convolve(call.args[0], call.args[1], **attrs, out_dtype="float32")
        else:
            wide = relax.Call(call.op, [self._float32(a) for a in call.args], call.attrs, call.ty_args)
        return relax.op.astype(self.builder_.emit(wide), dtype)


def AccumulateMatmulInFloat32() -> tvm.transform.Pass:
    """Return the pass; every Relax function is treated, composite ones included."""

    @tvm.transform.module_pass(opt_level=0, name="AccumulateMatmulInFloat32")
    def accumulate(mod: tvm.ir.IRModule, _: tvm.transform.PassContext) -> tvm.ir.IRModule:
        return _Widen(mod).run(mod)

    return accumulate


PASS = PassInfo(
    "accumulate-matmul-fp32",
    AccumulateMatmulInFloat32,
    "lower",
    # Against TVM's own float16 sums, which are the ones that are wrong; hence the wide bound.
    lowers_precision(5e-2),
    doc="Sum half-precision products in float32 and round once.",
)
