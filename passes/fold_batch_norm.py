"""Multiply batch norms and other maps of each channel into the weights of the layer beside them.

    y = conv(x, w); n = batch_norm(y, gamma, beta, mean, var)[0]       # inference
->  n = R.add(conv(x, R.multiply(w, scale)), shift)     # scale = gamma / sqrt(var + eps), shift = beta - mean * scale

Fires for an inference batch norm, and for products and sums with weights of one value a channel (as exporters leave
them, frozen batch norms, image normalization), behind a convolution, transposed convolution or linear layer; in front
of an unpadded convolution or a linear layer, whose results all see the same shift; a batch norm beside none becomes one
product and one sum, computed in float32 for half precision.  Arithmetic on weights alone is done when a model is built.
Never for a batch norm in training, nor where the layer's result (or the map's, in front of a layer) is read elsewhere,
nor for weights of another type than the result, nor for float16 unless the factors are constants that leave weights in
that type's range.  Products behind a linear layer without a batch norm are left to fold-scale-into-linear.

Numerics: reassociates (weights are rounded once after they are multiplied).  Linear in the module's size.
Source: Ioffe and Szegedy 2015 (arXiv 1502.03167); frozen batch norms as in DETR.
"""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.arithmetic import Arithmetic, Value, is_all, keeps_half, known
from .matching.channels import BATCH_NORM, STEPS, ChannelMap, channel_map, known_map, scale_and_shift
from .matching.layers import LAYERS, LINEAR, Layer, layer_at, times_channels
from .matching.spelling import dims, dtype, same_dims, sizes
from .regions.composites import linear

_NAME = "fold-batch-norm"
_LARGEST = 65504.0


def _match_behind_layer(graph: Graph, root: relax.Var) -> Match | None:
    """Match a map behind a layer, with one view (axes in another order, rows flattened) between them."""
    channels = channel_map(graph, root)
    if channels is None or not channels.scaled or channels.axis is None:
        return None
    source, axis, inside = channels.source, channels.axis, channels.inside
    view = graph.call(source, "relax.permute_dims", "relax.reshape")
    layer = layer_at(graph, source if view is None else view.args[0])
    if layer is None or (layer.name in (LINEAR, "relax.matmul") and not channels.normed):
        return None
    if view is not None:
        inner = _axis_behind(view, axis)
        if inner is None:
            return None
        axis, inside = inner, inside | {source}
    if axis != layer.out_axis:
        return None
    made = source if view is None else view.args[0]
    captures = {**layer.operands, **channels.captures}
    return Match(
        graph, root, captures, inside | {made}, {"channels": channels, "layer": layer, "made": made, "view": view}
    )


def _axis_behind(view: relax.Call, axis: int) -> int | None:
    """Return which axis of what a view is made from is an axis of the view."""
    before, after = dims(view.args[0]) or [], dims(view) or []
    if view.op.name == "relax.permute_dims":
        axes = view.attrs.axes
        return len(after) - 1 - axis if axes is None else int(axes[axis]) % len(after)
    last = axis == len(after) - 1 and same_dims(before[-1:], after[-1:])
    return len(before) - 1 if last else None


def _legal_behind_layer(m: Match) -> Verdict:
    layer: Layer = m.facts["layer"]
    if layer.outputs is None:
        return refuse("channels-of-symbolic-number", m.root.name)
    others = [m.facts["made"], *(v for k, v in layer.operands.items() if k != "x")]
    if any(dtype(other) != dtype(m.root) for other in others):
        return refuse("different-dtypes", m.root.name, f"{dtype(m.root)} of {dtype(others[1])} weights")
    if dtype(m.root) == "float16" and not _keeps_half(m.graph, m.facts["channels"], layer):
        return refuse("half-precision-factor-unknown", m.root.name, "weights might lose their bits")
    return accept()


def _keeps_half(graph: Graph, channels: ChannelMap, layer: Layer) -> bool:
    """Return whether a map is known to leave weights, and what is added, in float16's range."""
    found = known_map(graph, channels)
    if found is None:
        return False
    scale, shift = found
    if "bias" in layer.operands:
        bias = known(graph, layer.operands["bias"])
        if bias is None:
            return False
        shift = bias.reshape(-1) * scale + shift
    return keeps_half(scale) and bool(np.all(np.abs(shift) <= _LARGEST))


def _replace_behind_layer(site: Site) -> relax.Expr:
    match, do, kind = site.match, _arithmetic(site), dtype(site.match.root)
    layer: Layer = match.facts["layer"]
    scale, shift = _map_of(site, do)
    weight = times_channels(layer, "O", _value(site, "weight", do), scale, do)
    bias: Value | None = None
    if "bias" in layer.operands:
        flat = do.reshape(_value(site, "bias", do), [layer.outputs or 0])
        bias = do.plus(do.times(flat, scale), shift)
    elif not is_all(shift, 0):
        bias = shift
    made = _layer(site, do.expr(weight, kind), bias, do)
    view = match.facts["view"]
    return made if view is None else relax.Call(view.op, [site.builder.emit(made), *view.args[1:]], view.attrs)


def _match_before_layer(graph: Graph, root: relax.Var) -> Match | None:
    layer = layer_at(graph, root)
    if layer is None or not isinstance(x := layer.operands["x"], relax.Var) or x not in graph.value:
        return None
    channels = channel_map(graph, x)
    if channels is None or not channels.scaled or channels.axis not in (None, layer.in_axis):
        return None
    # A product in front of a linear layer is a norm's weight or a gate: other passes' affair.
    if layer.name in (LINEAR, "relax.matmul") and not channels.normed:
        return None
    captures = {**layer.operands, **channels.captures, "x": channels.source}
    return Match(graph, root, captures, channels.inside | {root}, {"channels": channels, "layer": layer})


def _legal_before_layer(m: Match) -> Verdict:
    layer: Layer = m.facts["layer"]
    if layer.inputs is None or layer.outputs is None:
        return refuse("channels-of-symbolic-number", m.root.name)
    values = [m["x"], *layer.operands.values(), m.root]
    if len({dtype(value) for value in values}) > 1:
        return refuse("different-dtypes", m.root.name, f"{dtype(m['x'])} beside {dtype(m.root)}")
    if dtype(m.root) == "float16":
        return refuse("half-precision-sum-unknown", m.root.name, "a sum of weights might leave the range of float16")
    found = known_map(m.graph, m.facts["channels"])
    if not layer.uniform and not (found is not None and is_all(found[1], 0)):
        return refuse("shift-is-not-uniform", m.root.name, "what lies beyond the border is zero, and is not shifted")
    return accept()


def _replace_before_layer(site: Site) -> relax.Expr:
    do, kind = _arithmetic(site), dtype(site.match.root)
    layer: Layer = site.match.facts["layer"]
    scale, shift = _map_of(site, do)
    given = _value(site, "weight", do)
    weight = times_channels(layer, "I", given, scale, do)
    bias: Value | None = _value(site, "bias", do) if "bias" in layer.operands else None
    if not is_all(shift, 0):
        places = [place for place, letter in enumerate(layer.kernel) if letter != "O"]
        extra = do.sum(times_channels(layer, "I", given, shift, do), places)
        bias = extra if bias is None else do("add", do.reshape(bias, [layer.outputs or 0]), extra)
    return _layer(site, do.expr(weight, kind), bias, do)


def _match_alone(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    item = graph.value[root]
    if isinstance(item, relax.TupleGetItem):
        norm = graph.call(item.tuple_value, BATCH_NORM)
        if norm is not None and item.index == 0 and bool(norm.attrs.training):
            return refuse("training", root.name, "its mean and variance are those of the batch")
    channels = channel_map(graph, root)
    if channels is None or not channels.normed:
        return None
    captures = {"x": channels.source, **channels.captures}
    return Match(graph, root, captures, channels.inside, {"channels": channels})


def _legal_alone(m: Match) -> Verdict:
    channels: ChannelMap = m.facts["channels"]
    if (sizes(m.root) or [])[channels.axis or 0] is None:
        return refuse("channels-of-symbolic-number", m.root.name)
    return accept()


def _replace_alone(site: Site) -> relax.Expr:
    emit, do, root = site.builder.emit, _arithmetic(site), site.match.root
    channels: ChannelMap = site.match.facts["channels"]
    scale, shift = (_along(value, channels.axis or 0, root, do) for value in _map_of(site, do))
    y = emit(relax.op.multiply(do.expr(site["x"]), scale))
    y = relax.op.add(y, shift)
    return y if dtype(root) == do.kind else relax.op.astype(emit(y), dtype(root))


def _arithmetic(site: Site) -> Arithmetic:
    return Arithmetic(site.builder.emit, "float64" if dtype(site.match.root) == "float64" else "float32")


def _value(site: Site, name: str, do: Arithmetic) -> Value:
    """Return an operand: its value where that is known, an expression of the arithmetic's type otherwise."""
    found = known(site.match.graph, site.match.captures[name])
    return do.expr(site[name]) if found is None else found


def _map_of(site: Site, do: Arithmetic) -> tuple[Value, Value]:
    return scale_and_shift(site.match.graph, site.match.facts["channels"], lambda name: _value(site, name, do), do)


def _along(value: Value, axis: int, like: relax.Expr, do: Arithmetic, kind: str | None = None) -> relax.Expr:
    """Return one value a channel so that it meets the channels of a tensor."""
    count = int(np.prod([int(d) for d in (value.shape if isinstance(value, np.ndarray) else value.ty.shape)]))
    behind = len(dims(like) or ()) - 1 - axis
    return do.expr(do.reshape(value, [count, *[1] * behind]), kind)


def _layer(site: Site, weight: relax.Expr, bias: Value | None, do: Arithmetic) -> relax.Expr:
    """Return the layer with other weights; its call is that of the root, or lies inside."""
    layer, kind = site.match.facts["layer"], dtype(site.match.root)
    made = site.match.facts.get("made", site.match.root)
    if layer.name == LINEAR:
        wide = None if bias is None else do.expr(do.reshape(bias, [layer.outputs]), kind)
        return linear(site, site["x"], weight, wide, "out_in" if layer.kernel == "OI" else "in_out")
    call = site.match.graph.resolve(made)
    out = relax.Call(call.op, [site["x"], weight], call.attrs, call.ty_args)
    return out if bias is None else relax.op.add(site.builder.emit(out), _along(bias, layer.out_axis, made, do, kind))


def _worth(m: Match) -> Verdict:
    """Return what is saved: a product and a sum of each value."""
    static = sizes(m.root) or [None]
    return accept(macs=0 if None in static else math.prod(size or 0 for size in static))


def FoldBatchNorm() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rules = [
        Rule("map-behind-layer", STEPS, _match_behind_layer, _replace_behind_layer, _legal_behind_layer, _worth),
        Rule("map-before-layer", LAYERS, _match_before_layer, _replace_before_layer, _legal_before_layer, _worth),
        Rule("batch-norm-alone", STEPS, _match_alone, _replace_alone, _legal_alone, _worth),
    ]
    # One after the other: a layer that took a map on one side can take another one on the other.
    return tvm.transform.Sequential([rewrite_pass(_NAME, [rule]) for rule in rules], name=_NAME)


PASS = PassInfo(_NAME, FoldBatchNorm, "fuse", REASSOCIATES, doc="Batch norms and maps of channels join weights.")
