"""What the schedule rules need to know of a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import tvm
from tvm.target import codegen


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
    @lru_cache(maxsize=64)
    def of(target: tvm.target.Target) -> Machine:
        """Read vector width and register count off a target's triple and what LLVM knows of its ``mcpu`` and ``mattr``.

        LLVM's own answer, ``llvm_get_vector_width``, is 512 bits for any x86-64, an SSE-only one among them.
        """
        attrs = target.attrs
        if attrs.get("feature.is_aarch64", False) or str(attrs.get("mtriple", "")).startswith(("aarch64", "arm64")):
            return Machine(16, 32)
        features = codegen.llvm_get_cpu_features(target)
        if "avx512f" in features:
            return Machine(64, 32)
        if "avx2" in features:
            return Machine(32, 16)
        return Machine(16, 16)

    def lanes(self, dtype: str) -> int:
        """Return elements of ``dtype`` in one register."""
        return max(1, self.vector_bytes * 8 // tvm.DataType(dtype).bits)
