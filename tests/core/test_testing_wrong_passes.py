"""Deliberately wrong passes: assert_pass_preserves catches each, with a message that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from crossloom.numerics import REASSOCIATES, lowers_precision
from crossloom.testing import assert_pass_preserves, strategies
from crossloom.testing.strategies import Case

Module = tvm.ir.IRModule
Change = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@mutator
class _Calls(PyExprMutator):
    """Replaces calls of one operator."""

    def __init__(self, mod: Module, op: str, change: Change) -> None:
        super().__init__(mod)
        self.op, self.change = op, change

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if isinstance(call.op, tvm.ir.Op) and call.op.name == self.op:
            return self.change(self.builder_, call)
        return call


def _rewrite(
    mod: Module, op: str, change: Callable[[relax.BlockBuilder, relax.Call], relax.Expr], *only: str
) -> Module:
    walker = _Calls(mod, op, change)
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and (not only or gvar.name_hint in only):
            walker.builder_.update_func(gvar, walker.visit_expr(func))
    return walker.builder_.get()


def _pass(run: Callable[[Module], Module]) -> tvm.transform.Pass:
    return tvm.transform.module_pass(lambda mod, ctx: run(mod), opt_level=0, name="Wrong")


def _caught(run: Callable[[Module], Module], modules: st.SearchStrategy[Case], message: str, **options) -> str:
    options = {"numerics": REASSOCIATES, "max_examples": 12, "shrink": False, **options}
    with pytest.raises(AssertionError, match=message) as raised:
        assert_pass_preserves(_pass(run), modules, **options)
    text = str(raised.value)
    assert text.startswith("pass Wrong: ") and "seed 0" in text and "def main" in text
    return text


def test_rotary_of_the_other_convention() -> None:
    # concat((-second, first)) is the turn of half-split pairs; this swaps its halves, the sign going along.
    def swapped(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        parts = list(call.args[0])
        return relax.op.concat(parts[::-1], axis=call.attrs.axis) if len(parts) == 2 else call

    _caught(lambda mod: _rewrite(mod, "relax.concat", swapped), strategies.rotary(), r"entry \w+.*, output 0 .*error")


def test_not_idempotent() -> None:
    def once_more(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return relax.op.negative(relax.op.negative(bb.emit(call)))

    _caught(lambda mod: _rewrite(mod, "relax.nn.silu", once_more), strategies.gated_mlp(), "twice differs from once")


def test_writes_to_its_input() -> None:
    def write(mod: Module) -> Module:
        for gvar, func in _rewrite(mod, "relax.nn.silu", _expanded).functions_items():
            mod.update_func(mod.get_global_var(gvar.name_hint), func)
        return mod

    _caught(write, strategies.gated_mlp(), "changed its input module")


def _expanded(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return relax.op.multiply(call.args[0], bb.emit(relax.op.sigmoid(call.args[0])))


def test_ill_formed() -> None:
    def unbound(mod: Module) -> Module:
        stray = relax.Var("stray", mod["main"].params[0].ty)
        return _rewrite(mod, "relax.add", lambda bb, call: relax.op.add(stray, stray), "main")

    _caught(unbound, strategies.linear(), "not well-formed: .*stray")


def test_only_the_second_entry() -> None:
    def second(mod: Module) -> Module:
        if "decode" not in [gvar.name_hint for gvar in mod.get_global_vars()]:
            return mod
        return _rewrite(mod, "relax.nn.silu", lambda bb, call: relax.op.sigmoid(call.args[0]), "decode")

    assert "entry main" not in _caught(second, strategies.gated_mlp(), "entry decode").split("\n")[0]


@pytest.mark.parametrize("length", [0, 1])
def test_only_at_one_length(length: int) -> None:
    """Adds one to the pooled sum where the symbolic length has that value."""

    def off(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        tokens = call.args[0].ty.shape[0]  # the class token and the sequence
        if isinstance(tokens, tirx.IntImm):
            return call

        def one_more(x: tvm.te.Tensor) -> tvm.te.Tensor:
            is_length = tvm.tirx.EQ(x.shape[0], tvm.tirx.const(length + 1, "int64"))
            one, none = (tvm.tirx.const(v, x.dtype) for v in (1, 0))
            return tvm.te.compute(x.shape, lambda *i: x(*i) + tvm.tirx.if_then_else(is_length, one, none))

        return relax.op.sum(bb.emit_te(one_more, call.args[0]), axis=[0], keepdims=True)

    run = _pass(lambda mod: _rewrite(mod, "relax.sum", off))
    with pytest.raises(AssertionError) as raised:
        assert_pass_preserves(run, strategies.pooled_sum(), numerics=REASSOCIATES, max_examples=12, shrink=False)
    first = str(raised.value).split("\n")[0]
    assert f"at n = {length}, " in first and f"at n = {1 - length}," not in first and "at n = 3" not in first


def test_only_when_summed_in_half_precision() -> None:
    def narrow(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if call.attrs.out_dtype != "float32" or str(call.args[0].ty.dtype) != "float16":
            return call
        return relax.op.astype(bb.emit(relax.op.matmul(*call.args)), "float32")

    def run(mod: Module) -> Module:
        return _rewrite(mod, "relax.matmul", narrow)

    _caught(run, strategies.half_precision_sum(), r"output 0 \(float16\): error .* > 0.002")
    # The same pass that declares the loss is held to what it declares.
    assert_pass_preserves(_pass(run), strategies.half_precision_sum(), numerics=lowers_precision(0.1), max_examples=2)


def test_outputs_in_another_order() -> None:
    def swap(mod: Module) -> Module:
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func.body.body, relax.Tuple):
                first, second, *rest = func.body.body.fields
                result = relax.Tuple([second, first, *rest])
                body = relax.SeqExpr(func.body.blocks, result)
                type_ = relax.TupleType([field.ty for field in result.fields])
                out.update_func(gvar, relax.Function(func.params, body, type_).with_attrs(func.attrs))
        return relax.transform.Normalize()(out)

    _caught(swap, strategies.residual_norm(), "output 0")


def test_an_entry_lost() -> None:
    def drop(mod: Module) -> Module:
        return Module({gvar: func for gvar, func in mod.functions_items() if gvar.name_hint != "decode"})

    _caught(drop, strategies.linear(), "does not run: .*no entry 'decode'")
