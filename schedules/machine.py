"""What the schedule rules need to know of a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Machine:
    """A CPU's vector unit.

    Attributes
    ----------
    vector_bytes : int
        Width of a vector register.
    registers : int
        Number of vector registers.
    """

    vector_bytes: int = 16
    registers: int = 16

    @staticmethod
    def of(target: tvm.target.Target) -> Machine:
        """Read vector width and register count off a target's features, triple and ``mcpu``."""
        attrs = target.attrs
        triple, mcpu = str(attrs.get("mtriple", "")), str(attrs.get("mcpu", ""))
        flags = " ".join(str(flag) for flag in attrs.get("mattr", ()))
        if attrs.get("feature.is_aarch64", False) or triple.startswith(("aarch64", "arm64")):
            return Machine(16, 32)
        if "+avx512" in flags or mcpu in ("skylake-avx512", "icelake-server", "sapphirerapids", "znver4", "znver5"):
            return Machine(64, 32)
        if "+avx2" in flags or mcpu.startswith(("haswell", "broadwell", "skylake", "znver", "alderlake", "core-avx2")):
            return Machine(32, 16)
        return Machine(16, 16)

    def lanes(self, dtype: str) -> int:
        """Return elements of ``dtype`` in one register."""
        return max(1, self.vector_bytes * 8 // tvm.DataType(dtype).bits)
