"""``tvmc passes``: the passes there are, their options, and the pipeline of a target."""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossloom.errors import UsageError

from . import arguments as args
from .console import print_json, print_table, progress

if TYPE_CHECKING:
    from crossloom.registry import PassInfo


def command(
    name: Annotated[str | None, typer.Argument(help="Pass to describe.", metavar="NAME")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Print this target's pipeline instead.")] = None,
    as_json: args.Json = False,
) -> None:
    """List the passes, describe one, or print a target's pipeline as text."""
    if name is not None and target is not None:
        raise UsageError("a pass and --target at once", "ask for one of them")
    with progress("loading TVM"):
        import tvm  # noqa: F401  (first: it loads crossloom.flow by its entry point)

        from crossloom.flow import default_text
        from crossloom.registry import STAGES, get_pass, passes
        from crossloom.targets import get_target

        if target is not None:
            text = default_text(get_target(target))
            if as_json:
                print_json({"target": target, "pipeline": text})
            else:
                typer.echo(text)
            return
        found = [get_pass(name)] if name is not None else list(passes().values())
    found.sort(key=lambda info: STAGES.index(info.stage))
    if as_json:
        print_json([_summary(info) for info in found])
    elif name is not None:
        _describe(found[0])
    else:
        rows = [(i.name, i.stage, str(i.numerics), " ".join(i.targets) or "any", i.doc) for i in found]
        print_table("", ("pass", "stage", "numerics", "targets", "what it does"), rows)


def _options(info: PassInfo) -> list[dict[str, Any]]:
    fields = dataclasses.fields(info.options) if info.options else ()
    out = []
    for field in fields:
        default = None if field.default is dataclasses.MISSING else field.default
        out.append({"name": field.name.replace("_", "-"), "type": str(field.type), "default": default})
    return out


def _summary(info: PassInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "stage": info.stage,
        "numerics": {"kind": info.numerics.kind, "bounds": dict(info.numerics.bounds)},
        "targets": list(info.targets),
        "options": [{**o, "default": str(o["default"])} for o in _options(info)],
        "doc": info.doc,
    }


def _describe(info: PassInfo) -> None:
    rows = [("pass", info.name), ("stage", info.stage), ("numerics", str(info.numerics))]
    rows += [("targets", " ".join(info.targets) or "any"), ("", info.doc)]
    print_table("", ("", ""), rows)
    if info.options:
        print_table("Options", ("option", "type", "default"), [tuple(o.values()) for o in _options(info)])
    module = python_inspect.getmodule(info.factory)
    text = python_inspect.getdoc(module) if module is not None and not info.name.startswith("relax.") else None
    if text:
        typer.echo("\n" + text)
