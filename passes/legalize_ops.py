"""Lower Relax operators to TIR, naming the operator and the binding when TVM cannot.

Fires for every operator that TVM can lower; attention over a composed number of keys (``P + 1``, with a kept key for
each earlier token), whose products TVM 0.27 takes for mismatched, is lowered over one variable in its place.
Never inside what a code generator has claimed; an operator that cannot be lowered, or that TVM passes over because a
shape is unknown, is an error that names it.

Numerics: reassociates (TVM chooses the order of reductions).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax, tirx

from crossloom.errors import UnsupportedModel
from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, outline
from crossloom.rewrite.driver import apply_rules

from .inline_composites import InlineComposites
from .matching.spelling import dims, matched

_ATTENTION = frozenset({"relax.nn.attention", "relax.nn.attention_bias"})
_OPERANDS = ("q", "k", "v", "bias")


def _match_composed(graph: Graph, root: relax.Var) -> Match | None:
    """Match attention with an operand of which a size is no number and no variable."""
    args = list(graph.value[root].args)
    sizes = [size for arg in args for size in dims(arg) or ()]
    if all(isinstance(size, (int, tirx.IntImm, tirx.Var)) for size in sizes):
        return None
    return matched(graph, root, dict(zip(_OPERANDS, args)))


def _outline_composed(site: Site) -> relax.Expr:
    call = site.match.graph.value[site.match.root]

    def body(builder: relax.BlockBuilder, **params: relax.Var) -> relax.Expr:
        return relax.Call(call.op, list(params.values()), call.attrs, call.ty_args)

    return outline(site, "crossloom.attention_operator", {name: site[name] for name in site.match.captures}, body)


_COMPOSED = Rule("attention-of-composed-sizes", _ATTENTION, _match_composed, _outline_composed)


def _culprit(mod: ir.IRModule) -> tuple[str, str, str]:
    """Return function, variable and operator of the first binding that does not legalize by itself."""
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        graph = Graph(gvar.name_hint, func, mod)
        for var in graph.order:
            op = graph.op(var)
            call = graph.value[var]
            if not op or not isinstance(call, relax.Call) or any(not isinstance(a, relax.Expr) for a in call.args):
                continue
            params = {leaf: leaf for leaf in call.args if isinstance(leaf, relax.Var)}
            builder = relax.BlockBuilder()
            try:
                with builder.function("probe", list(params)):
                    builder.emit_func_output(builder.emit(call))
                relax.transform.LegalizeOps()(builder.get())
            except Exception:
                return gvar.name_hint, var.name, op
    return "", "", ""


def _left_over(mod: ir.IRModule) -> tuple[str, str, str]:
    """Return function, variable and operator of the first call that TVM passed over: a shape in it is unknown."""
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function) or "Codegen" in (func.attrs or {}):
            continue
        graph = Graph(gvar.name_hint, func, mod)
        for var in graph.order:
            op = graph.op(var)
            call = graph.value[var]
            if not op or not isinstance(call, relax.Call) or call.op.get_attr("FLegalize") is None:
                continue
            for expr in (var, *call.args):
                if isinstance(expr.ty, relax.TensorType) and not isinstance(expr.ty.shape, relax.ShapeExpr):
                    return gvar.name_hint, var.name, op
    return "", "", ""


def LegalizeOps() -> tvm.transform.Pass:
    """Return TVM's LegalizeOps with errors that say where.

    Raises
    ------
    UnsupportedModel
        When run, naming function, binding and operator.
    """
    inner = relax.transform.LegalizeOps()

    @tvm.transform.module_pass(opt_level=0, name="legalize-ops")
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        apart = apply_rules(mod, [_COMPOSED], "legalize-ops")
        try:
            # The call to TIR that a function of plain sizes became holds for the composed ones that it is called with.
            out = inner(mod) if apart is mod else InlineComposites()(inner(apart))
        except Exception as error:
            function, var, op = _culprit(mod)
            last = str(error).strip().splitlines()[-1]
            raise UnsupportedModel(
                f"{op or 'an operator'} (binding {var!r} of function {function!r}) cannot be lowered to TIR: {last}",
                "check its dtypes and shapes, or rewrite it in operators TVM can lower",
            ) from error
        function, var, op = _left_over(out)
        if op:
            raise UnsupportedModel(
                f"{op} (binding {var!r} of function {function!r}) cannot be lowered to TIR: a shape in it is unknown",
                "run match-data-dependent-shapes before, or give the sizes with --input-shapes",
            )
        return out

    return run


PASS = PassInfo("legalize-ops", LegalizeOps, "lower", REASSOCIATES, doc="operators to TIR, with errors that say where")
