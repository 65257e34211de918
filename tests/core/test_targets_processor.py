"""A processor LLVM does not know is an error that names it, not code for a generic one."""

from __future__ import annotations

import pytest

from crossloom.errors import UnsupportedTarget
from crossloom.targets import get_target


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("rk3588 -mcpu=foo", "e.g. -mcpu="),
        ("rk3588 -mcpu=cortex-a77x", "cortex-a77"),
        ("rk3588 -mcpu=skylake", "e.g. -mcpu="),
        ("apple-m4 -mcpu=foo", "e.g. -mcpu="),
        ("llvm -mcpu=foo", "e.g. -mcpu="),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=foo", "e.g. -mcpu="),
        ('{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "foo"}', "e.g. -mcpu="),
        ("ane -chip=m4 -mcpu=foo", "e.g. -mcpu="),
        ("ane -chip=m4, llvm -mtriple=arm64-apple-macos -mcpu=foo", "e.g. -mcpu="),
    ],
)
def test_an_unknown_processor_is_named(capfd, text, remedy) -> None:
    with pytest.raises(UnsupportedTarget, match=r"knows no processor '(foo|cortex-a77x|skylake)'") as caught:
        get_target(text)
    assert remedy in caught.value.remedy
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    [
        "rk3588 -mcpu=cortex-a55",
        "llvm -mtriple=arm64-apple-macos -mcpu=apple-m1",
        "llvm -mtriple=thumbv7em-none-eabi -mcpu=cortex-m7",
        "llvm -mtriple=i686-linux-gnu -mcpu=pentium4",
        "llvm -mtriple=aarch64-linux-gnu -mcpu=generic",
    ],
)
def test_known_processors_are_taken(capfd, text) -> None:
    assert get_target(text).cpu.mcpu in text
    assert "is not valid" not in capfd.readouterr().err
