"""Translate cat as PyTorch defines it: an empty tensor of one dimension joins tensors of any rank.

TVM 0.27 refuses operands of different ranks.  A cache of keys begins as such an empty tensor.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.relax import op


def convert_concat(node: Any, importer: Any) -> relax.Expr:
    """Translate one node; a ``custom_convert_map`` entry of TVM's PyTorch importer."""
    tensors = [importer.env[arg] for arg in node.args[0]]
    joined = [tensor for tensor in tensors if not _adds_nothing(tensor)] or tensors[:1]
    if len(joined) == 1:
        return joined[0]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return importer.block_builder.emit(op.concat(joined, axis=int(axis)))


def _adds_nothing(tensor: relax.Expr) -> bool:
    """Return whether a tensor has the shape ``(0,)``, which PyTorch leaves out whatever the others have."""
    shape = list(tensor.ty.shape)
    return len(shape) == 1 and isinstance(shape[0], (int, tirx.IntImm)) and int(shape[0]) == 0
