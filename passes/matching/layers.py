"""Convolutions, transposed convolutions and linear layers, told alike: input, weights, and where channels are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, composite_attrs, composite_name

from .arithmetic import Arithmetic, Value, of_weights
from .spelling import dims, sizes

LINEAR = "crossloom.linear"
CONVOLUTIONS = frozenset(f"relax.nn.conv{n}d" for n in (1, 2, 3))
TRANSPOSED = frozenset(f"relax.nn.conv{n}d_transpose" for n in (1, 2, 3))
#: Operators and composites that :func:`layer_at` knows.
LAYERS = CONVOLUTIONS | TRANSPOSED | {"relax.matmul", LINEAR}


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes
    ----------
    name : str
        Its operator or composite.
    operands : dict of str to relax.Expr
        ``x``, ``weight`` and, for a composite, ``bias``.
    kernel : str
        A letter for each axis of the weight: ``I`` and ``O`` for channels, anything else for places.
    out_axis, in_axis : int
        Where channels are in the result and in ``x``.
    groups : int
    uniform : bool
        Whether each result is a sum over whole kernels: neither padded nor transposed.
    """

    name: str
    operands: dict[str, relax.Expr]
    kernel: str
    out_axis: int
    in_axis: int
    groups: int = 1
    uniform: bool = True

    @property
    def outputs(self) -> int | None:
        """The number of output channels, None where it is symbolic."""
        count = (sizes(self.operands["weight"]) or [])[self.kernel.index("O")]
        return count if count is None or self.name not in TRANSPOSED else count * self.groups

    @property
    def inputs(self) -> int | None:
        """The number of input channels, None where it is symbolic."""
        count = (sizes(self.operands["weight"]) or [])[self.kernel.index("I")]
        return count if count is None or self.name in TRANSPOSED else count * self.groups


def layer_at(graph: Graph, expr: relax.Expr) -> Layer | None:
    """Return the layer that a value is the result of."""
    callee = graph.callee(expr)
    if callee is not None and composite_name(callee) == LINEAR:
        kernel = "OI" if str(composite_attrs(callee)["weight_layout"]) == "out_in" else "IO"
        return _linear(graph, LINEAR, graph.operands(expr), kernel, expr)
    call = graph.call(expr, "relax.matmul", *CONVOLUTIONS, *TRANSPOSED)
    if call is None or not of_weights(graph, call.args[1]) or None in (dims(call.args[0]), dims(call.args[1])):
        return None
    operands = {"x": call.args[0], "weight": call.args[1]}
    name, attrs = call.op.name, call.attrs
    if name == "relax.matmul":
        return _linear(graph, name, operands, "IO", expr) if len(dims(call.args[1]) or ()) == 2 else None
    data, kernel = str(attrs.data_layout), str(attrs.kernel_layout)
    result = str(attrs.out_layout) or data
    # Layouts in blocks have lower case letters for what is inside of a block.
    if not (data.isupper() and kernel.isupper() and result.isupper() and data.isalpha() and kernel.isalpha()):
        return None
    uniform = name in CONVOLUTIONS and not any(int(p) for p in attrs.padding)
    return Layer(name, operands, kernel, result.index("C"), data.index("C"), int(attrs.groups), uniform)


def _linear(graph: Graph, name: str, operands: dict[str, relax.Expr], kernel: str, expr: relax.Expr) -> Layer | None:
    inner, outer = dims(operands["x"]), dims(expr)
    if not inner or not outer or len(dims(operands["weight"]) or ()) != 2 or len(inner) != len(outer):
        return None
    return Layer(name, operands, kernel, len(outer) - 1, len(inner) - 1)


def times_channels(layer: Layer, letter: str, weight: Value, factor: Value, do: Arithmetic) -> Value:
    """Return a layer's weight times a factor of each output channel (``O``) or each input channel (``I``).

    The channels of the axis that counts within a group differ from group to group.
    """
    kernel, shape = layer.kernel, [size or 0 for size in sizes(layer.operands["weight"]) or []]
    other = "I" if letter == "O" else "O"
    count = int(np.prod([int(d) for d in (factor.shape if isinstance(factor, np.ndarray) else factor.ty.shape)]))
    if layer.groups == 1 or count == 1 or letter == ("I" if layer.name in TRANSPOSED else "O"):
        return do("multiply", weight, do.reshape(factor, [count if axis == letter else 1 for axis in kernel]))
    # The other channels' axis comes apart into groups and channels of a group.
    wide: list[int] = []
    across: list[int] = []
    for axis, size in zip(kernel, shape):
        wide += [layer.groups, size // layer.groups] if axis == other else [size]
        across += [layer.groups, 1] if axis == other else [size if axis == letter else 1]
    by_group = do.reshape(factor, [layer.groups, count // layer.groups])
    if kernel.index(letter) < kernel.index(other):
        by_group = do.transpose(by_group)
    product = do("multiply", do.reshape(weight, wide), do.reshape(by_group, across))
    return do.reshape(product, shape)
