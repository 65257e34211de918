"""What is known of a target: processors, banks, precision schemes, capability rows; all with sources."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import tvm

from ..errors import UnsupportedTarget, UsageError

Answer = Literal["yes", "no", "unknown"]

#: What happens to an operator whose row says "no" (or "yes", for ``slow``).
EFFECTS = ("", "fallback", "build-fails", "wrong-values", "device-fails", "slow")
CONFIDENCES = ("high", "medium", "low", "conflict")


@dataclass(frozen=True)
class Cluster:
    """Cores of one kind.

    Attributes
    ----------
    name, core : str
        E.g. ``"big"``, ``"cortex-a76"``.
    count, clock_mhz : int
    speed : float
        Weight relative to the fastest cluster's core (1.0), for dividing work; an estimate.
    l1d_bytes, l2_bytes : int
        Per core, or shared by the cluster where ``l2_shared``; 0 when absent or not known.
    source : str
    """

    name: str
    core: str
    count: int
    clock_mhz: int
    speed: float
    source: str
    l1d_bytes: int = 0
    l2_bytes: int = 0
    l2_shared: bool = False


@dataclass(frozen=True)
class Cpu:
    """The processor and its TVM target attributes.

    Attributes
    ----------
    kind : str
        TVM target kind, ``"llvm"`` or ``"c"``.
    triple : str
        Of the system the code runs on; not every kind takes it as an attribute.
    mcpu : str
    mattr : tuple of str
        E.g. ``("+neon", "+dotprod")``.
    num_cores : int
        Cores that one kernel is divided over: those of the fast cluster.
    vector_bytes : int
        Width of a vector register (bytes); 0 when there is none or it is not known.
    l3_bytes : int
    extra : tuple of (str, value)
        Further TVM target attributes, from a raw target.
    """

    kind: str
    source: str
    triple: str = ""
    mcpu: str = ""
    mattr: tuple[str, ...] = ()
    num_cores: int = 0
    vector_bytes: int = 0
    l3_bytes: int = 0
    clusters: tuple[Cluster, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Npu:
    """The neural processor.

    Attributes
    ----------
    codegen : str
        Which code generator serves it: ``"rknn"``, ``"ane"``; empty when none does.
    platform : str
        Its name to that tool chain.
    tops : float
        Vendor's figure, 8-bit operations (10^12 per second).
    cores : int
    converts : mapping of str to str
        Types the tool chain takes and the type it computes in, e.g. float32 -> float16.
    options : mapping of str to str
        From a composite target string, e.g. ``chip``, ``os``.
    """

    codegen: str
    platform: str
    tops: float
    cores: int
    source: str
    converts: Mapping[str, str] = field(default_factory=dict, hash=False)
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    note: str = ""


@dataclass(frozen=True)
class Bank:
    """One memory.

    Attributes
    ----------
    kind : str
        ``"ram"`` (read and written), ``"flash"`` (read only) or ``"sram"`` (an accelerator's own).
    unit : str
        ``"cpu"`` or ``"npu"``.
    bytes, align_bytes : int
    verified : bool
        False for a figure without a public source: a parameter of the cost model, the user's to set.
    """

    name: str
    unit: str
    kind: str
    bytes: int
    align_bytes: int
    source: str
    verified: bool = True


@dataclass(frozen=True)
class Precision:
    """One precision scheme, e.g. w4a16.

    Attributes
    ----------
    name, weight, activation : str
        ``"w4a16"``, ``"int4"``, ``"float16"``.
    granularity : tuple of str
        ``"tensor"``, ``"channel"``, ``"group32"`` (elements along K), ``"grouped-channel"`` (one table for
        several output channels).
    algorithms : tuple of str
        The tool chain's names for its calibration methods; the first is the default.
    min_os : int
        Smallest OS version that takes it; 0 for any.
    """

    name: str
    weight: str
    activation: str
    unit: str
    supported: Answer
    source: str
    confidence: str
    granularity: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    min_os: int = 0
    note: str = ""


@dataclass(frozen=True)
class When:
    """Conditions of a row; it applies where all that are set hold.

    Attributes
    ----------
    arg : int
        Tensor whose shape counts: an argument's position, ``-1`` for any argument or the result.
    axes : tuple of int
        Axes the extents look at; empty for all.
    min_rank, max_rank, min_extent, max_extent : int or None
        Inclusive.  ``min_extent``: some axis has at least so many elements; ``max_extent``: all at most.
    features : tuple of str
        Facts about a call, see :data:`crossloom.lint.FEATURES`: ``"dynamic"``, ``"stepped"``, ...
    attrs : mapping of str to tuple of str
        Attribute name -> values (as text).
    precision : tuple of str
        Names of precision schemes.
    """

    arg: int = -1
    axes: tuple[int, ...] = ()
    min_rank: int | None = None
    max_rank: int | None = None
    min_extent: int | None = None
    max_extent: int | None = None
    features: tuple[str, ...] = ()
    attrs: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    precision: tuple[str, ...] = ()

    def _shape_holds(self, shape: Sequence[int | str]) -> bool:
        rank = len(shape)
        if self.min_rank is not None and rank < self.min_rank:
            return False
        if self.max_rank is not None and rank > self.max_rank:
            return False
        axes = self.axes or tuple(range(rank))
        known = [d for a in axes if -rank <= a < rank and isinstance(d := shape[a], int)]
        if self.min_extent is not None and not any(d >= self.min_extent for d in known):
            return False
        return self.max_extent is None or all(d <= self.max_extent for d in known)

    @property
    def about_shape(self) -> bool:
        """Whether a shape is needed to decide."""
        return any(v is not None for v in (self.min_rank, self.max_rank, self.min_extent, self.max_extent))

    def holds(
        self,
        shapes: Sequence[Sequence[int | str]],
        features: Sequence[str],
        attrs: Mapping[str, str],
        precision: str | None,
    ) -> bool:
        """Return whether all the conditions hold for one call."""
        if not set(self.features) <= set(features):
            return False
        if self.precision and precision not in self.precision:
            return False
        if any(attrs.get(key) not in values for key, values in self.attrs.items()):
            return False
        if not self.about_shape:
            return True
        chosen = shapes if self.arg < 0 else shapes[self.arg : self.arg + 1]
        return any(self._shape_holds(shape) for shape in chosen)

    def __str__(self) -> str:
        where = "" if self.arg < 0 else f" of argument {self.arg}"
        axes = "" if not self.axes else f" on axes {','.join(map(str, self.axes))}"
        parts = [
            f"{name.replace('_', ' ')} {value}{axes if 'extent' in name else ''}{where}"
            for name in ("min_rank", "max_rank", "min_extent", "max_extent")
            if (value := getattr(self, name)) is not None
        ]
        parts += list(self.features)
        parts += [f"{key}={'|'.join(values)}" for key, values in sorted(self.attrs.items())]
        parts += [f"precision {'|'.join(self.precision)}"] if self.precision else []
        return "; ".join(parts)


@dataclass(frozen=True)
class Capability:
    """One row of the operator table.

    Attributes
    ----------
    op : tuple of str
        Relax operator names; ``"*"`` is any.
    unit : str
        ``"npu"`` or ``"cpu"``.
    supported : {"yes", "no", "unknown"}
    source, confidence : str
        Where the statement is from, and one of ``CONFIDENCES``; ``conflict`` rows contradict each other.
    dtypes : tuple of str
        Types of an argument it is about; empty for any.
    effect : str
        One of ``EFFECTS``: what happens, where the answer is not a plain yes.
    note, remedy : str
    """

    op: tuple[str, ...]
    unit: str
    supported: Answer
    source: str
    confidence: str
    dtypes: tuple[str, ...] = ()
    when: When = field(default_factory=When)
    effect: str = ""
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Support:
    """Answer to "can this target run it", with the row that decided.

    Attributes
    ----------
    answer : {"yes", "no", "unknown"}
    row : Capability or Precision or None
        None when no row says anything (the answer is then ``"unknown"``).
    unit : str
    computed_in : str
        The type the unit computes in, where that is not the type asked for.
    disputed : tuple of Capability
        The rows that contradict each other, where that is why the answer is unknown.
    """

    answer: Answer
    row: Capability | Precision | None
    unit: str
    computed_in: str = ""
    disputed: tuple[Capability, ...] = ()

    @property
    def source(self) -> str:
        """Where the answer is from: each side's source in a dispute, empty when no row says anything."""
        if self.disputed:
            return " / ".join(f"{row.supported}: {row.source}" for row in self.disputed)
        return self.row.source if self.row is not None else ""

    def __bool__(self) -> bool:
        return self.answer == "yes"


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
        answer, row = _decide(op, unit, rows)
        disputed = tuple(r for r in rows if r.confidence == "conflict")
        return Support(answer, row, unit, computed, disputed if row in disputed and answer == "unknown" else ())


def _decide(op: str, unit: str, rows: Sequence[Capability]) -> tuple[Answer, Capability | None]:
    firm = [r for r in rows if r.confidence != "conflict"]
    for row in firm:
        if row.supported == "no":
            return "no", row
    disputed = [r for r in rows if r.confidence == "conflict"]
    if len({r.supported for r in disputed}) > 1:
        return "unknown", disputed[0]
    for row in (*disputed, *firm):
        if row.supported == "no":
            return "no", row
    named = [r for r in rows if op in r.op or unit == "cpu"]
    for wanted in ("unknown", "yes"):
        # The last row is the most particular one: the files go from the general to the particular.
        for row in reversed(named):
            if row.supported == wanted:
                return row.supported, row
    return "unknown", None
