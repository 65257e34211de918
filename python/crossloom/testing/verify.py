"""Hold every pass of a pipeline to its numerics class; name the pass and the rewrite that break it.

>>> records = verify_pipeline(mod, [("my-pass", MyPass(), REASSOCIATES)])   # doctest: +SKIP
>>> print(render(records))                                                   # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from ..errors import BudgetExceeded, UsageError
from ..model import Model
from ..numerics import REASSOCIATES, Numerics, check
from ..rewrite import limit_rewrites
from ..verdict import Ledger, Verdict
from .runner import public_entries, random_inputs, run_module

Inputs = Mapping[str, Sequence[np.ndarray]]
Step = tuple[str, tvm.transform.Pass, Numerics]


@dataclass(frozen=True)
class Record:
    """What one pass did.

    Attributes
    ----------
    name : str
    numerics : str
        The class it was held to.
    worst_error : float
        See :func:`crossloom.numerics.worst_error`; nan when the module could not be run.
    seconds : float
        Time in the pass itself.
    fired, refused : int
        Rewrites made and refused.
    problem : str
        ``""`` where the contract holds; else entry and output outside it, or why the module does not run.
    runnable : bool
        Whether the default pipeline can build and run the module after the pass.
    """

    name: str
    numerics: str
    worst_error: float
    seconds: float
    fired: int
    refused: int
    problem: str = ""
    runnable: bool = True


def render(records: Sequence[Record]) -> str:
    """Return the records as a text table."""
    rows = [("pass", "worst error", "seconds", "fired", "refused", "verdict")]
    for r in records:
        verdict = r.problem.split("\n")[0] or "ok"
        rows.append((r.name, f"{r.worst_error:.3g}", f"{r.seconds:.3f}", str(r.fired), str(r.refused), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def _inputs(model: Model | tvm.ir.IRModule, inputs: Inputs | None, seed: int) -> tuple[tvm.ir.IRModule, Inputs]:
    mod = model.mod if isinstance(model, Model) else model
    if inputs is not None:
        return mod, inputs
    drawn: dict[str, list[np.ndarray]] = {}
    for entry in public_entries(mod):
        values = random_inputs(mod, entry, seed)
        if isinstance(model, Model) and entry in model.entries:
            weights = model.entry_params(entry)
            values = values[: len(values) - len(weights)] + weights
        drawn[entry] = values
    if not drawn:
        raise UsageError("the module has no public Relax function", "give it a global_symbol")
    return mod, drawn


def run_entries(mod: tvm.ir.IRModule, inputs: Inputs) -> dict[str, list[np.ndarray]]:
    """Run every entry of ``inputs``; results by entry."""
    return {entry: run_module(mod, entry, values) for entry, values in inputs.items()}


def compare(
    numerics: Numerics, before: Mapping[str, Sequence[np.ndarray]], after: Mapping[str, Sequence[np.ndarray]]
) -> tuple[float, str]:
    """Return the worst error over all entries, and every violation by entry (``""`` when there is none)."""
    worst, broken = 0.0, []
    for entry, outputs in before.items():
        error, violations = check(numerics, outputs, after[entry])
        worst = max(worst, error)
        broken += [f"entry {entry}, {v}" for v in violations]
    return worst, "; ".join(broken)


def _why(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"not runnable: {type(error).__name__}: {lines[-1] if lines else ''}"


def verify_pipeline(
    model: Model | tvm.ir.IRModule,
    passes: Sequence[Step],
    inputs: Inputs | None = None,
    *,
    seed: int = 0,
    budget: float | None = None,
) -> list[Record]:
    """Run every entry before and after each pass and hold each to its class.

    Parameters
    ----------
    model : Model or tvm.ir.IRModule
        Must run as it is.
    passes : sequence of (name, pass, Numerics)
    inputs : mapping of str to arrays, optional
        All parameters of each entry; drawn from ``seed`` (and the model's weights) when missing.
    budget : float, optional
        Largest error of the whole pipeline against the original.

    Raises
    ------
    BudgetExceeded
        Naming the three passes with the largest errors.
    """
    mod, inputs = _inputs(model, inputs, seed)
    original = last = run_entries(mod, inputs)
    records: list[Record] = []
    for name, step, numerics in passes:
        start = time.perf_counter()
        with Ledger() as ledger:
            mod = step(mod)
        seconds = time.perf_counter() - start
        counts = (len(ledger.fired), len(ledger.refused))
        try:
            now = run_entries(mod, inputs)
        except Exception as error:  # whatever the compiler raises is the finding
            records.append(Record(name, str(numerics), float("nan"), seconds, *counts, _why(error), False))
            continue
        worst, problem = compare(numerics, last, now)
        records.append(Record(name, str(numerics), worst, seconds, *counts, problem))
        last = now
    if budget is not None:
        total, _ = compare(REASSOCIATES, original, last)
        if total > budget:
            ranked = sorted(((r.name, r.worst_error) for r in records if r.runnable), key=lambda p: -p[1])
            raise BudgetExceeded("numerics of the pipeline", budget, total, ranked)
        if records and not records[-1].runnable:
            raise BudgetExceeded("numerics of the pipeline", budget, float("inf"), [(records[-1].name, float("inf"))])
    return records


@dataclass(frozen=True)
class Culprit:
    """The first pass outside its contract, and the first rewrite instance that breaks it.

    ``rewrite`` is empty and ``instance`` -1 where the pass records no rewrite that can be held back.
    """

    name: str
    problem: str
    before: tvm.ir.IRModule
    rewrite: str = ""
    instance: int = -1
    function: str = ""
    site: str = ""


def _locate(culprit: Culprit, fired: Sequence[Verdict], problem: Callable[[], str]) -> Culprit:
    """Add the guilty rewrite to the culprit by binary search over how many of ``fired`` are let through."""

    def broken(count: int) -> bool:
        limits = dict.fromkeys((v.rewrite for v in fired), 0)
        for verdict in fired[:count]:
            limits[verdict.rewrite] += 1
        with limit_rewrites(limits):
            return bool(problem())

    if not fired or broken(0):
        return culprit
    good, bad = 0, len(fired)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if broken(middle) else (middle, bad)
    guilty = fired[bad - 1]
    instance = sum(v.rewrite == guilty.rewrite for v in fired[: bad - 1])
    return replace(culprit, rewrite=guilty.rewrite, instance=instance, function=guilty.function, site=guilty.site)


def bisect(
    model: Model | tvm.ir.IRModule, passes: Sequence[Step], inputs: Inputs | None = None, *, seed: int = 0
) -> Culprit | None:
    """Return the first pass outside its contract and the rewrite at fault, or None.

    The rules of the pass are held back through :func:`crossloom.rewrite.limit_rewrites`: by binary search over
    the rewrites in the order they fired, the first whose addition breaks the contract (``instance`` counts the
    rule's own, from 0).
    """
    mod, inputs = _inputs(model, inputs, seed)
    last = run_entries(mod, inputs)

    def attempt(step: tvm.transform.Pass, numerics: Numerics) -> tuple[tvm.ir.IRModule, dict, str]:
        after = step(mod)
        try:
            now = run_entries(after, inputs)
        except Exception as error:
            return after, {}, _why(error)
        return after, now, compare(numerics, last, now)[1]

    def attempted_problem(step: tvm.transform.Pass, numerics: Numerics) -> str:
        return attempt(step, numerics)[2]

    for name, step, numerics in passes:
        with Ledger() as ledger:
            after, now, problem = attempt(step, numerics)
        if not problem:
            mod, last = after, now
            continue
        return _locate(Culprit(name, problem, mod), ledger.fired, partial(attempted_problem, step, numerics))
    return None


_REPRO = '''"""Runs {text!r} on the saved module and prints the error of every entry."""

from pathlib import Path

import numpy as np
import tvm

from crossloom.options import parse_pipeline
from crossloom.registry import get_pass, make_pass
from crossloom.testing.verify import render, verify_pipeline

HERE = Path(__file__)
mod = tvm.ir.load_json(HERE.with_suffix(".json").read_text())
data = np.load(HERE.with_suffix(".npz"))
inputs = {{}}
for key in data.files:
    inputs.setdefault(key.rsplit("/", 1)[0], []).append(data[key])
passes = [(p.name, make_pass(p), get_pass(p.name).numerics) for p in parse_pipeline({text!r})]
print(render(verify_pipeline(mod, passes, inputs)))
'''


def write_repro(path: str | Path, mod_before: tvm.ir.IRModule, pass_text: str, inputs: Inputs) -> Path:
    """Write ``path`` (python), with the module (.json, and .txt to read) and inputs (.npz) beside it.

    TVM script loses constants; hence the JSON for running and the script for reading.
    """
    path = Path(path)
    path.write_text(_REPRO.format(text=pass_text))
    path.with_suffix(".json").write_text(tvm.ir.save_json(mod_before))
    path.with_suffix(".txt").write_text(mod_before.script(show_meta=False))
    arrays: dict[str, Any] = {
        f"{entry}/{i:04d}": value for entry, values in inputs.items() for i, value in enumerate(values)
    }
    np.savez(path.with_suffix(".npz"), **arrays)
    return path
