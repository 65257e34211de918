"""lint, targets, passes, doctor."""

from __future__ import annotations

import json

import pytest

from crossloom.cli import doctor
from crossloom.cli.arguments import parse_config, parse_shapes
from crossloom.errors import UsageError
from crossloom.flow import default_text


def test_targets(tvmc):
    code, out, _ = tvmc("targets")
    assert code == 0 and all(name in out for name in ("rk3588", "apple-m4", "stm32f746"))
    code, out, _ = tvmc("targets", "rk3588")
    assert code == 0 and "cortex-a76" in out and "956.0 KiB" in out
    code, out, _ = tvmc("targets", "rk3588", "--ops", "matmul,softmax", "--json")
    assert {row["op"] for row in json.loads(out)} == {"relax.matmul", "relax.nn.softmax"}
    assert tvmc("targets", "--ops", "matmull")[0] == 2


def test_passes(tvmc):
    code, out, _ = tvmc("passes")
    assert code == 0 and "schedule-cpu" in out and "reassociates" in out
    code, out, _ = tvmc("passes", "schedule-cpu")
    assert code == 0 and "Fires when" in out
    assert tvmc("passes", "--target", "rk3588")[1].strip() == default_text("rk3588")
    code, _, err = tvmc("passes", "shedule-cpu")
    assert code == 2 and "schedule-cpu" in err


def test_lint_exits_3_only_where_something_cannot_run(tvmc, model):
    code, out, err = tvmc("lint", model, "--target", "rk3588", "--json")
    assert code == 0, err
    assert any(f["code"] == "dynamic-shape" and f["source"] for f in json.loads(out))
    code, out, err = tvmc("lint", model, "--target", "stm32f746", "--input-shapes", "x:[100000,5]")
    assert code == 3 and "RAM" in out and "1 errors" in err


def test_doctor(tvmc, monkeypatch):
    code, out, _ = tvmc("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)}
    assert code == 0 and checks["tvm loads"]["ok"] and checks["apache-tvm"]["required"]
    bad = doctor.Check("a thing", False, True, "", "everything", "get it")
    monkeypatch.setattr(doctor, "_checks", lambda: iter([bad]))
    code, out, err = tvmc("doctor")
    assert code == 5 and "get it" in out and "a thing" in err


@pytest.mark.parametrize(
    ("version", "pin", "fits"),
    [
        ("0.27.0.post1", "==0.27.0.post1", True),
        ("0.27.0", "==0.27.0.post1", False),
        ("0.1.14.post1", "<0.1.15,>=0.1.14.post0", True),
        ("0.1.15", ">=0.1.14.post0,<0.1.15", False),
        ("0.1.15.post2", ">=0.1.14.post0,<0.1.15", False),
        ("1.0", "", True),
    ],
)
def test_pins(version, pin, fits):
    assert doctor.satisfies(version, pin) is fits


def test_shapes_and_settings():
    assert parse_shapes("x:[1,3,n]  in:0:[2]  s:[]") == {"x": (1, 3, "n"), "in:0": (2,), "s": ()}
    assert parse_config(["a=1", "b=true", "c=[1,2]", "d=x=y"]) == {"a": 1, "b": True, "c": [1, 2], "d": "x=y"}
    with pytest.raises(UsageError, match="twice"):
        parse_shapes("x:[1] x:[2]")
