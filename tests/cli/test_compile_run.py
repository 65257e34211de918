"""compile, run, inspect, explain: from a model to numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from crossloom.flow import CPU


def test_compiled_outputs_are_numpys(tvmc, bundle, weights, tmp_path):
    w, b = weights
    x = np.random.default_rng(7).standard_normal((4, 5)).astype("float32")
    np.savez(tmp_path / "x.npz", x=x)
    code, out, err = tvmc("run", bundle, "--inputs", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--json")
    assert code == 0, err
    with np.load(tmp_path / "y.npz") as file:
        np.testing.assert_allclose(file["y"], np.maximum(x @ w + b, 0), rtol=1e-5, atol=1e-6)
        assert file["z"].shape == (4, 5)
    assert [o["shape"] for o in json.loads(out)["outputs"]] == [[4, 3], [4, 5]]


def test_time_and_fill(tvmc, bundle):
    code, out, err = tvmc(
        "run", bundle, "--fill-mode", "random", "--bind", "n=2", "--print-time", "--repeat", 2, "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert len(report["seconds"]) == 2 and min(report["seconds"]) > 0
    assert report["outputs"][0]["shape"] == [2, 3]


def test_fill_modes_are_reproducible_and_say_what_they_chose(tvmc, bundle, tmp_path):
    for name in ("a", "b"):
        code, _, err = tvmc("run", bundle, "--fill-mode", "random", "--seed", 3, "-o", tmp_path / f"{name}.npz")
        assert code == 0 and "n=8" in err
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        np.testing.assert_array_equal(a["y"], b["y"])
    code, out, _ = tvmc("run", bundle, "--fill-mode", "zeros", "--bind", "n=0", "--json")
    assert code == 0 and json.loads(out)["outputs"][0]["shape"] == [0, 3]


def test_tar_shapes_bound_dimensions_and_pipelines(tvmc, model, tmp_path):
    tar = tmp_path / "m.tar"
    code, _, err = tvmc(
        "compile", model, "--target", "host", "-o", tar, "--input-shapes", "x:[k,5]", "--bind", "k=6",
        "--disabled-pass", "schedule-cpu", "--pass-config", "tirx.disable_assert=true",
    )  # fmt: skip
    assert code == 0, err
    code, out, _ = tvmc("inspect", tar, "--json")
    report = json.loads(out)
    assert report["entries"][0]["inputs"][0]["shape"] == [6, 5]
    assert "schedule-cpu" not in report["pipeline"] and "legalize-ops" in report["pipeline"]


def test_inspect_names_what_is_inside(tvmc, bundle):
    code, out, _ = tvmc("inspect", bundle)
    assert code == 0
    for word in ("lib.so", "weights.safetensors", "(n, 5)", "float32", "schedule-cpu", "code/asm.s"):
        assert word in out


def test_inspect_tells_regions_by_meaning(tvmc, model, tmp_path):
    passes = [name for name in CPU if name != "annotate-semantic-regions"]
    passes.insert(passes.index("canonicalize-transformer") + 1, "annotate-semantic-regions")
    told = tmp_path / "told"
    code, _, err = tvmc("compile", model, "--target", "host", "-o", told, "--pipeline", ",".join(passes))
    assert code == 0, err
    code, out, _ = tvmc("inspect", told)
    assert code == 0 and "Regions" in out and "head" in out
    code, out, _ = tvmc("inspect", told, "--json")
    ((entry, regions),) = json.loads(out)["regions"].items()
    assert [(r["name"], r["layer"], len(r["weights"])) for r in regions] == [("head", -1, 3)], entry


def test_dumped_code_is_code(bundle):
    assert "def main" in (bundle / "code/relax.py").read_text()
    assert "T.prim_func" in (bundle / "code/tir.py").read_text()
    assert ".text" in (bundle / "code/asm.s").read_text()


def test_explain_a_bundle_and_a_model(tvmc, bundle, model):
    code, out, err = tvmc("explain", bundle, "--code")
    assert code == 0 and "T.prim_func" in out and "refused" in err
    code, out, _ = tvmc("explain", bundle, "--json")
    assert code == 0 and "schedule-cpu" in json.loads(out)["pipeline"]
    code, _, err = tvmc("explain", bundle, "--pass", "no-such-pass")
    assert code == 2 and "these did" in err
    code, _, err = tvmc("explain", model)
    assert code == 2 and "--target" in err


@pytest.mark.aarch64
def test_rk3588_runs_under_qemu(tvmc, model, tmp_path):
    code, _, err = tvmc("compile", model, "--target", "rk3588", "-o", tmp_path / "arm.tar")
    assert code == 0, err
    code, out, err = tvmc("run", tmp_path / "arm.tar", "--fill-mode", "ones", "--bind", "n=3", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["device"] == "qemu" and report["outputs"][1]["shape"] == [3, 5]
    code, _, err = tvmc("run", tmp_path / "arm.tar", "--fill-mode", "ones", "--device", "host")
    assert code == 2 and "aarch64" in err
