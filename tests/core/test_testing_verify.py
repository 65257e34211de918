"""A wrong rewrite is caught, and found by name and instance; a right one passes."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm import relax

from crossloom.errors import BudgetExceeded, UsageError
from crossloom.numerics import EXACT, REASSOCIATES
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.testing import Culprit, as_model, bisect, make_calls, render, verify_pipeline, write_repro


def _module(width: int = 5) -> tvm.ir.IRModule:
    """Two entries; three silu in all."""
    bb = relax.BlockBuilder()
    for name, count in (("decode", 1), ("prefill", 2)):
        x = relax.Var("x", relax.TensorType((3, width), "float32"))
        with bb.function(name, [x]):
            with bb.dataflow():
                y = x
                for _ in range(count):
                    y = bb.emit(relax.op.nn.silu(y))
                out = bb.emit_output(y)
            bb.emit_func_output(out)
    return bb.get()


def _silu(wrong: int = -1) -> tvm.transform.Pass:
    """silu(x) -> x * sigmoid(x); the instance numbered ``wrong`` gets the sign wrong."""

    def match(graph: Graph, root: relax.Var) -> Match:
        return Match(graph, root, {"x": graph.value[root].args[0]}, frozenset({root}))

    @tvm.transform.module_pass(opt_level=0, name="ExpandSilu")
    def run(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        made = 0

        def replace(site: Site) -> relax.Expr:
            nonlocal made
            x = site["x"]
            inner = relax.op.negative(x) if made == wrong else x
            made += 1
            return relax.op.multiply(x, relax.op.sigmoid(inner))

        return rewrite_pass("inner", [Rule("expand-silu", frozenset({"relax.nn.silu"}), match, replace)])(mod)

    return run


def test_right_pass_is_within_its_class() -> None:
    (record,) = verify_pipeline(_module(), [("expand-silu", _silu(), REASSOCIATES)])
    assert record.problem == "" and record.fired == 3 and record.worst_error <= 1e-5
    assert "expand-silu" in render([record])
    assert bisect(_module(), [("expand-silu", _silu(), REASSOCIATES)]) is None


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_wrong_instance_is_named(wrong: int) -> None:
    steps = [("nothing", tvm.relax.transform.Normalize(), EXACT), ("expand-silu", _silu(wrong), REASSOCIATES)]
    records = verify_pipeline(_module(), steps)
    assert records[0].problem == "" and "entry" in records[1].problem
    culprit = bisect(_module(), steps)
    assert culprit is not None and (culprit.name, culprit.rewrite) == ("expand-silu", "expand-silu")
    assert culprit.instance == wrong


def test_budget_refuses() -> None:
    with pytest.raises(BudgetExceeded, match="expand-silu"):
        verify_pipeline(_module(), [("expand-silu", _silu(1), REASSOCIATES)], budget=1e-4)


def test_unrunnable_is_recorded() -> None:
    @tvm.transform.module_pass(opt_level=0, name="Break")
    def breaks(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        out = _module()
        for gvar, func in out.functions_items():
            ghost = relax.Call(relax.ExternFunc("no_such_function"), [func.params[0]], ty_args=[func.ret_ty])
            bb = relax.BlockBuilder()
            with bb.function(gvar.name_hint, list(func.params)):
                bb.emit_func_output(bb.emit(ghost))
            out.update_func(gvar, bb.get()[gvar.name_hint])
        return out

    (record,) = verify_pipeline(_module(), [("break", breaks, EXACT)])
    assert not record.runnable and "not run: " in record.problem and "no_such_function" in record.problem
    culprit = bisect(_module(), [("break", breaks, EXACT)])
    assert culprit is not None and (culprit.name, culprit.rewrite, culprit.instance) == ("break", "", -1)


def test_repro_runs_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = as_model(_module())
    calls = make_calls(model, lengths=(3,))
    culprit = Culprit("relax.LegalizeOps", "made up", model, REASSOCIATES)
    path = write_repro(tmp_path / "case", culprit, calls)
    runpy.run_path(str(path / "repro.py"))
    assert "decode: error 0 after relax.LegalizeOps" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no-such-pass"):
        write_repro(tmp_path / "other", replace(culprit, name="no-such-pass"), calls)
    assert not (tmp_path / "other").exists()


def test_a_pass_that_writes_to_its_input_and_then_fails_is_told_both() -> None:
    @tvm.transform.module_pass(opt_level=0, name="WriteAndFail")
    def run(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        mod.update_func(mod.get_global_var("decode"), mod["prefill"].with_attr("global_symbol", "decode"))
        raise ValueError("cannot")

    steps = [("write", run, EXACT), ("nothing", relax.transform.Normalize(), EXACT)]
    wrote, after = verify_pipeline(_module(), steps)
    assert "cannot" in wrote.fault and "changed its input" in wrote.fault
    # It goes on without the pass: with the module as it was.
    assert not wrote.changed and after.problem == "" and not after.changed


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_fires_in_the_place_of_a_rewrite_held_back_is_not_blamed(wrong: int) -> None:
    """silu(x) -> x * sigmoid(x), one of three wrong; where it is held back, a wrong rule of less priority matches."""

    def match(graph: Graph, root: relax.Var) -> Match:
        return Match(graph, root, {"x": graph.value[root].args[0]}, frozenset({root}))

    @tvm.transform.module_pass(opt_level=0, name="Two")
    def run(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        # The instance is known by its place: one in decode, then two in prefill.
        bindings = [*mod["decode"].body.blocks[0].bindings[:1], *mod["prefill"].body.blocks[0].bindings[:2]]
        names = [binding.var.name for binding in bindings]

        def replace(site: Site) -> relax.Expr:
            x, at = site["x"], (site.match.graph.name, site.match.root.name)
            bad = at == ("decode" if wrong == 0 else "prefill", names[wrong])
            return relax.op.multiply(x, relax.op.sigmoid(relax.op.negative(x) if bad else x))

        roots = frozenset({"relax.nn.silu"})
        rules = [Rule("high", roots, match, replace), Rule("low", roots, match, lambda s: relax.op.negative(s["x"]))]
        return rewrite_pass("inner", rules)(mod)

    culprit = bisect(_module(), [("two", run, REASSOCIATES)])
    assert culprit is not None and (culprit.rewrite, culprit.instance) == ("high", wrong)
    assert culprit.verdict is not None and culprit.verdict.function == ("decode" if wrong == 0 else "prefill")
