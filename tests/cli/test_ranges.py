"""Sizes, names and targets nothing can be compiled with: exit 2 or 3 and one error before the long work."""

from __future__ import annotations

import pytest

from crossloom import driver

HUGE = "99999999999999999999"


@pytest.fixture
def no_compilation(monkeypatch) -> None:
    """Refusals come before the long work."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(driver, "compile_model", refuse)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--bind", f"n={HUGE}"], f"0 to {2**31 - 1}"),
        (["--bind", f"n={2**63 - 1}"], f"0 to {2**31 - 1}"),
        (["--bind", "n=" + "9" * 5000], f"0 to {2**31 - 1}"),
        (["--bind", "n=\N{ARABIC-INDIC DIGIT FIVE}"], "DIMENSION=SIZE"),
        (["--input-shapes", f"x:[{HUGE},5]"], f"0 to {2**31 - 1}"),
    ],
)
def test_sizes_out_of_range(tvmc, model, tmp_path, no_compilation, arguments, word):
    code, _, err = tvmc("compile", model, "--target", "host", "-o", tmp_path / "out", *arguments)
    assert code == 2 and word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [HUGE, str(2**31 - 1)])
def test_sizes_of_filled_inputs(tvmc, bundle, monkeypatch, size):
    import numpy as np

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "full", refuse)  # 80 GB are not asked for in a test
    code, _, err = tvmc("run", bundle, "--fill-mode", "ones", "--bind", f"n={size}")
    assert (code, "out of range" in err) == ((2, True) if size == HUGE else (4, False)), err


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/out", "x" * 250])
def test_names_too_long(tvmc, model, tmp_path, no_compilation, name):
    code, _, err = tvmc("compile", model, "--target", "host", "-o", tmp_path / name)
    assert code == 2 and "too long" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["esp32s3", "apple-m1", "apple-m4", "stm32f746", "c", "stm32f746 -mcpu=cortex-m4"])
def test_targets_no_bundle_can_be_linked_for(tvmc, model, tmp_path, no_compilation, monkeypatch, target):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    code, _, err = tvmc("compile", model, "--target", target, "-o", tmp_path / "out")
    assert code == 3 and "cannot be linked yet" in err and target in err and "tvmc lint" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "1e300"])
def test_time_limits_nobody_can_keep(tvmc, bundle, seconds):
    code, _, err = tvmc("run", bundle, "--fill-mode", "ones", "--device", "host-process", "--timeout", seconds)
    assert code == 2 and "time limit" in err and str(float(seconds)) in err and "Traceback" not in err
