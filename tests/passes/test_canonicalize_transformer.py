"""Norms, rotary, attention, linear layers, embeddings and activations become composites that compute the same."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import checked, data, function
from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, references, strategies
from crossloom.verdict import Ledger

TARGET = tvm.target.Target({"kind": "llvm"})
op = relax.op


def composites(mod):
    return {composite_name(f): composite_attrs(f) for _, f in mod.functions_items() if composite_name(f)}


def run(mod, args, name="decode"):
    vm = relax.VirtualMachine(tvm.compile(mod, target=TARGET), tvm.cpu())
    out = vm[name](*[tvm.runtime.tensor(a) for a in args])
    return out.numpy() if hasattr(out, "numpy") else [o.numpy() for o in out]


def c(value, dtype="float32"):
    return relax.const(value, dtype)


# norms


def rms(square, invert, left=False):
    def build(e, x, w):
        r = e(invert(e, e(op.add(e(op.mean(e(square(x)), [-1], True)), c(1e-5)))))
        core = e(op.multiply(x, r) if not left else op.multiply(r, x))
        return op.multiply(w, core)

    return build


SQUARES = {"power": lambda x: op.power(x, c(2.0)), "product": lambda x: op.multiply(x, x), "square": op.square}
INVERSES = {
    "rsqrt": lambda e, v: op.rsqrt(v),
    "one-over": lambda e, v: op.divide(c(1.0), e(op.sqrt(v))),
    "power": lambda e, v: op.power(v, c(-0.5)),
}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_rms_norm_in_every_spelling(square, inverse):
    out, _ = checked(function(rms(SQUARES[square], INVERSES[inverse]), [(2, 3, 8), (8,)]))
    facts = composites(out)["crossloom.rms_norm"]
    assert list(facts["axes"]) == [-1] and facts["epsilon"] == pytest.approx(1e-5)
    x, w = data((2, 3, 8), (8,))
    want = x / np.sqrt((x.astype("float64") ** 2).mean(-1, keepdims=True) + 1e-5) * w
    assert worst_error(want.astype("float32"), run(out, [x, w])) < 1e-5


def test_golden_rms_norm():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, "n", 8), "float32"), w: R.Tensor((8,), "float32")):
            with R.dataflow():
                a = R.multiply(x, x)
                m = R.mean(a, axis=[-1], keepdims=True)
                v = R.add(m, R.const(1e-6, "float32"))
                r = R.rsqrt(v)
                y = R.multiply(x, r)
                z = R.multiply(y, w)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def rms_norm(x: R.Tensor((2, "n", 8), "float32"), weight: R.Tensor((8,), "float32")):
            R.func_attr(
                {
                    "Composite": "crossloom.rms_norm",
                    "crossloom.axes": [-1],
                    "crossloom.epsilon": float(np.float32(1e-6)),
                }
            )
            with R.dataflow():
                a = R.multiply(x, x)
                m = R.mean(a, axis=[-1], keepdims=True)
                v = R.add(m, R.const(1e-6, "float32"))
                r = R.rsqrt(v)
                y = R.multiply(x, r)
                z = R.multiply(y, weight)
                R.output(z)
            return z

        @R.function
        def main(x: R.Tensor((2, "n", 8), "float32"), w: R.Tensor((8,), "float32")):
            cls = Expected
            with R.dataflow():
                z = cls.rms_norm(x, w)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


def test_half_precision_keeps_its_casts():
    def build(e, x, w):
        f = e(op.astype(x, "float32"))
        v = e(op.add(e(op.mean(e(op.power(f, c(2.0))), [-1], True)), c(1e-5)))
        return op.multiply(w, e(op.astype(e(op.multiply(f, e(op.rsqrt(v)))), "float16")))

    mod = function(build, [(3, 64), (64,)], dtype="float16")
    out, _ = checked(mod)
    assert "crossloom.rms_norm" in composites(out)
    x, w = data((3, 64), (64,), dtype="float16")
    x *= 300  # squares leave float16
    before, after = run(mod, [x, w]), run(out, [x, w])
    assert np.isfinite(after).all() and np.array_equal(before, after)


def test_mean_of_another_value_is_refused():
    def build(e, x, y, w):
        v = e(op.add(e(op.mean(e(op.multiply(y, y)), [-1], True)), c(1e-5)))
        return op.multiply(w, e(op.multiply(x, e(op.rsqrt(v)))))

    out, ledger = checked(function(build, [(2, 8), (2, 8), (8,)]))
    assert not composites(out) and "mean-of-another-value" in {v.code for v in ledger.refused}


def test_inner_value_read_elsewhere_is_refused():
    def build(e, x, w):
        r = e(op.rsqrt(e(op.add(e(op.mean(e(op.multiply(x, x)), [-1], True)), c(1e-5)))))
        y = e(op.multiply(w, e(op.multiply(x, r))))
        return relax.Tuple([y, r])

    out, ledger = checked(function(build, [(2, 8), (8,)]))
    assert not composites(out) and "intermediate-used-outside" in {v.code for v in ledger.refused}


@pytest.mark.parametrize("spelled", [True, False])
def test_layer_norm(spelled):
    def build(e, x, w, b):
        if not spelled:
            return op.nn.layer_norm(x, w, b, axes=[-1], epsilon=1e-5)
        d = e(op.subtract(x, e(op.mean(x, [-1], True))))
        s = e(op.sqrt(e(op.add(e(op.mean(e(op.power(d, c(2.0))), [-1], True)), c(1e-5)))))
        return op.add(e(op.multiply(e(op.divide(d, s)), w)), b)

    out, _ = checked(function(build, [(2, 3, 8), (8,), (8,)]))
    assert list(composites(out)) == ["crossloom.layer_norm"]
    x, w, b = data((2, 3, 8), (8,), (8,))
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b
    assert worst_error(want, run(out, [x, w, b])) < 1e-5


# rotary


def cut(e, x, begin, end, step=1):
    return e(op.strided_slice(x, [3], [begin], [end], [step]))


def half_split(e, x, cos, sin, width=8, sign=1):
    r = e(op.concat([e(op.negative(cut(e, x, width // 2, 2**31 - 1))), cut(e, x, 0, width // 2)], -1))
    join = op.add if sign > 0 else op.subtract
    return join(e(op.multiply(x, cos)), e(op.multiply(r, sin)))


def half_split_joined(e, x, cos, sin):
    a, b = cut(e, x, 0, 4), cut(e, x, 4, 8)
    lo = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    return op.concat([lo, e(op.add(e(op.multiply(b, cos)), e(op.multiply(a, sin))))], -1)


def interleaved(e, x, cos, sin):
    a, b = cut(e, x, 0, 8, 2), cut(e, x, 1, 8, 2)
    even = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    odd = e(op.add(e(op.multiply(a, sin)), e(op.multiply(b, cos))))
    return op.reshape(e(op.stack([even, odd], -1)), x.ty.shape)


def partial(e, x, cos, sin):
    return op.concat([e(half_split(e, cut(e, x, 0, 4), cos, sin, 4)), cut(e, x, 4, 8)], -1)


def rotated(x, cos, sin, convention):
    out = x.copy()
    pairs = [(i, i + 4) for i in range(4)] if convention == "half-split" else [(2 * i, 2 * i + 1) for i in range(4)]
    for n, (a, b) in enumerate(pairs):
        out[..., a] = x[..., a] * cos[..., n] - x[..., b] * sin[..., n]
        out[..., b] = x[..., b] * cos[..., n] + x[..., a] * sin[..., n]
    return out


@pytest.mark.parametrize(
    ("build", "width", "facts"),
    [
        (half_split, 8, ("half-split", 8, "full")),
        (half_split_joined, 4, ("half-split", 8, "half")),
        (interleaved, 4, ("interleaved", 8, "half")),
        (partial, 4, ("half-split", 4, "full")),
    ],
)
def test_rotary_convention(build, width, facts):
    mod = function(build, [(1, 2, 5, 8), (5, width), (5, width)])
    out, _ = checked(mod)
    found = composites(out)["crossloom.rotary"]
    assert (found["convention"], found["rotary_dim"], found["table"]) == facts
    (x,), angle = data((1, 2, 5, 8)), data((5, 4))[0]
    cos, sin = np.cos(angle), np.sin(angle)
    if build is partial:
        assert np.array_equal(run(out, [x, cos, sin]), run(mod, [x, cos, sin]))
        return
    tables = [np.concatenate([t, t], -1) if width == 8 else t for t in (cos, sin)]
    assert worst_error(rotated(x, cos, sin, facts[0]), run(out, [x, *tables])) < 1e-5


def test_two_conventions_in_one_graph_stay_apart():
    def build(e, q, k, cos, sin):
        return relax.Tuple([e(half_split_joined(e, q, cos, sin)), e(interleaved(e, k, cos, sin))])

    out, _ = checked(function(build, [(1, 2, 5, 8), (1, 2, 5, 8), (5, 4), (5, 4)]))
    kinds = sorted(composite_attrs(f)["convention"] for _, f in out.functions_items() if composite_name(f))
    assert kinds == ["half-split", "interleaved"]


def test_rotation_backwards_is_refused():
    out, ledger = checked(
        function(lambda e, x, c_, s: half_split(e, x, c_, s, sign=-1), [(1, 2, 5, 8), (5, 8), (5, 8)])
    )
    assert not composites(out) and "rotates-backwards" in {v.code for v in ledger.refused}


def test_mixed_pairs_are_refused():
    def build(e, x, cos, sin):
        a, b = cut(e, x, 0, 8, 2), cut(e, x, 1, 8, 2)
        lo = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
        return op.concat([lo, e(op.add(e(op.multiply(b, cos)), e(op.multiply(a, sin))))], -1)

    out, _ = checked(function(build, [(1, 2, 5, 8), (5, 4), (5, 4)]))
    assert "crossloom.rotary" not in composites(out)


# attention


def attention(repeat):
    def build(e, q, k, v, mask):
        k, v = repeat(e, k), repeat(e, v)
        s = e(op.matmul(q, e(op.permute_dims(k, [0, 1, 3, 2]))))
        s = e(op.add(e(op.multiply(s, c(0.5))), mask))
        return op.matmul(e(op.nn.softmax(s, -1)), v)

    return build


def grouped(e, x, axis=2):
    shape = [1, 2, 5, 4]
    wide = [1, 2, 2, 5, 4]
    return e(op.reshape(e(op.broadcast_to(e(op.expand_dims(x, axis)), wide)), [1, 4, *shape[2:]]))


@pytest.mark.parametrize(
    ("repeat", "groups", "order"),
    [
        (grouped, 2, [0, 0, 1, 1]),
        (lambda e, x: e(op.repeat(x, 2, 1)), 2, [0, 0, 1, 1]),
        (lambda e, x: grouped(e, x, 1), 1, [0, 1, 0, 1]),
        (lambda e, x: e(op.tile(x, [1, 2, 1, 1])), 1, [0, 1, 0, 1]),
    ],
)
def test_grouped_heads_but_not_tiled_ones(repeat, groups, order):
    out, _ = checked(function(attention(repeat), [(1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (1, 1, 3, 5)]))
    facts = composites(out)["crossloom.attention"]
    assert facts["groups"] == groups and facts["scale"] == 0.5 and facts["masked"]
    q, k, v, mask = data((1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (1, 1, 3, 5))
    s = np.einsum("bhqd,bhkd->bhqk", q, k[:, order]) * 0.5 + mask
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v[:, order])
    assert worst_error(want, run(out, [q, k, v, mask])) < 1e-5


def test_softmax_over_another_axis_is_refused():
    def build(e, q, k, v):
        s = e(op.matmul(q, e(op.permute_dims(k, [0, 1, 3, 2]))))
        return op.matmul(e(op.nn.softmax(s, 2)), v)

    out, ledger = checked(function(build, [(1, 2, 5, 4)] * 3))
    assert not composites(out) and "softmax-not-over-keys" in {v.code for v in ledger.refused}


# linear, embedding, activation


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(transposed, biased):
    def build(e, x, w, b):
        y = op.matmul(x, e(op.permute_dims(w)) if transposed else w)
        return op.add(b, e(y)) if biased else y

    n = tvm.tirx.Var("n", "int64")
    shape = (6, 8) if transposed else (8, 6)
    out, _ = checked(function(build, [(2, n, 8), shape, (6,)]))
    assert composites(out)["crossloom.linear"]["weight_layout"] == ("out_in" if transposed else "in_out")
    x, w, b = data((2, 3, 8), shape, (6,))
    want = x @ (w.T if transposed else w) + (b if biased else 0)
    assert worst_error(want, run(out, [x, w, b])) < 1e-5


def test_bias_that_widens_is_no_linear_bias():
    out, ledger = checked(function(lambda e, x, w, b: op.add(e(op.matmul(x, w)), b), [(2, 8), (8, 1), (6,)]))
    assert "bias-is-not-one-per-output" in {v.code for v in ledger.refused}
    x, w, b = data((2, 8), (8, 1), (6,))
    assert worst_error(x @ w + b, run(out, [x, w, b])) < 1e-5


def test_product_of_activations_is_no_linear():
    out, _ = checked(function(lambda e, x, y: op.matmul(x, y), [(2, 8), (8, 3)], num_input=2))
    assert not composites(out)


def test_embedding_and_column_lookup():
    rows = function(lambda e, i, w: op.take(w, i, 0), [((2, 3), "int64"), (7, 4)])
    out, _ = checked(rows)
    assert list(composites(out)) == ["crossloom.embedding"]
    ids, w = np.array([[0, 6, 3], [1, 1, 2]], "int64"), data((7, 4))[0]
    assert np.array_equal(run(out, [ids, w]), w[ids])
    out, ledger = checked(function(lambda e, i, w: op.take(w, i, 1), [((2,), "int64"), (7, 4)]))
    assert not composites(out) and [v.code for v in ledger.refused] == ["not-a-row-lookup"]


def gelu(e, x):
    erf = e(op.add(e(op.erf(e(op.divide(x, c(math.sqrt(2)))))), c(1.0)))
    return op.multiply(x, e(op.multiply(c(0.5), erf)))


def gelu_half_last(e, x):
    erf = e(op.add(c(1.0), e(op.erf(e(op.multiply(x, c(1 / math.sqrt(2))))))))
    return op.multiply(e(op.multiply(x, erf)), c(0.5))


def gelu_tanh(e, x):
    cube = e(op.multiply(c(0.044715), e(op.power(x, c(3.0)))))
    inner = e(op.multiply(c(math.sqrt(2 / math.pi)), e(op.add(x, cube))))
    return op.multiply(e(op.multiply(c(0.5), x)), e(op.add(c(1.0), e(op.tanh(inner)))))


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("silu", lambda e, x: op.multiply(e(op.sigmoid(x)), x)),
        ("quick_gelu", lambda e, x: op.multiply(x, e(op.sigmoid(e(op.multiply(c(1.702), x)))))),
        ("gelu", gelu),
        ("gelu", gelu_half_last),
        ("gelu_tanh", gelu_tanh),
        ("silu", lambda e, x: op.nn.silu(x)),
    ],
)
def test_activation(kind, build):
    mod = function(build, [(3, 40)])
    out, _ = checked(mod)
    assert composites(out)["crossloom.activation"]["kind"] == kind
    (x,) = data((3, 40))
    assert np.array_equal(run(mod, [x]), run(out, [x]))


@pytest.mark.parametrize(
    ("slope", "dtype"),
    # 1.7 is 1.703125 in bfloat16, and so is 1.702.
    [(1.6, "float32"), (1.7, "float32"), (1.6, "float16"), (1.7, "float16"), (1.6, "bfloat16"), (1.71, "bfloat16")],
)
def test_other_slopes_are_other_functions(slope, dtype):
    def build(e, x):
        return op.multiply(x, e(op.sigmoid(e(op.multiply(x, c(slope, dtype))))))

    out, _ = checked(function(build, [(3, 4)], dtype=dtype))
    assert not composites(out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu"])
def test_constants_rounded_to_half_precision(kind, dtype):
    def half(value):
        return c(value, dtype)

    def build(e, x):
        if kind == "quick_gelu":
            return op.multiply(x, e(op.sigmoid(e(op.multiply(x, half(1.702))))))
        if kind == "gelu":
            return op.multiply(op.multiply(x, half(0.5)), op.add(op.erf(op.multiply(x, half(0.5**0.5))), half(1.0)))
        inner = op.multiply(half(0.7978845608), op.add(x, op.multiply(half(0.044715), op.power(x, half(3.0)))))
        return op.multiply(op.multiply(half(0.5), x), op.add(half(1.0), op.tanh(inner)))

    out, _ = checked(function(build, [(3, 4)], dtype=dtype))
    assert composites(out)["crossloom.activation"]["kind"] == kind


# modules


def test_every_function_is_treated():
    bb = relax.BlockBuilder()
    function(rms(SQUARES["power"], INVERSES["rsqrt"]), [(2, 8), (8,)], "prefill", builder=bb)
    mod = function(rms(SQUARES["power"], INVERSES["rsqrt"]), [(2, 8), (8,)], "decode", builder=bb)
    out, ledger = checked(mod)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"}
    x, w = data((2, 8), (8,))
    for name in ("prefill", "decode"):
        assert np.array_equal(run(mod, [x, w], name), run(out, [x, w], name))


@pytest.mark.parametrize("kind", ["rms", "attention", "linear", "embedding", "activation"])
def test_twice_is_once(kind):
    built = {
        "rms": (rms(SQUARES["power"], INVERSES["rsqrt"]), [(2, 8), (8,)]),
        "attention": (attention(grouped), [(1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (1, 1, 3, 5)]),
        "linear": (lambda e, x, w: op.matmul(x, w), [(2, 8), (8, 6)]),
        "embedding": (lambda e, i, w: op.take(w, i, 0), [((2, 3), "int64"), (7, 4)]),
        "activation": (gelu, [(2, 8)]),
    }[kind]
    once = CanonicalizeTransformer()(function(*built))
    assert composites(once)
    with Ledger() as ledger:
        assert CanonicalizeTransformer()(once).same_as(once)
    assert not len(ledger), "composites are no candidates"


def test_what_lies_inside_a_match_is_no_candidate():
    """A norm's inner product and a block's layers leave nothing in the ledger."""

    def build(e, x, w, a, b):
        y = e(rms(SQUARES["product"], INVERSES["one-over"])(e, x, w))
        return op.matmul(e(gelu(e, e(op.matmul(y, a)))), b)

    _, ledger = checked(function(build, [(2, 8), (8,), (8, 12), (12, 8)]))
    assert sorted((v.rewrite, v.code) for v in ledger) == [("mlp", "fired"), ("rms-norm", "fired")]


def test_time_grows_linearly():
    def chain(n):
        def build(e, x, w):
            for _ in range(n):
                x = e(rms(SQUARES["power"], INVERSES["rsqrt"])(e, x, w))
            return op.add(x, x)

        return function(build, [(2, 8), (8,)])

    def seconds(mod):
        start = time.process_time()
        CanonicalizeTransformer()(mod)
        return time.process_time() - start

    small, large = chain(30), chain(240)
    seconds(small)
    assert seconds(large) < 8 * 4 * max(seconds(small), 0.02)


def test_golden_activation():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, "n"), "float16")):
            with R.dataflow():
                a = R.multiply(x, R.const(1.702, "float16"))
                s = R.sigmoid(a)
                y = R.multiply(x, s)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def activation(x: R.Tensor((2, "n"), "float16")):
            R.func_attr({"Composite": "crossloom.activation", "crossloom.kind": "quick_gelu"})
            with R.dataflow():
                a = R.multiply(x, R.const(1.702, "float16"))
                s = R.sigmoid(a)
                y = R.multiply(x, s)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((2, "n"), "float16")):
            cls = Expected
            with R.dataflow():
                y = cls.activation(x)
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


ACTIVATIONS = {
    "silu": lambda e, x: op.multiply(x, e(op.sigmoid(x))),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick": lambda e, x: op.multiply(e(op.sigmoid(e(op.multiply(x, c(1.702))))), x),
}


@st.composite
def activations(draw):
    kind = draw(st.sampled_from(sorted(ACTIVATIONS)))

    def reference(x):
        if kind == "silu":
            return [references.silu(x[0])]
        return [references.gelu(x[0], {"gelu": "erf", "gelu_tanh": "tanh", "quick": "quick"}[kind])]

    return strategies.build(draw, [("n", 3)], lambda bb, p: [ACTIVATIONS[kind](bb.emit, p[0])], reference, "float32")


def test_property_activations_are_preserved():
    assert_pass_preserves(CanonicalizeTransformer(), activations(), max_examples=8)
