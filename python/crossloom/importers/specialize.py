"""Bind symbolic dimensions to fixed sizes in every entry of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from ..errors import UsageError
from ..model import Entry, Model
from .signature import entry_attributes, entry_of, symbolic_names


def bind_entry(
    function: relax.Function, entry: Entry, binding: Mapping[Any, int | tvm.ir.Expr]
) -> tuple[relax.Function, Entry]:
    """Bind symbolic dimensions (variables, or their names) of one entry; its description follows."""
    function = function.bind_symbolic_vars(binding)
    entry = entry_of(
        function,
        entry.name,
        [spec.name for spec in entry.inputs],
        [spec.name for spec in entry.outputs],
        weights=entry.weights,
        modality=entry.modality,
        upper_bounds=entry.upper_bounds,
        lower_bounds=entry.lower_bounds,
    )
    for attribute in ("tir_var_upper_bound", "tir_var_lower_bound"):
        if function.attrs and attribute in function.attrs:
            function = function.without_attr(attribute)
    for attribute, value in entry_attributes(entry).items():
        function = function.with_attr(attribute, value)
    return function, entry


def specialize(model: Model, sizes: Mapping[str, int]) -> Model:
    """Return `model` with symbolic dimensions bound.

    Parameters
    ----------
    model : Model
    sizes : mapping of str to int
        Dimension -> size (elements).  ``"T"`` binds in every entry that has it, ``"prefill.T"`` in one.

    Raises
    ------
    UsageError
        A dimension no entry has, a negative size, or one above the dimension's upper bound.
    """
    used: set[str] = set()
    functions = dict(model.mod.functions_items())
    entries = dict(model.entries)
    for gv, function in list(functions.items()):
        entry = model.entries.get(gv.name_hint)
        if entry is None:
            continue
        binding: dict[str, int] = {}
        for name in symbolic_names(function):
            for key in (name, f"{entry.name}.{name}"):
                if key in sizes:
                    binding[name] = int(sizes[key])
                    used.add(key)
        for name, size in binding.items():
            least, limit = entry.lower_bounds.get(name, 0), entry.upper_bounds.get(name)
            if size < least or (limit is not None and size > limit):
                raise UsageError(
                    f"{name} = {size} in entry {entry.name!r} is out of range",
                    f"give {least} to {limit}" if limit is not None else f"give a size of at least {least}",
                )
        if not binding:
            continue
        functions[gv], entries[entry.name] = bind_entry(function, entry, binding)
    missing = [key for key in sizes if key not in used]
    if missing:
        known = sorted({name for gv, f in functions.items() if gv.name_hint in entries for name in symbolic_names(f)})
        raise UsageError(
            f"no entry has a dimension {missing[0]!r}", f"dimensions left: {', '.join(known) or 'all static'}"
        )
    mod = tvm.IRModule(functions, attrs=model.mod.attrs, global_infos=model.mod.global_infos)
    relax.analysis.well_formed(mod)
    return replace(model, mod=mod, entries=entries)
