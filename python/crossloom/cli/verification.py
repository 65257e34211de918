"""Hold each pass of a pipeline to its numerics contract by running the model before and after it.

Every prefix of a pipeline is a runnable module, so the passes are applied one at a time, the module is built and run
after each, on the target's machine or under QEMU, and its outputs are compared with those before.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from crossloom.atomic import writing_folder
from crossloom.bundle import write_bundle
from crossloom.driver import Compiled, compile_model
from crossloom.flow import steps
from crossloom.model import Model
from crossloom.numerics import Numerics, check, worst_error
from crossloom.rewrite.driver import limit_rewrites
from crossloom.runtime import open_session
from crossloom.verdict import Verdict

from .inputs import fill

Arrays = dict[str, np.ndarray]
Outputs = dict[str, list[np.ndarray]]


@dataclass(frozen=True)
class PassError:
    """What one pass did to the numbers.

    Attributes
    ----------
    name : str
        Text of the pass.
    contract : Numerics
    errors : mapping of str to float
        Worst normwise error by entry, against the module before the pass.
    violations : tuple of str
        Empty when the contract holds.
    """

    name: str
    contract: Numerics
    errors: Mapping[str, float]
    violations: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Where a pass broke its contract: the model before it, and what is needed to see it again."""

    before: Model
    step: str
    limits: Mapping[str, int]
    instance: Verdict | None
    expected: Outputs


@dataclass(frozen=True)
class Verification:
    """All passes, the total, the last outputs, and the first failure."""

    passes: tuple[PassError, ...]
    total: Mapping[str, float]
    outputs: Outputs
    failure: Failure | None


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


def run_compiled(compiled: Compiled, inputs: Mapping[str, Arrays]) -> Outputs:
    """Run every entry of a compiled model where its target allows: here, else under QEMU."""
    with tempfile.TemporaryDirectory(prefix="crossloom-verify-") as folder:
        path = write_bundle(
            Path(folder) / "bundle", executable=compiled.executable, model=compiled.model, target=compiled.target
        )
        with open_session(path) as session:
            return {name: session.run(name, arrays) for name, arrays in inputs.items()}


def _compare(contract: Numerics, before: Outputs, after: Outputs) -> tuple[dict[str, float], tuple[str, ...]]:
    errors, violations = {}, []
    for name in before:
        errors[name], broken = check(contract, before[name], after[name])
        violations += [f"{name}: {item}" for item in broken]
    return errors, tuple(violations)


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
    on_step("unfused module")
    compiled = compile_model(model, target, text="")
    unfused = before = run_compiled(compiled, inputs)
    rows, failure, current = [], None, compiled.model
    for step in steps(target, text, disabled):
        name = str(step.text)
        on_step(name)
        after_model = compile_model(current, target, text=name)
        after = run_compiled(after_model, inputs)
        errors, violations = _compare(step.info.numerics, before, after)
        rows.append(PassError(name, step.info.numerics, errors, violations))
        if violations and failure is None:
            limits: dict[str, int] = {}
            instance = None
            if bisect:
                on_step(f"bisecting {name}")
                fired = after_model.ledger.fired
                limits, instance = _bisect(current, target, name, step.info.numerics, fired, inputs, before)
            failure = Failure(current, name, limits, instance, before)
        current, before = after_model.model, after
    total = {name: max(map(worst_error, unfused[name], before[name]), default=0.0) for name in before}
    return Verification(tuple(rows), total, before, failure)


def _bisect(
    model: Model,
    target: Any,
    name: str,
    contract: Numerics,
    fired: list[Verdict],
    inputs: Mapping[str, Arrays],
    expected: Outputs,
) -> tuple[dict[str, int], Verdict | None]:
    """Find the fewest first rewrites of a pass that break its contract; none when it breaks without any."""
    rules = {v.rewrite for v in fired}

    def limits(count: int) -> dict[str, int]:
        return dict.fromkeys(rules, 0) | Counter(v.rewrite for v in fired[:count])

    def broken(count: int) -> bool:
        with limit_rewrites(limits(count)):
            compiled = compile_model(model, target, text=name)
        return bool(_compare(contract, expected, run_compiled(compiled, inputs))[1])

    if not fired or broken(0):
        return {}, None
    low, high = 0, len(fired)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if broken(middle) else (middle, high)
    return limits(high), fired[high - 1]


_REPRO = '''"""Shows one pass outside its numerics contract; needs crossloom. Run: python repro.py"""

import json
from pathlib import Path

import numpy as np
import tvm
from crossloom.cli.verification import replay

folder = Path(__file__).resolve().parent
case = json.loads((folder / "case.json").read_text())
module = tvm.ir.load_json((folder / "module.json").read_text())
for entry, error in replay(folder, module, case).items():
    print(f"{entry}: error {error:.3g} after {case['pass']}, allowed {case['contract']}")
'''


def write_repro(path: Path, failure: Failure, inputs: Mapping[str, Arrays], target: Any, contract: Numerics) -> None:
    """Write a folder that shows a failure by itself: module before the pass, weights, inputs, and a script."""
    model = failure.before
    case = {
        "pass": failure.step,
        "contract": str(contract),
        "target": str(target),
        "limits": dict(failure.limits),
        "weights": {name: list(entry.weights) for name, entry in model.entries.items()},
        "entries": {name: [spec.name for spec in entry.inputs] for name, entry in model.entries.items()},
    }
    arrays = {
        f"weight:{key}": value for e in model.entries.values() for key in e.weights for value in [model.params[key]]
    }
    arrays |= {f"input:{name}:{key}": value for name, group in inputs.items() for key, value in group.items()}
    # numpy's archive keeps no names of bfloat16 and its like.
    case["dtypes"] = {key: str(value.dtype) for key, value in arrays.items()}
    with writing_folder(path) as folder:
        (folder / "module.json").write_text(tvm.ir.save_json(model.mod))
        (folder / "case.json").write_text(json.dumps(case, indent=1))
        with (folder / "arrays.npz").open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        (folder / "repro.py").write_text(_REPRO)


def replay(folder: Path, module: tvm.ir.IRModule, case: Mapping[str, Any]) -> dict[str, float]:
    """Run what :func:`write_repro` wrote; returns the worst error by entry."""
    from crossloom.importers.signature import entry_of
    from crossloom.targets import get_target

    from .inputs import dtype_of

    with np.load(folder / "arrays.npz", allow_pickle=False) as file:
        arrays = {key: file[key].view(dtype_of(case["dtypes"][key])) for key in file.files}
    entries = {}
    for name, names in case["entries"].items():
        returned = module[name].ret_ty
        count = len(returned.fields) if isinstance(returned, tvm.relax.TupleType) else 1
        outputs = [f"output{i}" for i in range(count)]
        entries[name] = entry_of(module[name], name, names, outputs, weights=tuple(case["weights"][name]))
    params = {key.removeprefix("weight:"): value for key, value in arrays.items() if key.startswith("weight:")}
    model = Model(module, params, entries)
    inputs = {n: {k: arrays[f"input:{n}:{k}"] for k in names} for n, names in case["entries"].items()}
    target = get_target(case["target"])
    before = run_compiled(compile_model(model, target, text=""), inputs)
    with limit_rewrites(case["limits"]):
        after = run_compiled(compile_model(model, target, text=case["pass"]), inputs)
    return {name: max(map(worst_error, before[name], after[name]), default=0.0) for name in before}
