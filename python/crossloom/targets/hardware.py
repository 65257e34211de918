"""The hardware of a target: cores, neural processor, memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
