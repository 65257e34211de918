"""Fused linear regions become kernels; what no kernel does stays as it is, and runs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import data, module
from crossloom.driver import compile_model
from crossloom.errors import UnsupportedTarget
from crossloom.model import Entry, Model, TensorSpec
from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_norm_into_linear import FoldNormIntoLinear
from crossloom.passes.fuse_linear_epilogue import FuseLinearEpilogue
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.rewrite import GroupRule, Match, composite_name, group_pass
from crossloom.schedules.fused_linear import Output, Spec, kernel
from crossloom.schedules.machine import Machine
from crossloom.targets import get_target
from crossloom.testing import assert_pass_preserves, run_module, strategies
from crossloom.verdict import Ledger
from fused import fused

op = relax.op
N = tirx.Var("n", "int64")
HOST = get_target("host").tvm_target()
NEON = get_target("rk3588").tvm_target()


def test_golden_two_layers():
    """On NEON a group is of 16 columns: 6 and 20 columns are one and two groups, filled up with the last column."""

    @I.ir_module
    class Before:
        @R.function(private=True)
        def linear(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 16), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def wide(x: R.Tensor(("n", 4), "float32"), weight: R.Tensor((4, 32), "float32")):
            R.func_attr({"Composite": "crossloom.linear", "crossloom.weight_layout": "in_out"})
            with R.dataflow():
                y = R.matmul(x, weight)
                R.output(y)
            return y

        @R.function(private=True)
        def fused_linear(
            a0: R.Tensor(("n", 4), "float32"), a1: R.Tensor((4, 16), "float32"), a2: R.Tensor((4, 32), "float32")
        ):
            R.func_attr({"Composite": "crossloom.fused_linear"})
            cls = Before
            with R.dataflow():
                first = cls.linear(a0, a1)
                second = cls.wide(a0, a2)
                both = (first, second)
                R.output(both)
            return both

        @R.function
        def decode(x: R.Tensor(("n", 4), "float32"), q: R.Tensor((4, 16), "float32"), k: R.Tensor((4, 32), "float32")):
            R.func_attr({"num_input": 1})
            cls = Before
            with R.dataflow():
                whole = cls.fused_linear(x, q, k)
                first = whole[0]
                second = whole[1]
                R.output(first, second)
            return (first, second)

    got = LowerFusedLinear(NEON)(Before)
    # The kernel's rows are those of the region.
    spec_rows, out_rows = Before["fused_linear"].params[0].ty.shape[0], tirx.Var("n", "int64")
    row = (("row", 0), ("lane", 0))
    spec = Spec((spec_rows,), 4, "float32", (Output(row, (), 16), Output(row, (), 32, 16)))
    bb = relax.BlockBuilder(tvm.ir.IRModule({g: f for g, f in Before.functions_items() if g.name_hint != "decode"}))
    gvar = bb.add_func(kernel(spec, Machine(16, 32)), "fused_linear_kernel")
    x, q, k = (
        relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", (out_rows, 4)), ("q", (4, 16)), ("k", (4, 32)))
    )
    with bb.function("decode", [x, q, k], attrs={"num_input": 1}):
        with bb.dataflow():
            joined = bb.emit(op.concat([q, k], 1))
            split = bb.emit(op.reshape(joined, [4, 3, 16]))
            packed = bb.emit(op.permute_dims(split, [1, 0, 2]))
            types = [relax.TensorType((out_rows, n), "float32") for n in (16, 32)]
            whole = bb.emit(relax.call_tir(gvar, [x, packed], types))
            first = bb.emit_output(relax.TupleGetItem(whole, 0))
            second = bb.emit_output(relax.TupleGetItem(whole, 1))
        bb.emit_func_output(relax.Tuple([first, second]))
    tvm.ir.assert_structural_equal(got, bb.get())


def layers(e, x, w, b, v, r):
    gate = e(op.nn.silu(e(op.add(e(op.matmul(x, w)), b))))
    return relax.Tuple([e(op.add(e(op.matmul(x, v)), r)), gate])


SHAPES = [(N, 5), (5, 19), (1, 19), (5, 21), (N, 21)]


def regions(build=layers, shapes=SHAPES, names=("prefill", "decode"), passes=(), **kwargs):
    mod = module(build, shapes, names, **kwargs)
    return fused(mod, FuseParallelProjections(), FuseLinearEpilogue(), FoldNormIntoLinear(), *passes)[0]


def kernels(mod):
    return [g.name_hint for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def test_two_entries_and_running_it_twice():
    mod = regions()
    with Ledger() as ledger:
        once = LowerFusedLinear(HOST)(mod)
    assert {v.function for v in ledger.fired} == {"prefill", "decode"} and not ledger.refused
    assert len(kernels(once)) == 1, "equal kernels are one"
    tvm.ir.assert_structural_equal(LowerFusedLinear(HOST)(once), once)
    for rows in (0, 1, 7):
        x, w, b, v, r = arrays = data((rows, 5), (5, 19), (1, 19), (5, 21), (rows, 21))
        y = x @ w + b
        for got, want in zip(run_module(once, "decode", arrays), (x @ v + r, y / (1 + np.exp(-y))), strict=True):
            assert worst_error(want, got) < 1e-5


def test_a_target_is_given_or_in_scope():
    mod = regions()
    with pytest.raises(UnsupportedTarget, match="no target"):
        LowerFusedLinear()(mod)
    with HOST:
        found = LowerFusedLinear()(mod)
    tvm.ir.assert_structural_equal(found, LowerFusedLinear(HOST)(mod))


def grouped(build, shapes, *positions, **kwargs):
    """A region of the bindings at these positions, whatever they are."""
    mod = CanonicalizeTransformer()(module(build, shapes, ("vision",), **kwargs))

    def match(graph, root):
        members = [graph.order[i] for i in positions]
        return Match(graph, root, {}, frozenset(members)) if root.same_as(members[0]) else None

    rule = GroupRule("any", frozenset({"crossloom.linear"}), match, "crossloom.fused_linear")
    return group_pass("any", [rule])(mod)


def refusal(mod, target=HOST):
    with Ledger() as ledger:
        out = LowerFusedLinear(target)(mod)
    assert out.same_as(mod)
    (verdict,) = ledger
    return verdict


#: What the verdict says: the graph, its shapes, how many bindings are the region, how many parameters are inputs.
UNREADABLE = {
    "relax.exp is not a step": (lambda e, x, w: e(op.exp(e(op.matmul(x, w)))), [(3, 4), (4, 6)], 2, 1),
    "another one's result": (lambda e, x, w, v: e(op.matmul(e(op.matmul(x, w)), v)), [(3, 4), (4, 6), (6, 5)], 2, 1),
    "different values": (
        lambda e, x, y, w, v: relax.Tuple([e(op.matmul(x, w)), e(op.matmul(y, v))]),
        [(3, 4), (3, 4), (4, 6), (4, 5)],
        2,
        2,
    ),
    "mixes rows": (lambda e, x, w: e(op.reshape(e(op.matmul(x, w)), [6, 3])), [(3, 4), (4, 6)], 2, 1),
    "wider value": (lambda e, x, r, w: e(op.add(e(op.matmul(x, w)), r)), [(1, 4), (3, 6), (4, 6)], 2, 2),
    "another order": (
        lambda e, x, r, w: e(op.nn.relu(e(op.add(e(op.matmul(x, w)), r)))),
        [(3, 4), (3, 6), (4, 6)],
        3,
        2,
    ),
    "types": (
        lambda e, x, w: e(op.matmul(x, w, out_dtype="float32")),
        [((3, 4), "float16"), ((4, 6), "float16")],
        1,
        1,
    ),
    "no length": (lambda e, x, w: e(op.matmul(x, w)), [(3, 0), (0, 6)], 1, 1),
}


@pytest.mark.parametrize("said", UNREADABLE)
def test_refused_what_no_kernel_does(said):
    build, shapes, count, inputs = UNREADABLE[said]
    mod = grouped(build, shapes, *range(count), num_input=inputs)
    assert any(composite_name(f) == "crossloom.fused_linear" for _, f in mod.functions_items())
    verdict = refusal(mod)
    assert verdict.code == "no-kernel" and said in verdict.detail


def test_refused_a_chain_that_the_targets_table_does_not_allow():
    mod = regions(names=("vision",))
    verdict = refusal(mod, get_target("stm32f746").tvm_target())
    assert verdict.code == "no-limit-known"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norms_weight_and_bias_go_into_the_layers_or_stay(dtype, constant, kind):
    """The rows lie far from 0: their mean must not be left in what centred weights give."""
    fixed = [a.astype(dtype) for a in data((4,), (4,), seed=5)]
    affine = 1 if kind == "rms" else 2

    def build(e, x, *rest):
        parts = [relax.const(a) for a in fixed[:affine]] if constant else rest[:affine]
        w, v, c = rest[-3:]
        if kind == "rms":
            n = e(op.nn.rms_norm(x, *parts, [-1], 1e-5))
        else:
            n = e(op.nn.layer_norm(x, *parts, [-1], 1e-5))
        return relax.Tuple([e(op.add(e(op.matmul(n, w)), c)), e(op.matmul(n, e(op.permute_dims(v))))])

    weights = [(4, 6), (5, 4), (1, 6)]
    shapes = [(N, 4), *([] if constant else [(4,)] * affine), *weights]
    mod = LowerFusedLinear(HOST)(regions(build, shapes, ("decode",), dtype=dtype))
    (name,) = kernels(mod)
    # Products of rounded weights would round twice.
    script = mod[name].script()
    assert ("norm_weight" in script) == (dtype == "float16")
    assert ("norm_bias" in script) == (dtype == "float16" and kind == "layer")
    arrays = data((5, 4), *([] if constant else [(4,)] * affine), *weights, dtype=dtype)
    arrays[0] = (arrays[0] + 4).astype(dtype)
    wide = [a.astype("float64") for a in arrays]
    x, w, v, c = wide[0], *wide[-3:]
    g, b = [a.astype("float64") for a in fixed] if constant else (wide[1], wide[2])
    if kind == "rms":
        n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * g
    else:
        n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
    for got, want in zip(run_module(mod, "decode", arrays), (n @ w + c, n @ v.T), strict=True):
        assert worst_error(want.astype(dtype), got) <= REASSOCIATES.bound(dtype)


def test_weights_are_packed_once_when_a_model_is_built():
    def lines(e, x, g, s, w, b, v):
        n = e(op.nn.layer_norm(x, g, s, [-1], 1e-5))
        return relax.Tuple([e(op.matmul(n, v)), e(op.add(e(op.matmul(n, w)), b))])

    shapes = [(5,), (5,), (5, 19), (1, 19), (5, 21)]
    mod = module(lines, [(N, 5), *shapes], ("decode",))
    names = ("g", "s", "w", "b", "v")
    weights = dict(zip(names, data(*shapes, seed=2)))
    outputs = tuple(TensorSpec(f"y{i}", ("n", n), "float32") for i, n in enumerate((21, 19)))
    model = Model(
        mod, weights, {"decode": Entry("decode", (TensorSpec("x", ("n", 5), "float32"),), outputs, names)}, {}, "toy"
    )
    compiled = compile_model(model, "host")
    main = compiled.model.mod["decode"]
    calls = [b.value for block in main.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    assert len(calls) == 1, "one kernel, and nothing that is done to weights"
    vm = relax.VirtualMachine(compiled.executable, tvm.cpu())
    (x,) = data((6, 5))
    packed = [compiled.model.params[k] for k in compiled.model.entries["decode"].weights]
    got = vm["decode"](*map(tvm.runtime.tensor, [x, *packed]))
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weights["g"] + weights["s"]
    for found, want in zip(got, (n @ weights["v"], n @ weights["w"] + weights["b"]), strict=True):
        assert worst_error(want, found.numpy()) < 1e-5


@pytest.mark.parametrize("cases", [strategies.linear, strategies.gated_mlp, strategies.decoder_layer])
def test_property_kernels_are_preserved(cases):
    def run(mod, _):
        with HOST:
            for made in (CanonicalizeTransformer, FuseParallelProjections, FuseLinearEpilogue, FoldNormIntoLinear):
                mod = made()(mod)
            return LowerFusedLinear()(mod)

    whole = tvm.transform.module_pass(run, opt_level=0, name="lower-fused-linear")
    assert_pass_preserves(whole, cases(), max_examples=10)
