"""Choose the template of a chain, or say which limit it passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import tvm

from crossloom.targets import Target
from crossloom.verdict import Verdict, accept, refuse

from ..machine import Machine
from .elementwise import ElementwiseTemplate, between
from .limits import admitted, target_of
from .linear import LinearTemplate, steps_of
from .region import RegionTemplate

Template: TypeAlias = ElementwiseTemplate | LinearTemplate | RegionTemplate


def template(chain: Sequence[str], target: Target, unit: str | None = None) -> Template | Verdict:
    """Return the template of a chain on a unit of a target, or a refusal that says which limit it passes.

    Parameters
    ----------
    chain : sequence of str
        Operators in their order, with or without Relax's prefixes: ``load`` and ``store`` may stand at the ends of an
        elementwise chain; ``linear`` makes it a linear one, in which ``add`` right behind it is the bias and a later
        ``add`` the residual.
    target : Target
    unit : {"npu", "cpu"}, optional
        Default: the NPU, where there is one.

    Returns
    -------
    ElementwiseTemplate, LinearTemplate, RegionTemplate or Verdict
        A refusal's codes: ``empty-chain``, ``no-such-unit``, ``no-limit-known`` (the table says nothing of such
        chains), ``operator-not-in-table``, ``chain-too-long``, ``order-of-steps``.
    """
    unit = unit or target.units[0]
    names = [name.split(".")[-1] for name in chain]
    if not [name for name in names if name not in ("load", "store")]:
        return refuse("empty-chain", str(target))
    if unit not in target.units:
        return refuse("no-such-unit", unit, f"{target} has {', '.join(target.units)}")
    if any(row.chain == "region" for row in target.fusions if row.unit == unit):
        return _region(names, target, unit)
    kind = "linear" if "linear" in names else "elementwise"
    rows = [row for row in target.fusions if row.unit == unit and row.chain == kind]
    parsed = steps_of(names) if kind == "linear" else between(names)
    if isinstance(parsed, Verdict):
        return parsed
    norm, steps = parsed
    # What a table calls add is a bias and a residual alike.
    counted = ["add" if s in ("bias", "residual") else s for s in steps] + ([norm] if norm else [])
    verdict = admitted(counted, len(steps), rows, kind)
    if isinstance(verdict, Verdict):
        return verdict
    machine = Machine.of(target.tvm_target())
    if kind == "linear":
        return LinearTemplate(norm.removesuffix("_norm"), tuple(steps), verdict, machine)
    return ElementwiseTemplate(tuple(steps), verdict, machine)


def _region(names: Sequence[str], target: Target, unit: str) -> RegionTemplate | Verdict:
    rows = [row for row in target.fusions if row.unit == unit and row.chain == "region"]
    found = admitted(names, len(names), rows, "region")
    if isinstance(found, Verdict):
        return found
    npu = target.npu if unit == "npu" else None
    operators = tuple(name for name in names if name not in ("load", "store"))
    return RegionTemplate(operators, unit, npu.codegen if npu else "", npu.converts if npu else {}, found)


def allowed(chain: Sequence[str], target: tvm.target.Target) -> Verdict:
    """Return whether a CPU's table lets a chain be one kernel: what passes ask, which have a TVM target only.

    Parameters
    ----------
    chain : sequence of str
        As for :func:`template`.
    target : tvm.target.Target
    """
    return _allowed(tuple(chain), target)


@lru_cache(maxsize=1024)
def _allowed(chain: tuple[str, ...], target: tvm.target.Target) -> Verdict:
    # Asked for every region of a model: reading the tables takes milliseconds.
    found = template(chain, target_of(target), "cpu")
    return found if isinstance(found, Verdict) else accept(detail=found.limit.source)
