"""A target: everything the quantizer, the partitioner, the planner and the linter ask about it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from ..errors import UnsupportedTarget, UsageError
from .capability import CONFIDENCES, EFFECTS, Answer, Capability, Fusion, Precision, Support, When, decide
from .hardware import Bank, Cluster, Cpu, Npu

__all__ = [
    "CONFIDENCES",
    "EFFECTS",
    "Answer",
    "Bank",
    "Capability",
    "Cluster",
    "Cpu",
    "Fusion",
    "Npu",
    "Precision",
    "Support",
    "Target",
    "When",
]


@dataclass(frozen=True)
class Target:
    """A target: everything the quantizer, the partitioner, the planner and the linter ask about it.

    Attributes
    ----------
    name, description : str
    family : str
        ``"linux"``, ``"macos"``, ``"micro"`` or ``"host"``.
    cpu : Cpu
    npu : Npu or None
    banks : tuple of Bank
    precisions : tuple of Precision
    capabilities : tuple of Capability
    fusions : tuple of Fusion
    bandwidth : float
        Of the main memory (bytes per second); 0 when not known.
    bandwidth_source : str
    spec : str
        The text it was made from; ``get_target(target.spec) == target``.
    """

    name: str
    description: str
    family: str
    cpu: Cpu
    npu: Npu | None = None
    banks: tuple[Bank, ...] = ()
    precisions: tuple[Precision, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    fusions: tuple[Fusion, ...] = ()
    bandwidth: float = 0.0
    bandwidth_source: str = ""
    spec: str = ""

    def __str__(self) -> str:
        return self.spec or self.name

    @property
    def triple(self) -> str:
        """Triple of the system the code runs on, e.g. ``aarch64-linux-gnu``."""
        return self.cpu.triple

    @property
    def is_host(self) -> bool:
        """Whether code for it runs on this machine as it is: same architecture and operating system."""
        arch = self.cpu.triple.split("-")[0]
        here = {"AMD64": "x86_64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        system = {"Darwin": ("apple",), "Linux": ("linux",), "Windows": ("windows",)}.get(platform.system(), ())
        return {"aarch64": "arm64"}.get(arch, arch) == here and any(s in self.cpu.triple for s in system)

    @property
    def units(self) -> tuple[str, ...]:
        """Units that may run a part of a model, the preferred first."""
        return ("npu", "cpu") if self.npu is not None else ("cpu",)

    def tvm_target(self) -> tvm.target.Target:
        """Return the CPU as a TVM target.

        Raises
        ------
        UnsupportedTarget
            When TVM does not know an attribute or the processor.
        """
        config: dict[str, Any] = {"kind": self.cpu.kind}
        if self.cpu.triple and self.cpu.kind == "llvm":
            config["mtriple"] = self.cpu.triple
        if self.cpu.mcpu:
            config["mcpu"] = self.cpu.mcpu
        if self.cpu.mattr:
            config["mattr"] = list(self.cpu.mattr)
        if self.cpu.num_cores and self.cpu.kind == "llvm":
            config["num-cores"] = self.cpu.num_cores
        config.update({key: list(v) if isinstance(v, tuple) else v for key, v in self.cpu.extra})
        try:
            return tvm.target.Target(config)
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).split(". Target creation")[0].strip().splitlines()[-1]
            raise UnsupportedTarget(f"TVM cannot make a target of {self}: {reason}", "correct the attribute") from None

    def bank(self, name: str) -> Bank:
        """Return the memory of that name; UsageError lists those there are."""
        for bank in self.banks:
            if bank.name == name:
                return bank
        raise UsageError(
            f"target {self.name} has no bank {name!r}",
            f"its banks: {', '.join(b.name for b in self.banks) or 'none'}",
        )

    def precision_schemes(self, unit: str | None = None) -> tuple[Precision, ...]:
        """Return the precision schemes the unit can run; default: the NPU, or the CPU where there is none."""
        unit = unit or self.units[0]
        return tuple(p for p in self.precisions if p.unit == unit and self._precision(p).answer == "yes")

    def _precision(self, row: Precision) -> Support:
        version = (self.npu.options.get("os", "") if self.npu else "").split(".")[0]
        if row.supported == "yes" and row.min_os and version.isdigit() and int(version) < row.min_os:
            return Support("no", row, row.unit)
        return Support(row.supported, row, row.unit)

    def supports_precision(self, name: str, unit: str | None = None, granularity: str = "") -> Support:
        """Return whether a scheme (``"w4a16"``), at a granularity (``"group32"``) where given, can run."""
        unit = unit or self.units[0]
        rows = [p for p in self.precisions if p.name == name and p.unit == unit]
        exact = [p for p in rows if granularity and granularity in p.granularity]
        # A row without a granularity speaks of all; one that lists others does not speak of this one.
        chosen = exact or [p for p in rows if not granularity or not p.granularity]
        if rows and not chosen:
            return Support("no", rows[0], unit)
        answers = [self._precision(p) for p in chosen]
        for answer in ("yes", "no", "unknown"):
            for support in answers:
                if support.answer == answer:
                    return support
        return Support("unknown", None, unit)

    def rows(
        self,
        op: str,
        dtype: str,
        shapes: Sequence[Sequence[int | str]] = (),
        *,
        unit: str | None = None,
        features: Sequence[str] = (),
        attrs: Mapping[str, str] | None = None,
        precision: str | None = None,
    ) -> tuple[Capability, ...]:
        """Return the rows that apply to a call, in the table's order; see :meth:`supports`."""
        unit = unit or self.units[0]
        features = tuple(features)
        if any(isinstance(d, str) for shape in shapes for d in shape):
            features += ("dynamic",)
        return tuple(
            row
            for row in self.capabilities
            if row.unit == unit
            and (op in row.op or "*" in row.op)
            and (not row.dtypes or dtype in row.dtypes)
            and row.when.holds(shapes, features, attrs or {}, precision)
        )

    def supports(
        self,
        op: str,
        dtype: str = "float32",
        *shapes: Sequence[int | str],
        unit: str | None = None,
        precision: str | None = None,
        features: Sequence[str] = (),
        attrs: Mapping[str, str] | None = None,
    ) -> Support:
        """Return whether a unit of the target can run one call.

        A row that says no outweighs one that says yes, unless both are marked as conflicting: the answer is
        then unknown.  A row about any operator can forbid; for an NPU only one about the operator itself
        allows.

        Parameters
        ----------
        op : str
            Relax operator name, e.g. ``"relax.matmul"``.
        dtype : str
            Of the arguments.
        *shapes : sequences of int or str
            One for each tensor argument, the result's last; a string is a symbolic dimension.
        unit : {"npu", "cpu"}, optional
            Default: the NPU, where there is one.
        precision : str, optional
            Name of a precision scheme, e.g. ``"w8a8"``; refused when the unit does not have it.
        features : sequence of str
            Facts that shapes do not show; see :data:`crossloom.lint.FEATURES`.
        attrs : mapping of str to str
            The call's attributes, as text.
        """
        unit = unit or self.units[0]
        if unit not in self.units:
            return Support("no", None, unit)
        if precision is not None:
            scheme = self.supports_precision(precision, unit)
            if scheme.answer != "yes":
                return scheme
        computed = self.npu.converts.get(dtype, "") if unit == "npu" and self.npu is not None else ""
        rows = self.rows(op, computed or dtype, shapes, unit=unit, features=features, attrs=attrs, precision=precision)
        answer, row = decide(op, unit, rows)
        disputed = tuple(r for r in rows if r.confidence == "conflict")
        return Support(answer, row, unit, computed, disputed if row in disputed and answer == "unknown" else ())
