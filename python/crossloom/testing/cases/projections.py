"""Products with weights: linear layers, several of one input, MLPs, embeddings, sums over a length."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from .. import references as ref
from .build import DIMS, DTYPES, Case, Input, build


@st.composite
def linear(draw: Any) -> Case:
    """A linear layer; weight transposed or not, bias of rank 1 or 2."""
    k, m, dtype, transposed = draw(DIMS), draw(DIMS), draw(DTYPES), draw(st.booleans())
    bias = (m,) if draw(st.booleans()) else (1, m)

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        w = bb.emit(relax.op.permute_dims(p[1])) if transposed else p[1]
        return [relax.op.add(bb.emit(relax.op.matmul(p[0], w)), p[2])]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        a, w, b = (t.astype("float64") for t in x)
        return [a @ (w.T if transposed else w) + b]

    return build(draw, [("n", k), (m, k) if transposed else (k, m), bias], emit, reference, dtype)


@st.composite
def parallel_projections(draw: Any) -> Case:
    """Two or three products of one input, of unequal widths, with biases of rank 1, 2 or none."""
    k, dtype, count = draw(DIMS), draw(DTYPES), draw(st.integers(2, 3))
    widths = [draw(DIMS) for _ in range(count)]
    ranks = [draw(st.sampled_from([0, 1, 2])) for _ in range(count)]
    weights = [(k, m) for m in widths]
    biases = [(m,) if rank == 1 else (1, m) for m, rank in zip(widths, ranks) if rank]

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        given = iter(p[1 + count :])
        products = [bb.emit(relax.op.matmul(p[0], w)) for w in p[1 : 1 + count]]
        return [bb.emit(relax.op.add(y, next(given))) if rank else y for y, rank in zip(products, ranks)]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        given = iter(x[1 + count :])
        products = [x[0].astype("float64") @ w.astype("float64") for w in x[1 : 1 + count]]
        return [y + next(given).astype("float64") if rank else y for y, rank in zip(products, ranks)]

    return build(draw, [("n", k), *weights, *biases], emit, reference, dtype)


@st.composite
def half_precision_sum(draw: Any) -> Case:
    """A float16 product over a long inner axis, summed in float32 and rounded once."""
    k, m = draw(st.sampled_from([2048, 3000])), draw(st.sampled_from([1, 3]))

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        return [relax.op.astype(bb.emit(relax.op.matmul(p[0], p[1], out_dtype="float32")), "float16")]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        return [x[0].astype("float64") @ x[1].astype("float64")]

    return build(draw, [("n", k), (k, m)], emit, reference, "float16")


@st.composite
def gated_mlp(draw: Any) -> Case:
    """SwiGLU; sometimes the gate's product is an output as well."""
    d, h, dtype, expose = draw(DIMS), draw(DIMS), draw(DTYPES), draw(st.booleans())

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        gate, down = emit_gated_mlp(bb, *p)
        return [down, gate] if expose else [down]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        gate = x[0].astype("float64") @ x[1].astype("float64")
        return [ref.gated_mlp(*x)] + ([gate] if expose else [])

    return build(draw, [("n", d), (d, h), (d, h), (h, d)], emit, reference, dtype)


def emit_gated_mlp(
    bb: relax.BlockBuilder, x: relax.Expr, gate: relax.Expr, up: relax.Expr, down: relax.Expr
) -> tuple[relax.Expr, relax.Expr]:
    """Emit SwiGLU; return the gate's product and the result."""
    gated, raised = bb.emit(relax.op.matmul(x, gate)), bb.emit(relax.op.matmul(x, up))
    hidden = bb.emit(relax.op.multiply(bb.emit(relax.op.nn.silu(gated)), raised))
    return gated, bb.emit(relax.op.matmul(hidden, down))


@st.composite
def mlp(draw: Any) -> Case:
    """Plain MLP with a GELU (erf or tanh) and biases of unequal rank."""
    d, h, dtype, kind = draw(DIMS), draw(DIMS), draw(DTYPES), draw(st.sampled_from(["erf", "tanh"]))
    activation = relax.op.nn.gelu if kind == "erf" else relax.op.nn.gelu_tanh

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        hidden = bb.emit(relax.op.add(bb.emit(relax.op.matmul(p[0], p[1])), p[2]))
        return [relax.op.add(bb.emit(relax.op.matmul(bb.emit(activation(hidden)), p[3])), p[4])]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        a, up, first, down, second = (t.astype("float64") for t in x)
        return [ref.gelu(a @ up + first, kind) @ down + second]

    return build(draw, [("n", d), (d, h), (h,), (h, d), (1, d)], emit, reference, dtype)


@st.composite
def embedding(draw: Any) -> Case:
    """Rows of a table by integers, and the product with the same table (tied head)."""
    d, dtype, index = draw(DIMS), draw(DTYPES), draw(st.sampled_from(["int32", "int64"]))

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        rows = bb.emit(relax.op.take(p[1], p[0], axis=0))
        return [rows, bb.emit(relax.op.matmul(rows, bb.emit(relax.op.permute_dims(p[1]))))]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        table = x[1].astype("float64")
        return [table[x[0]], table[x[0]] @ table.T]

    return build(draw, [Input(("n",), index), (3, d)], emit, reference, dtype)


@st.composite
def pooled_sum(draw: Any) -> Case:
    """The sum over a class token and a sequence, and its product with a weight: outputs of one size at every length.

    The token is there because TVM leaves a sum over nothing undefined.
    """
    d, m, dtype = draw(DIMS), draw(DIMS), draw(DTYPES)

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        tokens = bb.emit(relax.op.concat([p[1], p[0]], axis=0))
        pooled = bb.emit(relax.op.sum(tokens, axis=0, keepdims=True))
        return [bb.emit(relax.op.matmul(pooled, p[2])), pooled]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        pooled = np.concatenate([x[1], x[0]]).astype("float64").sum(0, keepdims=True)
        return [pooled @ x[2].astype("float64"), pooled]

    return build(draw, [("n", d), (1, d), (d, m)], emit, reference, dtype)
