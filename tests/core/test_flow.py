"""Pipelines as text, the registry, and TVM finding us."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import crossloom
from crossloom.errors import UsageError
from crossloom.flow import default_text, steps
from crossloom.numerics import EXACT, REASSOCIATES, check, worst_error
from crossloom.options import format_pipeline, parse_pipeline
from crossloom.registry import STAGES, get_pass, passes
from crossloom.verdict import Ledger, accept, record, refuse

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("text", ["a", "a,b", "a{x=1,y=true},b", default_text()])
def test_text_round_trips(text):
    assert format_pipeline(parse_pipeline(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [("a{x=1", "never closed"), ("a,,b", "expected a pass name"), ("a,", "ends"), ("a{x}", "no value")],
)
def test_bad_text_says_where(text, says):
    with pytest.raises(UsageError, match=says):
        parse_pipeline(text)


def test_an_unknown_pass_names_the_closest():
    with pytest.raises(UsageError, match="schedule-cpu"):
        get_pass("shedule-cpu")


def test_an_unknown_option_is_refused():
    with pytest.raises(UsageError, match="no option"):
        steps(None, "schedule-cpu{speed=11}")


def test_disabling_what_is_not_there_is_an_error():
    with pytest.raises(UsageError, match="not in the pipeline"):
        steps(None, None, ["fuse-everything"])


def test_stages_of_the_default_pipeline_are_in_order():
    order = [STAGES.index(step.info.stage) for step in steps(None)]
    assert order == sorted(order)


def test_every_pass_is_documented():
    for info in passes().values():
        assert info.doc and info.stage in STAGES


def test_tvm_finds_the_pipeline_by_name_without_importing_us():
    code = (
        "import tvm, numpy as np; from tvm import relax\n"
        "bb = relax.BlockBuilder(); x = relax.Var('x', relax.TensorType((3, 5), 'float32'))\n"
        "with bb.function('main', [x]):\n"
        "    with bb.dataflow(): o = bb.emit_output(relax.op.nn.softmax(x))\n"
        "    bb.emit_func_output(o)\n"
        "ex = tvm.compile(bb.get(), tvm.target.Target({'kind': 'llvm'}), relax_pipeline='crossloom')\n"
        "vm = relax.VirtualMachine(ex, tvm.cpu())\n"
        "print(vm['main'](tvm.runtime.tensor(np.ones((3, 5), 'float32'))).numpy().sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(3.0)


def test_importing_us_before_tvm_warns_of_nothing():
    code = "import crossloom.flow; from tvm import relax; print(relax.get_pipeline('crossloom'))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "autoload" not in done.stderr, done.stderr


def test_the_flow_computes_what_the_module_says_for_several_entries():
    builder = relax.BlockBuilder()
    for name in ("vision", "decode"):
        x = relax.Var("x", relax.TensorType((3, 8), "float32"))
        w = relax.Var("w", relax.TensorType((8, 16), "float32"))
        with builder.function(name, [x, w]):
            with builder.dataflow():
                y = builder.emit(relax.op.matmul(x, w))
                out = builder.emit_output(relax.Tuple([builder.emit(relax.op.nn.relu(y)), y]))
            builder.emit_func_output(out)
    target = tvm.target.Target({"kind": "llvm"})
    vm = relax.VirtualMachine(tvm.compile(builder.get(), target, relax_pipeline=crossloom.pipeline(target)), tvm.cpu())
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 8), "float32"), rng.standard_normal((8, 16), "float32")
    for name in ("vision", "decode"):
        relu, plain = vm[name](tvm.runtime.tensor(x), tvm.runtime.tensor(w))
        np.testing.assert_allclose(plain.numpy(), x @ w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(relu.numpy(), np.maximum(x @ w, 0), rtol=1e-5, atol=1e-6)


def test_the_core_imports_no_room_and_rooms_do_not_import_each_other():
    forbidden = {
        "python/crossloom": ("crossloom.passes", "crossloom.codegen", "crossloom.schedules"),
        "passes": ("crossloom.codegen",),
        "codegen": ("crossloom.passes",),
        "schedules": ("crossloom.passes", "crossloom.codegen"),
    }
    for room, names in forbidden.items():
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                found = []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
                elif isinstance(node, ast.Import):
                    found = [a.name for a in node.names]
                for name in found:
                    assert not name.startswith(names), f"{path.relative_to(ROOT)} imports {name}"
                    assert name.split(".")[0] not in ("passes", "codegen", "schedules"), f"{path}: bare import"


def test_ledgers_nest_and_round_trip():
    with Ledger() as outer:
        record(accept(macs=3))
        with Ledger() as inner:
            record(refuse("too-small", "x").at("r", "f", "lv"))
    assert len(outer) == 1 and len(inner) == 1
    assert Ledger.from_json(inner.to_json()).verdicts == inner.verdicts


def test_worst_error_is_normwise_and_strict_about_non_finite_values():
    a = np.array([1.0, -4.0], "float32")
    assert worst_error(a, a.copy()) == 0
    assert worst_error(a, np.array([1.0, -4.4], "float32")) == pytest.approx(0.1, rel=1e-5)
    assert worst_error(a, a.astype("float16")) == float("inf")
    nan = np.array([np.nan, 1.0], "float32")
    assert worst_error(nan, nan.copy()) == 0
    assert worst_error(nan, np.array([0.0, 1.0], "float32")) == float("inf")
    assert worst_error(np.array([np.inf], "float32"), np.array([-np.inf], "float32")) == float("inf")


def test_the_contract_is_by_dtype():
    x = np.ones(3, "float32")
    worst, broken = check(EXACT, [x], [x + np.float32(1e-6)])
    assert worst > 0 and len(broken) == 1
    assert check(REASSOCIATES, [x], [x + np.float32(1e-6)])[1] == []
    assert len(check(REASSOCIATES, [np.arange(3)], [np.arange(3) + 1])[1]) == 1
