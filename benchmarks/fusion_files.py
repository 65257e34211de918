"""An imported model as a folder of files: how it goes from the process that imports to the one that measures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from crossloom.atomic import writing_folder
from crossloom.model import Entry, Model, TensorSpec


def write_model(path: Path, model: Model) -> None:
    """Write a model's module, weights and entries; whole or not at all."""
    about = {
        "name": model.name,
        "modalities": dict(model.modalities),
        "entries": [asdict(entry) for entry in model.entries.values()],
        # numpy's archive keeps no names of bfloat16 and its like.
        "dtypes": {key: str(value.dtype) for key, value in model.params.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_folder(path) as folder:
        (folder / "module.json").write_text(tvm.ir.save_json(model.mod))
        (folder / "model.json").write_text(json.dumps(about, indent=1))
        with (folder / "params.npz").open("wb") as file:
            np.savez(file, **model.params)  # type: ignore[arg-type]


def read_model(path: Path) -> Model:
    """Read what :func:`write_model` wrote."""
    about = json.loads((path / "model.json").read_text())
    with np.load(path / "params.npz", allow_pickle=False) as file:
        params = {key: file[key].view(np.dtype(about["dtypes"][key])) for key in file.files}
    entries = {fields["name"]: _entry(fields) for fields in about["entries"]}
    mod = tvm.ir.load_json((path / "module.json").read_text())
    return Model(mod, params, entries, about["modalities"], about["name"])


def _entry(fields: dict[str, Any]) -> Entry:
    specs = {
        kind: tuple(TensorSpec(s["name"], tuple(s["shape"]), s["dtype"]) for s in fields[kind])
        for kind in ("inputs", "outputs")
    }
    return Entry(**{**fields, **specs, "weights": tuple(fields["weights"])})
