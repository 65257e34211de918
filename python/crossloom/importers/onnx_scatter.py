"""Read writes to the places where a mask is true without listing those places.

    index = Transpose(NonZero(mask)); y = ScatterND(data, index, values)
->  y = MaskedScatter(data, mask, values)       # the k-th true place takes the k-th of the values

It is how exporters write ``masked_scatter`` and ``embeds[mask] = features``: image features where placeholder tokens
stand.  How many places there are depends on data; that the values are as many is what ScatterND asks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from tvm import relax

from ..errors import UnsupportedModel
from . import onnx_check
from .gather import known_sizes, safe_take
from .onnx_branches import DOMAIN
from .onnx_contrib import Call, Converter

MASKED_SCATTER = "MaskedScatter"

op = relax.op


def masked_scatters(
    nodes: Sequence[onnx.NodeProto], outputs: Collection[str], tensors: Mapping[str, np.ndarray]
) -> list[onnx.NodeProto]:
    """Return a graph's nodes with such writes in one node, without what only these have read.

    Parameters
    ----------
    nodes : sequence of onnx.NodeProto
    outputs : collection of str
        Results of the graph.
    tensors : mapping of str to numpy.ndarray
        Initializers and folded constants.
    """
    makers = {name: node for node in nodes for name in node.output if name}
    out = [_rewritten(node, makers, tensors) for node in nodes]
    if all(new is node for new, node in zip(out, nodes)):
        return list(nodes)
    # Nodes that nobody has read before stay: they are judged as ever.
    before = _read(nodes, outputs)
    kept: list[onnx.NodeProto] = []
    wanted = set(outputs)
    for node in reversed(out):
        if wanted.isdisjoint(node.output) and not before.isdisjoint(node.output):
            continue
        wanted.update(onnx_check.reads(node))
        kept.append(node)
    return kept[::-1]


def _read(nodes: Sequence[onnx.NodeProto], outputs: Collection[str]) -> set[str]:
    return {name for node in nodes for name in onnx_check.reads(node)} | set(outputs)


def _rewritten(
    node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], tensors: Mapping[str, np.ndarray]
) -> onnx.NodeProto:
    if node.op_type != "ScatterND" or node.domain not in ("", "ai.onnx") or len(node.input) != 3:
        return node
    if any(a.name == "reduction" and a.s not in (b"", b"none") for a in node.attribute):
        return node
    turned = makers.get(node.input[1])
    listed = makers.get(turned.input[0]) if turned is not None and turned.op_type == "Transpose" else None
    axes = [list(a.ints) for a in turned.attribute if a.name == "perm"] if turned is not None else []
    if listed is None or listed.op_type != "NonZero" or axes not in ([], [[1, 0]]):
        return node
    values = node.input[2]
    cut = makers.get(values)
    # PyTorch's exporter cuts the values to as many as there are places.
    if cut is not None and cut.op_type == "Slice" and _cuts_the_end(cut, tensors):
        values = cut.input[0]
    given = [node.input[0], listed.input[0], values]
    return onnx.helper.make_node(MASKED_SCATTER, given, list(node.output), node.name, domain=DOMAIN)


def _cuts_the_end(cut: onnx.NodeProto, tensors: Mapping[str, np.ndarray]) -> bool:
    constants = [tensors.get(name) for name in cut.input]
    wanted = ((1, [0]), (3, [0]), (4, [1]))
    return len(cut.input) >= 4 and all(
        constants[at] is not None and constants[at].reshape(-1).tolist() == value  # type: ignore[union-attr]
        for at, value in wanted
        if at < len(cut.input) and cut.input[at]
    )


def masked_scatter(c: Call) -> list[Any]:
    """Emit a running count of the mask, a gather of the values by it, and a choice.

    Raises
    ------
    UnsupportedModel
        For a mask that does not have the sizes of the first axes of what is written to.
    """
    data, mask, values = c.need(0), c.need(1), c.need(2)
    sizes, places, given = known_sizes(data), known_sizes(mask), known_sizes(values)
    rank = len(places or ())
    same = sizes is not None and [str(d) for d in places or ()] == [str(d) for d in sizes[:rank]]
    if sizes is None or given is None or not places or not same:
        raise UnsupportedModel(
            f"{c.where}: writes where a mask of shape {places} is true into a tensor of shape {sizes}",
            "give the mask the sizes of the tensor's first axes",
        )
    rest = sizes[rank:]
    mask = mask if str(mask.ty.dtype) == "bool" else c.emit(op.not_equal(mask, relax.const(0, str(mask.ty.dtype))))
    flat = c.emit(op.reshape(mask, [math.prod(places)]))
    number = c.emit(op.cumsum(c.emit(op.astype(flat, "int64")), axis=0))
    number = c.emit(op.subtract(number, relax.const(1, "int64")))
    leading = given[: len(given) - len(rest)]
    source = values if len(leading) == 1 else c.emit(op.reshape(values, [math.prod(leading), *rest]))
    taken = c.emit(safe_take(c.emit, source, number, 0, from_end=False))
    if not rest:
        chosen = c.emit(op.where(flat, taken, c.emit(op.reshape(data, [math.prod(sizes)]))))
        return [c.emit(op.reshape(chosen, sizes))]
    mask = c.emit(op.reshape(mask, [*places, *[1] * len(rest)]))
    return [c.emit(op.where(mask, c.emit(op.reshape(taken, sizes)), data))]


SCATTERS: dict[tuple[str, str], Converter] = {(DOMAIN, MASKED_SCATTER): masked_scatter}
