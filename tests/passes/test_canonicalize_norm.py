"""RMSNorm and LayerNorm with and without weight and bias, in every spelling and order of factors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import checked, data, module
from crossloom.numerics import worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.verdict import Ledger

op = relax.op
EPS = 1e-3


def refusals(mod):
    with Ledger() as ledger:
        CanonicalizeTransformer()(mod)
    return [(v.rewrite.rsplit("/", 1)[-1], v.code) for v in ledger.refused]


def canonicalized(mod):
    out, ledger = checked(mod)
    found = {composite_name(f): f for _, f in out.functions_items() if composite_name(f)}
    return out, found, {v.code for v in ledger.refused}


def c(value, dtype="float32"):
    return relax.const(value, dtype)


def mean(e, x, axes=(-1,)):
    return e(op.mean(x, list(axes), True))


def squares(e, x, axes=(-1,)):
    return e(op.add(mean(e, e(op.multiply(x, x)), axes), c(EPS, str(x.ty.dtype))))


def centred(e, x, axes=(-1,)):
    return e(op.subtract(x, mean(e, x, axes)))


#: x / sqrt(v), the ways exporters write it.
DIVIDED = {
    "rsqrt": lambda e, x, v: op.multiply(x, e(op.rsqrt(v))),
    "div-sqrt": lambda e, x, v: op.divide(x, e(op.sqrt(v))),
    "one-over": lambda e, x, v: op.multiply(e(op.divide(c(1.0), e(op.sqrt(v)))), x),
    "reciprocal": lambda e, x, v: op.multiply(x, e(op.power(e(op.sqrt(v)), c(-1.0)))),
    "power": lambda e, x, v: op.multiply(x, e(op.power(v, c(-0.5)))),
    "root-by-power": lambda e, x, v: op.divide(x, e(op.power(v, c(0.5)))),
}


def normal(x, centre):
    x = x.astype("float64") - (x.mean(-1, keepdims=True) if centre else 0)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


@pytest.mark.parametrize("spelling", DIVIDED)
@pytest.mark.parametrize("operands", ["x", "xw", "xwb"])
def test_norms_with_and_without_weight_and_bias(spelling, operands):
    def build(e, x, y, *rest):
        out = []
        for value, layer in ((x, False), (y, True)):
            core = centred(e, value) if layer else value
            out.append(e(DIVIDED[spelling](e, core, squares(e, core))))
            for name, operand in zip(operands[1:], rest):
                if name == "w" or layer:
                    out[-1] = e(op.multiply(out[-1], operand) if name == "w" else op.add(out[-1], operand))
        return relax.Tuple(out)

    shapes = [(2, 3, 8), (2, 3, 8), *[(8,)] * (len(operands) - 1)]
    out, found, _ = canonicalized(module(build, shapes, num_input=2))
    assert set(found) == {"crossloom.rms_norm", "crossloom.layer_norm"}
    names = [p.name for p in found["crossloom.layer_norm"].params]
    assert names == ["x", "weight", "bias"][: len(operands)]
    assert [p.name for p in found["crossloom.rms_norm"].params] == names[:2]
    assert len(out["main"].body.blocks[0].bindings) == 3, "two calls and the tuple"
    x, y, *rest = data(*shapes)
    w, b = (rest + [1.0, 0.0][len(rest) :])[:2]
    for got, want in zip(run_module(out, "main", [x, y, *rest]), (normal(x, False) * w, normal(y, True) * w + b)):
        assert worst_error(want.astype("float32"), got) < 1e-5


def test_golden_layer_norm():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32"), b: R.Tensor((8,), "float32")):
            with R.dataflow():
                m = R.mean(x, axis=[-1], keepdims=True)
                d = R.subtract(x, m)
                p = R.power(d, R.const(2.0, "float32"))
                v = R.mean(p, axis=[-1], keepdims=True)
                s = R.add(v, R.const(0.5, "float32"))
                r = R.sqrt(s)
                q = R.divide(d, r)
                y = R.multiply(q, w)
                z = R.add(y, b)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def layer_norm(
            x: R.Tensor(("n", 8), "float32"), weight: R.Tensor((8,), "float32"), bias: R.Tensor((8,), "float32")
        ):
            R.func_attr({"Composite": "crossloom.layer_norm", "crossloom.axes": [-1], "crossloom.epsilon": 0.5})
            with R.dataflow():
                m = R.mean(x, axis=[-1], keepdims=True)
                d = R.subtract(x, m)
                p = R.power(d, R.const(2.0, "float32"))
                v = R.mean(p, axis=[-1], keepdims=True)
                s = R.add(v, R.const(0.5, "float32"))
                r = R.sqrt(s)
                q = R.divide(d, r)
                y = R.multiply(q, weight)
                z = R.add(y, bias)
                R.output(z)
            return z

        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8,), "float32"), b: R.Tensor((8,), "float32")):
            cls = Expected
            with R.dataflow():
                z = cls.layer_norm(x, w, b)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(Before), Expected)


def test_weight_before_the_division_and_variance_as_one_operator():
    def build(e, x, w, b):
        numerator = e(op.multiply(w, centred(e, x)))
        v = e(op.add(e(op.variance(x, [-1], True)), c(EPS)))
        return op.add(e(op.divide(numerator, e(op.sqrt(v)))), b)

    out, found, _ = canonicalized(module(build, [(3, 8), (8,), (8,)]))
    assert list(found) == ["crossloom.layer_norm"]
    x, w, b = data((3, 8), (8,), (8,))
    want = (normal(x, True) * w + b).astype("float32")
    assert worst_error(want, run_module(out, "main", [x, w, b])[0]) < 1e-5


def test_norm_of_a_product_and_of_a_norm():
    def build(e, x, y, w):
        product = e(op.multiply(x, y))
        first = e(op.multiply(w, e(op.multiply(product, e(op.rsqrt(squares(e, product)))))))
        return op.multiply(e(op.multiply(e(op.rsqrt(squares(e, first))), first)), w)

    out, found, _ = canonicalized(module(build, [(3, 8), (3, 8), (8,)], num_input=2))
    calls = [b.value for b in out["main"].body.blocks[0].bindings]
    assert list(found) == ["crossloom.rms_norm"] and len(calls) == 3
    x, y, w = data((3, 8), (3, 8), (8,))
    want = (normal(normal(x * y, False) * w, False) * w).astype("float32")
    assert worst_error(want, run_module(out, "main", [x, y, w])[0]) < 1e-5


def test_modulation_is_no_weight():
    """Diffusion transformers scale by an activation: the norm is bare, the product stays."""

    def build(e, x, scale):
        return op.multiply(e(op.multiply(x, e(op.rsqrt(squares(e, x))))), scale)

    out, found, codes = canonicalized(module(build, [(2, 3, 8), (2, 1, 8)], num_input=2))
    assert [p.name for p in found["crossloom.rms_norm"].params] == ["x"]
    assert codes == {"weight-does-not-span-axes"}
    assert len(out["main"].body.blocks[0].bindings) == 2


def test_statistics_of_another_value_are_refused():
    def build(e, x, y):
        return op.multiply(x, e(op.rsqrt(squares(e, y))))

    _, found, codes = canonicalized(module(build, [(2, 8), (2, 8)], num_input=2))
    assert not found and codes == {"mean-of-another-value"}


@pytest.mark.parametrize(("about_mean", "name"), [(True, "layer-norm"), (False, "rms-norm")])
def test_a_refusal_is_told_once_under_its_own_norms_name(about_mean, name):
    def build(e, x, scale):
        core = centred(e, x) if about_mean else x
        return op.multiply(e(op.multiply(core, e(op.rsqrt(squares(e, core))))), scale)

    mod = module(build, [(2, 3, 8), (2, 1, 8)], num_input=2)
    assert refusals(mod) == [(name, "weight-does-not-span-axes")]


@pytest.mark.parametrize("spelled", [True, False])
def test_inner_axes_are_refused(spelled):
    def build(e, x, w):
        if not spelled:
            return op.nn.layer_norm(x, w, w, axes=[1], epsilon=EPS)
        d = centred(e, x, [1])
        return op.divide(d, e(op.sqrt(squares(e, d, [1]))))

    mod = module(build, [(2, 8, 3), (8,)])
    out, found, codes = canonicalized(mod)
    assert not found and codes == {"axes-not-trailing"}
    tvm.ir.assert_structural_equal(out, mod)


def test_other_exponents_are_no_norm():
    def build(e, x, w):
        v = e(op.add(mean(e, e(op.power(x, c(3.0)))), c(EPS)))
        return op.multiply(w, e(op.multiply(x, e(op.rsqrt(v)))))

    assert not canonicalized(module(build, [(2, 8), (8,)]))[1]


def test_two_trailing_axes_and_half_precision_in_two_entries():
    def build(e, x, w):
        wide = e(op.astype(x, "float32"))
        core = e(op.multiply(wide, e(op.rsqrt(squares(e, wide, [1, 2])))))
        return op.multiply(w, e(op.astype(core, "float16")))

    n = tirx.Var("n", "int64")
    out, found, _ = canonicalized(module(build, [(n, 2, 4), (2, 4)], ("prefill", "decode"), "float16"))
    facts = composite_attrs(found["crossloom.rms_norm"])
    assert list(facts["axes"]) == [-2, -1] and facts["epsilon"] == pytest.approx(EPS)
    for length in (0, 1, 3):
        x, w = data((length, 2, 4), (2, 4), dtype="float16")
        x *= 300  # squares leave float16
        want = normal(x.astype("float32").reshape(length, 8), False).astype("float16").reshape(x.shape) * w
        for name in ("prefill", "decode"):
            assert worst_error(want, run_module(out, name, [x, w])[0]) < 2e-3


@pytest.mark.parametrize("norms", [strategies.rms_norm, strategies.layer_norm, strategies.residual_norm])
def test_property_norms_are_preserved(norms):
    assert_pass_preserves(CanonicalizeTransformer(), norms(), max_examples=8)


@st.composite
def bare_norms(draw):
    """Norms without operands, of any spelling."""
    spelling, layer = draw(st.sampled_from(sorted(DIVIDED))), draw(st.booleans())
    width = draw(st.sampled_from([2, 3, 8]))

    def emit(bb, p):
        x = centred(bb.emit, p[0]) if layer else p[0]
        return [DIVIDED[spelling](bb.emit, x, squares(bb.emit, x))]

    return strategies.build(draw, [("n", width)], emit, lambda x: [normal(x[0], layer)], "float32")


def test_property_bare_norms_are_preserved():
    assert_pass_preserves(CanonicalizeTransformer(), bare_norms(), max_examples=8)
