"""Read a ``crossloom.fused_conv`` region: a convolution, and the steps that are done to its sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from crossloom.rewrite import Graph, composite_attrs, composite_name
from crossloom.schedules.activations import ACTIVATIONS
from crossloom.schedules.fused_conv import MOST_PHASES, Geometry, Spec, Step

from ..matching.layers import CONVOLUTIONS
from ..matching.spelling import dims, dtype, first_name, number, results_of, same_dims, scalar, sizes
from .columns import FLOATS, NoKernel
from .reader import ACTIVATIONS as ACTIVATION_OPERATORS

#: The composite's name.
CONV_REGION = "crossloom.fused_conv"
#: Layouts of x and result, and of the weight, that the kernel reads, by the number of spatial axes.
_LAYOUTS = {1: ("NCW", "OIW"), 2: ("NCHW", "OIHW"), 3: ("NCDHW", "OIDHW")}
_UNARY = {**ACTIVATION_OPERATORS, **{f"relax.nn.{kind}": kind for kind in ("gelu", "gelu_tanh")}}


@dataclass(frozen=True)
class ConvRegion:
    """What a region computes, and which of its parameters the kernel takes for what.

    Attributes
    ----------
    spec : Spec
    x, weight : relax.Expr
    operands : tuple of relax.Expr
        Of the steps in turn; those of a value per channel have axes of size 1 beside it.
    """

    spec: Spec
    x: relax.Expr
    weight: relax.Expr
    operands: tuple[relax.Expr, ...]


def read_convolution(graph: Graph, var: relax.Var) -> Spec:
    """Return what a binding computes that is a convolution.

    Raises
    ------
    NoKernel
        Where the kernel cannot do it.
    """
    call = graph.call(var, *CONVOLUTIONS)
    if call is None:
        raise NoKernel(f"{var.name}: no convolution")
    x, weight = call.args
    shape, whole, attrs = dims(x), sizes(weight), call.attrs
    rank = int(graph.op(var)[-2])
    if shape is None or whole is None or dims(var) is None or None in whole or not isinstance(number(shape[1]), int):
        raise NoKernel(f"{var.name}: channels or a kernel of unknown size")
    if 0 in whole:
        raise NoKernel(f"{var.name}: a convolution of nothing")
    layout = (_LAYOUTS[rank][0], _LAYOUTS[rank][1], _LAYOUTS[rank][0])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout) != layout:
        raise NoKernel(f"{var.name}: layout {attrs.data_layout} with {attrs.kernel_layout}")
    kinds = {dtype(x), dtype(weight), dtype(var)}
    if len(kinds) > 1 or not kinds <= FLOATS:
        raise NoKernel(f"{var.name}: a convolution of types {', '.join(sorted(kinds))}")
    padding = [int(p) for p in attrs.padding]
    outputs, _, *kernel = (int(extent) for extent in whole if extent is not None)
    # The kernel's own variables stand for sizes that are composed.
    strides = [int(s) for s in attrs.strides]
    batch, *size = (
        e if isinstance(e, (int, tirx.Var)) else tirx.Var(f"s{i}", "int64")
        for i, e in enumerate(map(number, [shape[0], *shape[2:]]))
    )
    spec = Spec(
        batch,
        int(number(shape[1])),
        outputs,
        tuple(size),
        tuple(kernel),
        tuple(strides),
        tuple(padding[:rank]),
        tuple(padding[rank:]),
        tuple(int(d) for d in attrs.dilation),
        dtype(x),
        int(attrs.groups),
    )
    geometry = Geometry.of(spec)
    if not geometry.is_patches and math.prod(geometry.phases) > MOST_PHASES:
        raise NoKernel(f"{var.name}: strides {strides} under taps that overlap: code for {geometry.phases} phases")
    return spec


def read_step(graph: Graph, var: relax.Var, value: relax.Expr) -> tuple[Step, relax.Expr | None]:
    """Return the step that a binding does to ``value``, the sums of a convolution, and the operand that it takes.

    Raises
    ------
    NoKernel
        Where the kernel cannot do it.
    """
    call, name = graph.value[var], graph.op(var)
    callee = graph.callee(var)
    if not isinstance(call, relax.Call) or not same_dims(dims(var) or (), dims(value) or (None,)):
        raise NoKernel(f"{var.name}: no step behind a convolution")
    if dtype(var) != dtype(value):
        raise NoKernel(f"{var.name}: a result of type {dtype(var)} of values of type {dtype(value)}")
    if name in ("relax.add", "relax.multiply", "relax.subtract", "relax.divide"):
        return _binary(graph, name, list(call.args), value)
    if not call.args or not call.args[0].same_as(value):
        raise NoKernel(f"{var.name}: no step behind a convolution")
    if name in _UNARY:
        return Step(_UNARY[name]), None
    if name == "relax.nn.leakyrelu":
        return Step("leaky_relu", (float(call.attrs.alpha),)), None
    if name == "relax.clip":
        bounds = [bound for bound in map(_immediate, call.args[1:]) if bound is not None]
        if len(bounds) == 2:
            return Step("clip", tuple(bounds)), None
    if callee is not None and composite_name(callee) == "crossloom.activation":
        kind = str(composite_attrs(callee)["kind"])
        if kind in ACTIVATIONS:
            return Step(kind), None
    raise NoKernel(f"{var.name}: no step that the kernel can do to sums of a convolution")


def _immediate(expr: relax.Expr) -> float | None:
    """Return a number of the shape language, None where it is no number."""
    value = getattr(expr, "value", None)
    return float(value) if isinstance(value, (int, float)) else None


def _binary(graph: Graph, name: str, args: Sequence[relax.Expr], value: relax.Expr) -> tuple[Step, relax.Expr | None]:
    commutes = name in ("relax.add", "relax.multiply")
    mine = [arg.same_as(value) for arg in args]
    if sum(mine) != 1 or not (mine[0] or commutes):
        raise NoKernel("a sum or product that takes the convolution's result twice, or the other way round")
    other = args[mine.index(False)]
    constant = scalar(graph, other)
    if constant is not None:
        if name in ("relax.add", "relax.subtract"):
            return Step("shift", (constant if name == "relax.add" else -constant,)), None
        if constant or name == "relax.multiply":
            return Step("scale", (constant if name == "relax.multiply" else 1.0 / constant,)), None
    if not commutes or dtype(other) != dtype(value):
        raise NoKernel(f"{name} with an operand of type {dtype(other)}")
    own, whole = dims(other), dims(value)
    if own is None or whole is None:
        raise NoKernel(f"{name} with an operand of unknown shape")
    channels, rank = number(whole[1]), len(whole) - 2
    shape = [number(extent) for extent in own]
    if name == "relax.add" and same_dims(own, whole):
        return Step("residual"), other
    if shape in ([channels, *[1] * rank], [1, channels, *[1] * rank]):
        return Step("bias" if name == "relax.add" else "factor"), other
    raise NoKernel(f"{name} with an operand that is neither a value per channel nor of the result's shape")


def read_conv(graph: Graph) -> ConvRegion:
    """Read the body of a region.

    Parameters
    ----------
    graph : Graph
        Of the region's function.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what the region holds.
    """
    root = next((var for var in graph.order if graph.op(var) in CONVOLUTIONS), None)
    if root is None:
        raise NoKernel("no convolution in the region")
    spec = read_convolution(graph, root)
    x, weight = graph.value[root].args
    value: relax.Expr = root
    steps, operands = [], []
    for var in graph.order:
        if var.same_as(root) or isinstance(graph.value[var], relax.Var):
            continue
        step, operand = read_step(graph, var, value)
        steps.append(step)
        operands += [] if operand is None else [operand]
        value = var
    results = results_of(graph)
    if len(results) != 1 or not first_name(graph, results[0]).same_as(value):
        raise NoKernel("a region whose result is not behind its last step")
    given = (x, weight, *operands)
    if any(isinstance(operand, relax.Var) and operand in graph.value for operand in given):
        raise NoKernel("an operand that is made in the region")
    return ConvRegion(replace(spec, steps=tuple(steps)), x, weight, tuple(operands))
