"""What the tests of sequences share: the way from a graph to its kernel, and what is held at each step."""

from __future__ import annotations

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax

from canonical import module
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_cross_modal_embedding import FuseCrossModalEmbedding
from crossloom.passes.lower_fused_sequence import LowerFusedSequence
from crossloom.rewrite import composite_name
from crossloom.targets import get_target
from crossloom.testing import run_module
from crossloom.testing.strategies import Input, build
from crossloom.verdict import Ledger

op = relax.op
#: The placeholder.
TOKEN = 3
TARGET = get_target("host").tvm_target()


def sequence(mod):
    """Return a module with its sequences as regions, and the ledger of the pass."""
    mod = CanonicalizeTransformer()(mod)
    with Ledger() as ledger:
        out = FuseCrossModalEmbedding()(mod)
    relax.analysis.well_formed(out)
    tvm.ir.assert_structural_equal(FuseCrossModalEmbedding()(out), out)
    return out, ledger


def composites(mod):
    """Return the composites that are left, in all functions, by how often they are called."""
    found = {}
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function) and not composite_name(func):
            for block in func.body.blocks:
                for binding in block.bindings:
                    op = getattr(binding.value, "op", None)
                    if op in mod.functions and composite_name(mod[op]):
                        name = composite_name(mod[op]).removeprefix("crossloom.")
                        found[name] = found.get(name, 0) + 1
    return found


#: The last module and what it was lowered to: a test calls one module several times.
_last = []


def lowered(mod):
    """Return a module with its sequences as kernels; all of them."""
    if not _last or not _last[0].same_as(mod):
        _last[:] = [mod, LowerFusedSequence(TARGET)(mod)]
        assert "fused_sequence" not in composites(_last[1])
    return _last[1]


def agrees(mod, args, want, entry="main", bound=1e-5):
    """Hold a module, as it is and with its kernels, against a reference."""
    for step in (mod, lowered(mod)):
        got = run_module(step, entry, args)[0]
        assert got.shape == want.shape and got.dtype == args_dtype(args)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        clean = np.isfinite(want)
        scale = max(1.0, float(np.abs(want[clean]).max(initial=0.0)))
        assert np.abs(got[clean].astype("float64") - want[clean]).max(initial=0.0) <= bound * scale


def args_dtype(args):
    """Return the type of the float arguments."""
    return next(a.dtype for a in args if a.dtype.kind == "f")


def linear(e, x, w, b=None):
    y = e(op.matmul(x, w))
    return y if b is None else e(op.add(y, b))


def lookup(e, table, ids, mode="clip"):
    return e(op.take(table, ids, axis=0, mode=mode))


def entries(emit, shapes, num_input):
    return module(emit, shapes, ("prefill", "decode"), num_input=num_input)


@st.composite
def sequences(draw, lower=False):
    """Draw a sequence of images, audio and tokens: joined, or scattered by token."""
    k, d = draw(st.sampled_from([1, 3, 8, 17])), draw(st.sampled_from([1, 5, 8, 33]))
    dtype, form = draw(st.sampled_from(["float32", "float16"])), draw(st.sampled_from(["joined", "where"]))
    order = draw(st.permutations([0, 1, 2]))

    def emit(bb, p):
        image, audio, ids, w, b, table = p
        v = bb.emit(op.add(bb.emit(op.matmul(image, w)), b))
        t = bb.emit(op.take(table, ids, axis=0, mode="clip"))
        if form == "joined":
            return [bb.emit(op.concat([[v, audio, t][i] for i in order], 0))]
        mask = bb.emit(op.expand_dims(bb.emit(op.equal(ids, relax.const(TOKEN, "int64"))), [-1]))
        return [bb.emit(op.where(mask, v, t)), bb.emit(op.concat([audio, t], 0))]

    def reference(x):
        image, audio, ids, w, b, table = x
        v = image.astype("float64") @ w.astype("float64") + b.astype("float64")
        t = table.astype("float64")[np.clip(ids, 0, 4)]
        if form == "joined":
            return [np.concatenate([[v, audio, t][i] for i in order])]
        return [np.where((ids == TOKEN)[:, None], v, t), np.concatenate([audio, t])]

    inputs = [("n", k), ("m", d), Input(("n",), "int64"), (k, d), (d,), (5, d)]
    case = build(draw, inputs, emit, reference, dtype)
    canonical = CanonicalizeTransformer()(case.mod)
    return type(case)(FuseCrossModalEmbedding()(canonical) if lower else canonical, case.sizes, dtype, case.references)
