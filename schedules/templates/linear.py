"""A norm, a linear layer, and the steps behind its sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from crossloom.targets import Fusion
from crossloom.verdict import Verdict, refuse

from ..activations import ACTIVATIONS
from ..fused_linear import Dim, Norm, Output, Rotary, Spec, kernel
from ..machine import Machine
from .elementwise import Extent

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


def _norm(kind: str, epsilon: float) -> Norm:
    return Norm("layer" if kind == "layer" else "rms", epsilon, weight=True, bias=kind == "layer")


def steps_of(names: Sequence[str]) -> tuple[str, list[str]] | Verdict:
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
