"""Count the kernels of a compiled module by region, and the bytes between them; keep verdicts with their regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import ir, relax, tirx
from tvm.sym.analyzer import Analyzer

from crossloom.flow import CPU, Step, steps
from crossloom.importers.implied_sizes import bind_implied_sizes
from crossloom.importers.unify import substitute
from crossloom.model import Model
from crossloom.passes.annotate_semantic_regions import AnnotateSemanticRegions
from crossloom.rewrite import Graph, children
from crossloom.semantics import Region, assign, regions_of, weights_of
from crossloom.verdict import Ledger, Verdict

#: Symbolic dimensions count as this many elements, or as their upper bound where that is smaller.
LENGTH = 64
_CALLS = ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed", "relax.call_pure_packed")
_ALIASES = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
#: Scheduling changes no number counted here, and takes most of the time.
_LEFT_OUT = ("schedule-cpu",)
_ANNOTATE = "annotate-semantic-regions"


def unfused() -> list[str]:
    """Return the passes that fusion adds to the pipeline."""
    return [name for name in CPU if name.partition("{")[0].startswith(("fuse-", "lower-fused-", "fold-"))]


@dataclass(frozen=True)
class Kernel:
    """One call: its function, the region it belongs to (-1: none), and the bytes of activations it reads and writes."""

    name: str
    region: int
    read_bytes: int
    written_bytes: int


@dataclass
class Entry:
    """An entry's kernels.

    Attributes
    ----------
    regions : list of Region
    kernels : list of Kernel
    between_bytes : int
        Of values that one kernel makes and another reads, each once.
    """

    regions: list[Region]
    kernels: list[Kernel]
    between_bytes: int = 0

    @property
    def traffic_bytes(self) -> int:
        """Activations read and written, weights aside."""
        return sum(k.read_bytes + k.written_bytes for k in self.kernels)

    def by_region(self) -> dict[str, list[str]]:
        """Return the kernels of each region by its name; those of no region under ``""``."""
        out: dict[str, list[str]] = {region.name: [] for region in self.regions}
        for kernel in self.kernels:
            out.setdefault(self.regions[kernel.region].name if kernel.region >= 0 else "", []).append(kernel.name)
        return out


@dataclass
class Count:
    """A model's entries, and every verdict with the entry's region at whose binding it was given (None: nowhere)."""

    entries: dict[str, Entry]
    verdicts: list[tuple[Verdict, str | None]] = field(default_factory=list)


def count(model: Model, target: Any, disabled: Iterable[str] = (), text: str | None = None) -> Count:
    """Run the pipeline, weights unfolded and kernels unscheduled, and count what is left.

    Parameters
    ----------
    model : Model
    target : crossloom.targets.Target
    disabled : iterable of str
        Passes to leave out.
    text : str or None
        Textual pipeline instead of the target's own.
    """
    mod = bind_implied_sizes(model).mod
    out = Count({})
    chosen = steps(target, text, [*disabled, *_LEFT_OUT])
    with target.tvm_target():
        for step in chosen:
            places = _places(mod)
            with Ledger() as ledger:
                mod = step.run(mod)
                if step.text.name == "canonicalize-transformer" and not any(s.text.name == _ANNOTATE for s in chosen):
                    mod = AnnotateSemanticRegions()(mod)
            out.verdicts += [(v, places.get(v.function, {}).get(v.site)) for v in ledger]
        # What turns into another name of the same memory is no kernel.
        mod = relax.transform.RewriteDataflowReshape()(mod)
    for name, entry in model.entries.items():
        out.entries[name] = _entry(mod, mod[name], name, entry.upper_bounds)
    return out


def _places(mod: ir.IRModule) -> dict[str, dict[str, str]]:
    """Return the region's name of every binding, by function and variable."""
    out: dict[str, dict[str, str]] = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and (regions := regions_of(func)):
            placed = assign(Graph(gvar.name_hint, func, mod))
            out[gvar.name_hint] = {v.name: regions[n].name for v, n in placed.items() if n >= 0}
    return out


def _entry(mod: ir.IRModule, func: relax.Function, name: str, bounds: Mapping[str, int]) -> Entry:
    graph = Graph(name, func, mod)
    placed = assign(graph)
    sizes = _Sizes(bounds)
    of_weights: set[relax.Var] = set(weights_of(graph))
    alias: dict[relax.Var, relax.Var] = {}
    made: dict[relax.Var, int] = {}
    read: set[relax.Var] = set()
    out = Entry(regions_of(func), [])
    for var in graph.order:
        value = graph.value[var]
        operands = [alias.get(leaf, leaf) for leaf in children(value) if isinstance(leaf, relax.Var)]
        operands = [leaf for leaf in operands if isinstance(leaf.ty, relax.TensorType | relax.TupleType)]
        if operands and all(leaf in of_weights for leaf in operands):
            of_weights.add(var)
            continue
        if isinstance(value, relax.TupleGetItem | relax.Tuple) or not isinstance(value, relax.Call):
            if not isinstance(value, relax.Tuple) and operands:
                alias[var] = operands[0]
            continue
        op = graph.op(var)
        if op in _ALIASES or var in graph.casts:
            alias[var] = operands[0] if operands else var
            continue
        if op not in _CALLS and not op.startswith("relax."):
            raise ValueError(f"{name}: {var.name} calls {value.op}, which is no kernel")
        given = list(dict.fromkeys(leaf for leaf in operands if leaf not in of_weights))
        written = sizes.bytes(var.ty)
        out.kernels.append(_kernel(value, op, placed[var], sum(sizes.bytes(v.ty) for v in given), written))
        made[var] = written
        read.update(given)
    out.between_bytes = sum(size for var, size in made.items() if var in read)
    return out


def _kernel(call: relax.Call, op: str, region: int, read: int, written: int) -> Kernel:
    called = call.args[0] if op in _CALLS else None
    name = getattr(called, "name_hint", None) or getattr(called, "global_symbol", None) or op
    return Kernel(str(name), region, read, written)


class _Sizes:
    """Bytes of values whose symbolic dimensions are given a size."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self.bounds = bounds

    def bytes(self, ty: relax.Type) -> int:
        """Return the bytes of a tensor, or of all in a tuple; 0 for anything else."""
        if isinstance(ty, relax.TupleType):
            return sum(self.bytes(part) for part in ty.fields)
        if not isinstance(ty, relax.TensorType) or ty.shape is None or not hasattr(ty.shape, "values"):
            return 0
        dtype = str(ty.dtype)
        item = 1 if dtype == "bool" else 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        return int(np.prod([self._number(d) for d in ty.shape], dtype=np.int64)) * item

    def _number(self, extent: Any) -> int:
        if isinstance(extent, int | tirx.IntImm):
            return int(extent)
        free = tirx.analysis.undefined_vars(extent)
        known = {v: tirx.const(min(LENGTH, self.bounds.get(v.name, LENGTH)), v.ty.dtype) for v in free}
        return max(0, int(Analyzer().simplify(substitute(extent, known))))


__all__ = ["LENGTH", "Count", "Entry", "Kernel", "Step", "count", "unfused"]
