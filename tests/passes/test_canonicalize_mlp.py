"""Feed-forward blocks: the gate is the activated side, and what is read elsewhere stays."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.verdict import Ledger

op = relax.op
SHAPES = [(2, 8), (8, 12), (8, 12), (12, 8)]


def module(build):
    bb = relax.BlockBuilder()
    params = [relax.Var(n, relax.TensorType(s, "float32")) for n, s in zip(("x", "a", "b", "down"), SHAPES)]
    with bb.function("prefill", params, attrs={"num_input": 1}):
        with bb.dataflow():
            out = bb.emit_output(build(bb.emit, *params))
        bb.emit_func_output(out)
    return bb.get()


def silu(e, x):
    return e(op.multiply(x, e(op.sigmoid(x))))


def swiglu(e, x, a, b, down):
    gate, up = e(op.matmul(x, a)), e(op.matmul(x, b))
    return op.matmul(e(op.multiply(silu(e, gate), up)), down)


def swapped(e, x, a, b, down):
    up, gate = e(op.matmul(x, a)), e(op.matmul(x, b))
    return op.matmul(e(op.multiply(up, e(op.nn.relu(gate)))), down)


def plain(e, x, a, b, down):
    return op.matmul(silu(e, e(op.matmul(x, a))), down)


def shared_up(e, x, a, b, down):
    gate, up = e(op.matmul(x, a)), e(op.matmul(x, b))
    return relax.Tuple([e(op.matmul(e(op.multiply(silu(e, gate), up)), down)), up])


def both_activated(e, x, a, b, down):
    gate, up = e(op.matmul(x, a)), e(op.matmul(x, b))
    return op.matmul(e(op.multiply(silu(e, gate), silu(e, up))), down)


def other_value(e, x, a, b, down):
    gate, up = e(op.matmul(x, a)), e(op.matmul(e(op.add(x, x)), b))
    return op.matmul(e(op.multiply(silu(e, gate), up)), down)


def apply(mod):
    with Ledger() as ledger:
        out = CanonicalizeTransformer()(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(out), out)
    found = {composite_name(f): f for _, f in out.functions_items() if composite_name(f)}
    return out, found, {v.code for v in ledger.refused if v.rewrite == "mlp"}


def run(mod, args):
    target = tvm.target.Target({"kind": "llvm"})
    vm = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    out = vm["prefill"](*[tvm.runtime.tensor(a) for a in args])
    return [out.numpy()] if hasattr(out, "numpy") else [o.numpy() for o in out]


def args():
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s).astype("float32") for s in SHAPES]


def test_gate_and_up_are_told_apart():
    x, a, b, down = args()
    for build, kind in ((swiglu, "silu"), (swapped, "relu")):
        out, found, _ = apply(module(build))
        assert list(found) == ["crossloom.gated_mlp"]
        assert composite_attrs(found["crossloom.gated_mlp"])["activation"] == kind
        call = out["prefill"].body.blocks[0].bindings[0].value
        assert [v.name_hint if hasattr(v, "name_hint") else v.name for v in call.args] == (
            ["x", "a", "b", "down"] if build is swiglu else ["x", "b", "a", "down"]
        )
        g, u = x @ a, x @ b
        want = (g / (1 + np.exp(-g)) * u if build is swiglu else g * np.maximum(u, 0)) @ down
        assert worst_error(want, run(out, [x, a, b, down])[0]) < 1e-5


def test_plain_mlp():
    _, found, _ = apply(module(plain))
    assert list(found) == ["crossloom.mlp"]


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (shared_up, "intermediate-used-outside"),
        (both_activated, "gate-ambiguous"),
        (other_value, "gate-and-up-read-different-values"),
    ],
)
def test_refused_blocks_keep_their_parts(build, code):
    mod = module(build)
    out, found, codes = apply(mod)
    assert code in codes and "crossloom.gated_mlp" not in found
    assert {"crossloom.linear", "crossloom.activation"} <= set(found)
    for before, after in zip(run(mod, args()), run(out, args())):
        assert worst_error(before, after) < 1e-5
