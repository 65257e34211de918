"""The pass-by-pass driver: run a model before and after each stage, and hold the stage to its numerics class.

:func:`walk` is the one loop behind :func:`crossloom.testing.verify_pipeline`, ``tvmc verify`` and the
demonstration's table of passes; they differ in their stages and in where they run the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax
from tvm_ffi import structural_hash

from ..errors import CrossloomError, UnsupportedModel, UsageError
from ..model import Model
from ..numerics import EXACT, Numerics, Violation
from ..registry import get_pass, passes
from ..verdict import Ledger, Verdict
from .execution import Call, Executor, Outputs
from .records import Record, compare, reason


@dataclass(frozen=True)
class Stage:
    """One step from model to model, and what it may do to the numbers.

    Attributes
    ----------
    name : str
    numerics : Numerics
    apply : callable (Model) -> Model
    """

    name: str
    numerics: Numerics
    apply: Callable[[Model], Model]


def pass_stage(name: str, step: tvm.transform.Pass, numerics: Numerics) -> Stage:
    """Return the stage of one TVM pass."""
    return Stage(name, numerics, lambda model: replace(model, mod=step(model.mod)))


def compile_stages(target: Any, text: str | None = None, disabled: Sequence[str] = ()) -> list[Stage]:
    """Return what :func:`crossloom.driver.compile_model` does to a model once its implied sizes are bound.

    Parameters
    ----------
    target : crossloom.targets.Target
    text, disabled
        As for :func:`crossloom.flow.steps`.
    """
    from ..driver import FOLD_AFTER
    from ..flow import steps
    from ..fold_weights import fold_weights

    scope = target.tvm_target()

    def within(step: tvm.transform.Pass) -> Callable[[Model], Model]:
        def apply(model: Model) -> Model:
            with scope:
                return replace(model, mod=step(model.mod))

        return apply

    stages = []
    for step in steps(target, text, disabled):
        stages.append(Stage(str(step.text), step.info.numerics, within(step.run)))
        if step.text.name == FOLD_AFTER:
            # Values are computed by the same operators, once and before instead of on each call.
            stages.append(Stage("fold-weights", EXACT, fold_weights))
    return stages


def contract_of(name: str) -> Numerics | None:
    """Return what the registry says of a pass, by the name TVM shows; None for a pass nobody declared.

    Parameters
    ----------
    name : str
        A registry name, a factory's, or one of TVM's Relax passes with or without ``relax.``.

    Examples
    --------
    >>> contract_of("inline-composites").kind, contract_of("FuseOps").kind, contract_of("MyPass")
    ('exact', 'reassociates', None)
    """
    known = passes()
    if name in known:
        return known[name].numerics
    for info in known.values():
        if getattr(info.factory, "__name__", "") == name:
            return info.numerics
    try:
        return get_pass(f"relax.{name.removeprefix('relax.')}").numerics
    except UsageError:
        return None


def run_after(execute: Executor, model: Model, calls: Sequence[Call]) -> Outputs:
    """Run what a pass returned, but never an ill-formed module: that may take the process down.

    Raises
    ------
    UnsupportedModel
        Naming the first rule the module breaks.
    """
    try:
        relax.analysis.well_formed(model.mod)
    except Exception as error:
        raise UnsupportedModel(f"not well-formed: {reason(error)}") from error
    return execute(model, calls)


@dataclass(frozen=True)
class Walked:
    """One stage of a walk: the models before and after, and the outputs (of the last model that ran)."""

    stage: Stage
    record: Record
    before: Model
    after: Model
    expected: Outputs
    outputs: Outputs
    fired: tuple[Verdict, ...]


def walk(
    model: Model,
    stages: Sequence[Stage],
    execute: Executor,
    calls: Sequence[Call],
    *,
    strict: bool = False,
    on_stage: Callable[[str], None] = lambda name: None,
) -> Iterator[Walked]:
    """Apply stages one after the other and compare each module's outputs with the last ones.

    Parameters
    ----------
    model : Model
        Must run as it is.
    stages : sequence of Stage
    execute : Executor
    calls : sequence of Call
    strict : bool
        Raise where a pass fails or its result does not run, instead of recording it and going on (without the
        pass, or to the next module that runs).
    on_stage : callable
        Told each stage's name before it is applied.

    Yields
    ------
    Walked
        As soon as the stage is measured; a caller may stop.

    Raises
    ------
    UnsupportedModel
        In strict mode, naming the pass.
    """
    outputs = execute(model, calls)
    for stage in stages:
        on_stage(stage.name)
        # A copy that a pass which writes to its input cannot reach (functions themselves are immutable).
        kept = replace(model, mod=model.mod.clone())
        print_before = _fingerprint(model)
        start = time.perf_counter()
        after, fault = model, ""
        with Ledger() as ledger:
            try:
                after = stage.apply(model)
            except Exception as error:
                if strict:
                    raise _failed(stage, model, error) from error
                after, fault = kept, f"the pass failed: {reason(error)}"
        seconds = time.perf_counter() - start
        if _fingerprint(model) != print_before:
            fault = "; ".join(filter(None, (fault, "the pass changed its input")))
        errors: dict[str, float] = dict.fromkeys((c.entry for c in calls), 0.0)
        violations: tuple[Violation, ...] = ()
        not_run, expected = "", outputs
        changed = _fingerprint(after) != print_before
        if changed:
            try:
                outputs = run_after(execute, after, calls)
                errors, violations = compare(stage.numerics, calls, expected, outputs)
            except Exception as error:  # whatever the compiler raises is the finding
                if strict:
                    raise _failed(stage, model, error) from error
                errors, not_run = {}, reason(error)
        counts = {"fired": len(ledger.fired), "refused": len(ledger.refused)}
        record = Record(stage.name, stage.numerics, errors, violations, fault, not_run, changed, seconds, **counts)
        yield Walked(stage, record, kept, after, expected, outputs, tuple(ledger.fired))
        model = after


def _fingerprint(model: Model) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return what changes when the module or its weights do; weights are compared by object."""
    return structural_hash(model.mod), tuple((key, id(value)) for key, value in sorted(model.params.items()))


def _failed(stage: Stage, model: Model, error: Exception) -> CrossloomError:
    if isinstance(error, CrossloomError):
        return error
    return UnsupportedModel(
        f"pass {stage.name} failed on {model.name}: {reason(error)}", "leave it out with --disabled-pass"
    )
