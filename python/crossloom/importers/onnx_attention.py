"""com.microsoft GroupQueryAttention: causal attention with fewer key heads than query heads and a cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx_contrib import Call, Converter, dims_of, dtype_of, rotate

op = relax.op
_MASKED = -3.0e38


def _heads(c: Call, x: Any, heads: int, dim: int) -> Any:
    """``(batch, seq, heads * dim) -> (batch, heads, seq, dim)``."""
    batch, seq, _ = dims_of(x)
    return c.emit(op.permute_dims(c.emit(op.reshape(x, [batch, seq, heads, dim])), [0, 2, 1, 3]))


def group_query_attention(c: Call) -> list[Any]:
    """Convert GroupQueryAttention.

    Sequence b of the batch has ``past = max(seqlens_k[b] + 1 - seq, 0)`` tokens in its cache; its new keys
    follow directly on those, and query i attends to keys 0 .. past + i, with a ``local_window_size`` of w
    only to the last w of them.  A ``softcap`` of c turns scaled scores s into ``c tanh(s / c)``.  The present
    cache is ``past_seq + seq`` long: in it, what lies beyond ``past + seq`` has no
    meaning (shorter sequences of a batch).
    Source: the operator's documentation in ONNX Runtime's ContribOperators.md.

    Raises
    ------
    UnsupportedModel
        Quantized caches, attention sinks, or sizes that disagree.
    """
    c.refuse(smooth_softmax=0, qk_output=0, kv_cache_bit_width=0)
    for index, what in ((11, "head_sink"), (12, "k_scale"), (13, "v_scale")):
        if c.arg(index) is not None:
            raise UnsupportedModel(f"{c.where}: {what} is not supported", "export without it")
    query, key, value = c.need(0), c.arg(1), c.arg(2)
    heads, groups = int(c.attrs.get("num_heads", 0)), int(c.attrs.get("kv_num_heads", 0))
    if heads <= 0 or groups <= 0 or heads % groups:
        raise UnsupportedModel(f"{c.where}: num_heads={heads}, kv_num_heads={groups}", "correct the attributes")
    if (key is None) != (value is None) or query.ty.ndim != 3:
        raise UnsupportedModel(f"{c.where}: needs a 3-D query, and key and value or neither", "export it again")
    batch, seq, width = dims_of(query)
    lanes = heads if key is not None else heads + 2 * groups
    if not isinstance(width, int) or width % lanes:
        raise UnsupportedModel(f"{c.where}: width {width} does not divide into {lanes} heads", "fix the width")
    dim, dtype = width // lanes, dtype_of(query)
    if key is None:
        cuts = [heads * dim, (heads + groups) * dim]
        packed = c.emit(op.split(query, cuts, -1))
        query, key, value = (c.emit(relax.TupleGetItem(packed, i)) for i in range(3))
    q = _heads(c, query, heads, dim)
    k, v = _heads(c, key, groups, dim), _heads(c, value, groups, dim)

    const = lambda x: relax.const(x, "int64")
    length = c.emit(op.astype(c.emit(op.reshape(c.need(5), [batch])), "int64"))
    steps = c.emit(op.arange(0, seq, 1, "int64"))
    count = c.emit(op.add(length, const(1)))
    size = _scalar(c, seq)
    past = c.emit(op.maximum(c.emit(op.subtract(count, size)), const(0)))
    position = c.emit(op.add(c.emit(op.expand_dims(past, 1)), c.emit(op.expand_dims(steps, 0))))  # (batch, seq)

    if c.attrs.get("do_rotary", 0):
        cos, sin = c.need(7), c.need(8)
        at = position
        if c.arg(9) is not None:
            at = c.emit(op.astype(c.arg(9), "int64"))
        cos, sin = c.emit(op.take(cos, at, 0, mode="clip")), c.emit(op.take(sin, at, 0, mode="clip"))
        interleaved = bool(c.attrs.get("rotary_interleaved", 0))
        q, k = rotate(c, q, cos, sin, interleaved), rotate(c, k, cos, sin, interleaved)
    total = seq
    past_key, past_value = c.arg(3), c.arg(4)
    if past_key is not None and past_value is not None:
        old = dims_of(past_key)[2]
        total = old + seq
        # Token t of the present is past token t, or new token t - past, which lies at old + t - past.
        t = c.emit(op.expand_dims(c.emit(op.arange(0, total, 1, "int64")), 0))
        tail = c.emit(op.subtract(_scalar(c, old), past))
        moved = c.emit(op.add(t, c.emit(op.expand_dims(tail, 1))))
        source = c.emit(op.where(c.emit(op.less(t, c.emit(op.expand_dims(past, 1)))), t, moved))
        source = c.emit(op.expand_dims(source, [1, 3]))
        source = c.emit(op.broadcast_to(source, [batch, groups, total, dim]))
        k = c.emit(op.gather_elements(c.emit(op.concat([past_key, k], 2)), source, 2))
        v = c.emit(op.gather_elements(c.emit(op.concat([past_value, v], 2)), source, 2))

    keys = c.emit(op.reshape(c.emit(op.arange(0, total, 1, "int64")), [1, 1, 1, total]))
    own = c.emit(op.expand_dims(position, [1, 3]))
    allowed = c.emit(op.less_equal(keys, own))
    window = int(c.attrs.get("local_window_size", -1))
    if window == 0 or window < -1:
        raise UnsupportedModel(f"{c.where}: local_window_size={window}", "give the tokens to attend to, or -1 for all")
    if window > 0:
        oldest = c.emit(op.subtract(own, const(window - 1)))
        allowed = c.emit(op.logical_and(allowed, c.emit(op.greater_equal(keys, oldest))))
    bias = c.emit(op.where(allowed, relax.const(0.0, "float32"), relax.const(_MASKED, "float32")))
    if c.arg(10) is not None:
        bias = c.emit(op.add(bias, c.emit(op.astype(c.arg(10), "float32"))))
    # The queries of one key head lie together: (batch, groups, heads / groups * seq, dim).
    scale = float(c.attrs.get("scale", 0.0)) or 1.0 / math.sqrt(dim)
    wide = lambda x: x if dtype == "float32" else c.emit(op.astype(x, "float32"))
    rows = heads // groups * seq
    q = c.emit(op.multiply(wide(q), relax.const(scale, "float32")))
    q = c.emit(op.reshape(q, [batch, groups, rows, dim]))
    scores = c.emit(op.matmul(q, c.emit(op.permute_dims(wide(k), [0, 1, 3, 2]))))
    cap = float(c.attrs.get("softcap", 0.0))
    if cap > 0:
        scores = c.emit(op.tanh(c.emit(op.divide(scores, relax.const(cap, "float32")))))
        scores = c.emit(op.multiply(scores, relax.const(cap, "float32")))
    scores = c.emit(op.add(c.emit(op.reshape(scores, [batch, heads, seq, total])), bias))
    weights = c.emit(op.reshape(c.emit(op.nn.softmax(scores, -1)), [batch, groups, rows, total]))
    y = c.emit(op.reshape(c.emit(op.matmul(weights, wide(v))), [batch, heads, seq, dim]))
    y = c.emit(op.reshape(c.emit(op.permute_dims(y, [0, 2, 1, 3])), [batch, seq, heads * dim]))
    return [y if dtype == "float32" else c.emit(op.astype(y, dtype)), k, v]


def _scalar(c: Call, size: Any) -> Any:
    """A size, fixed or symbolic, as an int64 tensor of rank 0."""
    if isinstance(size, int):
        return relax.const(np.array(size, "int64"), "int64")
    x = c.emit(op.shape_to_tensor(relax.ShapeExpr([size])))
    return c.emit(op.reshape(x, []))


ATTENTION: dict[tuple[str, str], Converter] = {("com.microsoft", "GroupQueryAttention"): group_query_attention}
