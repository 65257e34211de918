"""verify: contracts hold, and ONNX Runtime agrees."""

from __future__ import annotations

import json


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
