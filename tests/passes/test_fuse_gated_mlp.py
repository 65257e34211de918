"""Feed-forward blocks become a region and a linear layer, to which norm and residual can be added."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.accumulate_matmul_fp32 import AccumulateMatmulFP32
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_norm_into_linear import FoldNormIntoLinear
from crossloom.passes.fuse_gated_mlp import FuseGatedMLP
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.inline_composites import InlineComposites
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import composite_name
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.testing import references as ref
from fused import calls, canonicalized, fused, layers

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
#: On the way to machine code: float16 sums are kept in float32 outside of kernels too.
LOWERED = (FuseGatedMLP(), LowerFusedLinear(HOST), InlineComposites(), AccumulateMatmulFP32())


def quick(emit, x):
    return op.multiply(x, emit(op.sigmoid(emit(op.multiply(x, relax.const(1.702, str(x.ty.dtype)))))))


#: Spelling and reference of each activation.
KINDS = {
    "silu": (lambda emit, x: op.multiply(x, emit(op.sigmoid(x))), ref.silu),
    "gelu": (lambda emit, x: op.nn.gelu(x), ref.gelu),
    "gelu_tanh": (lambda emit, x: op.nn.gelu_tanh(x), lambda x: ref.gelu(x, "tanh")),
    "relu": (lambda emit, x: op.nn.relu(x), lambda x: np.maximum(x, 0)),
    "quick_gelu": (quick, lambda x: ref.gelu(x, "quick")),
}
FORMS = ("gate and up", "gate-up", "up-gate", "plain")


def block(emit, kind, form, x, parts, transposed=False):
    """Emit a block; ``parts`` are (weight, bias or None) of its layers, down last."""

    def layer(x, weight, bias):
        y = emit(op.matmul(x, emit(op.permute_dims(weight)) if transposed else weight))
        return y if bias is None else emit(op.add(y, bias))

    act = KINDS[kind][0]
    *firsts, down = parts
    if form == "plain":
        hidden = emit(act(emit, layer(x, *firsts[0])))
    else:
        if form == "gate and up":
            gate, up = (layer(x, *part) for part in firsts)
        else:
            halves = emit(op.split(layer(x, *firsts[0]), 2, -1))
            gate, up = (emit(relax.TupleGetItem(halves, i)) for i in ((0, 1) if form == "gate-up" else (1, 0)))
        hidden = emit(op.multiply(emit(act(emit, gate)), up))
    return layer(hidden, *down)


def block_reference(kind, form, x, parts, transposed=False):
    def layer(x, weight, bias):
        y = x @ (weight.T if transposed else weight).astype("float64")
        return y if bias is None else y + bias

    act = KINDS[kind][1]
    *firsts, down = parts
    if form == "plain":
        return layer(act(layer(x.astype("float64"), *firsts[0])), *down)
    columns = [layer(x.astype("float64"), *part) for part in firsts]
    if form != "gate and up":
        columns = np.split(columns[0], 2, -1)
    gate, up = columns[::-1] if form == "up-gate" else columns
    return layer(act(gate) * up, *down)


def shapes_of(form, d, h, transposed=False):
    """Return the shapes of weight and bias of each layer."""
    wide = [(d, h), (d, h)] if form == "gate and up" else [(d, h if form == "plain" else 2 * h)]
    weights = [*wide, (h, d)]
    return [(w[::-1] if transposed else w, (w[1],)) for w in weights]


def paired(flat, biased):
    """Return (weight, bias) of layers from weights and, where there are any, biases between them."""
    return list(zip(flat[::2], flat[1::2])) if biased else [(w, None) for w in flat]


def one_block(kind, form, biased=False, transposed=False, d=6, h=10, lead=(1, N), dtype="float32", names=("decode",)):
    def build(emit, x, *flat):
        return block(emit, kind, form, x, paired(flat, biased), transposed)

    shapes = [s for pair in shapes_of(form, d, h, transposed) for s in (pair if biased else pair[:1])]
    return module(build, [(*lead, d), *shapes], names, dtype), shapes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_and_form_on_the_whole_way(kind, form):
    # Each kind and each form comes in both types: with biases and out_in weights, and with neither.
    biased = transposed = (list(KINDS).index(kind) + FORMS.index(form)) % 2 == 0
    dtype = "float32" if biased else "float16"
    mod, shapes = one_block(kind, form, biased, transposed, dtype=dtype)
    once, ledger = fused(mod, FuseGatedMLP())
    assert calls(once, "decode") == ["fused_linear", "linear"] and len(ledger.fired) == 1
    lowered, ledger = fused(mod, *LOWERED)
    assert not [v for v in ledger.refused if v.pass_name == "lower-fused-linear"]
    assert "fused_linear_kernel" in lowered["decode"].script(show_meta=False)
    for n in (0, 1, 5):
        x, *flat = data((1, n, 6), *shapes, dtype=dtype, seed=n)
        want = block_reference(kind, form, x, paired(flat, biased), transposed)
        got = run_module(lowered, "decode", [x, *flat])[0]
        assert got.dtype == dtype and got.shape == want.shape
        assert worst_error(want, got.astype("float64")) < REASSOCIATES.bound(dtype)


def test_norm_and_residual_join_it():
    """What a decoder layer's second half becomes: norm, gate and up, activation; down and residual."""

    def build(emit, x, gain, *flat):
        square = emit(op.mean(emit(op.multiply(x, x)), -1, keepdims=True))
        root = emit(op.rsqrt(emit(op.add(square, relax.const(1e-2, "float32")))))
        normed = emit(op.multiply(emit(op.multiply(x, root)), gain))
        return op.add(x, block(emit, "silu", "gate and up", normed, paired(flat, False)))

    flat_shapes = [pair[0] for pair in shapes_of("gate and up", 6, 10)]
    mod = module(build, [(1, N, 6), (6,), *flat_shapes], ("prefill", "decode"))
    passes = (FuseGatedMLP(), FuseLinearEpilogue(), FoldNormIntoLinear())
    once, _ = fused(mod, *passes)
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_linear", "fused_linear"]
    lowered, ledger = fused(mod, *passes, LowerFusedLinear(HOST))
    assert not ledger.refused and calls(lowered, "decode") == []
    x, gain, *flat = data((1, 3, 6), (6,), *flat_shapes)
    want = x + block_reference("silu", "gate and up", ref.rms_norm(x, gain, 1e-2), paired(flat, False))
    assert worst_error(want, run_module(lowered, "decode", [x, gain, *flat])[0].astype("float64")) < 1e-5


def test_what_is_saved_is_told():
    _, ledger = fused(one_block("silu", "gate and up", lead=(3,))[0], FuseGatedMLP())
    (verdict,) = ledger.fired
    # Gate, up and the activated gate, each written and read; three products.
    assert (verdict.bytes_saved, verdict.macs) == (2 * 3 * 3 * 10 * 4, 3 * 3 * 60)
    _, ledger = fused(one_block("gelu", "plain", lead=(N,))[0], FuseGatedMLP())
    assert [(v.bytes_saved, v.macs) for v in ledger.fired] == [(0, 0)]


def test_two_entries_and_running_it_twice():
    mod, _ = one_block("gelu", "gate-up", True, names=("prefill", "decode"))
    once, ledger = fused(mod, FuseGatedMLP())
    assert sorted(v.function for v in ledger.fired) == ["decode", "prefill"]
    assert calls(once, "prefill") == calls(once, "decode") == ["fused_linear", "linear"]
    assert FuseGatedMLP()(once).same_as(once)


def test_an_intermediate_that_is_a_result_keeps_the_parts_apart():
    """No block is recognised then: gate and up are an output, so there is nothing to take apart."""

    def build(emit, x, gate, up, down):
        g = emit(op.matmul(x, gate))
        h = emit(op.multiply(emit(op.nn.silu(g)), emit(op.matmul(x, up))))
        return emit(relax.Tuple([emit(op.matmul(h, down)), g]))

    mod = module(build, [(2, 6), (6, 10), (6, 10), (10, 6)], ("vision",))
    before = CanonicalizeTransformer()(mod)
    assert FuseGatedMLP()(before).same_as(before)


def test_a_type_without_kernel_stays_a_region():
    """It is opened again later, as the block would have been."""
    once, ledger = fused(one_block("silu", "gate and up", dtype="bfloat16")[0], FuseGatedMLP(), LowerFusedLinear(HOST))
    assert calls(once, "decode") == ["fused_linear", "linear"]
    assert [v.code for v in ledger.refused] == ["no-kernel"]


# Refusals ---------------------------------------------------------------------------------------------------------


def refused(mod, code):
    """Check that the pass refuses for one reason and leaves a module alone."""
    before = CanonicalizeTransformer()(mod)
    assert {composite_name(f) for f in before.functions.values()} & {"crossloom.gated_mlp", "crossloom.mlp"}
    after, ledger = fused(before, FuseGatedMLP())
    assert after.same_as(before) and {v.code for v in ledger.refused} == {code} and not ledger.fired


def test_refused_sums_of_another_type():
    def build(emit, x, up, down):
        return op.matmul(emit(op.nn.relu(emit(op.matmul(x, up, out_dtype="float32")))), down)

    refused(module(build, [((3, 6), "float16"), ((6, 10), "float16"), (10, 6)]), "different-dtypes")


def test_refused_a_weight_of_symbolic_size():
    h = tirx.Var("h", "int64")

    def build(emit, x, up, down):
        return op.matmul(emit(op.nn.gelu(emit(op.matmul(x, up)))), down)

    refused(module(build, [(3, 6), (6, h), (h, 6)]), "weight-of-symbolic-size")


def test_refused_rows_of_unknown_shape():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    up, down = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("up", (6, 10)), ("down", (10, 6))))
    with bb.function("main", [x, up, down], attrs={"num_input": 1}):
        with bb.dataflow():
            hidden = bb.emit(op.nn.gelu(bb.emit(op.matmul(x, up))))
            out = bb.emit_output(op.matmul(hidden, down))
        bb.emit_func_output(out)
    refused(bb.get(), "shape-unknown")


def test_refused_an_activation_that_no_kernel_has():
    """Another tool's composite: an activation of its own by our name for the block."""
    mod = CanonicalizeTransformer()(one_block("gelu", "plain")[0])
    functions = {
        gvar: func.with_attr("crossloom.activation", "mish") if composite_name(func) == "crossloom.mlp" else func
        for gvar, func in mod.functions_items()
    }
    refused(tvm.ir.IRModule(functions), "unknown-activation")


# Goldens ----------------------------------------------------------------------------------------------------------


def test_golden_gated():
    @I.ir_module
    class Before:
        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"),
            g: R.Tensor((6, 4), "float32"),
            u: R.Tensor((4, 6), "float32"),
            b: R.Tensor((6,), "float32"),
            d: R.Tensor((6, 4), "float32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                t = R.permute_dims(g, axes=[1, 0])
                gate = R.matmul(x, t)
                bare = R.matmul(x, u)
                up = R.add(bare, b)
                act = R.nn.silu(gate)
                h = R.multiply(act, up)
                y = R.matmul(h, d)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function(private=True)
        def linear1(
            x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 6), "float32"), bias: R.Tensor((6,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                t = R.matmul(x, weight)
                y = R.add(t, bias)
                R.output(y)
            return y

        @R.function(private=True)
        def activation(x: R.Tensor(("n", 6), "float32")):
            R.func_attr({"Composite": "crossloom.activation", "crossloom.kind": "silu"})
            with R.dataflow():
                y = R.nn.silu(x)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            x: R.Tensor(("n", 4), "float32"),
            gate: R.Tensor((6, 4), "float32"),
            up: R.Tensor((4, 6), "float32"),
            up_bias: R.Tensor((6,), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                g = cls.linear(x, gate)
                u = cls.linear1(x, up, up_bias)
                act = cls.activation(g)
                h = R.multiply(act, u)
                R.output(h)
            return h

        @R.function(private=True)
        def linear2(x: R.Tensor(("n", 6), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"),
            g: R.Tensor((6, 4), "float32"),
            u: R.Tensor((4, 6), "float32"),
            b: R.Tensor((6,), "float32"),
            d: R.Tensor((6, 4), "float32"),
        ):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                h = cls.fused_linear(x, g, u, b)
                y = cls.linear2(h, d)
                R.output(y)
            return y

    # What the block was called by is left for dead-code elimination.
    got = relax.transform.DeadCodeElimination(["decode"])(FuseGatedMLP()(CanonicalizeTransformer()(Before)))
    tvm.ir.assert_structural_equal(got, Expected)


def test_golden_packed():
    @I.ir_module
    class Before:
        @R.function
        def vision(x: R.Tensor((3, 4), "float32"), w: R.Tensor((4, 12), "float32"), d: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                both = R.matmul(x, w)
                halves = R.split(both, indices_or_sections=2, axis=-1)
                up = halves[0]
                gate = halves[1]
                act = R.nn.relu(gate)
                h = R.multiply(up, act)
                y = R.matmul(h, d)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def linear(x: R.Tensor((3, 4), "float32"), weight: R.Tensor((4, 12), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(x: R.Tensor((3, 4), "float32"), packed: R.Tensor((4, 12), "float32")):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                both = cls.linear(x, packed)
                halves = R.split(both, indices_or_sections=2, axis=-1)
                up = halves[0]
                gate = halves[1]
                act = R.nn.relu(gate)
                h = R.multiply(act, up)
                R.output(h)
            return h

        @R.function(private=True)
        def linear1(x: R.Tensor((3, 6), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function
        def vision(x: R.Tensor((3, 4), "float32"), w: R.Tensor((4, 12), "float32"), d: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                h = cls.fused_linear(x, w)
                y = cls.linear1(h, d)
                R.output(y)
            return y

    got = relax.transform.DeadCodeElimination(["vision"])(FuseGatedMLP()(CanonicalizeTransformer()(Before)))
    tvm.ir.assert_structural_equal(got, Expected)


# Properties -------------------------------------------------------------------------------------------------------


@st.composite
def blocks(draw):
    """Any activation in any form, the hidden values an output as well in some."""
    kind, form = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from(FORMS))
    biased, transposed, exposed = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([False, False, True]))

    def emit(bb, p):
        y = bb.emit(block(bb.emit, kind, form, p[0], paired(p[1:], biased), transposed))
        return [bb.emit(op.add(y, p[0])), y] if exposed else [y]

    def reference(values):
        x, *flat = (v.astype("float64") for v in values)
        y = block_reference(kind, form, x, paired(flat, biased), transposed)
        return [y + x, y] if exposed else [y]

    def shapes(d, h, _):
        return [("n", d), *(s for pair in shapes_of(form, d, h, transposed) for s in (pair if biased else pair[:1]))]

    return draw(layers(emit, reference, shapes))


def test_property_of_the_pass():
    assert_pass_preserves(FuseGatedMLP(), canonicalized(blocks()), numerics=REASSOCIATES, max_examples=10)


def test_property_of_the_kernel():
    run = tvm.transform.Sequential([FuseGatedMLP(), LowerFusedLinear(HOST)])
    assert_pass_preserves(run, canonicalized(blocks()), numerics=REASSOCIATES, max_examples=12)


def test_property_of_blocks_as_importers_write_them():
    cases = st.one_of(strategies.gated_mlp(), strategies.mlp(), strategies.decoder_layer())
    run = tvm.transform.Sequential([FuseGatedMLP(), LowerFusedLinear(HOST)])
    assert_pass_preserves(run, canonicalized(cases), numerics=REASSOCIATES, max_examples=8)
