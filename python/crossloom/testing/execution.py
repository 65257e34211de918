"""How a model is run between passes: on this machine, or as a bundle where its target allows.

An executor is any callable ``(model, calls) -> outputs``: one list of arrays a call.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm

from ..errors import UnsupportedModel, UsageError
from ..importers.signature import tensor_spec
from ..model import Entry, Model
from .runner import build_machine, check_call, flatten, public_entries, random_inputs

Outputs = list[list[np.ndarray]]


@dataclass(frozen=True)
class Call:
    """One call of an entry.

    Attributes
    ----------
    entry : str
    inputs : tuple of numpy.ndarray
        In the entry's order, without its weights: those are the model's, and passes may change them.
    label : str
        For messages, where the entry's name alone does not tell one call from another.
    """

    entry: str
    inputs: tuple[np.ndarray, ...]
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.entry


class Executor(Protocol):
    """Builds a model as it is, without any pass of a pipeline, and runs it."""

    def __call__(self, model: Model, calls: Sequence[Call]) -> Outputs:
        """Return the outputs of every call, nested tuples flattened."""


@dataclass(frozen=True)
class HostExecutor:
    """Runs in this process.

    Attributes
    ----------
    target : tvm.target.Target, optional
        ``llvm`` when missing.
    lowering : tvm.transform.Pass, optional
        TVM's default pipeline when missing; it takes modules at any stage.
    """

    target: tvm.target.Target | None = None
    lowering: tvm.transform.Pass | None = None

    def __call__(self, model: Model, calls: Sequence[Call]) -> Outputs:
        """Build once, run every call."""
        for call in calls:
            weights = model.entries[call.entry].weights if call.entry in model.entries else ()
            check_call(model.mod, call.entry, len(call.inputs) + len(weights))
        machine = build_machine(model.mod, self.target, self.lowering)
        placed: dict[str, Any] = {}
        found: Outputs = []
        for call in calls:
            keys = model.entries[call.entry].weights if call.entry in model.entries else ()
            for key in keys:
                if key not in placed:
                    placed[key] = tvm.runtime.tensor(np.asarray(model.params[key], order="C"))
            given = [tvm.runtime.tensor(np.asarray(x, order="C")) for x in call.inputs]
            found.append(list(flatten(machine[call.entry](*given, *(placed[key] for key in keys)))))
        return found


@dataclass(frozen=True)
class BundleExecutor:
    """Builds a bundle for a target and runs it here if this machine can, else under QEMU.

    Attributes
    ----------
    target : crossloom.targets.Target
    """

    target: Any

    def __call__(self, model: Model, calls: Sequence[Call]) -> Outputs:
        """Build once, run every call in one session."""
        from ..bundle import write_bundle
        from ..driver import compile_model
        from ..runtime import open_session

        compiled = compile_model(model, self.target, text="")
        with tempfile.TemporaryDirectory(prefix="crossloom-verify-") as folder:
            path = write_bundle(
                Path(folder) / "bundle", executable=compiled.executable, model=compiled.model, target=compiled.target
            )
            with open_session(path) as session:
                return [session.run(c.entry, dict(zip(_names(model, c), c.inputs, strict=True))) for c in calls]


def _names(model: Model, call: Call) -> list[str]:
    return [spec.name for spec in model.entries[call.entry].inputs]


def as_model(mod: tvm.ir.IRModule) -> Model:
    """Return a module as a model whose public functions take all their parameters as inputs.

    Outputs are left undescribed: nothing that runs a module here needs them, and they may be nested tuples.

    Raises
    ------
    UsageError
        When there is no public Relax function.
    """
    entries = {}
    for name, function in public_entries(mod).items():
        seen: set[str] = set()
        specs = []
        for i, param in enumerate(function.params):
            # Relax lets two parameters have one name.
            key = param.name if param.name not in seen else f"{param.name}.{i}"
            seen.add(key)
            try:
                specs.append(tensor_spec(key, param.ty))
            except UnsupportedModel as error:
                raise UsageError(f"entry {name!r}, parameter {error.message}", error.remedy) from error
        entries[name] = Entry(name, tuple(specs), ())
    if not entries:
        raise UsageError("the module has no public Relax function", "give it a global_symbol")
    return Model(mod, {}, entries)


def make_calls(
    model: Model,
    inputs: Mapping[str, Sequence[np.ndarray]] | None = None,
    *,
    seed: int = 0,
    lengths: Sequence[int | Mapping[str, int]] = (3,),
) -> list[Call]:
    """Return one call an entry from given inputs, or one an entry and length with inputs drawn from ``seed``.

    Parameters
    ----------
    model : Model
    inputs : mapping of str to arrays, optional
        Inputs of each entry to run, in order, without weights.
    lengths : sequence of int or of mapping of str to int
        Values of the symbolic dimensions (elements); entries without any are called once.

    Raises
    ------
    UsageError
        For an unknown entry or a wrong number of inputs.
    """
    if inputs is not None:
        for name, values in inputs.items():
            if name not in model.entries:
                raise UsageError(f"no entry {name!r}", f"the model has: {', '.join(model.entries)}")
            wanted = len(model.entries[name].inputs)
            if len(values) != wanted:
                raise UsageError(f"entry {name!r} takes {wanted} inputs, got {len(values)}")
        return [Call(name, tuple(values)) for name, values in inputs.items()]
    calls = []
    for name, entry in model.entries.items():
        dynamic = any(isinstance(dim, str) for spec in entry.inputs for dim in spec.shape)
        for length in lengths if dynamic else lengths[:1]:
            drawn = random_inputs(model.mod, name, seed, length)[: len(entry.inputs)]
            values = [model.params.get(spec.name, value) for spec, value in zip(entry.inputs, drawn)]
            label = f"{name} at {_spell(length)}" if dynamic and len(lengths) > 1 else ""
            calls.append(Call(name, tuple(values), label))
    return calls


def _spell(length: int | Mapping[str, int]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in length.items()) if isinstance(length, Mapping) else f"length {length}"
