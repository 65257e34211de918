"""Sum half-precision products in float32 and round once.

Before: ``y = R.matmul(x, w)`` with x, w and y float16 (TVM accumulates in float16: 4096 ones give 2048).
After: ``t = R.matmul(x, w, out_dtype="float32"); y = R.astype(t, "float16")``, which FuseOps makes one kernel.

Fires when the operator sums or multiplies up (matmul, convolutions and their transposes, einsum, sum, mean, variance,
std, prod, cumsum, softmax, norms, average pooling, attention) and its result is float16 or bfloat16.
Never when the result is already wider than the operands, or for integers (int8 products keep int32).

Numerics: lowers no precision; results differ from TVM's by the rounding TVM makes in float16.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from crossloom.numerics import lowers_precision
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass

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
    "relax.nn.avg_pool1d",
    "relax.nn.avg_pool2d",
    "relax.nn.avg_pool3d",
    "relax.nn.adaptive_avg_pool1d",
    "relax.nn.adaptive_avg_pool2d",
    "relax.nn.adaptive_avg_pool3d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
    "relax.nn.conv3d_transpose",
    "relax.nn.attention",
    "relax.nn.attention_bias",
)
#: Those of them that may name their result's type: that attribute, the builder, and the other attributes.
_RESULT_DTYPE: dict[str, tuple[str, Callable[..., relax.Call], tuple[str, ...]]] = {
    "relax.cumsum": ("dtype", relax.op.cumsum, ("axis", "exclusive")),
    **{
        f"relax.nn.conv{n}d_transpose": (
            "out_dtype",
            getattr(relax.op.nn, f"conv{n}d_transpose"),
            (*_CONV_ATTRS, "output_padding"),
        )
        for n in (1, 2, 3)
    },
}


def _is_half(expr: relax.Expr) -> bool:
    ty = expr.ty
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in _HALF


def _match(graph: Graph, root: relax.Var) -> Match | None:
    call = graph.value[root]
    if not _is_half(root):
        return None
    # Operands that are shapes or prim values stand as they are.
    captures = {f"operand {i}": arg for i, arg in enumerate(call.args)}
    return Match(graph, root, captures, frozenset({root}), {"op": graph.op(root), "call": call})


def _replace(site: Site) -> relax.Expr:
    call, name = site.match.facts["call"], site.match.facts["op"]
    args = [site[f"operand {i}"] for i in range(len(call.args))]

    def widened(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([widened(field) for field in expr.fields])
        return site.builder.emit(relax.op.astype(expr, "float32")) if _is_half(expr) else expr

    if name == "relax.matmul":
        wide = relax.op.matmul(args[0], args[1], out_dtype="float32")
    elif name in _OUT_DTYPE:
        convolve = getattr(relax.op.nn, name.rsplit(".", 1)[-1])
        attrs = {key: getattr(call.attrs, key) for key in _CONV_ATTRS}
        wide = convolve(args[0], args[1], **attrs, out_dtype="float32")
    elif name in _RESULT_DTYPE:
        key, build, others = _RESULT_DTYPE[name]
        # The result's type may be named, and then it is that of the sum too.
        kept = {attr: getattr(call.attrs, attr) for attr in others}
        wide = build(*[widened(a) for a in args], **kept, **{key: "float32"})
    else:
        wide = relax.Call(call.op, [widened(a) for a in args], call.attrs, call.ty_args)
    return relax.op.astype(site.builder.emit(wide), str(site.match.root.ty.dtype))


def AccumulateMatmulFP32() -> tvm.transform.Pass:
    """Return the pass; every Relax function is treated, composite ones included."""
    rule = Rule("accumulate-matmul-fp32", frozenset((*_OUT_DTYPE, *_WIDEN)), _match, _replace)
    return rewrite_pass("accumulate-matmul-fp32", [rule], within_composites=True)


PASS = PassInfo(
    "accumulate-matmul-fp32",
    AccumulateMatmulFP32,
    "lower",
    # Against TVM's own float16 sums, which are the ones that are wrong; hence the wide bound.
    lowers_precision(5e-2),
    doc="Sum half-precision products in float32 and round once.",
)
