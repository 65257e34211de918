"""Vector widths and registers of CPUs, as their makers' manuals give them."""

from __future__ import annotations

import pytest
import tvm

from crossloom.schedules.cpu import Machine


@pytest.mark.parametrize(
    "mcpu,vector_bytes,registers",
    [
        ("nehalem", 16, 16),
        ("haswell", 32, 16),
        ("skylake", 32, 16),
        ("znver3", 32, 16),
        ("alderlake", 32, 16),
        ("skylake-avx512", 64, 32),
        ("cascadelake", 64, 32),
        ("cooperlake", 64, 32),
        ("icelake-client", 64, 32),
        ("tigerlake", 64, 32),
        ("rocketlake", 64, 32),
        ("graniterapids", 64, 32),
        ("znver5", 64, 32),
    ],
)
def test_x86_by_mcpu_alone(mcpu: str, vector_bytes: int, registers: int) -> None:
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    assert Machine.of(target) == Machine(vector_bytes, registers)


@pytest.mark.parametrize(
    "target,vector_bytes,registers",
    [
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu"}, 16, 16),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mattr": ["+avx2"]}, 32, 16),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mattr": ["+avx512f"]}, 64, 32),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "mattr": ["-avx512f"]}, 32, 16),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}, 16, 32),
        ({"kind": "llvm", "mtriple": "arm64-apple-macos"}, 16, 32),
        ({"kind": "c"}, 16, 16),
    ],
)
def test_features_and_triples(target: dict, vector_bytes: int, registers: int) -> None:
    assert Machine.of(tvm.target.Target(target)) == Machine(vector_bytes, registers)
