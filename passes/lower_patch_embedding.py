"""A convolution whose kernels do not overlap is a linear layer over patches.

    y = conv2d(x, w, strides=[14, 14])          # w (O, C, 14, 14)
    t = R.permute_dims(R.reshape(R.add(y, b), (N, O, P)), (0, 2, 1))
->  p = R.reshape(R.permute_dims(R.reshape(x, (N, C, H', 14, W', 14)), (0, 2, 4, 1, 3, 5)), (N, P, C * 14 * 14))
    t = linear(p, R.reshape(w, (O, C * 14 * 14)), b)

Fires for one to three axes whose strides are the kernel's sizes; a rest that no kernel reads is cut off.  A bias of one
value a channel joins the layer, and where the tokens follow, flattened and transposed, they come out as they are: the
result is (N, P, O) then, and turned back to (N, O, H', W') otherwise.  A kernel as large as its input (video patches of
Qwen2-VL) needs no axes in another order.
Never with padding, dilation or groups, nor for kernels of size 1 (nothing is a patch), weights that are inputs,
layouts in blocks, mixed types, or channels of symbolic number; nor where results would have to be turned back and few
products are made of each value moved.

Numerics: reassociates.  Linear in the module's size.  Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.rewrite.sizes import same_size
from crossloom.verdict import Verdict, accept, refuse

from .matching.arithmetic import of_weights
from .matching.channels import channel_axis
from .matching.layers import CONVOLUTIONS
from .matching.spelling import dims, dtype, same_dims, sizes
from .regions.composites import linear

_NAME = "lower-patch-embedding"


@dataclass(frozen=True)
class Options:
    """What the pass weighs.

    Attributes
    ----------
    least_macs : int
        Products that have to be made for each value moved (a patch's, and its results), where results are turned back:
        moving a value costs about as much, on x86-64 with AVX2.
    """

    least_macs: int = 64


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    kernel, layout = call.attrs.kernel_layout, str(call.attrs.data_layout)
    letters = [letter for letter in str(kernel) if letter not in "IO"]
    window = dict(zip(str(kernel), sizes(call.args[1]) or []))
    strides = dict(zip((letter for letter in layout if letter not in "NC"), (int(s) for s in call.attrs.strides)))
    if None in (dims(call.args[0]), dims(root)) or not all(layout_.isupper() for layout_ in (str(kernel), layout)):
        return None
    if {letter: window.get(letter) for letter in letters} != strides or set(strides.values()) == {1}:
        return None
    out = str(call.attrs.out_layout)
    made = dict(zip(out, dims(root) or []))
    end, bias = _behind_bias(graph, root, out.index("C"))
    views, tokens = _behind_views(graph, end, out, made)
    last = views[-1] if views else end
    places = [letter for letter in layout if letter not in "NC"]
    rows = (dims(last) or [])[:-1] if tokens else [made[letter] for letter in ("N", *places)]
    depth = math.prod(size or 0 for letter, size in window.items() if letter != "O")
    rows = [*rows, tirx.IntImm("int64", depth)]
    x = call.args[0]
    whole = all(same_size(made[letter], 1) and same_size(whole_, k) for letter, whole_, k in _lengths(call, made))
    # Patches that were told apart for the convolution alone are read as they came.
    before = graph.call(x, "relax.reshape") if whole else None
    x = before.args[0] if before is not None and same_dims(dims(before.args[0]) or [], rows) else x
    captures = {"x": x, "weight": call.args[1]} | ({} if bias is None else {"bias": bias})
    facts = {"call": call, "window": window, "tokens": tokens, "made": made, "rows": rows, "whole": whole}
    return Match(graph, last, captures, frozenset({root, end, *views}), facts)


def _lengths(call: relax.Call, made: dict[str, tirx.Expr]) -> list[tuple[str, tirx.Expr, tirx.Expr]]:
    """Return letter, length of the input and length of the kernel along each axis of places."""
    lengths = dict(zip(str(call.attrs.data_layout), dims(call.args[0]) or []))
    kernel = dict(zip(str(call.attrs.kernel_layout), dims(call.args[1]) or []))
    return [(letter, lengths[letter], kernel[letter]) for letter in made if letter not in "NC"]


def _only_reader(graph: Graph, var: relax.Var) -> relax.Var | None:
    """Return the one binding that reads a value, where there is one."""
    readers = set(graph.users.get(var, ()))
    if len(readers) != 1 or var in graph.escapes:
        return None
    (reader,) = readers
    return reader if graph.scope[reader] == graph.scope[var] and reader not in graph.casts else None


def _behind_bias(graph: Graph, root: relax.Var, axis: int) -> tuple[relax.Var, relax.Expr | None]:
    """Return the sum with a bias behind a convolution, and the bias; the convolution itself where there is none."""
    reader = _only_reader(graph, root)
    call = graph.call(reader, "relax.add") if reader is not None else None
    if reader is None or call is None or not same_dims(dims(reader) or [], dims(root) or []):
        return root, None
    for value, bias in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
        single = (sizes(root) or [])[axis] == 1
        if value.same_as(root) and channel_axis(graph, bias, dims(root) or []) == (-1 if single else axis):
            return reader, bias
    return root, None


def _behind_views(
    graph: Graph, end: relax.Var, layout: str, shape: dict[str, tirx.Expr]
) -> tuple[list[relax.Var], bool]:
    """Return the views that turn results into tokens, channels last, and whether the results are tokens then."""
    if layout[-1] == "C" and layout[0] == "N":
        return [], True
    first = _only_reader(graph, end)
    if layout[:2] != "NC" or first is None:
        return [], False
    places, after = [shape[letter] for letter in layout[2:]], dims(first) or []
    reshaped, turned = graph.call(first, "relax.reshape"), graph.call(first, "relax.permute_dims")
    if turned is not None and turned.attrs.axes is not None:
        return ([first], True) if _axes(turned) == [0, *range(2, len(layout)), 1] else ([], False)
    if reshaped is None or not isinstance(first, relax.Var):
        return [], False
    if all(same_size(place, 1) for place in places) and same_dims(after[-1:], [shape["C"]]):
        return [first], True
    second = _only_reader(graph, first)
    turned = graph.call(second, "relax.permute_dims") if second is not None else None
    flat = len(after) == 3 and same_dims(after[:2], [shape["N"], shape["C"]])
    if second is None or turned is None or not flat or _axes(turned) != [0, 2, 1]:
        return [], False
    return [first, second], True


def _axes(call: relax.Call) -> list[int]:
    rank = len(dims(call) or ())
    return list(range(rank))[::-1] if call.attrs.axes is None else [int(axis) % rank for axis in call.attrs.axes]


def _legal(m: Match) -> Verdict:
    call = m.facts["call"]
    if int(call.attrs.groups) != 1:
        return refuse("grouped", m.root.name, f"{int(call.attrs.groups)} groups read channels of their own")
    if any(int(size) for size in call.attrs.padding) or any(int(size) != 1 for size in call.attrs.dilation):
        return refuse("padded-or-dilated", m.root.name, "what a kernel reads is no patch of its input")
    if not of_weights(m.graph, m["weight"]):
        return refuse("weight-is-an-input", getattr(m["weight"], "name", ""))
    kinds = {dtype(value) for value in (*m.captures.values(), m.root)}
    if len(kinds) > 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    if None in m.facts["window"].values():
        return refuse("channels-of-symbolic-number", m.root.name)
    return accept()


def _weigh(m: Match, least_macs: int) -> Verdict:
    count, depth = m.facts["window"]["O"], int(m.facts["rows"][-1])
    if not m.facts["tokens"] and count * depth < least_macs * (count + depth):
        return refuse(
            "moves-outweigh-products", m.root.name, f"{count * depth} products a patch, {count + depth} moves"
        )
    return accept(macs=math.prod(size or 0 for size in sizes(m.root) or []) * depth)


def _replace(site: Site) -> relax.Expr:
    emit, op, facts = site.builder.emit, relax.op, site.match.facts
    call, window = facts["call"], facts["window"]
    data, kernel, out = (str(call.attrs[name]) for name in ("data_layout", "kernel_layout", "out_layout"))
    # Values of a patch stand in the order in which the input has them.
    order = [letter for letter in data if letter != "N"]
    depth = int(facts["rows"][-1])
    x = site["x"] if same_dims(dims(site["x"]) or [], facts["rows"]) else _patches(site, order)
    weight = site["weight"]
    axes = [kernel.index("O"), *(kernel.index("I" if letter == "C" else letter) for letter in order)]
    if axes != list(range(len(kernel))):
        weight = emit(op.permute_dims(weight, axes))
    weight = emit(op.reshape(weight, [window["O"], depth]))
    bias = emit(op.reshape(site["bias"], [window["O"]])) if "bias" in site.match.captures else None
    y = linear(site, x, weight, bias, "out_in")
    if facts["tokens"]:
        return y
    rows = ["N", *(c for c in order if c != "C"), "C"]
    return op.permute_dims(emit(y), [rows.index(letter) for letter in out])


def _patches(site: Site, order: Sequence[str]) -> relax.Expr:
    """Return the rows of the linear layer: one a patch."""
    emit, op, facts = site.builder.emit, relax.op, site.match.facts
    call, made, window = facts["call"], facts["made"], facts["window"]
    data, x = str(call.attrs.data_layout), site["x"]
    read = {c: made[c] * window[c] for c, whole, _ in _lengths(call, made) if not same_size(made[c] * window[c], whole)}
    if read:
        axes = [data.index(letter) for letter in read]
        x = emit(op.strided_slice(x, axes, [0] * len(axes), list(read.values())))
    if facts["whole"]:
        return emit(op.reshape(x, facts["rows"]))
    apart: list[tirx.Expr] = []
    first: dict[str, int] = {}
    for letter in data:
        first[letter] = len(apart)
        apart += [made[letter], window[letter]] if letter not in "NC" else [made["N"] if letter == "N" else window["I"]]
    axes = [first["N"], *(first[c] for c in order if c != "C")]
    axes += [first[c] + (c != "C") for c in order]
    x = emit(op.permute_dims(emit(op.reshape(x, apart)), axes))
    return emit(op.reshape(x, facts["rows"]))


def LowerPatchEmbedding(least_macs: int = Options.least_macs) -> tvm.transform.Pass:
    """Return the pass; see the module's docstring and :class:`Options`."""
    worth = partial(_weigh, least_macs=least_macs)
    return rewrite_pass(_NAME, [Rule("patch-embedding", CONVOLUTIONS, _match, _replace, _legal, worth)])


PASS = PassInfo(
    _NAME, LowerPatchEmbedding, "fuse", REASSOCIATES, Options, doc="Convolutions over patches become linear layers."
)
