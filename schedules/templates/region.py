"""A chain that a unit with a compiler of its own takes as one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crossloom.targets import Fusion


@dataclass(frozen=True)
class RegionTemplate:
    """A chain that a unit's own compiler takes as one program.

    Attributes
    ----------
    operators : tuple of str
    unit : str
    codegen : str
        Which code generator serves the unit, ``""`` where none does yet.
    computed_in : mapping of str to str
        Types the program may be given and the type the unit computes in.
    limit : Fusion
        The row that says so.
    """

    operators: tuple[str, ...]
    unit: str
    codegen: str
    computed_in: Mapping[str, str]
    limit: Fusion
