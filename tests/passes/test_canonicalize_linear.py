"""Linear layers and embeddings, leading axes flattened or not; what is refused stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import checked, data, module
from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, run_module, strategies

op = relax.op
B, N = tirx.Var("b", "int64"), tirx.Var("n", "int64")


def canonicalized(mod):
    out, ledger = checked(mod)
    found = {composite_name(f): f for _, f in out.functions_items() if composite_name(f)}
    return out, found, {v.code for v in ledger.refused}


def bindings(mod, name="main"):
    return sum(len(block.bindings) for block in mod[name].body.blocks)


def test_golden_linear_and_embedding():
    @I.ir_module
    class Before:
        @R.function
        def main(ids: R.Tensor(("n",), "int64"), e: R.Tensor((7, 4), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                x = R.take(e, ids, axis=0)
                t = R.permute_dims(w, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def embedding(weight: R.Tensor((7, 4), "float32"), ids: R.Tensor(("n",), "int64")):
            R.func_attr({"Composite": "crossloom.embedding", "crossloom.mode": "fast"})
            with R.dataflow():
                x = R.take(weight, ids, axis=0)
                R.output(x)
            return x

        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((6, 4), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                y = R.matmul(x, t)
                R.output(y)
            return y

        @R.function
        def main(ids: R.Tensor(("n",), "int64"), e: R.Tensor((7, 4), "float32"), w: R.Tensor((6, 4), "float32")):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                x = cls.embedding(e, ids)
                y = cls.linear(x, w)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


@pytest.mark.parametrize("biased", [False, True])
def test_flattened_leading_axes_belong_to_the_layer(biased):
    """GPT-2's Conv1D: view, addmm, view; both leading axes symbolic, their product an expression."""

    def build(e, x, w, b):
        y = e(op.matmul(e(op.reshape(x, [B * N, 8])), w))
        return op.reshape(e(op.add(b, y)) if biased else y, [B, N, 6])

    out, found, _ = canonicalized(module(build, [(B, N, 8), (8, 6), (6,)]))
    assert list(found) == ["crossloom.linear"] and bindings(out) == 1
    for lengths in ((2, 3), (1, 0), (1, 1)):
        x, w, b = data((*lengths, 8), (8, 6), (6,))
        want = x @ w + (b if biased else 0)
        assert worst_error(want, run_module(out, "main", [x, w, b])[0]) < 1e-5


def test_a_view_that_cuts_heads_stays_outside():
    out, found, _ = canonicalized(
        module(lambda e, x, w: op.reshape(e(op.matmul(x, w)), [2, 3, 2, 3]), [(2, 3, 8), (8, 6)])
    )
    assert list(found) == ["crossloom.linear"] and bindings(out) == 2


def test_bias_with_leading_ones_and_cast_weights():
    def build(e, x, w, b):
        return op.add(e(op.matmul(x, e(op.astype(w, "float32")))), b)

    out, found, _ = canonicalized(module(build, [(2, 3, 8), ((8, 6), "float16"), (1, 1, 6)]))
    assert len(found["crossloom.linear"].params) == 3
    x, w, b = data((2, 3, 8), (8, 6), (1, 1, 6))
    w = w.astype("float16")
    assert worst_error(x @ w.astype("float32") + b, run_module(out, "main", [x, w, b])[0]) < 1e-5


@pytest.mark.parametrize("bias", [(1, 1, 1, 6), (3, 6), (1,), (2, 1, 6)])
def test_bias_of_another_shape_is_refused(bias):
    out, found, codes = canonicalized(
        module(lambda e, x, w, b: op.add(e(op.matmul(x, w)), b), [(2, 3, 8), (8, 6), bias])
    )
    assert codes == {"bias-is-not-one-per-output"}
    assert len(found["crossloom.linear"].params) == 2, "the product alone is a layer without a bias"
    x, w, b = data((2, 3, 8), (8, 6), bias)
    assert worst_error(x @ w + b, run_module(out, "main", [x, w, b])[0]) < 1e-5


def test_a_match_cast_between_product_and_bias_stays():
    bb = relax.BlockBuilder()
    shapes = {"x": (2, 8), "w": (8, 6), "b": (6,)}
    x, w, b = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    with bb.function("main", [x, w, b], attrs={"num_input": 1}):
        with bb.dataflow():
            product = bb.match_cast(bb.emit(op.matmul(x, w)), relax.TensorType((2, 6), "float32"))
            out = bb.emit_output(op.add(product, b))
        bb.emit_func_output(out)
    out, found, codes = canonicalized(bb.get())
    assert codes == {"crosses-a-match-cast"} and len(found["crossloom.linear"].params) == 2
    assert any(isinstance(binding, relax.MatchCast) for binding in out["main"].body.blocks[0].bindings)


def test_weight_transposed_for_two_readers_is_taken_as_it_is():
    def build(e, x, w):
        turned = e(op.permute_dims(w))
        return relax.Tuple([e(op.matmul(x, turned)), turned])

    _, found, codes = canonicalized(module(build, [(2, 8), (6, 8)]))
    assert composite_attrs(found["crossloom.linear"])["weight_layout"] == "in_out" and not codes


def test_lookup_flattened_and_by_column():
    def build(e, ids, w):
        flat = e(op.reshape(e(op.astype(ids, "int32")), [2 * N]))
        return op.reshape(e(op.take(w, flat, 0)), [2, N, 4])

    out, found, _ = canonicalized(module(build, [((2, N), "int64"), (7, 4)]))
    assert list(found) == ["crossloom.embedding"] and bindings(out) == 2
    ids, w = np.array([[0, 6, 3], [1, 1, 2]], "int64"), data((7, 4))[0]
    assert np.array_equal(run_module(out, "main", [ids, w])[0], w[ids])
    out, found, codes = canonicalized(module(lambda e, i, w: op.take(w, i, 1), [((2,), "int64"), (7, 4)]))
    assert not found and codes == {"not-a-row-lookup"}


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap"])
def test_a_lookup_keeps_what_it_does_out_of_range(mode):
    _, found, _ = canonicalized(module(lambda e, i, w: op.take(w, i, 0, mode=mode), [((2,), "int64"), (7, 4)]))
    assert composite_attrs(found["crossloom.embedding"])["mode"] == mode


def test_two_entries_share_one_function():
    out, found, _ = canonicalized(module(lambda e, x, w: op.matmul(x, w), [(N, 8), (8, 6)], ("prefill", "decode")))
    assert len(found) == 1 and len(out.functions) == 3
    x, w = data((1, 8), (8, 6))
    for name in ("prefill", "decode"):
        assert worst_error(x @ w, run_module(out, name, [x, w])[0]) < 1e-5


@pytest.mark.parametrize("layers", [strategies.linear, strategies.embedding, strategies.parallel_projections])
def test_property_layers_are_preserved(layers):
    assert_pass_preserves(CanonicalizeTransformer(), layers(), max_examples=8)
