"""Write what several modalities give a language model straight into the one sequence that it reads.

    v = linear(image, w, b); t = embedding(table, ids); y = R.concat((v, audio, t), axis=1)
->  y = fused_sequence(image, w, b, audio, table, ids)     # Composite = "crossloom.fused_sequence"

    y = R.where(R.expand_dims(ids == token), R.take(linear(image, w), cumsum(ids == token) - 1), embedding(table, ids))
->  y = fused_sequence(image, w, table, ids)

Fires for a concat along any axis but the last, of any number and order of linear layers (with their norm in front, and
bias, activation and factor behind), lookups and values that exist, one lookup or linear layer among them at least; for
rows put where a mask or a placeholder token is true, as a whole or in order (``masked_scatter``: the count of the mask
less 1, a gather, a choice; by row or by single element), several such choices over each other; a sum with positions,
which may be looked up themselves, behind a part or the whole.  Before that, a linear layer over features beside one-hot
integers becomes one over the features and a lookup of weights' rows, linear layers with nothing between them become
one where that takes fewer multiply-accumulates, and a projector of two layers (LLaVA's) is taken apart: the second one
writes to the sequence.
Never when a value between is read elsewhere (it is then copied in, as a value that exists), for projections that share
their input with others (they are worth more as one), nor when a mask may differ along a row or is counted by batch.

Numerics: reassociates.  Linear in the module's size.  Source: transformers' LLaVA, Qwen2-VL (masked_scatter), ViT.
"""

from __future__ import annotations

import math

import tvm
from tvm import ir, relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, apply_groups, apply_rules
from crossloom.schedules.fused_sequence import Copy
from crossloom.verdict import Verdict, accept

from .fold_linear_chain import fold_rules
from .fuse_gated_mlp import block_rule
from .regions.parts import VIEWS, Problem
from .regions.sequence import SEQUENCE_REGION, SequenceRegion, read_sequence
from .split_one_hot import one_hot_rules

_NAME = "fuse-cross-modal-embedding"


def _joins_a_sequence(graph: Graph, root: relax.Var) -> bool:
    """Return whether a value goes nowhere but into a sequence: its last layer can write there."""
    while root not in graph.escapes and len(readers := dict.fromkeys(graph.users.get(root, ()))) == 1:
        (root,) = readers
        if graph.op(root) in ("relax.concat", "relax.take", "relax.where"):
            return True
        if not isinstance(graph.value[root], relax.Tuple) and graph.op(root) not in (*VIEWS, "relax.add"):
            return False
    return False


def _behind(graph: Graph, root: relax.Var) -> list[relax.Var]:
    """Return a concat or choice, the view that gives single elements their axes back, and sums behind it."""
    out = [root]
    while out[-1] not in graph.escapes and len(readers := dict.fromkeys(graph.users.get(out[-1], ()))) == 1:
        (reader,) = readers
        first = len(out) == 1 and graph.op(root) == "relax.where"
        if graph.op(reader) != "relax.add" and not (first and graph.op(reader) == "relax.reshape"):
            break
        out.append(reader)
    return out


def _is_taken_along(graph: Graph, root: relax.Var, last: relax.Var) -> bool:
    """Return whether another choice, put over this one, takes it along."""
    while last not in graph.escapes and len(readers := dict.fromkeys(graph.users.get(last, ()))) == 1:
        (last,) = readers
        if graph.op(last) == "relax.where":
            over = _match(graph, last)
            return isinstance(over, Match) and root in over.interior
        if graph.op(last) != "relax.reshape":
            break
    return False


def _read(graph: Graph, root: relax.Var, last: relax.Var) -> SequenceRegion | None:
    """Read a sequence; what is read elsewhere too is left as it is."""
    blocked: frozenset[relax.Var] = frozenset()
    while (region := read_sequence(graph, last, blocked, graph.block.get(root))) is not None:
        outside = {
            v
            for v in region.inside
            if v is not last
            and not v.same_as(last)
            and (v in graph.escapes or any(u not in region.inside for u in graph.users.get(v, ())))
        }
        if not outside:
            return region
        blocked |= outside
    return None


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    if root not in graph.block:
        return None
    behind = _behind(graph, root)
    refusal: Verdict | None = None
    for last in reversed(behind):
        if graph.op(root) == "relax.where" and _is_taken_along(graph, root, last):
            return None
        try:
            region = _read(graph, root, last)
        except Problem as problem:
            refusal = refusal or problem.verdict
            continue
        if region is not None and root in region.inside:
            return Match(graph, root, {}, region.inside | {last}, {"region": region})
    return refusal


def _worth(m: Match) -> Verdict:
    """Return what is saved: every part that is made would have been written and read once more."""
    region: SequenceRegion = m.facts["region"]
    bits = tvm.DataType(region.spec.dtype).bits
    made = (*region.spec.parts, *(p for layer in region.spec.layers for p in layer.parts))
    rows = [math.prod(r if isinstance(r, int) else 0 for r in p.rows) for p in made if not isinstance(p.source, Copy)]
    return accept(bytes_saved=2 * sum(rows) * region.spec.width * bits // 8)


def FuseCrossModalEmbedding() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rules = [
        GroupRule("scattered-sequence", frozenset({"relax.where"}), _match, SEQUENCE_REGION, worth=_worth),
        GroupRule("sequence", frozenset({"relax.concat"}), _match, SEQUENCE_REGION, worth=_worth),
    ]

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        out = apply_rules(mod, one_hot_rules(), _NAME)
        # What became one layer may be one with the next.
        while (folded := apply_rules(out, fold_rules(), _NAME)) is not out:
            out = folded
        out = apply_rules(out, [block_rule("projector", _joins_a_sequence)], _NAME)
        out = apply_groups(out, rules, _NAME)
        if out is not mod:
            relax.analysis.well_formed(out)
        return out

    return run


PASS = PassInfo(_NAME, FuseCrossModalEmbedding, "fuse", REASSOCIATES, doc="Modalities are written into one sequence.")
