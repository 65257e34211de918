"""What the tests of feed-forward fusions share: blocks with all that stands around them, the passes in front."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from crossloom.passes.fold_norm_into_linear import FoldNormIntoLinear
from crossloom.passes.fuse_gated_mlp import FuseGatedMLP
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.fuse_rotary_mlp import FuseRotaryMLP
from crossloom.testing.strategies import build
from rotations import tables, turn, turned

op = relax.op
#: What grows the two regions.
BEFORE = (FuseGatedMLP(), FuseRotaryMLP(), FuseLinearEpilogue(), FoldNormIntoLinear())
KINDS = {
    "relu": (op.nn.relu, lambda x: np.maximum(x, 0)),
    "silu": (op.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": (op.nn.gelu, lambda x: x * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))) / 2),
}


def half(emit, x, kind, up, down):
    """Emit a plain block."""
    return emit(op.matmul(emit(KINDS[kind][0](emit(op.matmul(x, up)))), down))


@dataclass(frozen=True)
class Block:
    """A block: norm or 2-D rotary in front, gated or not, residual of x or of another value behind."""

    pairs: int
    hidden: int
    width: int
    kind: str
    gated: bool
    biased: bool
    front: str
    residual: str
    convention: str

    @property
    def depth(self):
        return 2 * self.pairs

    @property
    def inputs(self):
        angles = [("n", self.pairs)] * 2 if self.front == "rotary" else []
        gain = [(self.depth,)] if self.front == "norm" else []
        other = [(2, "n", self.out)] if self.residual == "other" else []
        ups = [(self.depth, self.hidden)] * (1 + self.gated)
        biases = [(self.hidden,), (self.out,)] if self.biased else []
        return [(2, "n", self.depth), *angles, *other, *gain, *ups, (self.hidden, self.out), *biases]

    @property
    def out(self):
        return self.depth if self.residual == "x" else self.width

    def _parts(self, given):
        """Return x, angles, the other residual, the gain, the first weights, the second one, and the biases."""
        rest = list(given[1:])
        angles = [rest.pop(0), rest.pop(0)] if self.front == "rotary" else []
        other = rest.pop(0) if self.residual == "other" else given[0]
        gain = rest.pop(0) if self.front == "norm" else None
        ups = [rest.pop(0) for _ in range(1 + self.gated)]
        return given[0], angles, other, gain, ups, rest.pop(0), rest or [None, None]

    def emit(self, bb, given):
        e = bb.emit
        x, angles, other, gain, ups, down, biases = self._parts(given)
        if gain is not None:
            x = e(op.nn.rms_norm(x, gain, [-1], 1e-2))
        if angles:
            cut = self.pairs // 2
            ends = ((angles[0], 0, cut), (angles[1], 0, self.pairs - cut)) if cut else ((angles[0], 0, self.pairs),)
            both = e(op.concat([e(op.strided_slice(t, [1], [a], [b])) for t, a, b in ends], -1))
            x = turn(e, x, *tables(e, both, self.convention, False), self.convention, False, self.depth)
        act = KINDS[self.kind][0]
        first = e(op.matmul(x, ups[0]))
        first = first if biases[0] is None else e(op.add(first, biases[0]))
        first = e(act(first))
        first = e(op.multiply(first, e(op.matmul(x, ups[1])))) if self.gated else first
        out = e(op.matmul(first, down))
        out = out if biases[1] is None else e(op.add(out, biases[1]))
        return [e(op.add(other, out))] if self.residual else [out]

    def reference(self, given):
        x, angles, other, gain, ups, down, biases = self._parts([t.astype("float64") for t in given])
        if gain is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-2) * gain
        if angles:
            cut = self.pairs // 2
            both = [angles[0][:, :cut], angles[1][:, : self.pairs - cut]] if cut else [angles[0]]
            x = turned(x, np.concatenate(both, -1), self.convention)
        first = KINDS[self.kind][1](x @ ups[0] + (0 if biases[0] is None else biases[0]))
        first = first * (x @ ups[1]) if self.gated else first
        out = first @ down + (0 if biases[1] is None else biases[1])
        return [out + other if self.residual else out]


@st.composite
def blocks(draw, dtypes=("float32", "float16")):
    """Draw a block."""

    def choose(*options):
        return draw(st.sampled_from(options))

    form = Block(
        pairs=choose(1, 2, 3, 8, 9),
        hidden=choose(1, 2, 5, 8, 19),
        width=choose(1, 3, 8, 17),
        kind=choose(*sorted(KINDS)),
        gated=choose(False, True),
        biased=choose(False, True),
        front=choose("", "norm", "rotary"),
        residual=choose("", "x", "other"),
        convention=choose("half-split", "interleaved"),
    )
    return build(draw, form.inputs, form.emit, form.reference, choose(*dtypes))
