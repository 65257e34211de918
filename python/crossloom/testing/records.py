"""What a pass did to the numbers: one record a pass, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import CrossloomError
from ..numerics import Numerics, Violation, check
from .execution import Call, Outputs


@dataclass(frozen=True)
class Record:
    """What one pass did.

    Attributes
    ----------
    name : str
    numerics : Numerics
        The class it was held to.
    errors : mapping of str to float
        Worst normwise error by entry, see :func:`crossloom.numerics.worst_error`; empty where it was not run.
    violations : tuple of Violation
        Outputs outside the class.
    fault : str
        What else is wrong: the pass changed its input, or failed.
    not_run : str
        Why the module after the pass was not run; ``""`` when it was.
    changed : bool
        Whether the pass changed the model; where it did not, the error is 0 without running.
    seconds : float
        Time in the pass itself.
    fired, refused : int
        Rewrites made and refused.
    depth : int
        How many passes it ran inside of.
    """

    name: str
    numerics: Numerics
    errors: Mapping[str, float]
    violations: tuple[Violation, ...] = ()
    fault: str = ""
    not_run: str = ""
    changed: bool = True
    seconds: float = 0.0
    fired: int = 0
    refused: int = 0
    depth: int = 0

    @property
    def runnable(self) -> bool:
        """Whether the module after the pass was built and run."""
        return not self.not_run

    @property
    def worst_error(self) -> float:
        """Largest error of all entries; nan where it was not run."""
        return max(self.errors.values(), default=0.0) if self.runnable else float("nan")

    @property
    def breaches(self) -> list[str]:
        """What the pass did wrong, one item a fault or violation."""
        return [*filter(None, [self.fault]), *map(str, self.violations)]

    @property
    def problem(self) -> str:
        """What stands against the pass in one line, ``""`` when nothing does."""
        return "; ".join([*self.breaches, *([f"not run: {self.not_run}"] if self.not_run else [])])


def render(records: Sequence[Record]) -> str:
    """Return the records as a text table, passes inside of others indented.

    Examples
    --------
    >>> from crossloom.numerics import EXACT
    >>> print(render([Record("fold-weights", EXACT, {"main": 0.0}, fired=2)]))
    pass          contract  worst error  seconds  fired  refused  verdict
    fold-weights  exact     0            0.000    2      0        ok
    """
    rows = [("pass", "contract", "worst error", "seconds", "fired", "refused", "verdict")]
    for r in records:
        cells = (f"{r.worst_error:.3g}", f"{r.seconds:.3f}", str(r.fired), str(r.refused))
        rows.append(("  " * r.depth + r.name, r.numerics.kind, *cells, r.problem or "ok"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def compare(
    numerics: Numerics, calls: Sequence[Call], before: Outputs, after: Outputs
) -> tuple[dict[str, float], tuple[Violation, ...]]:
    """Return the worst error of each entry, and every violation with its call."""
    errors: dict[str, float] = {}
    broken: list[Violation] = []
    for call, x, y in zip(calls, before, after, strict=True):
        error, violations = check(numerics, x, y)
        errors[call.entry] = max(errors.get(call.entry, 0.0), error)
        broken += [replace(v, call=str(call)) for v in violations]
    return errors, tuple(broken)


def reason(error: Exception) -> str:
    """Return an error in one line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if isinstance(error, CrossloomError) else lines[-1] if lines else ''}"
