"""verify: contracts hold, and ONNX Runtime agrees."""

from __future__ import annotations

import json
import runpy

import pytest


def test_every_pass_holds_and_onnxruntime_agrees(tvmc, model):
    code, out, err = tvmc("verify", model, "--against", "onnxruntime", "--size", "n=3", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert len(report["passes"]) > 3 and not any(p["violations"] for p in report["passes"])
    assert set(report["onnxruntime"]) == {"y", "z"} and max(report["onnxruntime"].values()) < 1e-5


def test_wrong_use(tvmc, model):
    code, _, err = tvmc("verify", model, "--against", "caffe")
    assert code == 2 and "caffe" in err
    before = model.read_bytes()
    code, _, err = tvmc("verify", model, "--repro", model)
    assert code == 2 and str(model) in " ".join(err.split()) and model.read_bytes() == before


@pytest.fixture
def wrong_pass(monkeypatch):
    """A registered pass whose rewrite of any relu loses the sign."""
    from tvm import relax

    from crossloom import registry
    from crossloom.numerics import REASSOCIATES
    from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass

    def match(graph: Graph, root: relax.Var) -> Match:
        return Match(graph, root, {"x": graph.value[root].args[0]}, frozenset({root}))

    def replace(site: Site) -> relax.Expr:
        return relax.op.negative(site.builder.emit(relax.op.sigmoid(site["x"])))

    def LoseSign():
        return rewrite_pass("lose-sign", [Rule("lose-sign", frozenset({"relax.nn.relu"}), match, replace)])

    registry.passes()
    monkeypatch.setitem(registry._passes, "lose-sign", registry.PassInfo("lose-sign", LoseSign, "fuse", REASSOCIATES))
    return "lose-sign"


def test_a_wrong_pass_is_named_and_written_out(tvmc, model, wrong_pass, tmp_path, capfd):
    case = tmp_path / "case"
    pipeline = f"relax.Normalize,{wrong_pass},legalize-ops"
    code, out, err = tvmc("verify", model, "--pipeline", pipeline, "--bisect", "--repro", case, "--json")
    report = json.loads(out)
    assert code == 4 and report["instance"]["rewrite"] == wrong_pass and report["instance"]["function"] == "main"
    assert [bool(p["violations"]) for p in report["passes"]] == [False, True, False]
    message = " ".join(err.split())
    assert f"pass {wrong_pass} breaks its contract: entry main, output 0" in message and "repro.py" in message
    runpy.run_path(str(case / "repro.py"))
    shown = capfd.readouterr().out
    assert "main: error" in shown and f"after {wrong_pass}" in shown and "error 0 " not in shown


def test_folding_of_weights_is_held_to_its_contract(tvmc, model):
    code, out, err = tvmc("verify", model, "--pipeline", "inline-composites,legalize-ops", "--json")
    assert code == 0, err
    assert [p["pass"] for p in json.loads(out)["passes"]] == ["inline-composites", "fold-weights", "legalize-ops"]


def test_a_case_replaces_nothing_but_a_case(tvmc, model, tmp_path):
    (tmp_path / "repro.py").write_text("print('mine')")
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = tvmc("verify", model, "--repro", tmp_path)
    assert code == 2 and "no case of ours" in err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
