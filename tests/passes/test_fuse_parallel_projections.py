"""Linear layers of one value become one region: weights and biases of any kind, in any place; and in linear time."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, function, module
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import composite_name
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module, strategies
from fused import calls, fused

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()


def test_golden_three_layers_of_which_one_has_a_bias():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def plain(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def biased(
            x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((3, 4), "float32"), bias: R.Tensor((1, 3), "float32")
        ):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                p = R.matmul(x, t)
                y = R.add(p, bias)
                R.output(y)
            return y

        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"),
            q: R.Tensor((4, 6), "float32"),
            k: R.Tensor((3, 4), "float32"),
            b: R.Tensor((1, 3), "float32"),
        ):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                first = cls.plain(x, q)
                e = R.exp(first)
                second = cls.biased(x, k, b)
                R.output(e, second)
            return (e, second)

    @I.ir_module
    class Expected:
        @R.function(private=True)
        def plain(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 6), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def biased(
            x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((3, 4), "float32"), bias: R.Tensor((1, 3), "float32")
        ):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "out_in"})
            with R.dataflow():
                t = R.permute_dims(weight, axes=[1, 0])
                p = R.matmul(x, t)
                y = R.add(p, bias)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor(("n", 4), "float32"),
            a1: R.Tensor((4, 6), "float32"),
            a2: R.Tensor((3, 4), "float32"),
            a3: R.Tensor((1, 3), "float32"),
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Expected
            with R.dataflow():
                first = cls.plain(a0, a1)
                second = cls.biased(a0, a2, a3)
                both = (first, second)
                R.output(both)
            return both

        @R.function
        def decode(
            x: R.Tensor(("n", 4), "float32"),
            q: R.Tensor((4, 6), "float32"),
            k: R.Tensor((3, 4), "float32"),
            b: R.Tensor((1, 3), "float32"),
        ):
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                whole = cls.fused_linear(x, q, k, b)
                first = whole[0]
                second = whole[1]
                e = R.exp(first)
                R.output(e, second)
            return (e, second)

    tvm.ir.assert_structural_equal(FuseParallelProjections()(Before), Expected)


def fuse(build, shapes, names=("decode",), **kwargs):
    return fused(module(build, shapes, names, **kwargs), FuseParallelProjections())


def run_both(mod, entry, arrays, wants, bound=1e-5):
    """Hold the regions, and the kernels that they become, against numpy."""
    for version in (mod, LowerFusedLinear(HOST)(mod)):
        for got, want in zip(run_module(version, entry, arrays), wants, strict=True):
            assert worst_error(want.astype(got.dtype), got) < bound


def test_two_entries_and_running_it_twice():
    def build(e, x, q, k):
        return relax.Tuple([e(op.matmul(x, q)), e(op.matmul(x, k))])

    mod, ledger = fuse(build, [(N, 4), (4, 6), (4, 5)], ("prefill", "decode"))
    assert calls(mod, "prefill") == calls(mod, "decode") == ["fused_linear"]
    assert sorted(v.function for v in ledger.fired) == ["decode", "prefill"]
    assert sum(composite_name(f) == "crossloom.fused_linear" for _, f in mod.functions_items()) == 1
    tvm.ir.assert_structural_equal(FuseParallelProjections()(mod), mod)
    for rows in (0, 1, 5):
        x, q, k = data((rows, 4), (4, 6), (4, 5))
        run_both(mod, "prefill", [x, q, k], [x @ q, x @ k])


def test_biases_of_every_rank_and_none():
    shapes = [(2, 3, 4), (4, 5), (7, 4), (4, 6), (4, 1), (5,), (1, 7), (1, 1, 6)]

    def build(e, x, q, k, v, g, bq, bk, bv):
        turned = e(op.permute_dims(k))
        values = [e(op.matmul(x, w)) for w in (q, turned, v, g)]
        biased = [e(op.add(a, b)) for a, b in zip(values, (bq, bk, bv))]
        return relax.Tuple([*biased, values[3]])

    mod, ledger = fuse(build, shapes)
    assert calls(mod, "decode") == ["fused_linear"] and len(ledger.fired) == 1
    x, q, k, v, g, bq, bk, bv = arrays = data(*shapes)
    run_both(mod, "decode", arrays, [x @ q + bq, x @ k.T + bk, x @ v + bv, x @ g])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_constants_and_parameters_side_by_side(dtype):
    fixed, bias = (a.astype(dtype) for a in data((4, 6), (6,), seed=3))

    def build(e, x, q):
        first = e(op.matmul(x, q))
        second = e(op.add(e(op.matmul(x, relax.const(fixed))), relax.const(bias)))
        return relax.Tuple([first, second])

    mod, _ = fuse(build, [(N, 4), (4, 3)], dtype=dtype)
    assert calls(mod, "decode") == ["fused_linear"]
    x, q = data((5, 4), (4, 3), dtype=dtype)
    wide = [a.astype("float64") for a in (x, q, fixed, bias)]
    wants = [wide[0] @ wide[1], wide[0] @ wide[2] + wide[3]]
    # The regions sum in the operands' type, as the model does; the kernel in float32.
    lowered = run_module(LowerFusedLinear(HOST)(mod), "decode", [x, q])
    for got, want in zip(lowered, wants, strict=True):
        assert worst_error(want.astype(dtype), got) <= REASSOCIATES.bound(dtype)


def test_a_weight_defined_behind_the_first_layer():
    def build(e, x, q, k):
        first = e(op.matmul(x, q))
        other = e(op.exp(first))
        wide = e(op.astype(k, "float32"))
        return relax.Tuple([other, e(op.matmul(x, wide)), first])

    mod, _ = fuse(build, [(3, 4), (4, 6), ((4, 5), "float16")])
    assert calls(mod, "decode") == ["fused_linear"]
    x, q, k = data((3, 4), (4, 6), (4, 5))
    k = k.astype("float16")
    run_both(mod, "decode", [x, q, k], [np.exp(x @ q), x @ k.astype("float32"), x @ q])


def test_a_result_that_nobody_reads_and_one_that_is_returned_twice():
    def build(e, x, q, k, v):
        first, second = e(op.matmul(x, q)), e(op.matmul(x, k))
        e(op.matmul(x, v))
        return relax.Tuple([second, first, second])

    mod, _ = fuse(build, [(3, 4), (4, 6), (4, 5), (4, 9)])
    x, q, k, _ = arrays = data((3, 4), (4, 6), (4, 5), (4, 9))
    run_both(mod, "decode", arrays, [x @ k, x @ q, x @ k])


def test_the_same_weight_twice_is_the_same_layer_twice():
    mod, _ = fuse(lambda e, x, q: relax.Tuple([e(op.matmul(x, q)), e(op.matmul(x, q))]), [(3, 4), (4, 6)])
    x, q = arrays = data((3, 4), (4, 6))
    run_both(mod, "decode", arrays, [x @ q, x @ q])


def test_a_layers_result_that_has_another_name_is_read_by_layers():
    def build(e, x, w, q, k):
        value = e(op.matmul(x, w))
        other = e(value)
        return relax.Tuple([other, e(op.matmul(value, q)), e(op.matmul(value, k)), e(op.exp(other))])

    mod, _ = fuse(build, [(3, 4), (4, 4), (4, 6), (4, 5)])
    assert calls(mod, "decode") == ["linear", "fused_linear"]
    x, w, q, k = arrays = data((3, 4), (4, 4), (4, 6), (4, 5))
    run_both(mod, "decode", arrays, [x @ w, x @ w @ q, x @ w @ k, np.exp(x @ w)])


def test_a_layer_alone_and_layers_of_different_values_stay():
    def build(e, x, y, q, k):
        return relax.Tuple([e(op.matmul(x, q)), e(op.matmul(y, k))])

    mod, ledger = fuse(build, [(3, 4), (3, 4), (4, 6), (4, 5)], num_input=2)
    assert calls(mod, "decode") == ["linear", "linear"] and not list(ledger)


def untouched(build, shapes, **kwargs):
    before = CanonicalizeTransformer()(module(build, shapes, ("vision",), **kwargs))
    after, ledger = fuse(build, shapes, ("vision",), **kwargs)
    tvm.ir.assert_structural_equal(after, before)
    return [v.code for v in ledger]


def test_refused_different_dtypes():
    def build(e, x, q, k):
        return relax.Tuple([e(op.matmul(x, q)), e(op.matmul(x, k, out_dtype="float32"))])

    assert untouched(build, [(3, 4), (4, 6), (4, 5)], dtype="float16") == ["different-dtypes"]


def test_refused_where_one_layers_weight_depends_on_another_layer():
    """A linear layer whose bias is made of the first one's result: canonicalized by hand, as a hypernetwork."""
    mod = CanonicalizeTransformer()(
        module(lambda e, x, q, k: relax.Tuple([e(op.matmul(x, q)), e(op.matmul(x, k))]), [(4, 4), (4, 4), (4, 4)])
    )
    gvar = next(g for g, f in mod.functions_items() if composite_name(f) == "crossloom.linear")
    bb = relax.BlockBuilder(mod)
    x, q = (relax.Var(n, relax.TensorType((4, 4), "float32")) for n in "xq")
    with bb.function("hyper", [x, q], attrs={"num_input": 1}):
        with bb.dataflow():
            first = bb.emit(relax.Call(gvar, [x, q]))
            weight = bb.emit(op.exp(first))
            out = bb.emit_output(relax.Call(gvar, [x, weight]))
        bb.emit_func_output(out)
    mod = bb.get()
    only = tvm.ir.IRModule({g: f for g, f in mod.functions_items() if g.name_hint != "main"})
    after, ledger = fused(only, FuseParallelProjections())
    assert [v.code for v in ledger] == ["not-convex"]
    tvm.ir.assert_structural_equal(after, CanonicalizeTransformer()(only))


def test_layers_in_branches_form_a_group_in_each():
    ty, wide = relax.TensorType((3, 4), "float32"), relax.TensorType((3, 6), "float32")
    params = [relax.Var("x", ty), relax.Var("c", relax.TensorType((), "bool"))]
    weights = [relax.Var(f"w{i}", relax.TensorType((4, 6), "float32")) for i in range(4)]

    def branch(name, first, second):
        a, b = (relax.DataflowVar(f"{name}{i}", wide) for i in range(2))
        out = relax.Var(f"{name}2", wide)
        bindings = [(a, op.matmul(params[0], first)), (b, op.matmul(params[0], second)), (out, op.add(a, b))]
        return relax.SeqExpr([relax.DataflowBlock([relax.VarBinding(v, e) for v, e in bindings])], out)

    out = relax.Var("out", wide)
    choice = relax.If(params[1], branch("t", *weights[:2]), branch("f", *weights[2:]))
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(out, choice)])], out)
    func = relax.Function([*params, *weights], body, wide).with_attrs({"global_symbol": "decode", "num_input": 2})
    mod, ledger = fused(relax.transform.Normalize()(tvm.ir.IRModule({"decode": func})), FuseParallelProjections())
    assert len(ledger.fired) == 2
    assert sum(composite_name(f) == "crossloom.fused_linear" for _, f in mod.functions_items()) == 1
    x, *ws = data((3, 4), *[(4, 6)] * 4)
    for cond, (a, b) in ((True, ws[:2]), (False, ws[2:])):
        got = run_module(mod, "decode", [x, np.array(cond), *ws])[0]
        assert worst_error(x @ a + x @ b, got) < 1e-5


def test_the_verdict_says_what_is_saved():
    def build(e, x, q, k, v):
        return relax.Tuple([e(op.matmul(x, w)) for w in (q, k, v)])

    _, ledger = fuse(build, [(2, 3, 4), (4, 6), (4, 5), (4, 49152)])
    (verdict,) = ledger.fired
    assert verdict.bytes_saved == 2 * (2 * 3 * 4) * 4 and verdict.macs == 6 * 4 * (6 + 5 + 49152)
    _, ledger = fuse(build, [(N, 4), (4, 6), (4, 5), (4, 7)])
    assert (ledger.fired[0].bytes_saved, ledger.fired[0].macs) == (0, 0), "a symbolic size is not known"


@pytest.mark.timeout(300)
def test_ten_thousand_bindings_take_seconds_and_grow_linearly():
    def seconds(layers):
        def build(e, x, *weights):
            value = x
            for _ in range(layers):
                q, k, v = (e(op.matmul(value, w)) for w in weights)
                value = e(op.add(e(op.multiply(q, k)), v))
            return value

        mod = CanonicalizeTransformer()(function(build, [(N, 8), (8, 8), (8, 8), (8, 8)]))
        start = time.process_time()
        out = FuseParallelProjections()(mod)
        taken = time.process_time() - start
        assert calls(out, "decode") == ["fused_linear"] * layers
        return taken

    seconds(20)
    small, large = seconds(200), seconds(2000)
    assert large < 20
    assert large < 25 * max(small, 0.01)


@pytest.mark.timeout(300)
def test_a_thousand_layers_of_one_value_are_one_group():
    count = 1000
    mod = CanonicalizeTransformer()(
        module(lambda e, x, *ws: relax.Tuple([e(op.matmul(x, w)) for w in ws]), [(3, 4), *[(4, 2)] * count])
    )
    start = time.process_time()
    out = FuseParallelProjections()(mod)
    assert time.process_time() - start < 10
    assert calls(out, "main") == ["fused_linear"]


@pytest.mark.parametrize("cases", [strategies.parallel_projections, strategies.gated_mlp, strategies.attention])
def test_property_results_are_preserved(cases):
    def run(mod, _):
        return FuseParallelProjections()(CanonicalizeTransformer()(mod))

    both = tvm.transform.module_pass(run, opt_level=0, name="fuse-parallel-projections")
    assert_pass_preserves(both, cases(), max_examples=15)


def test_property_kernels_are_preserved():
    def run(mod, _):
        return LowerFusedLinear(HOST)(FuseParallelProjections()(CanonicalizeTransformer()(mod)))

    both = tvm.transform.module_pass(run, opt_level=0, name="lower-fused-linear")
    assert_pass_preserves(both, strategies.parallel_projections(), max_examples=15)
