"""Write a folder that shows one pass outside its numerics contract by itself, and run it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from ..atomic import writing_folder
from ..model import Entry, Model, TensorSpec
from ..numerics import EXACT
from ..options import parse_pipeline
from ..registry import get_pass, make_pass
from ..rewrite import limit_rewrites
from .bisection import Culprit
from .execution import BundleExecutor, Call, Executor, HostExecutor
from .records import compare
from .stages import Stage, compile_stages, pass_stage

_SCRIPT = '''"""Shows one pass outside its numerics contract; needs crossloom. Run: python repro.py"""

import json
from pathlib import Path

from crossloom.testing import replay

folder = Path(__file__).resolve().parent
case = json.loads((folder / "case.json").read_text())
for entry, error in replay(folder).items():
    print(f"{entry}: error {error:.3g} after {case['pass']}, allowed {case['contract']}")
'''


def _stage(text: str, target: Any) -> Stage:
    """Return the stage of a pass written as in pipelines, or of the weights' folding."""
    if text == "fold-weights":
        from ..fold_weights import fold_weights

        return Stage(text, EXACT, fold_weights)
    if target is not None:
        return compile_stages(target, text)[0]
    (item,) = parse_pipeline(text)
    return pass_stage(text, make_pass(item), get_pass(item.name).numerics)


def write_repro(path: str | Path, culprit: Culprit, calls: Sequence[Call], target: Any = None) -> Path:
    """Write the model before a pass, its inputs, and a script; whole or not at all.

    Parameters
    ----------
    path : path
        A folder; one that is there is replaced.
    culprit : Culprit
        Its name must be the pass's text in a pipeline: the script makes it anew from the registry.
    calls : sequence of Call
    target : crossloom.targets.Target, optional
        Where to run; TVM's defaults on this machine when missing.

    Returns
    -------
    pathlib.Path
        The folder: ``repro.py`` to run, ``module.txt`` to read (without its constants), and their data.

    Raises
    ------
    UsageError
        For a pass the registry does not know.
    """
    _stage(culprit.name, target)
    model = culprit.model
    keys = sorted({key for entry in model.entries.values() for key in entry.weights})
    arrays = {f"weight:{key}": model.params[key] for key in keys}
    arrays |= {f"input:{i}:{j}": value for i, call in enumerate(calls) for j, value in enumerate(call.inputs)}
    case = {
        "pass": culprit.name,
        "contract": str(culprit.numerics),
        "problem": culprit.problem,
        "target": None if target is None else str(target),
        "limits": [[*place, count] for place, count in culprit.limits.items()],
        "entries": [asdict(entry) for entry in model.entries.values()],
        "calls": [[call.entry, len(call.inputs), call.label] for call in calls],
        # numpy's archive keeps no names of bfloat16 and its like.
        "dtypes": {key: str(value.dtype) for key, value in arrays.items()},
    }
    with writing_folder(path) as folder:
        (folder / "module.json").write_text(tvm.ir.save_json(model.mod))
        (folder / "module.txt").write_text(model.mod.script(show_meta=False))
        (folder / "case.json").write_text(json.dumps(case, indent=1))
        with (folder / "arrays.npz").open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        (folder / "repro.py").write_text(_SCRIPT)
    return Path(path)


def _entry(fields: dict[str, Any]) -> Entry:
    specs = {
        kind: tuple(TensorSpec(s["name"], tuple(s["shape"]), s["dtype"]) for s in fields[kind])
        for kind in ("inputs", "outputs")
    }
    return Entry(**{**fields, **specs, "weights": tuple(fields["weights"])})


def replay(path: str | Path) -> dict[str, float]:
    """Run what :func:`write_repro` wrote; returns the worst error by entry."""
    folder = Path(path)
    case = json.loads((folder / "case.json").read_text())
    with np.load(folder / "arrays.npz", allow_pickle=False) as file:
        # numpy knows bfloat16 and its like by name once TVM has loaded ml_dtypes.
        arrays = {key: file[key].view(np.dtype(case["dtypes"][key])) for key in file.files}
    params = {key.removeprefix("weight:"): value for key, value in arrays.items() if key.startswith("weight:")}
    entries = {fields["name"]: _entry(fields) for fields in case["entries"]}
    model = Model(tvm.ir.load_json((folder / "module.json").read_text()), params, entries)
    calls = [
        Call(entry, tuple(arrays[f"input:{i}:{j}"] for j in range(count)), label)
        for i, (entry, count, label) in enumerate(case["calls"])
    ]
    target: Any = None
    execute: Executor = HostExecutor()
    if case["target"] is not None:
        from ..targets import get_target

        target = get_target(case["target"])
        execute = BundleExecutor(target)
    stage = _stage(case["pass"], target)
    before = execute(model, calls)
    limits = {(rule, function, site): count for rule, function, site, count in case["limits"]}
    with limit_rewrites(limits) if limits else nullcontext():
        changed = stage.apply(model)
    return compare(stage.numerics, calls, before, execute(changed, calls))[0]
