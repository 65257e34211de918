"""``tvmc lint``: what a target cannot take of a model."""

from __future__ import annotations

from dataclasses import asdict

import typer

from . import arguments as args
from .console import print_json, print_table, progress, say

UNSUPPORTED = 3


def command(
    model: args.ModelPath,
    target: args.TargetText,
    input_shapes: args.InputShapes = None,
    bind: args.Bind = None,
    model_format: args.ModelFormat = None,
    as_json: args.Json = False,
) -> None:
    """List what a target can't take of a model, with the source of each claim; exit 3 if something can't run."""
    with progress("loading TVM") as show:
        from crossloom.lint import lint
        from crossloom.targets import get_target

        chosen = get_target(target)
        show(f"loading {model.name}")
        loaded = args.load(model, input_shapes, model_format, bind)
        show("comparing with the tables")
        findings = lint(loaded, chosen)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        columns = ("", "where", "times", "what", "why", "remedy", "source")
        rows = [
            (
                f.severity,
                f"{f.function}: {f.where}" if f.function else f.where,
                f.count,
                f.what,
                f.why,
                f.remedy,
                f.source,
            )
            for f in findings
        ]
        if rows:
            print_table("", columns, rows)
    errors = sum(f.severity == "error" for f in findings)
    warnings = sum(f.severity == "warning" for f in findings)
    say(f"{model.name} on {chosen}: {errors} errors, {warnings} warnings, {len(findings) - errors - warnings} remarks")
    if errors:
        raise typer.Exit(UNSUPPORTED)
