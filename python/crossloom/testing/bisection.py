"""Narrow a broken contract down to the rewrite that breaks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm

from ..model import Model
from ..numerics import Numerics
from ..rewrite import limit_rewrites
from ..verdict import Verdict
from .execution import Call, Executor
from .records import compare, reason
from .stages import Stage, Walked, run_after


@dataclass(frozen=True)
class Culprit:
    """The first pass outside its contract, and the first rewrite instance that breaks it.

    Attributes
    ----------
    name, problem : str
        The pass, and what stands against it.
    model : Model
        As it was before the pass.
    limits : dict of (str, str, str) to int
        By rule, function and site, how many rewrites of the pass show the problem (see
        :func:`crossloom.rewrite.limit_rewrites`); empty where the pass breaks without any.
    verdict : Verdict or None
        Of the guilty rewrite.
    numerics : Numerics
        The class the pass was held to.
    """

    name: str
    problem: str
    model: Model
    numerics: Numerics
    limits: dict[tuple[str, str, str], int] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def before(self) -> tvm.ir.IRModule:
        """The module before the pass."""
        return self.model.mod

    @property
    def rewrite(self) -> str:
        """Rule at fault, ``""`` where the pass records no rewrite that can be held back."""
        return self.verdict.rewrite if self.verdict else ""

    @property
    def instance(self) -> int:
        """Number of the guilty rewrite among its rule's own, from 0; -1 where there is none."""
        return sum(n for (rule, _, _), n in self.limits.items() if rule == self.rewrite) - 1 if self.verdict else -1


def find_rewrite(walked: Walked, execute: Executor, calls: Sequence[Call]) -> Culprit:
    """Find the fewest first rewrites of a stage that break its contract, by binary search over those that fired.

    Parameters
    ----------
    walked : Walked
        A stage with a problem.
    execute, calls
        As for :func:`crossloom.testing.stages.walk`.
    """
    stage, fired = walked.stage, walked.fired
    culprit = Culprit(stage.name, walked.record.problem, walked.before, stage.numerics)

    def limits(count: int) -> dict[tuple[str, str, str], int]:
        return dict(Counter((v.rewrite, v.function, v.site) for v in fired[:count]))

    def broken(count: int) -> bool:
        return bool(_problem(stage, walked, execute, calls, limits(count)))

    if not fired or broken(0):
        return culprit
    good, bad = 0, len(fired)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if broken(middle) else (middle, bad)
    return Culprit(stage.name, culprit.problem, walked.before, stage.numerics, limits(bad), fired[bad - 1])


def _problem(
    stage: Stage, walked: Walked, execute: Executor, calls: Sequence[Call], limits: dict[tuple[str, str, str], int]
) -> str:
    try:
        # A copy: the pass may be one that writes to its input.
        before = Model(**{**vars(walked.before), "mod": walked.before.mod.clone()})
        with limit_rewrites(limits):
            after = stage.apply(before)
        # Outside: to build the model may take rewrites of its own.
        outputs = run_after(execute, after, calls)
    except Exception as error:
        return reason(error)
    return "; ".join(map(str, compare(stage.numerics, calls, walked.expected, outputs)[1]))
