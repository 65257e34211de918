"""Say what a target cannot take of a model, before anything is converted, with the table row that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm

from .lint_calls import FEATURES, Shape, calls, functions
from .lint_finding import SEVERITIES, Finding
from .lint_judge import judge, judge_inputs, judge_support
from .lint_memory import judge_memory
from .model import Model
from .targets.model import Target

__all__ = ["FEATURES", "Finding", "Shape", "lint"]


def lint(model: Model | tvm.ir.IRModule, target: Target) -> list[Finding]:
    """Find what a target cannot take.

    Parameters
    ----------
    model : Model or IRModule
        As imported; parameters after ``num_input`` and constants count as known when the model is built.
    target : Target

    Returns
    -------
    list of Finding
        Errors first; then by function and by order of appearance.  Findings of a function that differ only in
        place are one, with a count.
    """
    mod = model.mod if isinstance(model, Model) else model
    merged: dict[tuple[Any, ...], Finding] = {}

    def add(finding: Finding) -> None:
        key = (finding.function, finding.code, finding.op, finding.what, finding.why, finding.source)
        old = merged.get(key)
        merged[key] = finding if old is None else replace(old, count=old.count + 1)

    for name, function in functions(mod):
        for finding in judge_inputs(function, target, name):
            add(finding)
        converted: dict[tuple[str, str], tuple[int, str]] = {}
        for where, call, fixed in calls(function):
            for unit in target.units:
                for support, dtype in judge(call, target, unit, fixed):
                    found = judge_support(support, dtype, target, call.op.name, where, name)
                    if found is not None:
                        add(found)
                    elif support.computed_in:
                        count, first = converted.get((dtype, support.computed_in), (0, where))
                        converted[dtype, support.computed_in] = (count + 1, first)
        for (dtype, computed), (count, first) in converted.items():
            what = f"{dtype} is computed as {computed} on the NPU"
            npu = target.npu
            source = f"{target.name}: {npu.note or npu.source}" if npu is not None else ""
            why = "the tool chain converts it"
            add(Finding("info", "converted", name, first, "", what, why, source, "", count=count))
    if target.family == "micro":
        for finding in judge_memory(mod, model if isinstance(model, Model) else None, target):
            add(finding)
    return sorted(merged.values(), key=lambda f: SEVERITIES.index(f.severity))
