"""--tuning-records: a database of one record, made by hand, decides the kernel's schedule."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from crossloom.flow import steps
from crossloom.importers.load import load_model
from crossloom.targets import get_target


@pytest.fixture(scope="module")
def records(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    paths = [folder / name for name in ("database_workload.json", "database_tuning_record.json")]
    for path in paths:
        path.touch()
    target = get_target("host").tvm_target()
    mod = load_model(model).mod
    with target:
        # A fused linear layer is a kernel written as it is to be; the rest is scheduled.
        for step in steps("host", disabled=("lower-fused-linear",)):
            if step.text.name == "schedule-cpu":
                break
            mod = step.run(mod)
    kernels = {gv.name_hint: fn for gv, fn in mod.functions_items() if isinstance(fn, tvm.tirx.PrimFunc)}
    (kernel,) = (fn for name, fn in kernels.items() if "matmul" in name)
    workload_mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    database = JSONDatabase(path_workload=str(paths[0]), path_tuning_record=str(paths[1]))
    workload = database.commit_workload(workload_mod)
    schedule = s_tir.Schedule(workload_mod)
    schedule.annotate(schedule.get_loops(schedule.get_sblock("matmul"))[-1], "made.by.hand", 1)
    database.commit_tuning_record(TuningRecord(schedule.trace, workload, [0.001], target, []))
    return folder


def test_the_record_is_applied_and_the_numbers_stay(tvmc, model, weights, records, tmp_path):
    out = tmp_path / "tuned"
    code, _, err = tvmc(
        "compile", model, "--target", "host", "-o", out, "--dump-code", "tir", "--tuning-records", records,
        "--disabled-pass", "lower-fused-linear",
    )  # fmt: skip
    assert code == 0, err
    assert "made.by.hand" in (out / "code/tir.py").read_text()
    x = np.random.default_rng(1).standard_normal((3, 5)).astype("float32")
    np.savez(tmp_path / "x.npz", x=x)
    code, _, err = tvmc("run", out, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--json")
    assert code == 0, err
    w, b = weights
    with np.load(tmp_path / "y.npz") as file:
        np.testing.assert_allclose(file["y"], np.maximum(x @ w + b, 0), rtol=1e-5, atol=1e-6)


def test_a_damaged_database_is_named(tvmc, model, records, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "database_workload.json").write_text(json.dumps(["not", "a", "workload"]) + "\n")
    (bad / "database_tuning_record.json").write_text("{\n")
    code, _, err = tvmc("compile", model, "--target", "host", "-o", tmp_path / "out", "--tuning-records", bad)
    assert code == 2 and "bad" in err and "Traceback" not in err
    code, _, err = tvmc(
        "compile", model, "--target", "host", "-o", tmp_path / "out", "--pipeline", "legalize-ops",
        "--tuning-records", records,
    )  # fmt: skip
    assert code == 2 and "schedule-cpu" in err
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]
