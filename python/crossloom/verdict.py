"""Verdicts: what became of every candidate of every rewrite, and the ledger that keeps them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType

FIRED = "fired"


@dataclass(frozen=True)
class Verdict:
    """One candidate's fate.

    Attributes
    ----------
    fired : bool
        Whether the rewrite was made.
    code : str
        ``"fired"``, or the stable kebab-case reason of a refusal.
    culprit : str
        The value, operator or limit to blame.
    detail : str
        One sentence for a person.
    bytes_saved, macs : int
        Memory traffic saved (bytes) and multiply-accumulates at stake; estimates from static shapes, 0 where a
        dimension is symbolic.
    rewrite, function, site, pass_name : str
        Filled in by the driver: rewrite's name, function, the variable at the root (for display), and the registry
        name of the pass that the rewrite belongs to.
    """

    fired: bool
    code: str = FIRED
    culprit: str = ""
    detail: str = ""
    bytes_saved: int = 0
    macs: int = 0
    rewrite: str = ""
    function: str = ""
    site: str = ""
    pass_name: str = ""

    def at(self, rewrite: str, function: str, site: str, pass_name: str = "") -> Verdict:
        """Return the verdict with its place filled in; a pass of one rewrite has its name."""
        return replace(self, rewrite=rewrite, function=function, site=site, pass_name=pass_name or rewrite)


def accept(*, detail: str = "", bytes_saved: int = 0, macs: int = 0) -> Verdict:
    """Return a verdict in favour, with what it is estimated to save (bytes, MACs)."""
    return Verdict(True, FIRED, detail=detail, bytes_saved=bytes_saved, macs=macs)


def refuse(code: str, culprit: str = "", detail: str = "", *, bytes_saved: int = 0, macs: int = 0) -> Verdict:
    """Return a refusal with a stable kebab-case code and the value to blame."""
    return Verdict(False, code, culprit, detail, bytes_saved, macs)


_current: ContextVar[Ledger | None] = ContextVar("crossloom_ledger", default=None)


@dataclass
class Ledger:
    """Collects verdicts; as a context manager it receives those of every pass run inside.

    Examples
    --------
    >>> with Ledger() as ledger:
    ...     _ = ledger.add(accept())
    >>> ledger.counts()[("", "fired")]
    1
    """

    verdicts: list[Verdict] = field(default_factory=list)
    _tokens: list[Token[Ledger | None]] = field(default_factory=list, repr=False, compare=False)

    @staticmethod
    def current() -> Ledger | None:
        """Return the innermost open ledger, or None."""
        return _current.get()

    def add(self, verdict: Verdict) -> Verdict:
        """Keep a verdict and return it."""
        self.verdicts.append(verdict)
        return verdict

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    def __enter__(self) -> Ledger:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())

    @property
    def fired(self) -> list[Verdict]:
        """Verdicts of rewrites that were made."""
        return [v for v in self.verdicts if v.fired]

    @property
    def refused(self) -> list[Verdict]:
        """Verdicts of rewrites that were not made."""
        return [v for v in self.verdicts if not v.fired]

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how often each (rewrite, code) occurred."""
        return Counter((v.rewrite, v.code) for v in self.verdicts)

    def to_json(self) -> str:
        """Return the ledger as JSON text."""
        return json.dumps([asdict(v) for v in self.verdicts], indent=1)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Read what :meth:`to_json` wrote."""
        return cls([Verdict(**row) for row in json.loads(text)])


def record(verdict: Verdict) -> Verdict:
    """Put a verdict into the innermost open ledger, if any, and return it."""
    ledger = Ledger.current()
    if ledger is not None:
        ledger.add(verdict)
    return verdict
