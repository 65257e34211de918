"""Arguments that several subcommands share, and the reading of their text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossloom.errors import UsageError

if TYPE_CHECKING:
    from crossloom.model import Model

ModelPath = Annotated[Path, typer.Argument(help="Model: .onnx, .gguf, .pt2 or a .toml description.", metavar="MODEL")]
BundlePath = Annotated[Path, typer.Argument(help="Folder or .tar that `tvmc compile` wrote.", metavar="BUNDLE")]
TargetText = Annotated[str, typer.Option("--target", help='E.g. rk3588, host, "rk3588 -cores=2"; see `tvmc targets`.')]
InputShapes = Annotated[
    str | None, typer.Option("--input-shapes", help='Shapes by input: "x:[1,3,224,224] y:[1,n]".', metavar="SHAPES")
]
ModelFormat = Annotated[
    str | None, typer.Option("--model-format", help="onnx, gguf, toml or pt2; told by the suffix if left out.")
]
Bind = Annotated[
    list[str] | None, typer.Option("--bind", help="Fix a symbolic dimension: T=100, or prefill.T=100.", metavar="D=N")
]
PipelineText = Annotated[
    str | None, typer.Option("--pipeline", help="Passes instead of the target's own: a{option=1},b.", metavar="TEXT")
]
DisabledPass = Annotated[
    list[str] | None, typer.Option("--disabled-pass", help="Passes to leave out: a,b.", metavar="NAMES")
]
PassConfig = Annotated[
    list[str] | None, typer.Option("--pass-config", help="TVM PassContext setting: key=value.", metavar="K=V")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

_SHAPE = re.compile(r"\s*(\S+?)\s*:\s*\[([^\[\]]*)\]\s*,?")
_SIZE = re.compile(r"-?[0-9]+")

#: Largest size of a dimension (elements); products of two still fit the 64 bits that indices have.
MAX_SIZE = 2**31 - 1


def _size(flag: str, item: str, digits: str) -> int:
    # int() itself refuses thousands of digits.
    if len(digits.lstrip("0")) > len(str(MAX_SIZE)) or int(digits[-20:]) > MAX_SIZE:
        raise UsageError(f"{flag}: {item!r} is out of range", f"give a size of 0 to {MAX_SIZE}")
    return int(digits[-20:])


def parse_shapes(text: str | None) -> dict[str, tuple[int | str, ...]]:
    """Read ``x:[1,3,224,224] y:[1,n]``; a word is a symbolic dimension.

    Raises
    ------
    UsageError
        Where the text stops making sense, a size is negative or too large, or an input comes twice.
    """
    shapes: dict[str, tuple[int | str, ...]] = {}
    text, at = (text or "").strip(), 0
    while at < len(text):
        match = _SHAPE.match(text, at)
        if match is None:
            raise UsageError(f"--input-shapes: cannot read {text[at:]!r}", 'write "x:[1,3,224,224] y:[1,n]"')
        name, at = match.group(1).strip("'\""), match.end()
        dims: list[int | str] = []
        for part in (p.strip() for p in match.group(2).split(",")) if match.group(2).strip() else ():
            if not (_SIZE.fullmatch(part) or part.isidentifier()) or part.startswith("-"):
                raise UsageError(f"--input-shapes: {part!r} of input {name!r} is no dimension", "give a size or a name")
            dims.append(_size("--input-shapes", part, part) if part.isdigit() else part)
        if name in shapes:
            raise UsageError(f"--input-shapes: input {name!r} comes twice")
        shapes[name] = tuple(dims)
    return shapes


def parse_sizes(items: Iterable[str] | None, flag: str = "--bind") -> dict[str, int]:
    """Read ``T=100`` items (or several in one, separated by commas) as sizes of dimensions."""
    sizes: dict[str, int] = {}
    for item in (part for text in items or () for part in text.split(",") if part.strip()):
        name, sign, value = (part.strip() for part in item.partition("="))
        if not sign or not name or not (value.isascii() and value.isdecimal()):
            raise UsageError(f"{flag}: {item!r} is not DIMENSION=SIZE", f"write {flag} T=100")
        sizes[name] = _size(flag, item, value)
    return sizes


def parse_names(items: Iterable[str] | None) -> list[str]:
    """Read comma-separated names, from an option that may be repeated."""
    return [name.strip() for item in items or () for name in item.split(",") if name.strip()]


def parse_config(items: Iterable[str] | None) -> dict[str, Any]:
    """Read ``key=value`` items; values are JSON where they can be, else text."""
    config: dict[str, Any] = {}
    for item in items or ():
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or not key:
            raise UsageError(
                f"--pass-config: {item!r} is not key=value", "write --pass-config tirx.disable_assert=true"
            )
        try:
            config[key] = json.loads({"True": "true", "False": "false"}.get(value, value))
        except json.JSONDecodeError:
            config[key] = value
    return config


def load(path: Path, shapes: str | None, model_format: str | None, bind: Iterable[str] | None) -> Model:
    """Load a model, with input shapes and bound dimensions applied.

    Raises
    ------
    UsageError, UnsupportedModel
        From the importers.
    """
    wanted, sizes = parse_shapes(shapes), parse_sizes(bind)
    if not path.is_file():
        raise UsageError(f"no model file {str(path)!r}", "give the path of an existing file")
    from crossloom.importers.load import load_model

    model = load_model(path, input_shapes=wanted or None, model_format=model_format)
    if sizes:
        from crossloom.importers.specialize import specialize

        model = specialize(model, sizes)
    return model


def is_bundle(path: Path) -> bool:
    """Tell whether a path can be meant as a bundle: a folder or a .tar."""
    return path.is_dir() or path.suffix == ".tar"
