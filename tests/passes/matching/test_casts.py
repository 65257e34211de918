"""A cast between floats rounds; one through integers or booleans computes something, and is never read past."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name

op = relax.op


def composites(body, shapes) -> dict[str, dict[str, object]]:
    builder = relax.BlockBuilder()
    for name in ("prefill", "decode"):
        params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
        with builder.function(name, params, attrs={"num_input": len(params)}):
            with builder.dataflow():
                out = builder.emit_output(body(builder, *params))
            builder.emit_func_output(out)
    mod = CanonicalizeTransformer()(builder.get())
    assert relax.analysis.check_well_formed(mod)
    return {composite_name(f): composite_attrs(f) for f in mod.functions.values() if composite_name(f)}


def through(builder, x, *kinds):
    for kind in (*kinds, "float32"):
        x = builder.emit(op.astype(x, kind))
    return x


def attention(builder, q, k, v, scale=0.25, scores=(), weights=(), query=()):
    q = through(builder, q, *query) if query else q
    s = builder.emit(op.matmul(q, builder.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    s = builder.emit(op.multiply(s, scale if isinstance(scale, relax.Expr) else relax.const(scale)))
    s = through(builder, s, *scores) if scores else s
    p = builder.emit(op.nn.softmax(s, -1))
    p = through(builder, p, *weights) if weights else p
    return op.matmul(p, v)


HEADS = [(1, 2, 3, 4)] * 3


@pytest.mark.parametrize("place", ["scores", "weights", "query"])
@pytest.mark.parametrize(("kinds", "recognised"), [(("float16",), True), (("int32",), False), (("bool",), False)])
def test_attention(place, kinds, recognised):
    found = composites(lambda b, q, k, v: attention(b, q, k, v, **{place: kinds}), HEADS)
    if place == "query" and not recognised:
        # What the attention reads is the cast value, which stays outside.
        assert float(found["crossloom.attention"]["scale"]) == pytest.approx(0.25)
    else:
        assert ("crossloom.attention" in found) == recognised


def test_the_scale_is_what_the_casts_leave_of_it():
    def body(b, q, k, v):
        return attention(b, q, k, v, scale=through(b, relax.const(1.5), "int32"))

    assert float(composites(body, HEADS)["crossloom.attention"]["scale"]) == 1.0


@pytest.mark.parametrize(("kind", "recognised"), [("float16", True), ("int32", False)])
def test_silu(kind, recognised):
    def body(b, x):
        return op.multiply(x, b.emit(op.sigmoid(through(b, x, kind))))

    assert ("crossloom.activation" in composites(body, [(2, 8)])) == recognised


def test_the_epsilon_of_a_norm_is_what_the_casts_leave_of_it():
    def body(b, x, w):
        mean = b.emit(op.mean(b.emit(op.multiply(x, x)), -1, keepdims=True))
        root = b.emit(op.rsqrt(b.emit(op.add(mean, through(b, relax.const(np.float32(1.5)), "int32")))))
        return op.multiply(b.emit(op.multiply(x, root)), w)

    found = composites(body, [(2, 8), (8,)])
    assert float(found["crossloom.rms_norm"]["epsilon"]) == 1.0


def test_twice_is_once():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    with builder.function("decode", [x]):
        out = builder.emit(op.multiply(x, builder.emit(op.sigmoid(through(builder, x, "float16")))))
        builder.emit_func_output(out)
    once = CanonicalizeTransformer()(builder.get())
    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(once), once)
