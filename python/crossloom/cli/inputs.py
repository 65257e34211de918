"""Inputs of an entry from a file or made up, and outputs to a file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossloom.atomic import writing_file
from crossloom.errors import UsageError
from crossloom.model import Entry, TensorSpec
from crossloom.runtime.checks import evaluate

FILL_MODES = ("random", "ones", "zeros")

#: Size of a dynamic dimension nobody gave, where its upper bound allows (elements).
_DEFAULT_SIZE = 8


def read_npz(path: Path, entry: Entry) -> dict[str, np.ndarray]:
    """Read arrays by name.

    numpy stores bfloat16 and its like as raw bytes; such an array takes the type its input declares.

    Raises
    ------
    UsageError
        The file is missing, is no .npz, or holds Python objects.
    """
    declared = {spec.name: spec.dtype for spec in entry.inputs}
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise UsageError(f"{path} holds a single array", "write inputs by name with numpy.savez")
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise UsageError(f"no input file {str(path)!r}", "write one with numpy.savez(path, name=array)") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"cannot read {path}: {error}", "write it with numpy.savez(path, name=array)") from error
    for name, array in arrays.items():
        if array.dtype.kind == "V" and name in declared:
            dtype = dtype_of(declared[name])
            if dtype.itemsize == array.dtype.itemsize:
                arrays[name] = array.view(dtype)
    return arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, whole or not at all."""
    with writing_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def dtype_of(name: str) -> np.dtype:
    """Return the numpy type of a name, those of ml_dtypes included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def fill(
    entry: Entry, given: Mapping[str, np.ndarray], mode: str | None, seed: int, sizes: Mapping[str, int]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Add the inputs that are not given.

    Parameters
    ----------
    entry : Entry
    given : mapping of str to numpy.ndarray
    mode : {"random", "ones", "zeros"} or None
        None adds nothing.  Random integers are 0 or 1, which any lookup takes.
    seed : int
    sizes : mapping of str to int
        Dynamic dimensions, for inputs that are added; those of given inputs win.

    Returns
    -------
    tuple
        The inputs, and the dimensions whose size had to be chosen.

    Raises
    ------
    UsageError
        An unknown mode, a dimension the entry has not, or one whose size contradicts or cannot be found.
    """
    if mode is not None and mode not in FILL_MODES:
        raise UsageError(f"--fill-mode: {mode!r} is not known", f"modes: {', '.join(FILL_MODES)}")
    arrays = dict(given)
    if mode is None:
        return arrays, {}
    symbols = {d for spec in entry.inputs for d in spec.shape if isinstance(d, str) and d.isidentifier()}
    for name in sizes:
        if name not in symbols:
            raise UsageError(
                f"--bind: entry {entry.name!r} has no dimension {name!r}",
                f"its dimensions: {', '.join(sorted(symbols)) or 'all static'}",
            )
    known = dict(sizes)
    for spec in entry.inputs:
        if spec.name in arrays and len(spec.shape) == arrays[spec.name].ndim:
            for dim, size in zip(spec.shape, arrays[spec.name].shape):
                if isinstance(dim, str) and dim.isidentifier() and known.setdefault(dim, size) != size:
                    raise UsageError(
                        f"input {spec.name!r} has {dim} = {size}, but --bind says {known[dim]}", "make them agree"
                    )
    missing = [spec for spec in entry.inputs if spec.name not in arrays]
    assumed = {}
    for dim in sorted({d for spec in missing for d in spec.shape if isinstance(d, str) and d.isidentifier()}):
        if dim not in known:
            known[dim] = assumed[dim] = min(_DEFAULT_SIZE, entry.upper_bounds.get(dim, _DEFAULT_SIZE))
    rng = np.random.default_rng(seed)
    for spec in missing:
        arrays[spec.name] = _make(spec, tuple(_size(d, known, spec) for d in spec.shape), mode, rng)
    return arrays, assumed


def _size(dim: int | str, known: Mapping[str, int], spec: TensorSpec) -> int:
    size = dim if isinstance(dim, int) else evaluate(dim, known)
    if size is None or size < 0:
        raise UsageError(
            f"input {spec.name!r}: the size of dimension {dim} cannot be found", "give this input with --inputs"
        )
    return size


def _make(spec: TensorSpec, shape: tuple[int, ...], mode: str, rng: np.random.Generator) -> np.ndarray:
    dtype = dtype_of(spec.dtype)
    if math.prod(shape) * max(dtype.itemsize, 8) >= 2**63:
        raise UsageError(
            f"input {spec.name!r} of shape {shape} is larger than any memory", "give smaller sizes with --bind"
        )
    if mode != "random":
        return np.full(shape, 1 if mode == "ones" else 0).astype(dtype)
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)
