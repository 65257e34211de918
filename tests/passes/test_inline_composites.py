"""Composites go back into their callers, symbolic dimensions inside shape operands included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.dpl import is_op, wildcard

from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.inline_composites import InlineComposites
from crossloom.rewrite import Rule, outline, pattern, rewrite_pass
from crossloom.testing import assert_pass_preserves, strategies


def flatten_rule() -> Rule:
    """abs(x) as a composite that reshapes by a symbolic dimension and back."""
    x = wildcard()

    def body(builder, x):
        rows, columns = x.ty.shape
        flat = builder.emit(relax.op.reshape(x, [rows, columns, 1]))
        return relax.op.reshape(builder.emit(relax.op.abs(flat)), [rows, columns])

    match = pattern(is_op("relax.abs")(x), x=x)
    return Rule("flat-abs", frozenset({"relax.abs"}), match, lambda s: outline(s, "test.abs", {"x": s["x"]}, body))


def module() -> tvm.ir.IRModule:
    builder = relax.BlockBuilder()
    for name in ("prefill", "decode"):
        rows = tirx.Var("T", "int64")
        x = relax.Var("x", relax.TensorType((rows, 4), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                y = builder.emit(relax.op.abs(x))
                longer = builder.emit(relax.op.concat([y, relax.const(np.full((1, 4), -2, "float32"))], 0))
                out = builder.emit_output(builder.emit(relax.op.abs(longer)))
            builder.emit_func_output(out)
    return builder.get()


def test_symbolic_shape_operands_take_the_callers_dimensions():
    composed = rewrite_pass("flat-abs", [flatten_rule()])(module())
    assert composed.script().count("test.abs") >= 1
    inlined = InlineComposites()(composed)
    assert relax.analysis.check_well_formed(inlined)
    assert {gvar.name_hint for gvar in inlined.functions} == {"prefill", "decode"}
    vm = relax.VirtualMachine(tvm.compile(inlined, tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    x = np.linspace(-3, 3, 12, dtype="float32").reshape(3, 4)
    want = np.concatenate([np.abs(x), np.full((1, 4), 2, "float32")])
    for entry in ("prefill", "decode"):
        np.testing.assert_array_equal(vm[entry](tvm.runtime.tensor(x)).numpy(), want)


def test_golden_the_outlined_comes_back():
    before = module()
    composed = rewrite_pass("flat-abs", [flatten_rule()])(before)
    again = rewrite_pass("flat-abs", [Rule("flat", frozenset({"relax.abs"}), pattern_of_abs(), reshaped)])(before)
    plain = relax.transform.CanonicalizeBindings()  # drops `gv = lv`
    tvm.ir.assert_structural_equal(plain(InlineComposites()(composed)), plain(again))


def pattern_of_abs():
    x = wildcard()
    return pattern(is_op("relax.abs")(x), x=x)


def reshaped(site):
    """What the composite's body says, written into the caller by hand."""
    rows, columns = site["x"].ty.shape
    flat = site.builder.emit(relax.op.reshape(site["x"], [rows, columns, 1]))
    return relax.op.reshape(site.builder.emit(relax.op.abs(flat)), [rows, columns])


def test_twice_is_once():
    once = InlineComposites()(rewrite_pass("flat-abs", [flatten_rule()])(module()))
    assert InlineComposites()(once).same_as(once)


def test_it_preserves_canonical_transformer_modules():
    def canonical(case):
        return replace(case, mod=CanonicalizeTransformer()(case.mod))

    assert_pass_preserves(InlineComposites(), strategies.modules().map(canonical), max_examples=15)


def test_a_module_without_composites_is_returned_as_it_is():
    mod = module()
    assert InlineComposites()(mod).same_as(mod)


def test_what_a_code_generator_claimed_stays():
    composed = rewrite_pass("flat-abs", [flatten_rule()])(module())
    claimed = tvm.ir.IRModule(
        {
            gvar: func.with_attr("Codegen", "npu") if func.attrs and "Composite" in func.attrs else func
            for gvar, func in composed.functions_items()
        }
    )
    assert InlineComposites()(claimed).same_as(claimed)
