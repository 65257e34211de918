"""What the linter reports."""

from __future__ import annotations

from dataclasses import dataclass

#: Most serious first.
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing a target cannot take, or may not.

    Attributes
    ----------
    severity : {"error", "warning", "info"}
        error: no unit of the target can run it; warning: it stays off the NPU; info: worth knowing.
    code : str
        ``dynamic-shape``, ``op``, ``dtype``, ``rank``, ``extent``, ``disputed``, ``op-unknown``,
        ``converted``, ``flash`` or ``ram``.
    function : str
    where : str
        The binding or input it was first met at.
    op : str
        Relax operator, or empty.
    what, why, source, confidence, remedy : str
        ``source`` and ``confidence`` are those of the table's row.
    count : int
        How many places of the function it stands for.
    """

    severity: str
    code: str
    function: str
    where: str
    op: str
    what: str
    why: str
    source: str
    remedy: str
    confidence: str = ""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        remedy = f" Remedy: {self.remedy}." if self.remedy else ""
        place = f"{self.function}: {self.where}" if self.function else self.where
        return f"{self.severity}: {place}{times}: {self.what}: {self.why}.{remedy} [{self.source}]"
