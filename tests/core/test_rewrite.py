"""The rewriting driver: what fires, what is refused, what stays, and how long it takes."""

from __future__ import annotations

import time

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.dpl import is_op, wildcard

from crossloom.rewrite import (
    Rule,
    composite_attrs,
    composite_name,
    limit_rewrites,
    outline,
    pattern,
    rewrite_pass,
)
from crossloom.rewrite.composite import fresh_params
from crossloom.rewrite.sizes import same_size
from crossloom.verdict import Ledger


def silu_rule(**kwargs) -> Rule:
    x = wildcard()
    match = pattern(is_op("relax.multiply")(x, is_op("relax.sigmoid")(x)), x=x)

    def replace(site):
        return outline(site, "test.silu", {"x": site["x"]}, lambda bb, x: relax.op.nn.silu(x), {"axes": [1, 2]})

    return Rule("silu", frozenset({"relax.multiply"}), match, replace, **kwargs)


def module(count: int, names=("f",), keep_sigmoid=False) -> tvm.ir.IRModule:
    builder = relax.BlockBuilder()
    for name in names:
        length = tirx.Var("T", "int64")
        x = relax.Var("x", relax.TensorType((length, 8), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                value, kept = x, []
                for _ in range(count):
                    gate = builder.emit(relax.op.sigmoid(value))
                    kept.append(gate)
                    value = builder.emit(relax.op.multiply(value, gate))
                    for _ in range(3):
                        value = builder.emit(relax.op.nn.relu(value))
                out = builder.emit_output(relax.Tuple([value, kept[0]]) if keep_sigmoid else value)
            builder.emit_func_output(out)
    return builder.get()


def op_names(func: relax.Function) -> list[str]:
    out = []
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                op = binding.value.op
                out.append(op.name if isinstance(op, tvm.ir.Op) else op.name_hint)
    return out


def test_every_function_is_rewritten_and_equal_composites_are_shared():
    with Ledger() as ledger:
        out = rewrite_pass("silu", [silu_rule()])(module(2, ("vision", "decode")))
    assert relax.analysis.check_well_formed(out)
    assert ledger.counts() == {("silu", "fired"): 4}
    assert {v.function for v in ledger} == {"vision", "decode"}
    for name in ("vision", "decode"):
        assert op_names(out[name]).count("silu") == 2
        assert "relax.sigmoid" not in op_names(out[name])
    assert composite_name(out["silu"]) == "test.silu"
    assert list(composite_attrs(out["silu"])["axes"]) == [1, 2]
    assert len(out.functions) == 3


def test_running_twice_equals_once():
    once = rewrite_pass("silu", [silu_rule()])(module(3))
    tvm.ir.assert_structural_equal(rewrite_pass("silu", [silu_rule()])(once), once)


def test_an_intermediate_read_outside_is_refused_and_nothing_changes():
    mod = module(1, keep_sigmoid=True)
    with Ledger() as ledger:
        out = rewrite_pass("silu", [silu_rule()])(mod)
    assert [v.code for v in ledger] == ["intermediate-used-outside"]
    assert out.same_as(mod)


def test_a_shared_intermediate_stays_beside_the_replacement_where_the_rule_allows_it():
    out = rewrite_pass("silu", [silu_rule(shared_interior=True)])(module(1, keep_sigmoid=True))
    assert op_names(out["f"]).count("silu") == 1
    assert op_names(out["f"]).count("relax.sigmoid") == 1


def test_bisecting_holds_back_all_but_one_place():
    mod = module(3, ("f", "g"))
    second = mod["f"].body.blocks[0].bindings[6].var.name
    with Ledger() as ledger, limit_rewrites({("silu", "f", second): 1}):
        out = rewrite_pass("silu", [silu_rule()])(mod)
    assert ledger.counts() == {("silu", "fired"): 1, ("silu", "held-back"): 5}
    assert [i for i, name in enumerate(op_names(out["f"])) if name == "silu"] == [5]
    assert "silu" not in op_names(out["g"])


def test_a_place_may_fire_once_however_often_the_pass_comes_by():
    mod = module(1)
    name = mod["f"].body.blocks[0].bindings[1].var.name
    with Ledger() as ledger, limit_rewrites({("silu", "f", name): 1}):
        for _ in range(2):
            rewrite_pass("silu", [silu_rule()])(mod)
    assert [v.code for v in ledger] == ["fired", "held-back"]


def test_branches_are_not_crossed():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    cond = relax.Var("c", relax.TensorType((), "bool"))
    gate = relax.Var("g", relax.TensorType((4,), "float32"))
    inner = relax.Var("i", relax.TensorType((4,), "float32"))
    branch = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(inner, relax.op.multiply(x, gate))])], inner)
    other = relax.SeqExpr([], x)
    out = relax.Var("o", relax.TensorType((4,), "float32"))
    body = relax.SeqExpr(
        [
            relax.BindingBlock(
                [
                    relax.VarBinding(gate, relax.op.sigmoid(x)),
                    relax.VarBinding(out, relax.If(cond, branch, other)),
                ]
            )
        ],
        out,
    )
    func = relax.Function([x, cond], body, relax.TensorType((4,), "float32")).with_attr("global_symbol", "main")
    del builder
    mod = relax.transform.Normalize()(tvm.ir.IRModule({"main": func}))
    with Ledger() as ledger:
        rewrite_pass("silu", [silu_rule()])(mod)
    assert [v.code for v in ledger] == ["crosses-a-branch"]


@pytest.mark.timeout(300)
def test_ten_thousand_bindings_take_seconds_and_grow_linearly():
    def seconds(count: int) -> float:
        mod = module(count)
        start = time.process_time()
        rewrite_pass("silu", [silu_rule()])(mod)
        return time.process_time() - start

    seconds(20)
    small, large = seconds(200), seconds(2000)
    assert large < 20
    assert large < 25 * max(small, 0.01)


def test_sizes_are_equal_however_they_are_spelled():
    t, p = tirx.Var("T", "int64"), tirx.Var("P", "int64")
    number = lambda n: tirx.IntImm("int64", n)
    for a, b in ((t + 49, number(49) + t), (t * 2 - t, t), (t + p, p + t), (number(4), 4), (3, 3)):
        assert same_size(a, b) and same_size(b, a)
    for a, b in ((t + 49, t + 48), (t, p), (t, number(4)), (4, number(5)), (t * 2, t)):
        assert not same_size(a, b) and not same_size(b, a)
    x, y = (relax.Var(n, relax.TensorType((1, s), "float32")) for n, s in (("x", t + 49), ("y", number(49) + t)))
    left, right = fresh_params([x, y], ["a", "b"])
    assert left.ty.shape[1].same_as(right.ty.shape[1])
