"""Name the weights of composed parts: one name for all that hold the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..model import Model, PackedWeight
from .signature import check_entry


def share_weights(
    parts: Mapping[str, Model], picked: Mapping[str, Sequence[tuple[str, str]]]
) -> tuple[dict[tuple[str, str], str], dict[str, np.ndarray], dict[str, PackedWeight]]:
    """Name every used weight, one name for all weights with the same dtype, shape and bytes.

    Parameters
    ----------
    parts : mapping of str to Model
    picked : mapping of str to sequence of (part, entry)
        What each composed entry runs.

    Returns
    -------
    names : dict of (part, weight) to str
    params : dict of str to numpy.ndarray
    packed : dict of str to PackedWeight
        Stored form of the weights that any part has in packed form.
    """
    groups: dict[tuple[str, tuple[int, ...], str], list[tuple[str, str]]] = {}
    seen: set[tuple[str, str]] = set()
    digests: dict[int, str] = {}
    for chain in picked.values():
        for part, entry_name in chain:
            check_entry(parts[part], entry_name, part)
            for weight in parts[part].entries[entry_name].weights:
                if (part, weight) in seen:
                    continue
                seen.add((part, weight))
                array = parts[part].params[weight]
                if id(array) not in digests:
                    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    digests[id(array)] = hashlib.sha256(flat.data).hexdigest()
                ident = (str(array.dtype), tuple(array.shape), digests[id(array)])
                groups.setdefault(ident, []).append((part, weight))
    names: dict[tuple[str, str], str] = {}
    params: dict[str, np.ndarray] = {}
    packed: dict[str, PackedWeight] = {}
    for members in groups.values():
        owners, bases = {part for part, _ in members}, {weight for _, weight in members}
        part, weight = members[0]
        common = len(owners) > 1 and len(bases) == 1
        name = free_name(weight if common or weight.startswith(f"{part}.") else f"{part}.{weight}", params)
        params[name] = parts[part].params[weight]
        names.update(dict.fromkeys(members, name))
        for owner, member in members:
            if member in parts[owner].packed:
                packed.setdefault(name, parts[owner].packed[member])
    return names, params, packed


def free_name(name: str, taken: Mapping[str, object] | set[str]) -> str:
    """Return `name`, with a number behind it when it is taken."""
    if name not in taken:
        return name
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
