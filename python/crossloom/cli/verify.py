"""``tvmc verify``: hold every pass to its numerics contract, and the model to another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossloom.errors import ToolchainMissing, UnsupportedModel, UsageError

from . import arguments as args
from .console import print_json, print_table, progress, say

if TYPE_CHECKING:
    import numpy as np

BROKEN = 4

#: What :func:`crossloom.testing.write_repro` writes, and what running it leaves.
_CASE = {"repro.py", "case.json", "module.json", "module.txt", "arrays.npz", "__pycache__"}


def command(
    model: args.ModelPath,
    target: args.TargetText = "host",
    against: Annotated[
        str | None, typer.Option("--against", help="Also compare with: onnxruntime (for .onnx models).")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Largest normwise error allowed --against another runtime.", min=0)
    ] = 1e-3,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the first rewrite that breaks its pass's contract.")
    ] = False,
    repro: Annotated[
        Path | None, typer.Option("--repro", help="Where a contract breaks, write a case that shows it.", metavar="DIR")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs.", min=0)] = 0,
    input_shapes: args.InputShapes = None,
    bind: args.Bind = None,
    size: Annotated[
        list[str] | None, typer.Option("--size", help="Run a dynamic dimension at this size: T=100.", metavar="D=N")
    ] = None,
    model_format: args.ModelFormat = None,
    pipeline: args.PipelineText = None,
    disabled_pass: args.DisabledPass = None,
    as_json: args.Json = False,
) -> None:
    """Run the model before and after each pass and compare; exit 4 if a pass breaks its numerics contract."""
    if against not in (None, "onnxruntime"):
        raise UsageError(f"--against: {against!r} is not known", "known: onnxruntime")
    if against and model_format != "onnx" and model.suffix != ".onnx":
        raise UsageError(f"--against onnxruntime: {model} is no ONNX model", "leave --against out")
    sizes, disabled = args.parse_sizes(size, "--size"), tuple(args.parse_names(disabled_pass))
    if repro is not None:
        from .compile import check_output

        check_output(repro)
        # An older case is deleted with all that is in its folder: nothing else may be there.
        there = {item.name for item in repro.iterdir()} if repro.is_dir() else set()
        if (repro.exists() and not repro.is_dir()) or there - _CASE or (there and "repro.py" not in there):
            raise UsageError(f"--repro {repro} exists and is no case of ours", "name a new folder")
    with progress("loading TVM") as show:
        from crossloom.targets import get_target
        from crossloom.testing import write_repro

        from .verification import make_calls, make_inputs, verify

        chosen = get_target(target)
        show(f"loading {model.name}")
        loaded = args.load(model, input_shapes, model_format, bind)
        inputs = make_inputs(loaded, seed, sizes)
        result = verify(
            loaded, chosen, inputs, text=pipeline, disabled=disabled, bisect=bisect or repro is not None, on_step=show
        )
        other: dict[str, float] = {}
        if against:
            show("ONNX Runtime")
            (entry,) = loaded.entries
            names = [spec.name for spec in loaded.entries[entry].outputs]
            other = _onnxruntime(model, inputs[entry], names, result.outputs[entry])
    broken = [row for row in result.passes if row.problem]
    failure = result.failure
    if failure is not None and repro is not None:
        write_repro(repro, failure, make_calls(loaded, inputs), chosen)
    far = {name: error for name, error in other.items() if not error <= tolerance}
    if as_json:
        report: dict[str, Any] = {
            "passes": [
                {
                    "pass": r.name,
                    "contract": str(r.numerics),
                    "errors": dict(r.errors),
                    "violations": r.breaches,
                }
                for r in result.passes
            ],
            "total": dict(result.total),
            "onnxruntime": other,
        }
        if failure is not None and failure.verdict is not None:
            report["instance"] = {
                "rewrite": failure.verdict.rewrite,
                "function": failure.verdict.function,
                "site": failure.verdict.site,
            }
        print_json(report)
    else:
        rows = [
            ("BROKEN" if r.problem else "ok", r.name, f"{r.worst_error:.2e}", str(r.numerics)) for r in result.passes
        ]
        rows.append(("", "all passes", f"{max(result.total.values(), default=0.0):.2e}", "against the unfused module"))
        rows += [("FAR" if n in far else "ok", n, f"{e:.2e}", "against ONNX Runtime") for n, e in other.items()]
        print_table("", ("", "pass", "worst error", "contract"), rows)
    for row in broken:
        say(f"error: pass {row.name} breaks its contract: {'; '.join(row.breaches[:3])}")
    if failure is not None and failure.verdict is not None:
        v = failure.verdict
        say(f"  first rewrite to do so: {v.rewrite} at {v.site} of {v.function}")
    if failure is not None and repro is not None:
        say(f"  to see it alone: python {repro / 'repro.py'}")
    for name, error in far.items():
        say(f"error: output {name} is {error:.3g} away from ONNX Runtime's, allowed {tolerance:g} (--tolerance)")
    if broken or far:
        raise typer.Exit(BROKEN)


def _onnxruntime(
    path: Path, inputs: dict[str, np.ndarray], names: list[str], ours: list[np.ndarray]
) -> dict[str, float]:
    """Return the normwise error of each output against ONNX Runtime's on the same inputs."""
    from crossloom.numerics import worst_error

    try:
        import onnxruntime
    except ImportError as error:
        raise ToolchainMissing("onnxruntime is not installed", "pip install 'crossloom[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        theirs = session.run(names, inputs)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModel(
            f"ONNX Runtime does not run {path}: {lines[0]}", "verify without --against onnxruntime"
        ) from error
    return {name: worst_error(want, have) for name, want, have in zip(names, theirs, ours)}
