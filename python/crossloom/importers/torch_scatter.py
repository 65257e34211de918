"""Translate masked_scatter as PyTorch decomposes it: the k-th true element takes element k of the source.

TVM 0.27 has no translation of it; it is how models put image features where placeholder tokens stand.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.relax import op

from ..errors import UnsupportedModel
from .gather import known_sizes, safe_take

NAMES = ("self", "mask", "source")


def convert_masked_scatter(node: Any, importer: Any) -> relax.Var:
    """Translate one node; a ``custom_convert_map`` entry of TVM's PyTorch importer.

    PyTorch refuses a source of fewer elements than the mask has true ones; here they read its last one.

    Raises
    ------
    UnsupportedModel
        For a mask of more axes, or of longer ones, than what is written to.
    """
    given: dict[str, Any] = dict(zip(NAMES, node.args))
    given.update(node.kwargs)
    emit = importer.block_builder.emit
    base, mask, source = (importer.env[given[name]] for name in NAMES)
    shape, narrow = list(base.ty.shape), known_sizes(mask) or []
    wide = known_sizes(base) or []
    fits = len(narrow) <= len(wide) and all(
        n == 1 or (n is w if not isinstance(n, int) else n == w) or str(n) == str(w)
        for n, w in zip(narrow, wide[len(wide) - len(narrow) :])
    )
    if not fits:
        raise UnsupportedModel(
            f"{node.name!r}: masked_scatter whose mask {narrow} does not fit into {wide}", "expand the tensor first"
        )
    if [str(n) for n in narrow] != [str(w) for w in wide]:
        mask = emit(op.broadcast_to(mask, relax.ShapeExpr(shape)))
    flat, places, values = (emit(op.reshape(x, [_count(x)])) for x in (base, mask, source))
    number = emit(op.cumsum(emit(op.astype(places, "int64")), axis=0))
    number = emit(op.subtract(number, relax.const(1, "int64")))
    taken = emit(safe_take(emit, values, number, 0, from_end=False))
    return emit(op.reshape(emit(op.where(places, taken, flat)), relax.ShapeExpr(shape)))


def _count(x: relax.Expr) -> Any:
    total: Any = 1
    for size in x.ty.shape:
        total = total * size
    return total
