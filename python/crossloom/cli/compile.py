"""``tvmc compile``: a model to a bundle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossloom.errors import UsageError

from . import arguments as args
from .console import progress, say, size_text
from .tuning import tuning

if TYPE_CHECKING:
    from crossloom.driver import Compiled

FORMATS = ("dir", "tar")
CODE = {"relax": "code/relax.py", "tir": "code/tir.py", "asm": "code/asm.s"}

#: What the temporary sibling of an output adds to its name: ``.NAME.xxxxxxxx.tmp`` (bytes).
_TEMPORARY = 14


def command(
    model: args.ModelPath,
    target: args.TargetText,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder or .tar to write.", metavar="OUT")],
    output_format: Annotated[
        str | None, typer.Option("--output-format", help="dir or tar; told by OUT if left out.")
    ] = None,
    input_shapes: args.InputShapes = None,
    bind: args.Bind = None,
    model_format: args.ModelFormat = None,
    pipeline: args.PipelineText = None,
    disabled_pass: args.DisabledPass = None,
    pass_config: args.PassConfig = None,
    tuning_records: Annotated[
        Path | None, typer.Option("--tuning-records", help="Folder of a MetaSchedule database to apply.")
    ] = None,
    cross_compiler: Annotated[
        str | None, typer.Option("--cross-compiler", help="C++ compiler that links for the target.", metavar="CC")
    ] = None,
    dump_code: Annotated[
        list[str] | None, typer.Option("--dump-code", help="Store in the bundle: relax,tir,asm.", metavar="KINDS")
    ] = None,
) -> None:
    """Compile a model into a bundle: library, weights, manifest and the ledger of every rewrite."""
    kinds = args.parse_names(dump_code)
    for kind in kinds:
        if kind not in CODE:
            raise UsageError(f"--dump-code: {kind!r} is not known", f"kinds: {', '.join(CODE)}")
    if output_format is not None and output_format not in FORMATS:
        raise UsageError(f"--output-format: {output_format!r} is not known", f"formats: {', '.join(FORMATS)}")
    settings, disabled = args.parse_config(pass_config), args.parse_names(disabled_pass)
    check_output(output)
    if model.exists() and output.exists() and model.samefile(output):
        raise UsageError(f"--output {output} is the model itself", "name another file or folder")
    with progress("loading TVM") as show:
        from crossloom.bundle import write_bundle
        from crossloom.bundle.link import check_linkable
        from crossloom.bundle.replace import check_replaceable
        from crossloom.driver import compile_model
        from crossloom.semantics import region_table
        from crossloom.targets import get_target

        check_replaceable(output, output_format or ("tar" if output.suffix == ".tar" else "dir"))
        chosen = get_target(target)
        check_linkable(chosen, cross_compiler)
        show(f"loading {model.name}")
        loaded = args.load(model, input_shapes, model_format, bind)
        with tuning(pipeline, chosen, tuning_records) as text:
            compiled = compile_model(loaded, chosen, text=text, disabled=disabled, pass_config=settings, on_pass=show)
        show("writing the bundle")
        extras = {
            "ledger.json": compiled.ledger.to_json().encode(),
            "pipeline.txt": (compiled.pipeline + "\n").encode(),
            "seconds.json": json.dumps(compiled.seconds, indent=1).encode(),
            "regions.json": json.dumps(region_table(compiled.model.mod), indent=1).encode(),
        } | {CODE[kind]: code_of(compiled, kind).encode() for kind in kinds}
        path = write_bundle(
            output,
            executable=compiled.executable,
            model=compiled.model,
            target=compiled.target,
            target_name=str(chosen),
            cross_compiler=cross_compiler,
            extras=extras,
            format=output_format,  # type: ignore[arg-type]
        )
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    size = sum(file.stat().st_size for file in files)
    say(
        f"{path}: {size_text(size)}, entries {', '.join(compiled.model.entries)}; "
        f"{len(compiled.ledger.fired)} rewrites made, {len(compiled.ledger.refused)} refused, "
        f"{sum(compiled.seconds.values()):.1f} s"
    )


def check_output(path: Path) -> None:
    """Refuse an output that cannot be written before the long work starts.

    Raises
    ------
    UsageError
    """
    folder = path.absolute().parent
    try:
        path.exists()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        # What is written first has a longer name, a temporary one beside the output.
        longest = os.pathconf(folder, "PC_NAME_MAX") - _TEMPORARY if hasattr(os, "pathconf") else 0
        if longest and len(os.fsencode(path.name)) > longest:
            raise UsageError(f"cannot write {path}: the name is too long", f"use at most {longest} bytes")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "choose a path that can be written") from None
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: {folder} is not a folder", "choose a path that can be written")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: no permission in {folder}", "choose a path that can be written")


def code_of(compiled: Compiled, kind: str) -> str:
    """Return the code of a compiled model as text: ``relax`` and ``tir`` as TVMScript, ``asm`` of its kernels."""
    import tvm
    from tvm import relax

    if kind == "asm":
        found, todo = [], [compiled.executable.mod]
        while todo:
            module = todo.pop(0)
            todo += list(module.imports)
            if module.kind == "llvm":
                found.append(module.inspect_source("asm"))
            elif module.kind == "c":
                found.append(module.inspect_source())
        if not found:
            raise UsageError("--dump-code asm: the compiled model holds no machine code", "dump tir instead")
        return "\n".join(found)
    wanted = relax.Function if kind == "relax" else tvm.tirx.PrimFunc
    functions = {gv: fn for gv, fn in compiled.model.mod.functions_items() if isinstance(fn, wanted)}
    return str(tvm.IRModule(functions).script())
