"""Tuning records on the command line: a MetaSchedule database, consulted before the default schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossloom.errors import UsageError

_APPLY = "relax.MetaScheduleApplyDatabase"
_FILES = ("database_workload.json", "database_tuning_record.json")


@contextlib.contextmanager
def tuning(text: str | None, target: Any, records: Path | None) -> Iterator[str | None]:
    """Open the database of a tuning run; yields the pipeline's text with TVM's pass that applies it.

    The pass goes before ``schedule-cpu``, which leaves alone what is scheduled.

    Parameters
    ----------
    text : str or None
        Textual pipeline; None is the target's own.
    target : crossloom.targets.Target
    records : Path or None
        Work folder of the tuning run; None changes nothing.

    Raises
    ------
    UsageError
        The records are missing or damaged, or the pipeline has no ``schedule-cpu``.
    """
    if records is None:
        yield text
        return
    for name in _FILES:
        if not (records / name).is_file():
            raise UsageError(f"--tuning-records {records}: no {name} there", "give the work folder of a tuning run")
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    from crossloom.flow import default_text
    from crossloom.options import PassText, format_pipeline, parse_pipeline

    try:
        database = JSONDatabase(path_workload=str(records / _FILES[0]), path_tuning_record=str(records / _FILES[1]))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"--tuning-records {records}: cannot be read: {lines[-1]}", "tune again") from error
    steps = parse_pipeline(default_text(target) if text is None else text)
    if _APPLY not in [step.name for step in steps]:
        at = [i for i, step in enumerate(steps) if step.name == "schedule-cpu"]
        if not at:
            raise UsageError(
                "--tuning-records: the pipeline has no schedule-cpu to apply them before", f"add {_APPLY} to it"
            )
        steps.insert(at[0], PassText(_APPLY))
    # TVM's pass asks for the target where it is made, not only where it runs.
    with target.tvm_target(), database:
        yield format_pipeline(steps)
