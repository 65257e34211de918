"""Load a model file of any format crossloom reads, told by its suffix or its first bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..model import Model

FORMATS = ("onnx", "gguf", "toml", "pt2")


def load_model(
    path: str | Path,
    *,
    input_shapes: Mapping[str, Sequence[int | str]] | None = None,
    model_format: str | None = None,
) -> Model:
    """Load ``.onnx``, ``.gguf``, ``.pt2`` or a ``.toml`` model description.

    Parameters
    ----------
    path : str or Path
    input_shapes : mapping of str to sequence of int or str, optional
        Input name -> shape, for ONNX graphs.
    model_format : str, optional
        One of ``FORMATS``; by default told by the suffix, else by the first bytes.

    Raises
    ------
    UsageError
        The file is missing or of no known format, or `input_shapes` is given for a format that has none.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no model file {str(path)!r}", "give the path of an existing file")
    kind = model_format or _guess(path)
    if kind not in FORMATS:
        raise UsageError(
            f"{str(path)!r} is of no known model format" + (f" ({model_format!r})" if model_format else ""),
            f"formats: {', '.join(FORMATS)}; a PyTorch checkpoint must be exported with torch.export first",
        )
    if input_shapes and kind != "onnx":
        raise UsageError(f"input shapes cannot be given for a {kind} model", "bind dimensions with specialize()")
    from .implied_sizes import bind_implied_sizes

    return bind_implied_sizes(_import(kind, path, input_shapes))


def _import(kind: str, path: Path, input_shapes: Mapping[str, Sequence[int | str]] | None) -> Model:
    if kind == "onnx":
        from .onnx import from_onnx

        return from_onnx(path, input_shapes=input_shapes)
    if kind == "gguf":
        from .gguf import from_gguf

        return from_gguf(path)
    if kind == "pt2":
        from .torch import from_torch

        return from_torch(path)
    from .description import load_description

    return load_description(path)


def _guess(path: Path) -> str:
    suffix = path.suffix.lower().lstrip(".")
    if suffix in FORMATS:
        return suffix
    with path.open("rb") as file:
        return "gguf" if file.read(4) == b"GGUF" else ""
