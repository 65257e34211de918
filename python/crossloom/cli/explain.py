"""``tvmc explain``: the ledger: every rewrite that was made or refused, and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from crossloom.errors import UsageError
from crossloom.verdict import Ledger, Verdict

from . import arguments as args
from .compile import CODE, code_of
from .console import print_json, print_table, progress, say, size_text


def command(
    path: Annotated[Path, typer.Argument(help="A bundle, or a model with --target.", metavar="BUNDLE|MODEL")],
    target: Annotated[str | None, typer.Option("--target", help="Compile the model for it first.")] = None,
    pass_name: Annotated[
        str | None, typer.Option("--pass", help="Only what this pass (or rewrite) did or refused.", metavar="NAME")
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the kernels after the passes, as TVMScript.")] = False,
    input_shapes: args.InputShapes = None,
    bind: args.Bind = None,
    model_format: args.ModelFormat = None,
    pipeline: args.PipelineText = None,
    as_json: args.Json = False,
) -> None:
    """Print the ledger: each rewrite that was made or refused, with the reason and what was at stake."""
    if args.is_bundle(path):
        if target or pipeline or input_shapes or bind:
            raise UsageError(f"{path} is a bundle, compiled already", "give the model to compile it another way")
        ledger, text, script = _from_bundle(path, code)
    else:
        if not path.is_file():
            raise UsageError(f"no model or bundle {str(path)!r}", "give the path of an existing file")
        if target is None:
            raise UsageError(f"{path} is a model: for which target?", "add --target, e.g. --target rk3588")
        with progress("loading TVM") as show:
            from crossloom.driver import compile_model
            from crossloom.targets import get_target

            chosen = get_target(target)
            show(f"loading {path.name}")
            loaded = args.load(path, input_shapes, model_format, bind)
            compiled = compile_model(loaded, chosen, text=pipeline, on_pass=show, build=False)
            ledger, text = compiled.ledger, compiled.pipeline
            script = code_of(compiled, "tir") if code else ""
    verdicts = list(ledger) if pass_name is None else _of_pass(ledger, pass_name, text)
    if as_json:
        report = {"pipeline": text, "verdicts": [asdict(v) for v in verdicts]}
        print_json(report | ({"code": script} if code else {}))
        return
    if code:
        typer.echo(script)
    rows = [
        (v.rewrite, v.function, v.site, v.code, v.culprit, v.detail, size_text(v.bytes_saved), v.macs) for v in verdicts
    ]
    columns = ("rewrite", "function", "site", "verdict", "culprit", "detail", "saves", "MACs")
    if rows:
        print_table("", columns, rows)
    fired = sum(v.fired for v in verdicts)
    saved = sum(v.bytes_saved for v in verdicts if v.fired)
    say(
        f"{fired} rewrites made (estimated to save {size_text(saved)} of traffic), {len(verdicts) - fired} refused; "
        f"passes: {text}"
    )


def _from_bundle(path: Path, code: bool) -> tuple[Ledger, str, str]:
    from crossloom.bundle import Bundle

    with Bundle.open(path) as bundle:
        parts = {part.path for part in bundle.manifest.parts}
        if code and CODE["tir"] not in parts:
            raise UsageError(f"{path} holds no code", "compile with --dump-code tir")
        try:
            ledger = Ledger.from_json(bundle.read("ledger.json").decode())
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}: ledger.json cannot be read: {error}", "compile again") from error
        text = bundle.read("pipeline.txt").decode().strip() if "pipeline.txt" in parts else ""
        return ledger, text, bundle.read(CODE["tir"]).decode() if code else ""


def _of_pass(ledger: Ledger, name: str, text: str) -> list[Verdict]:
    """Return the verdicts of one pass; a name neither in the ledger nor in the pipeline is an error."""
    from crossloom.options import parse_pipeline

    found = [v for v in ledger if name in (v.pass_name, v.rewrite)]
    ran = [step.name for step in parse_pipeline(text)]
    if not found and name not in ran:
        raise UsageError(f"pass {name!r} did not run", f"these did: {', '.join(ran) or 'none'}")
    return found
