"""Write a bundle: the library, the weights, the manifest and whatever else belongs to one compiled model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tvm

import crossloom
from crossloom.atomic import writing_file, writing_folder
from crossloom.bundle.archive import pack
from crossloom.bundle.link import arch_of, link
from crossloom.bundle.manifest import LIBRARY, MANIFEST, WEIGHTS, Manifest, Part, is_safe
from crossloom.bundle.replace import check_replaceable
from crossloom.bundle.weights import write_weights
from crossloom.errors import InternalError, UsageError
from crossloom.model import Model


def write_bundle(
    path: str | os.PathLike[str],
    *,
    executable: Any,
    model: Model,
    target: tvm.target.Target,
    target_name: str = "",
    cross_compiler: str | None = None,
    extras: Mapping[str, bytes] | None = None,
    format: Literal["dir", "tar"] | None = None,
) -> Path:
    """Write one compiled model, whole or not at all.

    Parameters
    ----------
    path : path
        A folder, or a file for ``format="tar"``.  A bundle that is there already is replaced; a file or
        folder that is, or holds, anything else is not.
    executable : tvm.relax.VMExecutable
        What ``tvm.compile`` returned for the module of `model`.
    model : Model
        Entries and weights, as they are after the pipeline.
    target : tvm.target.Target
    target_name : str
        Name of the crossloom target, e.g. ``"rk3588"``.
    cross_compiler : str, optional
        Compiler that links for the target instead of the usual one.
    extras : mapping of str to bytes
        More files by relative path, e.g. ``{"ledger.json": ..., "pipeline.txt": ...}``.
    format : {"dir", "tar"}, optional
        By default ``"tar"`` where `path` ends in ``.tar``.

    Returns
    -------
    path : pathlib.Path

    Raises
    ------
    UsageError
        The output cannot be written or replaced, or an extra file has an unusable name.
    ToolchainMissing, ToolchainFailed
        The library could not be linked.
    InternalError
        The executable lacks an entry, or takes another number of parameters.
    """
    output = Path(path)
    chosen = format or ("tar" if output.suffix == ".tar" else "dir")
    if chosen not in ("dir", "tar"):
        raise UsageError(f"unknown bundle format `{chosen}`", 'use "dir" or "tar"')
    extra_files = dict(extras or {})
    for name in extra_files:
        if not is_safe(name) or name in (MANIFEST, LIBRARY, WEIGHTS):
            raise UsageError(f"extra file `{name}` cannot be stored in a bundle", "give a plain relative name")
    _check_entries(executable, model)
    with _folder(output, chosen) as folder:
        arch = arch_of(target)
        link(executable, folder / LIBRARY, arch, cross_compiler)
        used: dict[str, np.ndarray] = {
            name: model.params[name] for entry in model.entries.values() for name in entry.weights
        }
        try:
            stored = write_weights(folder / WEIGHTS, used)
            for name, data in extra_files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            names = [LIBRARY, WEIGHTS, *sorted(extra_files)]
            manifest = Manifest(
                name=model.name,
                target=target_name or target.kind.name,
                arch=arch,
                tvm_target=_describe(target),
                entries=dict(model.entries),
                weights=stored,
                modalities=dict(model.modalities),
                parts=tuple(Part(n, (folder / n).stat().st_size, sha256(folder / n)) for n in names),
                versions={"crossloom": crossloom.__version__, "tvm": version("apache-tvm")},
            )
            # Nothing is written that this version would refuse to read.
            Manifest.from_json(manifest.to_json(), str(output))
            (folder / MANIFEST).write_text(manifest.to_json())
            if chosen == "tar":
                with writing_file(output) as temporary:
                    pack(folder, [MANIFEST, *names], temporary)
        except OSError as err:
            raise UsageError(f"cannot write {output}: {err.strerror or err}", "choose another path") from err
    return output


def sha256(path: Path) -> str:
    """Return the sha256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _folder(output: Path, chosen: str) -> Iterator[Path]:
    check_replaceable(output, chosen)
    if chosen == "tar":
        with tempfile.TemporaryDirectory(prefix="crossloom-bundle-") as name:
            yield Path(name)
        return
    with writing_folder(output) as folder:
        yield folder


def _check_entries(executable: Any, model: Model) -> None:
    arity = executable.mod["vm_load_executable"]()["get_function_arity"]
    for entry in model.entries.values():
        missing = [name for name in entry.weights if name not in model.params]
        if missing:
            raise InternalError(f"entry `{entry.name}` takes weight `{missing[0]}`, which the model lacks")
        wanted = len(entry.inputs) + len(entry.weights)
        try:
            had = arity(entry.name)
        except Exception as err:  # TVM raises several types for a function that is not there
            raise InternalError(f"the executable has no entry `{entry.name}`") from err
        if had != wanted:
            raise InternalError(f"entry `{entry.name}` takes {had} parameters, the model says {wanted}")


def _describe(target: tvm.target.Target) -> dict[str, Any]:
    # A target prints itself as JSON.
    return dict(json.loads(str(target)))
