"""NumericsInstrument: every pass recorded, wrong ones found, nothing skipped in silence."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossloom import pipeline
from crossloom.errors import BudgetExceeded
from crossloom.numerics import EXACT, REASSOCIATES, lowers_precision
from crossloom.testing import NumericsBudgetExceeded, NumericsInstrument, render
from crossloom.testing.execution import Call, HostExecutor, Outputs
from crossloom.verdict import Ledger, accept, record


def _module(*names: str) -> tvm.ir.IRModule:
    """silu(x + x) with x (n, 4), once an entry."""
    bb = relax.BlockBuilder()
    for name in names or ("main",):
        x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4), "float32"))
        with bb.function(name, [x]):
            with bb.dataflow():
                out = bb.emit_output(relax.op.nn.silu(bb.emit(relax.op.add(x, x))))
            bb.emit_func_output(out)
    return bb.get()


def _scaled(by: float, name: str = "Scale", entry: str = "main") -> tvm.transform.Pass:
    """A pass that multiplies the result of one entry."""

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        record(accept().at("scale", entry, "y"))
        bb = relax.BlockBuilder(mod)
        old = mod[entry]
        x = relax.Var("x", old.params[0].ty)
        with bb.function(f"{entry}_new", [x]):
            y = bb.emit(relax.op.nn.silu(bb.emit(relax.op.add(x, x))))
            bb.emit_func_output(bb.emit(relax.op.multiply(y, relax.const(by, "float32"))))
        new = bb.get()[f"{entry}_new"].with_attr("global_symbol", entry)
        out = mod.clone()
        out.update_func(mod.get_global_var(entry), new)
        return out

    return run


def _run(instrument: NumericsInstrument, mod: tvm.ir.IRModule, *steps: tvm.transform.Pass) -> tvm.ir.IRModule:
    with tvm.transform.PassContext(instruments=[instrument]):
        return tvm.transform.Sequential(list(steps), name="mine")(mod)


def test_a_users_sequential_of_tvms_passes_and_a_wrong_one() -> None:
    instrument = NumericsInstrument(lengths=(3, 0))
    t = relax.transform
    _run(instrument, _module("decode", "prefill"), t.Normalize(), _scaled(1.5, entry="prefill"), t.LegalizeOps())
    whole, normalize, scale, legalize = instrument.records
    assert [r.depth for r in instrument.records] == [0, 1, 1, 1]
    assert (normalize.problem, legalize.problem) == ("", "") and not normalize.changed and legalize.changed
    assert scale.errors == {"decode": 0.0, "prefill": pytest.approx(0.5)} and scale.fired == 1 and whole.fired == 1
    assert "entry prefill at length 3, output 0" in scale.problem and len(scale.violations) == 1
    # The Sequential is nobody's: held to its passes together, which one of them broke.
    assert whole.numerics.kind == "composed" and whole.violations
    assert [name for name, _ in instrument.violations] == ["mine", "Scale"]
    with pytest.raises(AssertionError, match=r"Scale \(reassociates"):
        instrument.check()
    assert "  Scale" in render(instrument.records)


def test_contracts_given_declared_and_default() -> None:
    loose = lowers_precision(0.2)
    instrument = NumericsInstrument(contracts={"Scale": loose, "mine": loose}, default=EXACT)
    _run(instrument, _module(), _scaled(1.1), relax.transform.LegalizeOps())
    assert [r.numerics for r in instrument.records] == [loose, loose, REASSOCIATES]
    instrument.check()
    strict = NumericsInstrument(default=EXACT)
    _run(strict, _module(), _scaled(1 + 1e-6))
    assert [r.problem != "" for r in strict.records] == [True, True]


def test_the_whole_flow_runs_at_every_step() -> None:
    instrument = NumericsInstrument()
    _run(instrument, _module(), pipeline("host"))
    names = [r.name for r in instrument.records]
    assert names[:2] == ["mine", "crossloom"] and {"canonicalize-transformer", "VMShapeLower"} <= set(names)
    assert max(r.depth for r in instrument.records) >= 3
    instrument.check()
    # TVM runs one of its passes on a module without functions: recorded with the reason.
    idle = [r for r in instrument.records if not r.runnable]
    assert all(r.name == "NormalizeGlobalVar" and "no public Relax function" in r.problem for r in idle)
    assert len(idle) < len(names) / 4


def _call_nothing(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 4), "float32"))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.call_dps_packed("no_such_kernel", [x], x.ty)))
    return bb.get()


def test_what_does_not_run_is_recorded_and_the_next_starts_anew() -> None:
    breaks = tvm.transform.module_pass(lambda mod, ctx: _call_nothing(mod), opt_level=0, name="Break")
    mends = tvm.transform.module_pass(lambda mod, ctx: _module(), opt_level=0, name="Mend")
    instrument = NumericsInstrument()
    _run(instrument, _module(), breaks, relax.transform.Normalize(), mends, _scaled(2.0))
    _, broken, after, mended, scaled = instrument.records
    assert "not run: " in broken.problem and "no_such_kernel" in broken.problem and np.isnan(broken.worst_error)
    assert "nor what it was given" in after.not_run and "nor what it was given" in mended.not_run
    assert scaled.runnable and scaled.violations


def test_another_signature_is_not_compared() -> None:
    @tvm.transform.module_pass(opt_level=0, name="AddInput")
    def widen(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        bb = relax.BlockBuilder()
        x, y = (relax.Var(k, relax.TensorType((2, 4), "float32")) for k in "xy")
        with bb.function("main", [x, y]):
            bb.emit_func_output(bb.emit(relax.op.add(x, y)))
        return bb.get()

    instrument = NumericsInstrument()
    _run(instrument, _module(), widen, relax.transform.LegalizeOps())
    _, widened, legalized = instrument.records
    assert "takes 2 inputs, got 1" in widened.not_run
    assert legalized.runnable and legalized.problem == ""


def test_budget_raises_out_of_the_pass() -> None:
    instrument = NumericsInstrument(budget=1e-3)
    with pytest.raises(NumericsBudgetExceeded, match=r"after pass Scale: wanted at most 0.001, had 0.5") as raised:
        with tvm.transform.PassContext(instruments=[instrument]):
            mod = relax.transform.Normalize()(_module())
            _scaled(1.5)(mod)
    assert isinstance(raised.value, BudgetExceeded) and raised.value.exit_code == 4
    assert [r.name for r in instrument.records] == ["Normalize", "Scale"]


def test_budget_counts_from_the_first_module() -> None:
    instrument = NumericsInstrument(budget=0.15)
    with pytest.raises(NumericsBudgetExceeded, match=r"had 0\.2"):
        with tvm.transform.PassContext(instruments=[instrument]):
            _scaled(1.2)(_scaled(1.1)(_module()))
    assert len(instrument.records) == 2


def test_a_pass_that_fails_and_one_that_writes_to_its_input() -> None:
    @tvm.transform.module_pass(opt_level=0, name="Fail")
    def fails(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        raise ValueError("cannot")

    @tvm.transform.module_pass(opt_level=0, name="Write")
    def writes(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        mod.update_func(mod.get_global_var("main"), _scaled(1.0)(mod)["main"])
        return mod

    instrument = NumericsInstrument()
    with Ledger() as ledger:
        with pytest.raises(ValueError, match="cannot"):
            _run(instrument, _module(), fails)
    assert [r.fault for r in instrument.records] == ["the pass ended with an error"] * 2
    assert Ledger.current() is None and len(ledger) == 0
    instrument = NumericsInstrument()
    _run(instrument, _module(), writes)
    assert "changed its input" in instrument.records[1].fault
    assert Ledger.current() is None


def test_own_executor_and_inputs() -> None:
    seen: list[tuple[str, float]] = []

    def execute(model, calls: list[Call]) -> Outputs:
        seen.extend((call.entry, float(call.inputs[0][0, 0])) for call in calls)
        return HostExecutor()(model, calls)

    inputs = {"main": [np.full((2, 4), 7, "float32")]}
    _run(NumericsInstrument(inputs=inputs, execute=execute), _module(), relax.transform.LegalizeOps())
    assert seen == [("main", 7.0)] * 2  # once before, once after: the Sequential's ends are the pass's


def test_a_nested_pass_of_the_same_name_that_failed_closes_its_own_record() -> None:
    @tvm.transform.module_pass(opt_level=0, name="Twin")
    def fails(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        raise ValueError("cannot")

    @tvm.transform.module_pass(opt_level=0, name="Twin")
    def survives(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        with pytest.raises(ValueError, match="cannot"):
            fails(mod)
        return _scaled(1.5)(mod)

    instrument = NumericsInstrument()
    with tvm.transform.PassContext(instruments=[instrument]):
        survives(_module())
    outer, inner, scale = instrument.records
    assert [r.name for r in instrument.records] == ["Twin", "Twin", "Scale"]
    assert outer.fault == "" and outer.changed and outer.errors == {"main": pytest.approx(0.5)}
    assert inner.fault == "the pass ended with an error" and inner.depth == 1
    assert scale.depth >= 1
