"""Feed-forward blocks: the gate is the activated side, and what is read elsewhere stays."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import checked
from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, run_module, strategies

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
    out, ledger = checked(mod)
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


def test_activation_that_an_earlier_block_returns():
    """The output of a dataflow block has a name of its own: ``gv = lv``."""
    bb = relax.BlockBuilder()
    shapes = {"x": (2, 8), "a": (8, 12), "down": (12, 8)}
    x, a, down = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    with bb.function("prefill", [x, a, down], attrs={"num_input": 1}):
        with bb.dataflow():
            hidden = bb.emit_output(silu(bb.emit, bb.emit(op.matmul(x, a))))
        with bb.dataflow():
            out = bb.emit_output(op.matmul(hidden, down))
        bb.emit_func_output(out)
    _, found, _ = apply(bb.get())
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


def test_a_gate_of_one_column_is_no_gated_mlp():
    bb = relax.BlockBuilder()
    shapes = {"x": (3, 8), "a": (8, 1), "b": (8, 16), "down": (16, 8)}
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    with bb.function("decode", params, attrs={"num_input": 1}):
        x, a, b, down = params
        gate, up = bb.emit(op.matmul(x, a)), bb.emit(op.matmul(x, b))
        bb.emit_func_output(bb.emit(op.matmul(bb.emit(op.multiply(silu(bb.emit, gate), up)), down)))
    _, found, codes = apply(bb.get())
    assert "gate-and-up-differ-in-shape" in codes and "crossloom.gated_mlp" not in found


def test_golden_gated_mlp():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor(("n", 8), "float32"),
            a: R.Tensor((8, 12), "float32"),
            b: R.Tensor((8, 12), "float32"),
            d: R.Tensor((12, 8), "float32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                gate = R.matmul(x, a)
                up = R.matmul(x, b)
                act = R.nn.silu(gate)
                h = R.multiply(act, up)
                y = R.matmul(h, d)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def gated_mlp(
            x: R.Tensor(("n", 8), "float32"),
            gate: R.Tensor((8, 12), "float32"),
            up: R.Tensor((8, 12), "float32"),
            down: R.Tensor((12, 8), "float32"),
        ):
            R.func_attr(
                {
                    "Composite": "crossloom.gated_mlp",
                    "crossloom.activation": "silu",
                    "crossloom.packed": "",
                    "crossloom.gate_layout": "in_out",
                    "crossloom.up_layout": "in_out",
                    "crossloom.down_layout": "in_out",
                }
            )
            with R.dataflow():
                g = R.matmul(x, gate)
                u = R.matmul(x, up)
                act = R.nn.silu(g)
                h = R.multiply(act, u)
                y = R.matmul(h, down)
                R.output(y)
            return y

        @R.function
        def main(
            x: R.Tensor(("n", 8), "float32"),
            a: R.Tensor((8, 12), "float32"),
            b: R.Tensor((8, 12), "float32"),
            d: R.Tensor((12, 8), "float32"),
        ):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                y = cls.gated_mlp(x, a, b, d)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


def test_golden_plain_mlp():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), a: R.Tensor((12, 8), "float32"), d: R.Tensor((12, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                t = R.permute_dims(a)
                up = R.matmul(x, t)
                h = R.nn.gelu_tanh(up)
                y = R.matmul(h, d)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def mlp(x: R.Tensor(("n", 8), "float32"), up: R.Tensor((12, 8), "float32"), down: R.Tensor((12, 8), "float32")):
            R.func_attr(
                {
                    "Composite": "crossloom.mlp",
                    "crossloom.activation": "gelu_tanh",
                    "crossloom.up_layout": "out_in",
                    "crossloom.down_layout": "in_out",
                }
            )
            with R.dataflow():
                t = R.permute_dims(up)
                u = R.matmul(x, t)
                h = R.nn.gelu_tanh(u)
                y = R.matmul(h, down)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), a: R.Tensor((12, 8), "float32"), d: R.Tensor((12, 8), "float32")):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                y = cls.mlp(x, a, d)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


def packed_module(order, wide=24):
    """Phi-3's block: one layer for gate and up, cut in two behind 12."""
    bb = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    shapes = {"x": (1, n, 8), "w": (wide, 8), "d": (12, 8)}
    x, w, d = params = [relax.Var(k, relax.TensorType(s, "float32")) for k, s in shapes.items()]
    with bb.function("decode", params, attrs={"num_input": 1}):
        with bb.dataflow():
            e = bb.emit
            halves = e(op.split(e(op.matmul(x, e(op.permute_dims(w)))), [12], -1))
            parts = [e(relax.TupleGetItem(halves, i)) for i in range(2)]
            gate, up = parts if order == "gate-up" else parts[::-1]
            out = bb.emit_output(op.matmul(e(op.multiply(up, silu(e, gate))), d))
        bb.emit_func_output(out)
    return bb.get()


@pytest.mark.parametrize("order", ["gate-up", "up-gate"])
def test_packed_gate_and_up(order):
    out, found, codes = apply(packed_module(order))
    assert list(found) == ["crossloom.gated_mlp"] and not codes
    facts = composite_attrs(found["crossloom.gated_mlp"])
    assert (facts["packed"], facts["packed_layout"], facts["activation"]) == (order, "out_in", "silu")
    rng = np.random.default_rng(5)
    for length in (0, 1, 3):
        x, w, d = (rng.standard_normal(s).astype("float32") for s in ((1, length, 8), (24, 8), (12, 8)))
        first, second = x @ w[:12].T, x @ w[12:].T
        gate, up = (first, second) if order == "gate-up" else (second, first)
        want = (gate / (1 + np.exp(-gate)) * up) @ d
        assert worst_error(want, run_module(out, "decode", [x, w, d])[0]) < 1e-5


def test_unequal_parts_are_no_gate_and_up():
    """The second part is one wide and broadcast."""
    _, found, _ = apply(packed_module("up-gate", 13))
    assert set(found) == {"crossloom.linear", "crossloom.activation"}


def test_flattened_block_is_one_composite():
    """GPT-2: both layers between views, the activation on the restored axes."""
    bb = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    shapes = {"x": (1, n, 8), "a": (8, 12), "ab": (12,), "d": (12, 8), "db": (8,)}
    x, a, ab, d, db = params = [relax.Var(k, relax.TensorType(s, "float32")) for k, s in shapes.items()]
    with bb.function("prefill", params, attrs={"num_input": 1}):
        with bb.dataflow():
            e = bb.emit
            up = e(op.add(ab, e(op.matmul(e(op.reshape(x, [n, 8])), a))))
            h = e(op.nn.gelu(e(op.reshape(up, [1, n, 12]))))
            down = e(op.add(db, e(op.matmul(e(op.reshape(h, [n, 12])), d))))
            out = bb.emit_output(op.reshape(down, [1, n, 8]))
        bb.emit_func_output(out)
    mod = bb.get()
    out, found, _ = apply(mod)
    assert list(found) == ["crossloom.mlp"] and len(out["prefill"].body.blocks[0].bindings) == 1
    rng = np.random.default_rng(5)
    values = [
        rng.standard_normal([2 if isinstance(k, tirx.Var) else k for k in s]).astype("float32") for s in shapes.values()
    ]
    assert np.array_equal(run_module(mod, "prefill", values)[0], run_module(out, "prefill", values)[0])


@pytest.mark.parametrize("blocks", [strategies.gated_mlp, strategies.mlp, strategies.decoder_layer])
def test_property_blocks_are_preserved(blocks):
    assert_pass_preserves(CanonicalizeTransformer(), blocks(), max_examples=8)
