"""Stitch imported parts (vision, audio, projector, embedding, decoder) into one module of several entries.

An entry is a chain of parts inlined into one function body, so that passes see across the seam between, say,
a vision tower and its projector.  Weights with the same bytes are kept once, whatever part they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import tvm
import tvm_ffi
from tvm import relax

from ..errors import UnsupportedModel, UsageError
from ..model import Model
from .compose_chain import Step, join
from .compose_functions import private_functions, renew
from .compose_weights import share_weights
from .gather import bound_gathers
from .signature import check_entry
from .unused import drop_unused


@dataclass(frozen=True)
class Chain:
    """One entry of a composed model.

    Attributes
    ----------
    parts : tuple of str
        Names of parts, in the order they run; ``"part:entry"`` picks an entry of a part that has several.
    modality : str
        By default the first part's that has one.
    upper_bounds : mapping of str to int
        Largest value of symbolic dimensions (elements), over those the parts bring.
    outputs : tuple of str
        Names of the outputs to return, of any part (the last that has the name).  By default every output that
        no later part takes: those of the last part, then those of the others in order.
    """

    parts: tuple[str, ...]
    modality: str = ""
    upper_bounds: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


def compose(
    parts: Mapping[str, Model],
    entries: Mapping[str, Sequence[str] | Chain],
    *,
    modalities: Mapping[str, str] | None = None,
    name: str = "model",
) -> Model:
    """Stitch parts into one model.

    Each part after the first takes the outputs of the parts before it: by name where one has the name of an
    input (the nearest part wins), else by position from the part just before.  Inputs nothing feeds become
    inputs of the entry.  The entry returns what its last part returns, then what else no part takes; tuples
    within tuples are flattened.  A float output may feed a wider float input.

    Parameters
    ----------
    parts : mapping of str to Model
    entries : mapping of str to sequence of str, or to Chain
        Entry name -> the parts it runs, in order.
    modalities : mapping of str to str, optional
        Part name -> modality, over what the parts' own entries say.
    name : str
        Name of the result.

    Returns
    -------
    Model
        Weights are named ``part.weight``; those shared between parts keep the name they have in common.

    Raises
    ------
    UsageError
        Unknown part, entry, output or dimension, or an empty chain.
    UnsupportedModel
        A part's output does not fit the next part's input (the message names both), or two parts' modules
        carry different values of one attribute.
    """
    if not entries:
        raise UsageError("compose() was given no entries", "name at least one, e.g. {'main': ['part']}")
    chains = {
        key: value if isinstance(value, Chain) else Chain(tuple(_listed(key, value))) for key, value in entries.items()
    }
    picked = {key: [_pick(parts, key, item) for item in chain.parts] for key, chain in chains.items()}
    for key, items in picked.items():
        if not items:
            raise UsageError(f"entry {key!r} has no parts", f"name some of: {', '.join(sorted(parts))}")
    tags = _modalities(parts, modalities or {})
    parts = {key: replace(part, mod=bound_gathers(part.mod, from_end=False)) for key, part in parts.items()}
    shared, params, packed = share_weights(parts, picked)
    functions, renamed = private_functions(parts, set(chains))
    mod = tvm.IRModule(functions, attrs=_module_attributes(parts), global_infos=_global_infos(parts))

    result = Model(mod, params, {}, tags, name, packed)
    for key, chain in chains.items():
        steps = []
        for part, entry_name in picked[key]:
            function = renew(renamed[part], check_entry(parts[part], entry_name, part))
            entry = parts[part].entries[entry_name]
            steps.append(Step(part, entry, function, [shared[part, weight] for weight in entry.weights]))
        modality = chain.modality or next((tags[s.part] for s in steps if tags.get(s.part)), "")
        function, entry = join(key, steps, modality, chain.upper_bounds, chain.outputs)
        result.mod[key] = function
        result.entries[key] = entry
    result.mod = relax.transform.CanonicalizeBindings()(result.mod)
    result.mod = relax.transform.DeadCodeElimination(list(chains))(drop_unused(result.mod))
    relax.analysis.well_formed(result.mod)
    return result


def _listed(key: str, value: Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        raise UsageError(f"entry {key!r} is the string {value!r}", f"write a list of parts: [{value!r}]")
    return value


def _pick(parts: Mapping[str, Model], key: str, item: str) -> tuple[str, str]:
    """Resolve ``part`` or ``part:entry`` for the entry `key`."""
    part, _, wanted = item.partition(":")
    if part not in parts:
        raise UsageError(f"entry {key!r} names an unknown part {part!r}", f"parts: {', '.join(sorted(parts))}")
    names = list(parts[part].entries)
    if wanted:
        if wanted not in names:
            raise UsageError(f"part {part!r} has no entry {wanted!r}", f"it has: {', '.join(names)}")
        return part, wanted
    for choice in (names[0] if len(names) == 1 else None, key, part):
        if choice in names:
            return part, str(choice)
    raise UsageError(
        f"part {part!r} has several entries and entry {key!r} does not say which",
        f"write one of: {', '.join(f'{part}:{choice}' for choice in names)}",
    )


def _modalities(parts: Mapping[str, Model], given: Mapping[str, str]) -> dict[str, str]:
    unknown = [key for key in given if key not in parts]
    if unknown:
        raise UsageError(f"modalities name an unknown part {unknown[0]!r}", f"parts: {', '.join(sorted(parts))}")
    tags = {}
    for key, model in parts.items():
        own = [entry.modality for entry in model.entries.values() if entry.modality]
        tags[key] = given.get(key) or (own[0] if own else "")
    return tags


def _module_attributes(parts: Mapping[str, Model]) -> dict[str, object] | None:
    """Unite the parts' module attributes."""
    united: dict[str, object] = {}
    owner: dict[str, str] = {}
    for part, model in parts.items():
        for key, value in dict(model.mod.attrs or {}).items():
            if key in united and not tvm_ffi.structural_equal(united[key], value):
                raise UnsupportedModel(
                    f"modules of parts {owner[key]!r} and {part!r} carry different values of attribute {key!r}",
                    "make them equal, or remove the attribute with mod.without_attr()",
                )
            united.setdefault(key, value)
            owner.setdefault(key, part)
    return united or None


def _global_infos(parts: Mapping[str, Model]) -> dict[str, list[tvm.ir.GlobalInfo]] | None:
    """Unite the parts' global infos (such as virtual devices), each kept once."""
    united: dict[str, list[tvm.ir.GlobalInfo]] = {}
    for model in parts.values():
        for key, infos in dict(model.mod.global_infos or {}).items():
            have = united.setdefault(str(key), [])
            have += [info for info in infos if not any(tvm_ffi.structural_equal(info, other) for other in have)]
    return united or None
