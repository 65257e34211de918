"""Hold each pass of a target's pipeline to its numerics contract, on the target's machine or under QEMU.

The loop is :func:`crossloom.testing.stages.walk`; here it runs bundles of a model with inputs by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossloom.model import Model
from crossloom.numerics import EXACT
from crossloom.testing import Call, Culprit, Record
from crossloom.testing.bisection import find_rewrite
from crossloom.testing.execution import BundleExecutor
from crossloom.testing.records import compare
from crossloom.testing.stages import compile_stages, walk

from .inputs import fill

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Verification:
    """All passes, the total error by entry, the last outputs by entry, and the first failure."""

    passes: tuple[Record, ...]
    total: Mapping[str, float]
    outputs: Mapping[str, list[np.ndarray]]
    failure: Culprit | None


def make_inputs(model: Model, seed: int, sizes: Mapping[str, int]) -> dict[str, Arrays]:
    """Return random inputs for every entry; an input that has a default value in the model takes it.

    Parameters
    ----------
    model : Model
    seed : int
    sizes : mapping of str to int
        Dynamic dimensions; entries that lack one ignore it.
    """
    made = {}
    for name, entry in model.entries.items():
        given = {s.name: model.params[s.name] for s in entry.inputs if s.name in model.params}
        symbols = {d for s in entry.inputs for d in s.shape if isinstance(d, str)}
        arrays, _ = fill(entry, given, "random", seed, {k: v for k, v in sizes.items() if k in symbols})
        made[name] = arrays
    return made


def make_calls(model: Model, inputs: Mapping[str, Arrays]) -> list[Call]:
    """Return one call an entry from inputs by name."""
    return [
        Call(name, tuple(arrays[spec.name] for spec in model.entries[name].inputs)) for name, arrays in inputs.items()
    ]


def verify(
    model: Model,
    target: Any,
    inputs: Mapping[str, Arrays],
    *,
    text: str | None = None,
    disabled: tuple[str, ...] = (),
    bisect: bool = False,
    on_step: Callable[[str], None] = lambda name: None,
) -> Verification:
    """Run a pipeline pass by pass.

    Parameters
    ----------
    model : Model
    target : crossloom.targets.Target
    inputs : mapping of str to dict of str to numpy.ndarray
        By entry.
    text, disabled
        As for :func:`crossloom.driver.compile_model`.
    bisect : bool
        Narrow the first broken contract down to the first rewrite instance that breaks it.

    Returns
    -------
    Verification
    """
    stages = compile_stages(target, text, disabled)
    on_step("unfused module")
    calls, execute = make_calls(model, inputs), BundleExecutor(target)
    first = last = None
    records: list[Record] = []
    failure: Culprit | None = None
    for step in walk(model, stages, execute, calls, strict=True, on_stage=on_step):
        records.append(step.record)
        first, last = first or step.expected, step.outputs
        if step.record.problem and failure is None:
            failure = Culprit(step.stage.name, step.record.problem, step.before, step.stage.numerics)
            if bisect:
                on_step(f"bisecting {step.stage.name}")
                failure = find_rewrite(step, execute, calls)
    if first is None or last is None:  # a pipeline of no passes
        first = last = execute(model, calls)
    total, _ = compare(EXACT, calls, first, last)
    return Verification(tuple(records), total, {c.entry: y for c, y in zip(calls, last)}, failure)
