"""Tell tables (cosines and sines of positions, masks) from weights among the initializers of an ONNX graph.

A table belongs to the program: passes read its values to prove what it is (which positions turn which lanes, which
keys a query sees).  A weight stays a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from . import onnx_check

#: Largest table (elements): a causal mask of 1,024 tokens.
MOST_ELEMENTS = 1 << 20
_VIEWS = ("Unsqueeze", "Squeeze", "Reshape", "Slice", "Cast", "Expand", "Transpose", "Identity")
_MASKS = ("Add", "Sub", "Mul", "Where", "And", "Or", "Not")


def tables(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of tensors that are tables by their values and by who reads them.

    Parameters
    ----------
    nodes : sequence of onnx.NodeProto
        All nodes that are left.
    tensors : mapping of str to numpy.ndarray
        Initializers and folded constants.

    Returns
    -------
    set of str
        Float tensors of rank 2 or more within [-1, 1] that only products read (rotary tables); boolean ones, and
        float ones of 0 and one value that is 1 or at most -10,000, that only sums, products, selections and
        connectives read (masks).  Views and casts in between do not count.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in set(onnx_check.reads(node)):
            readers.setdefault(name, []).append(node)
    found = set()
    for name, array in tensors.items():
        allowed = _operators(array)
        if allowed and _ends(name, readers, 0) <= set(allowed):
            found.add(name)
    return found


def _operators(array: np.ndarray) -> tuple[str, ...]:
    """Return the operators that may read an array of such values if it is a table, none if it cannot be one."""
    if array.ndim < 2 or not 1 < array.size <= MOST_ELEMENTS:
        return ()
    if array.dtype.kind == "b":
        return _MASKS
    if array.dtype.kind != "f":
        return ()
    low, high = float(array.min()), float(array.max())
    two_values = bool(np.all((array == low) | (array == high)))
    if two_values and ((high == 0 and low <= -1e4) or (low, high) == (0.0, 1.0)):
        return _MASKS
    return ("Mul",) if -1 <= low and high <= 1 else ()


def _ends(name: str, readers: Mapping[str, list[onnx.NodeProto]], depth: int) -> set[str]:
    """Return the operators that read a value, through views; an operator none allows where it cannot be followed."""
    found: set[str] = set()
    for node in readers.get(name, ()):
        if name not in node.input or node.domain not in ("", "ai.onnx") or depth > len(_VIEWS):
            return {"?"}
        if node.op_type not in _VIEWS:
            found.add(node.op_type)
        elif node.input[0] == name:
            found |= _ends(node.output[0], readers, depth + 1)
        else:
            return {"?"}
    return found or {"?"}
