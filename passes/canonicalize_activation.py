"""Recognise activations by what they compute: SiLU, GELU (erf and tanh) and quick GELU.

    s = R.sigmoid(g); y = R.multiply(g, s)
->  y = activation(g)             # Composite = "crossloom.activation", kind = "silu"

Fires when the elementwise lines between one value and the root give a known function on probe points, in
whatever order they are written.
Never when two tensors take part, or the function is another (no verdict: any product would be a candidate).

Numerics: exact; the body is the model's own spelling.  Source: Hendrycks & Gimpel 2016; Elfwing et al. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict

from .matching.spelling import dims, dtype, matched, only_rounds, replay, replayable, same_dims, scalar

_erf = np.vectorize(math.erf, otypes=[np.float64])
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relax.sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "relax.tanh": np.tanh,
    "relax.erf": _erf,
    "relax.exp": np.exp,
    "relax.negative": np.negative,
    "relax.square": np.square,
    "relax.astype": lambda a: a,
    "relax.nn.silu": lambda a: a / (1 + np.exp(-a)),
    "relax.nn.gelu": lambda a: a * (1 + _erf(a / math.sqrt(2))) / 2,
}
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "relax.multiply": np.multiply,
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.divide": np.divide,
    "relax.power": np.power,
}
_X = np.concatenate([np.linspace(-9.0, 9.0, 41), [-0.37, 0.013, 1.0]])
_C = math.sqrt(2 / math.pi)
_KINDS = {
    "silu": _X / (1 + np.exp(-_X)),
    "gelu": _X * (1 + _erf(_X / math.sqrt(2))) / 2,
    "gelu_tanh": _X * (1 + np.tanh(_C * (_X + 0.044715 * _X**3))) / 2,
    "quick_gelu": _X / (1 + np.exp(-1.702 * _X)),
}
_OPERATORS = {"relax.nn.silu": "silu", "relax.nn.gelu": "gelu", "relax.nn.gelu_tanh": "gelu_tanh"}
ROOTS = frozenset({"relax.multiply", "relax.divide", *_OPERATORS})
#: What constants rounded to the type (1.702, sqrt(2), 0.044715) change of the function.
_NEAR = {"float16": 1.5e-4, "bfloat16": 4e-4}
#: The longest spelling (GELU by tanh) has nine lines.
_DEEP = 14


def _sources(graph: Graph, expr: relax.Expr) -> list[relax.Var]:
    """Return ``expr`` and the values it is made of by elementwise lines, nearest first."""
    out: list[relax.Var] = []
    stack = [expr]
    while stack and len(out) < _DEEP:
        at = stack.pop(0)
        if not isinstance(at, relax.Var) or any(at.same_as(o) for o in out):
            continue
        out.append(at)
        call = graph.call(at, *_UNARY, *_BINARY)
        stack.extend(call.args if call is not None else ())
    return out


def _evaluate(graph: Graph, root: relax.Var, x: relax.Var) -> np.ndarray | None:
    """Return the root on the probe points in terms of x, None where something else takes part."""
    done: dict[relax.Var, np.ndarray | None] = {x: _X}

    def at(expr: relax.Expr) -> np.ndarray | None:
        if isinstance(expr, relax.Var) and expr in done:
            return done[expr]
        number = scalar(graph, expr)
        if number is not None:
            return np.full_like(_X, number)
        call = graph.call(expr, *_UNARY, *_BINARY)
        if call is None or len(done) > _DEEP or (graph.op(expr) == "relax.astype" and not only_rounds(call)):
            return None
        args = [at(a) for a in call.args]
        result: np.ndarray | None = None
        name, known = graph.op(expr), [a for a in args if a is not None]
        if len(known) == len(args):
            result = _UNARY[name](known[0]) if name in _UNARY else _BINARY[name](known[0], known[1])
        if isinstance(expr, relax.Var):
            done[expr] = result
        return result

    with np.errstate(all="ignore"):
        return at(root)


def match_activation(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    """Match an activation at its last line."""
    call = graph.resolve(root)
    if graph.op(root) in _OPERATORS:
        return matched(graph, root, {"x": call.args[0]}, kind=_OPERATORS[graph.op(root)])
    both = [a for a in call.args if scalar(graph, a) is None]
    if len(both) == 1:
        inner = graph.call(both[0], "relax.multiply")
        both = list(inner.args) if inner is not None else []
    if len(both) != 2:
        return None
    left, right = (_sources(graph, a) for a in both)
    common = [v for v in left if any(v.same_as(r) for r in right)]
    # A spelling reads its value at most three times; anything further off is another function.
    for x in common[:3]:
        if not same_dims(dims(x) or (), dims(root) or (None,)):
            continue
        value = _evaluate(graph, root, x)
        if value is None:
            continue
        # Two kinds of GELU are 5e-4 apart, more than a type's rounding moves either; the nearest is meant.
        kind = min(_KINDS, key=lambda k: float(np.nan_to_num(np.abs(value - _KINDS[k]), nan=np.inf).max()))
        if np.allclose(value, _KINDS[kind], rtol=2e-4, atol=_NEAR.get(dtype(root), 2e-6)):
            return matched(graph, root, {"x": x}, kind=kind)
    return None


def activation_rules() -> list[Rule]:
    """Return the rules."""

    def outline(site: Site) -> relax.Expr:
        return replay(site, "crossloom.activation", {"kind": site.match.facts["kind"]})

    return [Rule("activation", ROOTS, match_activation, outline, legal=replayable)]
