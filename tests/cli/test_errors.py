"""Bad input: exit code, one or two lines that name the thing, nothing half-written."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from crossloom.cli import main


def check(result: tuple[int, str, str], code: int, *words: str) -> None:
    got, _, err = result
    lines = [line for line in err.strip().splitlines() if line]
    assert got == code, err
    assert 1 <= len(lines) <= 2 and lines[0].startswith("error: "), err
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_missing_model_and_unknown_target(tvmc, model, tmp_path):
    out = tmp_path / "out"
    check(tvmc("compile", tmp_path / "no.onnx", "--target", "host", "-o", out), 2, "no.onnx")
    check(tvmc("compile", model, "--target", "rk3589", "-o", out), 3, "rk3589", "rk3588")
    assert list(tmp_path.iterdir()) == []


def test_truncated_onnx(tvmc, model, tmp_path):
    data = model.read_bytes()
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(data[: len(data) // 2])
    code, _, err = tvmc("compile", broken, "--target", "host", "-o", tmp_path / "out")
    assert code in (2, 3) and "Traceback" not in err and len(err.strip().splitlines()) <= 2
    assert [p.name for p in tmp_path.iterdir()] == ["broken.onnx"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pipeline", "legalise-ops"], ("legalise-ops", "legalize-ops")),
        (["--pipeline", "schedule-cpu{speed=11}"], ("speed",)),
        (["--disabled-pass", "nothing"], ("nothing",)),
        (["--pass-config", "no.such.key=1"], ("no.such.key",)),
        (["--pass-config", "novalue"], ("novalue",)),
        (["--input-shapes", "x:[1,-5]"], ("-5",)),
        (["--input-shapes", "x=5"], ("x=5",)),
        (["--input-shapes", "nope:[1,5]"], ("nope",)),
        (["--bind", "n=many"], ("n=many",)),
        (["--bind", "q=3"], ("q",)),
        (["--dump-code", "wasm"], ("wasm",)),
        (["--output-format", "zip"], ("zip",)),
        (["--model-format", "caffe"], ("caffe",)),
        (["--tuning-records", "nowhere"], ("nowhere",)),
        (["--no-such-flag"], ("--no-such-flag",)),
    ],
)
def test_bad_flags_of_compile(tvmc, model, tmp_path, arguments, words):
    check(tvmc("compile", model, "--target", "host", "-o", tmp_path / "out", *arguments), 2, *words)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_outputs(tvmc, model, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    for out in ("file/below", "file", "folder"):
        check(
            tvmc("compile", model, "--target", "host", "-o", tmp_path / out, "--output-format", "dir"),
            2,
            "file" if "file" in out else out,
        )
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["mine.txt"]


def test_missing_cross_compiler(tvmc, model, tmp_path):
    check(
        tvmc("compile", model, "--target", "host", "-o", tmp_path / "o", "--cross-compiler", "no-such-g++"),
        5,
        "no-such-g++",
    )
    assert list(tmp_path.iterdir()) == []


def test_wrong_inputs_at_run(tvmc, bundle, tmp_path):
    path = tmp_path / "x.npz"
    out = ("-o", tmp_path / "y.npz")
    np.savez(path, x=np.ones((2, 5), "float64"))
    check(tvmc("run", bundle, "-i", path, *out), 2, "float64", "float32")
    np.savez(path, x=np.ones((2, 6), "float32"))
    check(tvmc("run", bundle, "-i", path, *out), 2, "(2, 6)")
    np.savez(path, wrong=np.ones((2, 5), "float32"))
    check(tvmc("run", bundle, "-i", path, *out), 2, "`x`")
    np.savez(path, x=np.array([object()]))
    check(tvmc("run", bundle, "-i", path, *out), 2, "x.npz")
    path.write_bytes(b"PK\x03\x04 not really")
    check(tvmc("run", bundle, "-i", path, *out), 2, "x.npz")
    check(tvmc("run", bundle, "-i", tmp_path / "no.npz", *out), 2, "no.npz")
    check(tvmc("run", bundle, *out), 2, "--fill-mode")
    check(tvmc("run", bundle, "--fill-mode", "sevens"), 2, "sevens")
    check(tvmc("run", bundle, "--fill-mode", "ones", "--entry", "tail"), 2, "tail", "main")
    check(tvmc("run", bundle, "--fill-mode", "ones", "--device", "gpu"), 2, "gpu")
    check(tvmc("run", bundle, "--fill-mode", "ones", "--bind", "q=3"), 2, "'q'")
    check(tvmc("run", tmp_path / "none", "--fill-mode", "ones"), 2, "none")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_damaged_bundle(tvmc, bundle, tmp_path):
    import shutil

    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / "lib.so").write_bytes(b"not a library")
    check(tvmc("run", copy, "--fill-mode", "ones"), 2, "lib.so")


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("odd"), 70), (MemoryError(), 4)]
)
def test_whatever_is_raised_has_a_code_and_no_traceback(tvmc, monkeypatch, raised, code):
    def fail(name: str = "x") -> None:
        raise raised

    monkeypatch.setattr(main, "_COMMANDS", (("fail", fail), ("other", fail)))
    got, _, err = tvmc("fail")
    assert got == code and "Traceback" not in err
    if code == 70:
        assert "internal error" in err and "odd" in err and "--debug" in err
        assert "Traceback" in tvmc("fail", "--debug")[2]


def test_exit_codes_as_a_program(program, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path)

    assert run("--version").stdout.startswith("tvmc (crossloom)")
    usage = run("comple")
    assert usage.returncode == 2 and "compile" in usage.stderr
    unsupported = run("targets", "rk3589")
    assert unsupported.returncode == 3 and "rk3588" in unsupported.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_loads_neither_tvm_nor_numpy(program):
    code = (
        "import sys; from crossloom.cli.main import execute; execute(['--help']);"
        "sys.exit(bool({'tvm', 'numpy', 'onnx', 'rich.console'} & set(sys.modules)))"
    )
    assert subprocess.run([program[0], "-c", code], capture_output=True, timeout=60).returncode == 0


def test_no_arguments_print_the_help(tvmc):
    code, out, err = tvmc()
    assert code == 2 and "compile" in out + err and "doctor" in out + err
