"""Tell the regions of a function by what they mean: backbone, neck and head, encoders, projector, decoder layers.

    def prefill(ids, table, wq0, ..., lm_head): ...
->  the same, with the attribute crossloom.semantic_regions = [text.embedding, text.decoder.0, ..., text.head],
    each with the weights that it reads

Fires for every function with linear layers, lookups, attention or convolutions in it.  Layers are chains of residual
sums; a layer begins at every branch that attends to itself, so that cross-attention and MLP belong to the layer before
them.  What lies in front of a stack is its embedding, what lies behind it a projector (where another stack or another
entry takes the features on), a neck (what joins levels of a feature pyramid, or has no weights that multiply), or a
head.  Modalities are the entries' tags (``crossloom.modality``); a stack that begins at looked-up ids is text.
Never for a function with nothing of this kind; the function stays as it is.

Numerics: exact; no operator is touched.  Linear in the module's size.
Needs the composites of canonicalize-transformer, and keeps nothing but attributes: see :mod:`crossloom.semantics`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import ir, relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, composite_attrs, root_name
from crossloom.rewrite.driver import graphs_of
from crossloom.semantics import Region, region_name, weights_of, with_regions
from crossloom.verdict import accept, record, refuse

from .matching.layers import CONVOLUTIONS
from .matching.stacks import ATTENTION, Stack, find_stacks, leaves

_NAME = "annotate-semantic-regions"
_LOOKUP = "crossloom.embedding"
_PRODUCTS = frozenset({"crossloom.linear", "crossloom.mlp", "crossloom.gated_mlp"}) | CONVOLUTIONS
_JOINS = frozenset({"relax.image.resize2d", "relax.concat"})
#: Bindings between ids as they are handed in and as they are looked up.
_DEEP = 16
_TOWER = {"image": "backbone", "audio": "encoder", "text": "encoder", "": "encoder"}

#: part, modality, layer
_Label = tuple[str, str, int]


@dataclass
class _Reader:
    """Labels the bindings of one function."""

    graph: Graph
    #: Whether a function of another modality takes on what this one returns.
    feeds: bool
    labels: dict[relax.Var, _Label] = field(default_factory=dict)
    after: dict[relax.Var, int] = field(default_factory=dict)
    #: Branches that attend, by label.
    attending: dict[_Label, int] = field(default_factory=dict)

    def read(self, stacks: list[Stack]) -> None:
        """Label every binding."""
        graph, tag = self.graph, _tag(self.graph.func)
        modalities = [self._modality(stack, tag, len(stacks)) for stack in stacks]
        count: dict[tuple[str, str], int] = {}
        for number, (stack, modality) in enumerate(zip(stacks, modalities)):
            part = _TOWER[modality] if not self._is_decoder(stack, modality) else "decoder"
            for layer in stack.layers:
                index = count[part, modality] = count.get((part, modality), -1) + 1
                self.attending[part, modality, index] = layer.attentions
                for binding in (b for branch in layer.branches for b in branch.bindings):
                    self.labels[binding] = (part, modality, index)
                    self.after[binding] = number
        for var in graph.order:
            if var not in self.labels:
                behind = [self.after[leaf] for leaf in leaves(graph, var) if leaf in self.after]
                if behind:
                    self.after[var] = max(behind)
        alone = "embedding" if stacks else self._alone(tag)
        tails: dict[int, list[relax.Var]] = {}
        for var in graph.order:
            if var in self.labels:
                continue
            if var in self.after:
                tails.setdefault(self.after[var], []).append(var)
            else:
                self.labels[var] = (alone, self._of_ids(var, tag if len(modalities) != 1 else modalities[0]), -1)
        for number, tail in tails.items():
            self._label_tail(tail, modalities[number], number + 1 < len(stacks), stacks[-1])

    def _alone(self, modality: str) -> str:
        """Return what a function without layers is."""
        found = {root_name(self.graph, var) for var in self.graph.order}
        if _LOOKUP in found or found & CONVOLUTIONS or not found & _PRODUCTS:
            return "embedding"
        return "projector" if modality in ("image", "audio") and self.feeds else "head"

    def _modality(self, stack: Stack, tag: str, stacks: int) -> str:
        """Return a stack's modality: the function's, where that is known and it is the only one."""
        if tag and stacks == 1:
            return tag
        found, seen, todo = "", set(), [stack.start]
        while todo and not found:
            var = todo.pop()
            if var in seen or var not in self.graph.value or var in self.labels:
                continue
            seen.add(var)
            name = root_name(self.graph, var)
            if name == _LOOKUP and self._looks_up_inputs(var):
                found = "text"
            elif name in CONVOLUTIONS:
                found = "audio" if name == "relax.nn.conv1d" else "image"
            todo.extend(leaves(self.graph, var))
        return found or tag

    def _looks_up_inputs(self, var: relax.Var) -> bool:
        """Return whether a lookup is by ids that were handed in: a table of positions is read by constants."""
        todo: list[relax.Expr] = [self.graph.value[var].args[1]]
        for at in todo:
            if at in self.graph.value and len(todo) < _DEEP:
                todo.extend(self.graph.leaves[at])
        given = [leaf for leaf in todo if leaf in self.graph.func.params]
        return any(leaf not in weights_of(self.graph) for leaf in given)

    def _is_decoder(self, stack: Stack, modality: str) -> bool:
        """Return whether a stack of text looks back: masked, over kept keys, or at another stack."""
        if modality != "text":
            return False
        for branch in (b for layer in stack.layers for b in layer.branches):
            for var in branch.bindings:
                if root_name(self.graph, var) == ATTENTION and (callee := self.graph.callee(var)) is not None:
                    facts = composite_attrs(callee)
                    if branch.crosses or bool(facts.get("masked")) or str(facts.get("mask", "none")) != "none":
                        return True
        return False

    def _of_ids(self, var: relax.Var, modality: str) -> str:
        return "text" if root_name(self.graph, var) == _LOOKUP and self._looks_up_inputs(var) else modality

    def _label_tail(self, tail: list[relax.Var], modality: str, taken_on: bool, last: Stack) -> None:
        """Label what lies behind a stack."""
        graph = self.graph
        products = [v for v in tail if root_name(graph, v) in _PRODUCTS]
        joins = [v for v in tail if root_name(graph, v) in _JOINS] if modality == "image" and not taken_on else []
        convolved = any(root_name(graph, v) in CONVOLUTIONS for v in products)
        neck = graph.position[joins[-1]] if joins and convolved else -1
        for var in tail:
            if taken_on and self._joins_ids(var):
                self.labels[var] = ("embedding", "text", -1)
            elif not products or graph.position[var] <= neck:
                self.labels[var] = ("neck", modality, -1)
            elif modality in ("image", "audio") and (taken_on or self.feeds) and neck < 0:
                self.labels[var] = ("projector", modality, -1)
            else:
                self.labels[var] = ("head", modality, -1)

    def _joins_ids(self, var: relax.Var) -> bool:
        """Return whether a value between two stacks is made of features and of looked-up ids."""
        found = {root_name(self.graph, leaf) for leaf in leaves(self.graph, var)}
        parts = {self.labels.get(leaf, ("",))[0] for leaf in leaves(self.graph, var)}
        return _LOOKUP in found or "embedding" in parts

    def regions(self) -> list[Region]:
        """Return the regions in the order in which their weights are read first."""
        graph, weights = self.graph, weights_of(self.graph)
        made_of: dict[relax.Var, tuple[str, ...]] = {v: (v.name,) for v in weights}
        read: dict[_Label, dict[str, None]] = {}
        begins: dict[_Label, int] = {}
        for var in graph.order:
            operands = [leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var)]
            names = tuple(name for leaf in operands for name in made_of.get(leaf, ()))
            if operands and all(leaf in made_of for leaf in operands):
                made_of[var] = names
                continue
            label = self.labels[var]
            read.setdefault(label, {}).update(dict.fromkeys(names))
            if names or label[2] >= 0:
                begins.setdefault(label, graph.position[var])
        # What has neither weights nor layers (masks, tables of positions) is no region of its own.
        kept = sorted(begins, key=begins.__getitem__)
        return [
            Region(region_name(*label), *label, attentions=self.attending.get(label, 0), weights=tuple(read[label]))
            for label in kept
        ]


def _tag(func: relax.Function) -> str:
    attrs = func.attrs or {}
    return str(attrs["crossloom.modality"]) if "crossloom.modality" in attrs else ""


def AnnotateSemanticRegions() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        functions = dict(mod.functions_items())
        tags = {gvar: _tag(func) for gvar, func in functions.items() if isinstance(func, relax.Function)}
        changed = False
        for gvar, graph in graphs_of(mod):
            site = graph.order[-1].name if graph.order else ""
            stacks, refused = find_stacks(graph)
            # Beside layers that attend, a residual sum by itself is part of what lies behind them.
            stacks = [stack for stack in stacks if stack.attends] or stacks
            for verdict in refused:
                record(verdict.at("residual-branch", graph.name, verdict.site, _NAME))
            feeds = any(tag == "text" and other is not gvar for other, tag in tags.items())
            reader = _Reader(graph, feeds)
            reader.read(stacks)
            regions = reader.regions()
            if not regions:
                record(refuse("nothing-recognized", graph.name).at("semantic-regions", graph.name, site, _NAME))
                continue
            told = with_regions(graph.func, regions)
            verdict = accept(detail=", ".join(dict.fromkeys(_short(region) for region in regions)))
            record(verdict.at("semantic-regions", graph.name, site, _NAME))
            changed, functions[gvar] = True, told
        return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos) if changed else mod

    return run


def _short(region: Region) -> str:
    return region_name(region.part, region.modality, -1)


PASS = PassInfo(_NAME, AnnotateSemanticRegions, "canonicalize", EXACT, doc="Regions by meaning, stored with functions.")
