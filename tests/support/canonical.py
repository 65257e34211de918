"""What the tests of CanonicalizeTransformer share: entries built from a few lines, the pass and its promises, data."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.verdict import Ledger


def function(build, shapes, name="decode", dtype="float32", builder=None, num_input=1):
    """Return a module of ``build(emit, *parameters)`` over shapes, or (shape, dtype); into ``builder`` where given.

    ``num_input`` of None makes every parameter an input.
    """
    bb = builder or relax.BlockBuilder()
    typed = [s if s and isinstance(s[-1], str) else (s, dtype) for s in shapes]
    params = [relax.Var(f"p{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(typed)]
    with bb.function(name, params, attrs={"num_input": len(params) if num_input is None else num_input}):
        with bb.dataflow():
            out = bb.emit_output(build(bb.emit, *params))
        bb.emit_func_output(out)
    return bb.get()


def module(build, shapes, names=("main",), dtype="float32", num_input=1):
    """Return a module of equal entries, each with symbolic sizes of its own."""
    first = function(build, shapes, names[0], dtype, num_input=num_input)[names[0]]
    rest = {n: relax.utils.copy_with_new_vars(first).with_attr("global_symbol", n) for n in names[1:]}
    return tvm.ir.IRModule({names[0]: first, **rest})


def checked(mod):
    """Return what the pass makes of a module, well-formed and the same the second time, and its ledger."""
    with Ledger() as ledger:
        out = CanonicalizeTransformer()(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(out), out)
    return out, ledger


def data(*shapes, dtype="float32", seed=0):
    """Return normal random arrays."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]
