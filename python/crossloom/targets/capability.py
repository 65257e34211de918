"""What a unit of a target can run: precision schemes, rows of the operator table, and how rows decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["yes", "no", "unknown"]

#: What happens to an operator whose row says "no" (or "yes", for ``slow``).
EFFECTS = ("", "fallback", "build-fails", "wrong-values", "device-fails", "slow")
CONFIDENCES = ("high", "medium", "low", "conflict")


@dataclass(frozen=True)
class Precision:
    """One precision scheme, e.g. w4a16.

    Attributes
    ----------
    name, weight, activation : str
        ``"w4a16"``, ``"int4"``, ``"float16"``.
    granularity : tuple of str
        ``"tensor"``, ``"channel"``, ``"group32"`` (elements along K), ``"grouped-channel"`` (one table for
        several output channels).
    algorithms : tuple of str
        The tool chain's names for its calibration methods; the first is the default.
    min_os : int
        Smallest OS version that takes it; 0 for any.
    """

    name: str
    weight: str
    activation: str
    unit: str
    supported: Answer
    source: str
    confidence: str
    granularity: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    min_os: int = 0
    note: str = ""


@dataclass(frozen=True)
class When:
    """Conditions of a row; it applies where all that are set hold.

    Attributes
    ----------
    arg : int
        Tensor whose shape counts: an argument's position, ``-1`` for any argument or the result.
    axes : tuple of int
        Axes the extents look at; empty for all.
    min_rank, max_rank, min_extent, max_extent : int or None
        Inclusive.  ``min_extent``: some axis has at least so many elements; ``max_extent``: all at most.
    features : tuple of str
        Facts about a call, see :data:`crossloom.lint.FEATURES`: ``"dynamic"``, ``"stepped"``, ...
    attrs : mapping of str to tuple of str
        Attribute name -> values (as text).
    precision : tuple of str
        Names of precision schemes.
    """

    arg: int = -1
    axes: tuple[int, ...] = ()
    min_rank: int | None = None
    max_rank: int | None = None
    min_extent: int | None = None
    max_extent: int | None = None
    features: tuple[str, ...] = ()
    attrs: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    precision: tuple[str, ...] = ()

    def _shape_holds(self, shape: Sequence[int | str]) -> bool:
        rank = len(shape)
        if self.min_rank is not None and rank < self.min_rank:
            return False
        if self.max_rank is not None and rank > self.max_rank:
            return False
        axes = self.axes or tuple(range(rank))
        known = [d for a in axes if -rank <= a < rank and isinstance(d := shape[a], int)]
        if self.min_extent is not None and not any(d >= self.min_extent for d in known):
            return False
        return self.max_extent is None or all(d <= self.max_extent for d in known)

    @property
    def about_shape(self) -> bool:
        """Whether a shape is needed to decide."""
        return any(v is not None for v in (self.min_rank, self.max_rank, self.min_extent, self.max_extent))

    def holds(
        self,
        shapes: Sequence[Sequence[int | str]],
        features: Sequence[str],
        attrs: Mapping[str, str],
        precision: str | None,
    ) -> bool:
        """Return whether all the conditions hold for one call."""
        if not set(self.features) <= set(features):
            return False
        if self.precision and precision not in self.precision:
            return False
        if any(attrs.get(key) not in values for key, values in self.attrs.items()):
            return False
        if not self.about_shape:
            return True
        chosen = shapes if self.arg < 0 else shapes[self.arg : self.arg + 1]
        return any(self._shape_holds(shape) for shape in chosen)

    def __str__(self) -> str:
        where = "" if self.arg < 0 else f" of argument {self.arg}"
        axes = "" if not self.axes else f" on axes {','.join(map(str, self.axes))}"
        parts = [
            f"{name.replace('_', ' ')} {value}{axes if 'extent' in name else ''}{where}"
            for name in ("min_rank", "max_rank", "min_extent", "max_extent")
            if (value := getattr(self, name)) is not None
        ]
        parts += list(self.features)
        parts += [f"{key}={'|'.join(values)}" for key, values in sorted(self.attrs.items())]
        parts += [f"precision {'|'.join(self.precision)}"] if self.precision else []
        return "; ".join(parts)


@dataclass(frozen=True)
class Capability:
    """One row of the operator table.

    Attributes
    ----------
    op : tuple of str
        Relax operator names; ``"*"`` is any.
    unit : str
        ``"npu"`` or ``"cpu"``.
    supported : {"yes", "no", "unknown"}
    source, confidence : str
        Where the statement is from, and one of ``CONFIDENCES``; ``conflict`` rows contradict each other.
    dtypes : tuple of str
        Types of an argument it is about; empty for any.
    effect : str
        One of ``EFFECTS``: what happens, where the answer is not a plain yes.
    note, remedy : str
    """

    op: tuple[str, ...]
    unit: str
    supported: Answer
    source: str
    confidence: str
    dtypes: tuple[str, ...] = ()
    when: When = field(default_factory=When)
    effect: str = ""
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Fusion:
    """One limit on what a unit keeps together as one kernel.

    Attributes
    ----------
    chain : {"elementwise", "linear", "region"}
        ``elementwise``: operators between one load and one store; ``linear``: a norm, a linear layer and the steps
        behind its sums; ``region``: whatever the unit's own compiler is given as one program.
    most : int
        Operators between load and store, or behind the sums; 0 for any number.
    operators : tuple of str
        Names of operators that may be in it, as :mod:`crossloom.schedules.templates` names them; empty for any.
    """

    chain: Literal["elementwise", "linear", "region"]
    unit: str
    source: str
    confidence: str
    most: int = 0
    operators: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Support:
    """Answer to "can this target run it", with the row that decided.

    Attributes
    ----------
    answer : {"yes", "no", "unknown"}
    row : Capability or Precision or None
        None when no row says anything (the answer is then ``"unknown"``).
    unit : str
    computed_in : str
        The type the unit computes in, where that is not the type asked for.
    disputed : tuple of Capability
        The rows that contradict each other, where that is why the answer is unknown.
    """

    answer: Answer
    row: Capability | Precision | None
    unit: str
    computed_in: str = ""
    disputed: tuple[Capability, ...] = ()

    @property
    def source(self) -> str:
        """Where the answer is from: each side's source in a dispute, empty when no row says anything."""
        if self.disputed:
            return " / ".join(f"{row.supported}: {row.source}" for row in self.disputed)
        return self.row.source if self.row is not None else ""

    def __bool__(self) -> bool:
        return self.answer == "yes"


def decide(op: str, unit: str, rows: Sequence[Capability]) -> tuple[Answer, Capability | None]:
    """Return the answer of the rows that apply to a call, and the row that gives it.

    A firm row that says no outweighs all; rows that contradict each other make the answer unknown; a row about any
    operator can forbid, but allows on a CPU only.
    """
    firm = [r for r in rows if r.confidence != "conflict"]
    for row in firm:
        if row.supported == "no":
            return "no", row
    disputed = [r for r in rows if r.confidence == "conflict"]
    if len({r.supported for r in disputed}) > 1:
        return "unknown", disputed[0]
    for row in (*disputed, *firm):
        if row.supported == "no":
            return "no", row
    named = [r for r in rows if op in r.op or unit == "cpu"]
    for wanted in ("unknown", "yes"):
        # The last row is the most particular one: the files go from the general to the particular.
        for row in reversed(named):
            if row.supported == wanted:
                return row.supported, row
    return "unknown", None
