"""Regions by meaning: how a function's attribute tells them, and which binding belongs to which.

A region is known by the weights that it reads.  These stay where passes group, move and replace what lies between
them, so that a region can be found again in whatever the pipeline has made of the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tvm import ir, relax

from .rewrite.graph import Graph

#: The attribute of a function that holds its regions, in the order in which data runs through them.
ATTRIBUTE = "crossloom.semantic_regions"
#: Parts that repeat: the region's ``layer`` counts within them.
STACKS = ("backbone", "encoder", "decoder")
PARTS = ("embedding", *STACKS, "neck", "projector", "head")


@dataclass(frozen=True)
class Region:
    """One region of a function.

    Attributes
    ----------
    name : str
        ``part``, or ``part.layer`` for one layer of a stack, behind the modality, such as ``image.backbone.3``.
    part : str
        One of ``PARTS``.
    modality : str
        ``image``, ``audio``, ``text`` or ``""``.
    layer : int
        Which layer of the stack, -1 elsewhere.
    attentions : int
        Residual branches in it that attend: 2 for a decoder layer with cross-attention.
    weights : tuple of str
        Names of the parameters it reads.
    """

    name: str
    part: str
    modality: str = ""
    layer: int = -1
    attentions: int = 0
    weights: tuple[str, ...] = ()


def region_name(part: str, modality: str, layer: int) -> str:
    """Return the name of a region."""
    return ".".join(filter(None, (modality, part, str(layer) if layer >= 0 else "")))


def with_regions(func: relax.Function, regions: Sequence[Region]) -> relax.Function:
    """Return a function with its regions stored."""
    return func.with_attr(ATTRIBUTE, [asdict(region) | {"weights": list(region.weights)} for region in regions])


def regions_of(func: ir.BaseFunc) -> list[Region]:
    """Return a function's regions, none where nobody stored them."""
    stored = func.attrs[ATTRIBUTE] if func.attrs is not None and ATTRIBUTE in func.attrs else ()
    return [
        Region(
            str(row["name"]),
            str(row["part"]),
            str(row["modality"]),
            int(row["layer"]),
            int(row["attentions"]),
            tuple(map(str, row["weights"])),
        )
        for row in stored
    ]


def region_table(mod: ir.IRModule) -> dict[str, list[dict[str, object]]]:
    """Return the regions of every function that has some, as JSON can hold them."""
    found = {gvar.name_hint: regions_of(func) for gvar, func in mod.functions_items()}
    return {name: [asdict(region) for region in regions] for name, regions in found.items() if regions}


def assign(graph: Graph) -> dict[relax.Var, int]:
    """Return the region of every binding, by its number among :func:`regions_of`.

    A binding belongs to the region whose weights it reads, directly or through values made of weights alone.  One that
    reads none belongs to the latest region among its operands', or, where it has but one operand, to that of its first
    reader (what measures a layer's result for the next one); or else to the only one that reads it (a layer's kept
    keys).  One that reads the weights of several layers, or what more than two of them made (a stack of caches), is
    theirs together and has the number -1, as have those that nothing places (tables made of positions).
    """
    regions = regions_of(graph.func)
    owners: dict[str, set[int]] = {}
    for number, region in enumerate(regions):
        for weight in region.weights:
            owners.setdefault(weight, set()).add(number)
    made_of: dict[relax.Var, frozenset[str]] = {
        v: frozenset((v.name,)) for v in graph.func.params if v.name in owners or v in weights_of(graph)
    }
    out: dict[relax.Var, int] = {}
    shared: set[relax.Var] = set()
    operands: dict[relax.Var, set[relax.Var]] = {}
    read_by: dict[relax.Var, frozenset[str]] = {}
    for var in graph.order:
        leaves = [leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var)]
        operands[var] = {leaf for leaf in leaves if leaf not in made_of}
        read = read_by[var] = frozenset().union(*(made_of.get(leaf, frozenset()) for leaf in leaves))
        if leaves and all(leaf in made_of for leaf in leaves):
            made_of[var] = read
            continue
        inside = {out[leaf] for leaf in leaves if out.get(leaf, -1) >= 0}
        before = -1 if len(inside) > 2 and not read else max(inside, default=-1)
        out[var] = _place([owners[w] for w in read if w in owners], before, regions)
        shared |= {var} if out[var] < 0 and (len(inside) > 2 or any(w in owners for w in read)) else set()
    for var in reversed(graph.order):
        readers = {out[user] for user in graph.users.get(var, ()) if user in out}
        if var not in out or var in shared or not readers:
            continue
        if out[var] == -1 and len(readers) == 1:
            out[var] = readers.pop()
        elif -1 < out[var] < min(readers) and regions[out[var]].layer >= 0:
            # What only reshapes or measures a layer's result for the next one.
            out[var] = out[var] if read_by[var] or len(operands[var]) > 1 else min(readers)
    return out


def weights_of(graph: Graph) -> frozenset[relax.Var]:
    """Return the parameters that are weights; none where a function does not say which of them are inputs."""
    attrs = graph.func.attrs
    return graph.weights if attrs is not None and "num_input" in attrs else frozenset()


def _place(candidates: Sequence[set[int]], before: int, regions: Sequence[Region]) -> int:
    """Return the region of a binding: by the regions of each of its weights, and the latest of its operands'."""
    if not candidates:
        return before
    common = set.intersection(*candidates)
    if not common:
        # Weights of one layer each: what several layers have in common, computed once.
        either = set.union(*candidates)
        return -1 if len({regions[n].name for n in either}) > 1 else min(either)
    later = [n for n in common if n >= before]
    return min(later) if later else max(common)


def summary(regions: Sequence[Mapping[str, object]]) -> list[tuple[str, str, int, int]]:
    """Return rows of (part, modality, layers, weights) with the layers of each stack counted together."""
    rows: dict[tuple[str, str], list[int]] = {}
    for region in regions:
        row = rows.setdefault((str(region["part"]), str(region["modality"])), [0, 0])
        row[0] += 1
        row[1] += len(region["weights"])  # type: ignore[arg-type]
    return [(part, modality, layers, weights) for (part, modality), (layers, weights) in rows.items()]
