"""Multiply a linear layer's weights by the factors that its outputs are multiplied by.

    y = linear(x, w, bias); z = R.multiply(y, scale)          # scale: a weight, one value per output
->  z = linear(x, R.multiply(w, scale), R.multiply(bias, scale))

The products are of weights alone and computed once when a model is built.

Fires for a factor of as many values as the layer has outputs (leading axes of size 1 allowed), a parameter behind the
inputs or a constant: LayerScale of DINOv2 and CaiT.
Never where the layer's result is read elsewhere, nor for weights of another type than the factor or of symbolic size,
nor for float16 unless the factor is a constant that leaves weights in that type's range.

Numerics: reassociates (weights are rounded once after they are multiplied).  Linear in the module's size.
Source: Touvron et al. 2021 (arXiv 2103.17239).
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import (
    Graph,
    Match,
    Rule,
    Site,
    composite_attrs,
    composite_name,
    rewrite_pass,
)
from crossloom.verdict import Verdict, accept, refuse

from .matching.arithmetic import keeps_half
from .matching.spelling import dims, dtype, either, is_constant, is_weight, same_dims, sizes
from .regions.composites import linear

_NAME = "fold-scale-into-linear"
_LINEAR = "crossloom.linear"


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    for value, scale in either(graph.resolve(root)):
        callee = graph.callee(value)
        if callee is None or composite_name(callee) != _LINEAR or not isinstance(value, relax.Var):
            continue
        single = (sizes(scale) or [1])[-1] == 1
        if single or not is_weight(graph, scale) or not isinstance(graph.value[value], relax.Call):
            continue
        if not same_dims(dims(value) or (), dims(root) or (None,)):
            return None
        operands = graph.operands(value)
        if any(dtype(operand) != dtype(scale) for operand in (root, *operands.values())):
            return refuse("different-dtypes", getattr(scale, "name", ""), f"{dtype(scale)} beside {dtype(root)}")
        facts = {"layout": str(composite_attrs(callee)["weight_layout"])}
        return Match(graph, root, {**operands, "scale": scale}, frozenset((root, value)), facts)
    return None


def _legal(m: Match) -> Verdict:
    leading = (sizes(m["scale"]) or [])[:-1]
    if any(size != 1 for size in leading):
        return refuse("not-one-per-output", getattr(m["scale"], "name", ""), "it differs from row to row")
    if (sizes(m["scale"]) or [None])[-1] is None:
        return refuse("outputs-of-symbolic-number", getattr(m["scale"], "name", ""))
    if dtype(m.root) == "float16" and not _keeps_half(m.graph.resolve(m["scale"])):
        return refuse("half-precision-factor-unknown", getattr(m["scale"], "name", ""), "weights might lose their bits")
    return accept()


def _keeps_half(scale: relax.Expr) -> bool:
    """Return whether a factor is known to leave float16 weights in that type's range (LayerScale begins at 1e-5)."""
    return is_constant(scale) and keeps_half(scale.value.numpy().astype("float64"))


def _replace(site: Site) -> relax.Expr:
    emit, match = site.builder.emit, site.match
    (count,) = (sizes(match["scale"]) or [0])[-1:]
    out_in = match.facts["layout"] == "out_in"
    column = emit(relax.op.reshape(site["scale"], [count, 1] if out_in else [1, count]))
    weight = emit(relax.op.multiply(site["weight"], column))
    bias = site["bias"] if "bias" in match.captures else None
    if bias is not None:
        row = emit(relax.op.reshape(site["scale"], [1] * (bias.ty.ndim - 1) + [count]))
        bias = emit(relax.op.multiply(bias, row))
    return linear(site, site["x"], weight, bias, match.facts["layout"])


def FoldScaleIntoLinear() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = Rule("scale-into-linear", frozenset({"relax.multiply"}), _match, _replace, legal=_legal)
    return rewrite_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FoldScaleIntoLinear, "fuse", REASSOCIATES, doc="Factors of a linear layer's outputs join it.")
