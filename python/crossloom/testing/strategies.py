"""Hypothesis strategies of transformer-shaped Relax modules, each with its own numpy reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from . import references as ref
from .runner import random_inputs

Outputs = dict[str, list[np.ndarray]]
Emit = Callable[[relax.BlockBuilder, list[relax.Var]], list[relax.Expr]]
Reference = Callable[[list[np.ndarray]], list[np.ndarray]]

DIMS = st.sampled_from([1, 2, 3, 5, 7, 8])
DTYPES = st.sampled_from(["float32", "float16"])


@dataclass(frozen=True)
class Case:
    """A module and how to run it.

    Attributes
    ----------
    mod : tvm.ir.IRModule
    length : int
        Value of the symbolic dimension, where there is one (elements; may be 0).
    references : mapping of str to callable
        float64 reference by entry, over all parameters.
    dtype : str
        Of the outputs.
    """

    mod: tvm.ir.IRModule
    length: int
    dtype: str
    references: Mapping[str, Reference] = field(repr=False)

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Values of the symbolic dimensions."""
        return ({"n": self.length},)

    def inputs(self, seed: int = 0) -> Outputs:
        """Draw all parameters of every entry."""
        return {name: random_inputs(self.mod, name, seed, self.length) for name in self.references}

    def expected(self, inputs: Outputs) -> Outputs:
        """Return the references' outputs, rounded once."""
        return {n: [y.astype(self.dtype) for y in self.references[n](xs)] for n, xs in inputs.items()}


def _case(draw: Any, shapes: list[tuple[Any, ...]], emit: Emit, reference: Reference, dtype: str) -> Case:
    """Build one or two entries; ``"n"`` in a shape is a length, symbolic or drawn; outputs may be duplicated."""
    length, dynamic = draw(st.sampled_from([0, 1, 3])), draw(st.booleans())
    if not dynamic:
        length = max(length, 1)
    twice = draw(st.booleans())
    bb = relax.BlockBuilder()
    names = ["main", "decode"][: draw(st.integers(1, 2))]
    for name in names:
        n = tirx.Var("n", "int64") if dynamic else length
        params = [
            relax.Var(f"p{i}", relax.TensorType([n if d == "n" else d for d in shape], dtype))
            for i, shape in enumerate(shapes)
        ]
        with bb.function(name, params, attrs={"num_input": 1}):
            with bb.dataflow():
                values = [bb.emit_output(v) for v in emit(bb, params)]
            values = values * 2 if twice else values
            bb.emit_func_output(values[0] if len(values) == 1 else relax.Tuple(values))
    again = (lambda xs: reference(xs) * 2) if twice else reference
    return Case(bb.get(), length, dtype, dict.fromkeys(names, again))


@st.composite
def rms_norm(draw: Any) -> Case:
    """RMSNorm as importers spell it, weight a parameter."""
    d, dtype = draw(DIMS), draw(DTYPES)

    def emit(bb: relax.BlockBuilder, p: list[relax.Var]) -> list[relax.Expr]:
        square = bb.emit(relax.op.multiply(p[0], p[0]))
        mean = bb.emit(relax.op.mean(square, -1, keepdims=True))
        inv = bb.emit(relax.op.rsqrt(bb.emit(relax.op.add(mean, relax.const(1e-3, dtype)))))
        return [relax.op.multiply(bb.emit(relax.op.multiply(p[0], inv)), p[1])]

    return _case(draw, [("n", d), (d,)], emit, lambda x: [ref.rms_norm(x[0], x[1], 1e-3)], dtype)


@st.composite
def linear(draw: Any) -> Case:
    """A linear layer; weight transposed or not, bias of rank 1 or 2."""
    k, m, dtype, transposed = draw(DIMS), draw(DIMS), draw(DTYPES), draw(st.booleans())
    bias = (m,) if draw(st.booleans()) else (1, m)

    def emit(bb: relax.BlockBuilder, p: list[relax.Var]) -> list[relax.Expr]:
        w = bb.emit(relax.op.permute_dims(p[1])) if transposed else p[1]
        return [relax.op.add(bb.emit(relax.op.matmul(p[0], w)), p[2])]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        a, w, b = (t.astype("float64") for t in x)
        return [a @ (w.T if transposed else w) + b]

    return _case(draw, [("n", k), (m, k) if transposed else (k, m), bias], emit, reference, dtype)


@st.composite
def gated_mlp(draw: Any) -> Case:
    """SwiGLU; sometimes the gate's product is an output as well."""
    d, h, dtype, expose = draw(DIMS), draw(DIMS), draw(DTYPES), draw(st.booleans())

    def emit(bb: relax.BlockBuilder, p: list[relax.Var]) -> list[relax.Expr]:
        gate, up = bb.emit(relax.op.matmul(p[0], p[1])), bb.emit(relax.op.matmul(p[0], p[2]))
        hidden = bb.emit(relax.op.multiply(bb.emit(relax.op.nn.silu(gate)), up))
        return [relax.op.matmul(hidden, p[3])] + ([gate] if expose else [])

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        gate = x[0].astype("float64") @ x[1].astype("float64")
        return [ref.gated_mlp(*x)] + ([gate] if expose else [])

    return _case(draw, [("n", d), (d, h), (d, h), (h, d)], emit, reference, dtype)


@st.composite
def residual_norm(draw: Any) -> Case:
    """``x + y`` and its layer normalization, the sum being an output too (shared residual)."""
    d, dtype = draw(DIMS), draw(DTYPES)

    def emit(bb: relax.BlockBuilder, p: list[relax.Var]) -> list[relax.Expr]:
        total = bb.emit(relax.op.add(p[0], p[1]))
        return [relax.op.nn.layer_norm(total, p[2], p[3], axes=[-1], epsilon=1e-2), total]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        total = x[0].astype("float64") + x[1].astype("float64")
        return [ref.layer_norm(total, x[2], x[3], 1e-2), total]

    return _case(draw, [("n", d), ("n", d), (d,), (d,)], emit, reference, dtype)


def _rotate(bb: relax.BlockBuilder, x: relax.Expr, half: int) -> relax.Expr:
    """Return ``[-second, first, rest]`` of the half-split convention (without the rest)."""
    first = bb.emit(relax.op.strided_slice(x, [1], [0], [half]))
    second = bb.emit(relax.op.strided_slice(x, [1], [half], [2 * half]))
    return bb.emit(relax.op.concat([bb.emit(relax.op.negative(second)), first], axis=-1))


@st.composite
def rotary(draw: Any, convention: str = "half-split") -> Case:
    """Rotary embedding of (n, d) by angles (n, d_rotated / 2), whole or partial.

    ``convention`` is ``"half-split"`` or ``"interleaved"``.
    """
    half, rest, dtype = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 1, 4])), draw(DTYPES)
    d = 2 * half + rest

    def emit(bb: relax.BlockBuilder, p: list[relax.Var]) -> list[relax.Expr]:
        x = bb.emit(relax.op.strided_slice(p[0], [1], [0], [2 * half]))
        cos, sin = bb.emit(relax.op.cos(p[1])), bb.emit(relax.op.sin(p[1]))
        if convention == "half-split":
            cos, sin = (bb.emit(relax.op.concat([t, t], axis=-1)) for t in (cos, sin))
            turned = _rotate(bb, x, half)
        else:
            cos, sin = (bb.emit(relax.op.repeat(t, 2, axis=1)) for t in (cos, sin))
            even = bb.emit(relax.op.strided_slice(x, [1], [0], [2 * half], [2]))
            odd = bb.emit(relax.op.strided_slice(x, [1], [1], [2 * half], [2]))
            pairs = [bb.emit(relax.op.expand_dims(t, 2)) for t in (bb.emit(relax.op.negative(odd)), even)]
            stacked = bb.emit(relax.op.concat(pairs, axis=2))
            turned = bb.emit(relax.op.reshape(stacked, relax.ShapeExpr([p[0].ty.shape[0], 2 * half])))
        left, right = bb.emit(relax.op.multiply(x, cos)), bb.emit(relax.op.multiply(turned, sin))
        out = bb.emit(relax.op.add(left, right))
        if not rest:
            return [out]
        tail = bb.emit(relax.op.strided_slice(p[0], [1], [2 * half], [d]))
        return [relax.op.concat([out, tail], axis=-1)]

    return _case(draw, [("n", d), ("n", half)], emit, lambda x: [ref.rotary(x[0], x[1], convention)], dtype)


def modules() -> st.SearchStrategy[Case]:
    """Return any of the module strategies."""
    return st.one_of(rms_norm(), linear(), gated_mlp(), residual_norm(), rotary(), rotary("interleaved"))
