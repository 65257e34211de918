"""A linear layer that nothing joins is a region of its own, with a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from canonical import data, function
from crossloom.flow import steps
from crossloom.numerics import REASSOCIATES
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_single_linear import FuseSingleLinear
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import composite_name
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger

op = relax.op


def layer(emit, x, w, bias=None):
    y = emit(op.matmul(x, w))
    return y if bias is None else emit(op.add(y, bias))


def canonical(shapes, names=("vision",), lines=layer, dtype="float32"):
    builder = relax.BlockBuilder()
    for name in names:
        function(lines, shapes, name, dtype, builder)
    return CanonicalizeTransformer()(builder.get())


def fused(mod):
    """Return what the pass makes of a module, and the codes of its verdicts."""
    with Ledger() as ledger:
        out = FuseSingleLinear()(mod)
    if not ledger.fired:
        assert out.same_as(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(FuseSingleLinear()(out), out)
    return out, [v.code for v in ledger]


def test_golden():
    before = canonical([(1, 5, 4), (4, 20), (20,)])
    after, codes = fused(before)
    assert codes == ["fired"]
    (call,) = [b.value for b in after["vision"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    region = after[call.op]
    assert composite_name(region) == "crossloom.fused_linear"
    # The region holds the layer as the function held it.
    alone = lambda func: tvm.IRModule({"f": func.without_attr("Composite").without_attr("num_input")})
    inner = [b.value for b in region.body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    outer = [b.value for b in before["vision"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    (had,), (has,) = outer, inner
    tvm.ir.assert_structural_equal(alone(before[had.op]), alone(after[has.op]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernel_computes_it(biased, dtype):
    rows = tirx.Var("T", "int64")
    shapes = [(1, rows, 7), (7, 19), *([(19,)] if biased else [])]
    out, codes = fused(canonical(shapes, dtype=dtype))
    assert codes == ["fired"]
    low = LowerFusedLinear(get_target("host").tvm_target())(out)
    assert any("fused_linear_kernel" in gvar.name_hint for gvar in low.get_global_vars())
    for count in (0, 1, 5):
        values = data((1, count, 7), *shapes[1:], dtype=dtype)
        (got,) = run_module(low, "vision", values)
        x, w, *bias = (v.astype("float64") for v in values)
        want = x @ w + (bias[0] if biased else 0)
        np.testing.assert_allclose(
            got, want, rtol=1e-5 if dtype == "float32" else 2e-3, atol=1e-5 if dtype == "float32" else 1e-2
        )


def test_few_columns_are_refused():
    assert fused(canonical([(1, 5, 4), (4, 15)]))[1] == ["few-columns"]


def test_what_the_kernel_cannot_do_is_refused():
    wide = lambda emit, x, w: emit(op.matmul(x, w, out_dtype="float32"))
    assert fused(canonical([(1, 5, 4), (4, 20)], lines=wide, dtype="float16"))[1] == ["no-kernel"]


def test_the_pipeline_asks_last():
    order = [step.info.name for step in steps(None)]
    place = order.index("fuse-single-linear")
    growing = ["fuse-parallel-projections", "fuse-linear-epilogue", "fold-norm-into-linear", "fuse-feed-forward"]
    assert max(order.index(name) for name in growing) < place < order.index("lower-fused-linear")


def test_vision_and_decode_are_treated_alike_and_twice_is_once():
    with Ledger() as ledger:
        once = FuseSingleLinear()(canonical([(1, 5, 4), (4, 20)], ("vision", "decode")))
    assert {v.function for v in ledger.fired} == {"vision", "decode"}
    assert FuseSingleLinear()(once).same_as(once)


@st.composite
def layers(draw):
    depth, count = draw(st.integers(1, 9)), draw(st.integers(14, 33))
    emit = lambda builder, p: [layer(builder.emit, *p)]
    reference = lambda v: [v[0].astype("float64") @ v[1].astype("float64") + v[2].astype("float64")]
    return build(
        draw, [("n", depth), (depth, count), (count,)], emit, reference, draw(st.sampled_from(["float32", "float16"]))
    )


def test_it_preserves_layers():
    lower = LowerFusedLinear(get_target("host").tvm_target())
    passes = tvm.transform.Sequential([CanonicalizeTransformer(), FuseSingleLinear(), lower], name="single-linear")
    assert_pass_preserves(passes, layers(), numerics=REASSOCIATES, max_examples=10)
