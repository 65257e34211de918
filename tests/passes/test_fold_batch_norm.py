"""Batch norms, and products and sums of each channel, become part of the layer beside them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from tvm import relax, tirx

from canonical import data, function
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES
from crossloom.passes.annotate_semantic_regions import AnnotateSemanticRegions
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_batch_norm import FoldBatchNorm
from crossloom.semantics import regions_of
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op
EPSILON = 0.5
NORM = [(4,)] * 4


def norm(emit, y, weights, axis=1, **flags):
    """Return a batch norm's first result; of the last weight the square is the variance."""
    gamma, beta, mean, root = weights
    variance = emit(op.multiply(root, root)) if isinstance(root, relax.Var) else root
    whole = emit(op.nn.batch_norm(y, gamma, beta, mean, variance, axis, EPSILON, training=False, **flags))
    return emit(whole[0])


def normed(y, weights, axis=1, center=True, scale=True):
    """Return what :func:`norm` gives, in numpy."""
    gamma, beta, mean, root = (w.astype("float64").reshape(-1, *[1] * (y.ndim - 1 - axis)) for w in weights)
    whole = (y - mean) / np.sqrt(root * root + EPSILON)
    return whole * (gamma if scale else 1) + (beta if center else 0)


def convolved(x, w, groups=1, padding=0):
    """Return a convolution of stride 1 over two axes, in numpy."""
    x = np.pad(x.astype("float64"), [(0, 0), (0, 0), (padding,) * 2, (padding,) * 2])
    parts = []
    for part, kernel in zip(np.split(x, groups, 1), np.split(w.astype("float64"), groups, 0)):
        windows = sliding_window_view(part, w.shape[2:], (2, 3))
        parts.append(np.einsum("nihwab,oiab->nohw", windows, kernel))
    return np.concatenate(parts, 1)


def folded(mod):
    """Return what the pass makes of a module, and the codes of its verdicts in order."""
    with Ledger() as ledger:
        out = FoldBatchNorm()(mod)
    if not ledger.fired:
        assert out.same_as(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(FoldBatchNorm()(out), out)
    return out, [v.code for v in ledger]


def names(mod, entry="vision"):
    """Return the operators that read something else than weights, in order."""
    func = mod[entry]
    weights = set(list(func.params)[int(func.attrs["num_input"]) :])
    out = []
    for binding in func.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and not all(
            a in weights or not isinstance(a, relax.Var) for a in value.args if not isinstance(a, relax.ShapeExpr)
        ):
            out.append(value.op.name.rsplit(".", 1)[-1] if isinstance(value.op, tvm.ir.Op) else value.op.name_hint)
        else:
            weights.add(binding.var)
    return out


def check(lines, shapes, want, dtype="float32", tol=1e-5, codes=("fired",), left=None, seed=0):
    """Fold, compare with numpy, and return the module."""
    mod = function(lines, shapes, "vision", dtype)
    out, seen = folded(mod)
    assert seen == list(codes)
    if left is not None:
        assert names(out) == left
    values = data(*[s if not isinstance(s[-1], str) else s[0] for s in shapes], dtype=dtype, seed=seed)
    (got,) = run_module(out, "vision", values)
    wanted = want(*values)
    np.testing.assert_allclose(got.astype("float64"), wanted, rtol=tol, atol=tol * np.abs(wanted).max())
    return out


def test_golden():
    def before(emit, x, w, gamma, beta, mean, variance):
        y = emit(op.nn.conv2d(x, w, padding=1))
        return emit(emit(op.nn.batch_norm(y, gamma, beta, mean, variance, 1, 0.25, training=False))[0])

    def expected(emit, x, w, gamma, beta, mean, variance):
        deviation = emit(op.sqrt(emit(op.add(variance, relax.const(0.25)))))
        scale = emit(op.divide(gamma, deviation))
        shift = emit(op.subtract(beta, emit(op.multiply(mean, scale))))
        wide = emit(op.multiply(w, emit(op.reshape(scale, (4, 1, 1, 1)))))
        y = emit(op.nn.conv2d(x, wide, padding=1))
        return emit(op.add(y, emit(op.reshape(shift, (4, 1, 1)))))

    shapes = [("n", 3, 6, 5), (4, 3, 3, 3), *NORM]
    shapes[0] = (tirx.Var("n", "int64"), 3, 6, 5)
    mod, codes = folded(function(before, shapes, "vision"))
    assert codes == ["fired"]
    shapes[0] = (tirx.Var("n", "int64"), 3, 6, 5)
    tidy = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(tidy(mod), tidy(function(expected, shapes, "vision")))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("flags", [{}, {"center": False}, {"scale": False}])
def test_behind_a_convolution_with_a_bias(groups, flags):
    def lines(emit, x, w, bias, *weights):
        y = emit(op.nn.conv2d(x, w, padding=1, groups=groups))
        return norm(emit, emit(op.add(y, emit(op.reshape(bias, (1, 4, 1, 1))))), weights, **flags)

    want = lambda x, w, b, *rest: normed(convolved(x, w, groups, 1) + b.reshape(4, 1, 1), rest, **flags)
    check(lines, [(2, 4, 5, 3), (4, 4 // groups, 3, 3), (4,), *NORM], want, left=["conv2d", "add"])


def test_layouts_with_channels_behind():
    def lines(emit, x, w, *weights):
        return norm(emit, emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO")), weights, 3)

    def want(x, w, *rest):
        y = convolved(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)).transpose(0, 2, 3, 1)
        return normed(y, rest, 3)

    check(lines, [(1, 5, 4, 3), (2, 2, 3, 4), *NORM], want, left=["conv2d", "add"])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2])
def test_behind_a_transposed_convolution(groups, rank):
    convolution = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose}[rank]

    def lines(emit, x, w, *weights):
        return norm(emit, emit(convolution(x, w, strides=2, groups=groups)), weights)

    shapes = [(1, 6, *[3] * rank), (6, 4 // groups, *[3] * rank), *NORM]
    values = data(*shapes)
    (want,) = run_module(function(lines, shapes, "vision"), "vision", values)
    check(lines, shapes, lambda *_: want, left=[f"conv{rank}d_transpose", "add"])


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("view", ["none", "turned", "flat"])
def test_behind_a_linear_layer(canonical, view):
    def lines(emit, x, w, bias, *weights):
        y = emit(op.add(emit(op.matmul(x, emit(op.permute_dims(w)))), bias))
        if view == "turned":
            return norm(emit, emit(op.permute_dims(y, (0, 2, 1))), weights)
        y = emit(op.reshape(y, (6, 4))) if view == "flat" else y
        return norm(emit, y, weights, 1 if view == "flat" else 2)

    def want(x, w, b, *rest):
        y = normed(x.astype("float64") @ w.T + b, rest, 2)
        return {"none": y, "turned": y.transpose(0, 2, 1), "flat": y.reshape(6, 4)}[view]

    shapes = [(2, 3, 5), (4, 5), (4,), *NORM]
    if not canonical:
        # The bias is a step of its own: in front of a view it hides the layer.
        check(lines, shapes, want, left=["matmul", "add"] if view == "none" else None)
        return
    mod = CanonicalizeTransformer()(function(lines, shapes, "vision"))
    out, codes = folded(mod)
    assert codes == ["fired"] and not {"multiply", "add"} & set(names(out))
    values = data(*shapes)
    np.testing.assert_allclose(run_module(out, "vision", values)[0], want(*values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1)])
def test_what_exporters_leave_of_it(shape):
    def lines(emit, x, w, mean, deviation, gamma, beta):
        y = emit(op.subtract(emit(op.nn.conv2d(x, w)), mean))
        y = emit(op.divide(y, deviation))
        return emit(op.add(beta, emit(op.multiply(gamma, y))))

    want = lambda x, w, m, d, g, b: (convolved(x, w) - m) / d * g + b
    check(lines, [(1, 3, 5, 4), (4, 3, 2, 2), *[shape] * 4], want, tol=1e-4, left=["conv2d", "add"])


@pytest.mark.parametrize("first", [False, True])
def test_weights_less_the_values(first):
    def lines(emit, x, w, shift, scale):
        if first:
            y = emit(op.subtract(shift, emit(op.multiply(x, scale))))
            return emit(op.nn.conv2d(y, w))
        return emit(op.multiply(emit(op.subtract(shift, emit(op.nn.conv2d(x, w)))), scale))

    want = lambda x, w, m, s: convolved(m - x * s, w) if first else (m - convolved(x, w)) * s
    check(lines, [(1, 4, 5, 4), (4, 4, 2, 2), (1, 4, 1, 1), (4, 1, 1)], want, tol=1e-4, left=["conv2d", "add"])


def test_frozen_batch_norms_are_arithmetic_on_weights():
    def lines(emit, x, w, gamma, beta, mean, root):
        gamma, beta, mean, root = (emit(op.reshape(v, (1, 4, 1, 1))) for v in (gamma, beta, mean, root))
        variance = emit(op.add(emit(op.multiply(root, root)), relax.const(EPSILON)))
        scale = emit(op.multiply(gamma, emit(op.rsqrt(variance))))
        shift = emit(op.subtract(beta, emit(op.multiply(mean, scale))))
        return emit(op.add(emit(op.multiply(emit(op.nn.conv2d(x, w)), scale)), shift))

    want = lambda x, w, *rest: normed(convolved(x, w), rest)
    check(lines, [(1, 3, 5, 4), (4, 3, 2, 2), *NORM], want, left=["conv2d", "add"])


@pytest.mark.parametrize("groups", [1, 2])
def test_in_front_of_a_convolution_without_padding(groups):
    def lines(emit, x, w, *weights):
        return emit(op.nn.conv2d(norm(emit, x, weights), w, groups=groups))

    want = lambda x, w, *rest: convolved(normed(x, rest), w, groups)
    check(lines, [(1, 4, 5, 4), (6, 4 // groups, 3, 2), *NORM], want, left=["conv2d", "add"])


def test_image_normalization_in_front_of_patches():
    mean, deviation = np.float32([0.48, 0.45, 0.4]).reshape(3, 1, 1), np.float32([0.26, 0.25, 0.27]).reshape(1, 3, 1, 1)

    def lines(emit, x, w):
        y = emit(op.multiply(x, relax.const(1 / 255.0)))
        y = emit(op.divide(emit(op.subtract(y, relax.const(mean))), relax.const(deviation)))
        return emit(op.nn.conv2d(y, w, strides=2))

    want = lambda x, w: convolved((x / 255.0 - mean) / deviation, w)[:, :, ::2, ::2]
    check(lines, [(1, 3, 6, 4), (5, 3, 2, 2)], want, left=["conv2d", "add"])


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_in_front_of_a_linear_layer(canonical, biased):
    def lines(emit, x, w, *rest):
        y = emit(op.matmul(norm(emit, x, rest[:4], 2), w))
        return emit(op.add(y, rest[4])) if biased else y

    shapes = [(1, 3, 4), (4, 5), *NORM, *([(5,)] if biased else [])]
    mod = function(lines, shapes, "vision")
    out, codes = folded(CanonicalizeTransformer()(mod) if canonical else mod)
    assert codes == ["fired"]
    values = data(*shapes)
    wanted = normed(values[0], values[2:6], 2) @ values[1].astype("float64") + (values[6] if biased else 0)
    np.testing.assert_allclose(run_module(out, "vision", values)[0], wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_takes_a_map_on_either_side():
    def lines(emit, x, w, *weights):
        return norm(emit, emit(op.nn.conv2d(norm(emit, x, weights[:4]), w)), weights[4:])

    want = lambda x, w, *rest: normed(convolved(normed(x, rest[:4]), w), rest[4:])
    check(
        lines,
        [(1, 4, 5, 4), (4, 4, 3, 2), *NORM, *NORM],
        want,
        tol=1e-4,
        codes=["fired", "fired"],
        left=["conv2d", "add", "add"],
    )


@pytest.mark.parametrize(("dtype", "tol"), [("float32", 1e-5), ("float16", 2e-3)])
def test_alone_it_is_a_product_and_a_sum(dtype, tol):
    lines = lambda emit, x, *weights: norm(emit, x, weights)
    left = ["multiply", "add"] if dtype == "float32" else ["astype", "multiply", "add", "astype"]
    check(lines, [(2, 4, 5), *NORM], lambda x, *rest: normed(x, rest), dtype, tol, left=left)


def test_results_that_stay_the_statistics_are_left_alone():
    def lines(emit, x, gamma, beta, mean, variance):
        whole = emit(op.nn.batch_norm(x, gamma, beta, mean, variance, 1, training=False))
        return emit(op.add(emit(whole[0]), emit(op.reshape(emit(whole[1]), (4, 1)))))

    assert folded(function(lines, [(2, 4, 5), *NORM], "vision"))[1] == ["intermediate-used-outside"]


def test_training_is_refused():
    def lines(emit, x, *weights):
        return emit(emit(op.nn.batch_norm(x, *weights, axis=1, training=True))[0])

    assert folded(function(lines, [(2, 4, 5), *NORM], "vision"))[1] == ["training"]


def test_a_result_that_is_read_elsewhere_is_refused_and_the_norm_stands_alone():
    def lines(emit, x, w, *weights):
        y = emit(op.nn.conv2d(x, w))
        return emit(op.add(norm(emit, y, weights), y))

    _, codes = folded(function(lines, [(1, 3, 5, 4), (4, 3, 2, 2), *NORM], "vision"))
    assert codes == ["intermediate-used-outside", "fired"]


def test_padding_sees_no_shift():
    def lines(emit, x, w, *weights):
        return emit(op.nn.conv2d(norm(emit, x, weights), w, padding=1))

    want = lambda x, w, *rest: convolved(normed(x, rest), w, padding=1)
    check(lines, [(1, 4, 5, 4), (2, 4, 3, 3), *NORM], want, codes=["shift-is-not-uniform", "fired"])
    factor = relax.const(np.float32([1, 2, 3, 4]).reshape(4, 1, 1))
    scaled = lambda emit, x, w: emit(op.nn.conv2d(emit(op.multiply(x, factor)), w, padding=1))
    want = lambda x, w: convolved(x * factor.value.numpy(), w, padding=1)
    check(scaled, [(1, 4, 5, 4), (2, 4, 3, 3)], want, left=["conv2d"])


def test_other_types_are_refused():
    def lines(emit, x, w, gamma):
        y = emit(op.nn.conv2d(x, w, out_dtype="float32"))
        return emit(op.multiply(y, gamma))

    def before(emit, x, gamma, w):
        y = emit(op.multiply(x, gamma))
        return emit(op.nn.conv2d(y, w, out_dtype="float32"))

    gamma = ((4, 1, 1), "float32")
    shapes = [((1, 3, 5, 4), "float16"), ((4, 3, 2, 2), "float16"), gamma]
    assert folded(function(lines, shapes, "vision"))[1] == ["different-dtypes"]
    shapes = [((1, 4, 5, 4), "float16"), ((4, 1, 1), "float16"), ((4, 4, 2, 2), "float16")]
    assert folded(function(before, shapes, "vision"))[1] == ["different-dtypes"]


def half(gamma, known=True):
    """Return a float16 convolution in front of a batch norm in float32, as ONNX files have them."""
    constants = [relax.const(np.full(4, v, "float32")) for v in (gamma, 0.5, 0.25, 1.0 - EPSILON)]

    def lines(emit, x, w, *weights):
        y = emit(op.astype(emit(op.nn.conv2d(x, w)), "float32"))
        return emit(op.astype(norm(emit, y, constants if known else weights), "float16"))

    rest = [] if known else [((4,), "float32")] * 4
    return lines, [((1, 3, 5, 4), "float16"), ((4, 3, 2, 2), "float16"), *rest]


def test_half_precision_weights_keep_their_bits():
    lines, shapes = half(0.5)
    want = lambda x, w: (convolved(x, w) - 0.25) * 0.5 + 0.5
    check(lines, shapes, want, "float16", 4e-3, left=["conv2d", "add"])
    for lines, shapes in (half(1e-5), half(1e7), half(0.5, known=False)):
        out, codes = folded(function(lines, shapes, "vision", "float16"))
        assert codes == ["half-precision-factor-unknown", "fired"]
        assert names(out) == ["conv2d", "astype", "multiply", "add", "astype"]


def test_half_precision_sums_of_weights_are_refused():
    lines = lambda emit, x, w, *weights: emit(op.nn.conv2d(norm(emit, x, weights), w))
    mod = function(lines, [(1, 4, 5, 4), (2, 4, 3, 3), *NORM], "vision", "float16")
    assert folded(mod)[1] == ["half-precision-sum-unknown", "fired"]


def test_channels_of_symbolic_number_are_refused():
    count = tirx.Var("c", "int64")
    alone = lambda emit, x, *weights: norm(emit, x, weights)
    assert folded(function(alone, [(2, count, 5), *[(count,)] * 4], "vision"))[1] == ["channels-of-symbolic-number"]
    behind = lambda emit, x, w, *weights: norm(emit, emit(op.nn.conv2d(x, w)), weights)
    mod = function(behind, [(1, 3, 5, 4), (count, 3, 2, 2), *[(count,)] * 4], "vision")
    assert folded(mod)[1] == ["channels-of-symbolic-number"] * 2
    front = lambda emit, x, w, *weights: emit(op.nn.conv2d(norm(emit, x, weights), w))
    mod = function(front, [(1, count, 5, 4), (3, count, 2, 2), *[(count,)] * 4], "vision")
    assert folded(mod)[1] == ["channels-of-symbolic-number"] * 2


@pytest.mark.parametrize("case", ["input", "row", "bias", "layer-scale", "residual"])
def test_what_is_no_map_of_channels(case):
    def lines(emit, a, x, w, s):
        if case == "layer-scale":
            return emit(op.multiply(emit(op.matmul(x, w)), s))
        y = emit(op.nn.conv2d(x, w))
        return emit(
            {"input": op.multiply, "row": op.multiply, "bias": op.add, "residual": op.add}[case](
                y, a if case in ("input", "residual") else s
            )
        )

    first = {"input": (4, 1, 1), "residual": (1, 4, 4, 3)}.get(case, (1,))
    shapes = [first, (1, 3, 5, 4), (4, 3, 2, 2), (3,) if case == "row" else (4, 1, 1)]
    if case == "layer-scale":
        shapes = [first, (1, 3, 5, 4), (4, 6), (6,)]
    assert folded(function(lines, shapes, "vision", num_input=2))[1] == []


def test_what_the_regions_say_stays_and_weights_keep_their_names():
    def lines(emit, x, w, *weights):
        return emit(op.nn.relu(norm(emit, emit(op.nn.conv2d(x, w)), weights)))

    mod = AnnotateSemanticRegions()(function(lines, [(1, 3, 5, 4), (4, 3, 2, 2), *NORM], "vision"))
    out, codes = folded(mod)
    assert codes == ["fired"] and regions_of(mod["vision"]) == regions_of(out["vision"]) != ()
    # Told anew they are the same, with the weights in another order.
    assert [set(r.weights) for r in regions_of(AnnotateSemanticRegions()(out)["vision"])] == [
        {f"p{i}" for i in range(1, 6)}
    ]


def test_the_pipeline_runs_it_before_regions_grow():
    order = [step.info.name for step in steps(None)]
    place = order.index("fold-batch-norm")
    assert (
        order.index("annotate-semantic-regions") < place < min(i for i, n in enumerate(order) if n.startswith("fuse-"))
    )


def test_vision_and_decode_are_treated_alike_and_twice_is_once():
    lines = lambda emit, x, w, *weights: norm(emit, emit(op.nn.conv2d(x, w)), weights)
    builder = relax.BlockBuilder()
    for name in ("vision", "decode"):
        function(lines, [(1, 3, 5, 4), (4, 3, 2, 2), *NORM], name, "float32", builder)
    mod = builder.get()
    with Ledger() as ledger:
        once = FoldBatchNorm()(mod)
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    tvm.ir.assert_structural_equal(FoldBatchNorm()(once), once)


@st.composite
def networks(draw):
    groups, padding = draw(st.sampled_from([1, 2])), draw(st.integers(0, 1))
    before, behind, biased = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    channels, count = 2 * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    shapes = [
        ("n", channels, 4, 3),
        (count, channels // groups, *kernel),
        (count,),
        *[(channels,)] * 4,
        *[(count,)] * 4,
    ]

    def emit(builder, p):
        x, w, bias, *rest = p
        x = norm(builder.emit, x, rest[:4]) if before else x
        y = builder.emit(op.nn.conv2d(x, w, padding=padding, groups=groups))
        y = builder.emit(op.add(y, builder.emit(op.reshape(bias, (count, 1, 1))))) if biased else y
        return [norm(builder.emit, y, rest[4:]) if behind else y]

    def reference(values):
        x, w, bias, *rest = (v.astype("float64") for v in values)
        y = convolved(normed(x, rest[:4]) if before else x, w, groups, padding)
        y = y + bias.reshape(-1, 1, 1) if biased else y
        return [normed(y, rest[4:]) if behind else y]

    return build(draw, shapes, emit, reference, "float32")


def test_it_preserves_convolutions_with_batch_norms():
    assert_pass_preserves(FoldBatchNorm(), networks(), numerics=REASSOCIATES, max_examples=8)
