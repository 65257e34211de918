"""Fusion templates: from a chain of operators and a target to the one kernel that computes it, or the limit it passes.

    template(["load", "multiply", "add", "store"], get_target("rk3588"), unit="cpu")    # one loop, all in registers
    template(["rms_norm", "linear", "silu", "gate"], get_target("host"))                # a fused linear kernel
    template(["linear", "gelu", "linear"], get_target("apple-m4"))                      # a region of the Neural Engine

What a unit keeps together is data: the ``[[fusion]]`` rows of the target's capability table, each with its source.
There are three kinds of chain.  *Elementwise*: operators between one load and one store.  *Linear*: a norm, a linear
layer, and the steps behind its sums.  *Region*: a unit with a compiler of its own is given the whole chain as one
program, and no kernel is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import tvm
from tvm import tirx

from crossloom.targets import Fusion, Target, list_targets
from crossloom.verdict import Verdict, accept, refuse

from .activations import ACTIVATIONS, BINARY, UNARY
from .chain import chain_kernel
from .fused_linear import Dim, Norm, Output, Rotary, Spec, kernel
from .machine import Machine

Extent: TypeAlias = int | tirx.Var

_NORMS = ("rms_norm", "layer_norm")
#: Steps behind the sums, in the order of the kernel; each at most once.
_STEPS: tuple[tuple[str, ...], ...] = (
    ("bias",),
    ACTIVATIONS,
    ("gate",),
    ("multiply",),
    _NORMS,
    ("rotary",),
    ("residual",),
)


@dataclass(frozen=True)
class ElementwiseTemplate:
    """A chain between one load and one store.

    Attributes
    ----------
    operators : tuple of str
        Without load and store.
    limit : Fusion
        The row that allows it.
    machine : Machine
    """

    operators: tuple[str, ...]
    limit: Fusion
    machine: Machine

    @property
    def operands(self) -> int:
        """How many operands it takes beside the value that runs through it."""
        return sum(name in BINARY for name in self.operators)

    def kernel(
        self, shape: Sequence[Extent], operands: Sequence[Sequence[Extent]] | None = None, dtype: str = "float32"
    ) -> tirx.PrimFunc:
        """Write the kernel; see :func:`crossloom.schedules.chain.chain_kernel`.

        Parameters
        ----------
        shape : sequence of int or tvm.tirx.Var
        operands : sequence of shapes or None
            None gives every operand the value's own shape.
        dtype : str
        """
        shapes = [shape] * self.operands if operands is None else operands
        return chain_kernel(self.operators, shape, shapes, dtype, self.machine)


@dataclass(frozen=True)
class LinearTemplate:
    """A norm, a linear layer and the steps behind its sums.

    Attributes
    ----------
    norm : str
        ``""``, ``rms`` or ``layer``.
    steps : tuple of str
        ``bias``, an activation, ``gate`` (activation of one layer times another), ``multiply`` (by a number),
        a norm of heads, ``rotary``, ``residual``.
    limit : Fusion
        The row that allows it.
    machine : Machine
    """

    norm: str
    steps: tuple[str, ...]
    limit: Fusion
    machine: Machine

    def spec(
        self,
        rows: Sequence[Extent],
        depth: int,
        lanes: int,
        heads: Sequence[int] = (),
        *,
        dtype: str = "float32",
        epsilon: float = 1e-5,
        scale: float = 1.0,
        rotary: Rotary | None = None,
    ) -> Spec:
        """Return what the kernel computes: rows, then heads, then lanes, as the columns of one layer.

        Parameters
        ----------
        rows : sequence of int or tvm.tirx.Var
            Leading axes of x.
        depth, lanes : int
            Last axes of x and of the result.
        heads : sequence of int
            Axes between; none for plain columns.
        dtype : str
        epsilon, scale : float
            Of the norms, and the factor of ``multiply``.
        rotary : Rotary or None
            Where the chain has ``rotary``; by default all lanes turn, half-split, by a table of rows and lanes.

        Raises
        ------
        ValueError
            Where a rotation is given and the chain has none, or lanes cannot be paired.
        """
        if rotary is not None and "rotary" not in self.steps:
            raise ValueError("the chain has no rotary")
        leading: tuple[Dim, ...] = tuple(("row", i) for i in range(len(rows)))
        dims: tuple[Dim, ...] = (*leading, *(("head", i) for i in range(len(heads))), ("lane", 0))
        strides: list[int] = []
        width = lanes
        for extent in reversed(heads):
            strides.insert(0, width)
            width *= extent
        if "rotary" in self.steps and rotary is None:
            if lanes % 2:
                raise ValueError(f"{lanes} lanes are no pairs")
            units: tuple[Dim, ...] = tuple(("unit", 0) for _ in heads)
            table = (*leading, *units, ("lane", 0)) if rows else (("lane", 0),)
            rotary = Rotary("half-split", lanes, table, table)
        of_heads = next((step for step in self.steps if step in _NORMS), "")
        output = Output(
            dims,
            tuple(heads),
            lanes,
            strides=tuple(strides),
            gate=width if "gate" in self.steps else None,
            activation=next((step for step in self.steps if step in ACTIVATIONS), ""),
            scale=scale if "multiply" in self.steps else 1.0,
            norm=_norm(of_heads.removesuffix("_norm"), epsilon) if of_heads else None,
            rotary=rotary,
            residual=dims if "residual" in self.steps else None,
        )
        norm = _norm(self.norm, epsilon) if self.norm else None
        return Spec(tuple(rows), depth, dtype, (output,), norm, "bias" in self.steps)

    def kernel(self, spec: Spec) -> tirx.PrimFunc:
        """Write the kernel of a spec; see :func:`crossloom.schedules.fused_linear.kernel`."""
        return kernel(spec, self.machine)


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


Template: TypeAlias = ElementwiseTemplate | LinearTemplate | RegionTemplate


def _norm(kind: str, epsilon: float) -> Norm:
    return Norm("layer" if kind == "layer" else "rms", epsilon, weight=True, bias=kind == "layer")


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
    parsed = _steps(names) if kind == "linear" else _between(names)
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


def admitted(operators: Sequence[str], length: int, rows: Sequence[Fusion], kind: str) -> Fusion | Verdict:
    """Return the strictest of a table's rows that all allow a chain, or a refusal that names the one which does not.

    Parameters
    ----------
    operators : sequence of str
    length : int
        How many of them count: those between load and store, or behind the sums.
    rows : sequence of Fusion
        Of one kind and unit.
    kind : str
        For the refusal where there are no rows.
    """
    if not rows:
        return refuse("no-limit-known", kind, "the target's table has no fusion row for such chains")
    for row in rows:
        for name in operators:
            if row.operators and name not in row.operators:
                return refuse(
                    "operator-not-in-table", name, f"not among those that may be in a {kind} chain: {row.source}"
                )
        if row.most and length > row.most:
            return refuse("chain-too-long", f"{length} operators", f"at most {row.most}: {row.source}")
    return min(rows, key=lambda row: row.most or 1 << 30)


def _between(names: Sequence[str]) -> tuple[str, list[str]] | Verdict:
    """Return the operators between load and store."""
    inner = list(names)
    if inner[0] == "load":
        inner = inner[1:]
    if inner and inner[-1] == "store":
        inner = inner[:-1]
    for name in inner:
        if name in ("load", "store"):
            return refuse("order-of-steps", name, "a chain is one load and one store, at its ends")
        if name not in BINARY and name not in UNARY:
            return refuse("operator-not-in-table", name, "it is not elementwise")
    return "", inner


def _steps(names: Sequence[str]) -> tuple[str, list[str]] | Verdict:
    """Return the norm in front of a linear layer, and the steps behind its sums by the kernel's names."""
    names = [name for i, name in enumerate(names) if not (name == "load" and i == 0)]
    names = names[:-1] if names[-1] == "store" else names
    at = names.index("linear")
    front, behind = names[:at], names[at + 1 :]
    if len(front) > 1 or any(name not in _NORMS for name in front):
        return refuse("order-of-steps", front[0], "in front of a linear layer there may be one norm")
    steps: list[str] = []
    place = -1
    for i, name in enumerate(behind):
        name = ("bias" if i == 0 else "residual") if name == "add" else name
        here = next((n for n, kinds in enumerate(_STEPS) if name in kinds), None)
        if here is None:
            return refuse("operator-not-in-table", name, "it is not a step behind a linear layer's sums")
        if here <= place:
            return refuse("order-of-steps", name, "steps in another order than the kernel's, or one of them twice")
        steps.append(name)
        place = here
    return (front[0] if front else ""), steps


def _region(names: Sequence[str], target: Target, unit: str) -> RegionTemplate | Verdict:
    rows = [row for row in target.fusions if row.unit == unit and row.chain == "region"]
    found = admitted(names, len(names), rows, "region")
    if isinstance(found, Verdict):
        return found
    npu = target.npu if unit == "npu" else None
    operators = tuple(name for name in names if name not in ("load", "store"))
    return RegionTemplate(operators, unit, npu.codegen if npu else "", npu.converts if npu else {}, found)


def chain_of(spec: Spec, output: Output) -> list[str]:
    """Return the chain that one output of a fused linear kernel is, as :func:`template` takes it."""
    steps = ["bias"] if spec.bias else []
    steps += [output.activation] if output.activation else []
    steps += ["gate"] if output.gate is not None else []
    steps += ["multiply"] if output.scale != 1.0 else []
    steps += [f"{output.norm.kind}_norm"] if output.norm is not None else []
    steps += ["rotary"] if output.rotary is not None else []
    steps += ["residual"] if output.residual is not None else []
    return [*([f"{spec.norm.kind}_norm"] if spec.norm is not None else []), "linear", *steps]


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


def target_of(target: tvm.target.Target) -> Target:
    """Return the known target whose table speaks of a TVM target: of its processor, else of its architecture.

    A TVM target carries no table.  Where no known target has its architecture, the host's is taken.
    """
    known = list_targets()
    attrs = target.attrs
    triple, mcpu = (str(attrs.get(key, "")) for key in ("mtriple", "mcpu"))
    alike = [
        t
        for t in known.values()
        if t.name != "host"
        and t.cpu.kind == str(target.kind)
        and (t.cpu.kind == "c" or _arch(t.triple) == _arch(triple))
    ]
    return min(alike, key=lambda t: (t.cpu.mcpu != mcpu, t.name), default=known["host"])


def _arch(triple: str) -> str:
    arch = triple.split("-")[0]
    return "aarch64" if arch == "arm64" else arch
