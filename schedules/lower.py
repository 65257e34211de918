"""From Relax operators to scheduled TIR on a CPU: the ordered list of passes."""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.errors import UnsupportedModel

#: The longest part of a compiler message worth repeating.
_MESSAGE_CHARS = 400


def _failing_binding(mod: tvm.ir.IRModule) -> str:
    """Name the first binding whose operator cannot be lowered alone, or an empty string."""
    for gv, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        for block in getattr(func.body, "blocks", ()):
            for binding in block.bindings:
                call = getattr(binding, "value", None)
                if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
                    continue
                free = list(relax.analysis.free_vars(call))
                if any(not isinstance(v, relax.Var) for v in free):
                    continue
                builder = relax.BlockBuilder()
                params = [relax.Var(v.name_hint, v.ty) for v in free]
                body = relax.Call(call.op, [_swap(a, free, params) for a in call.args], call.attrs, call.ty_args)
                try:
                    with builder.function("probe", params):
                        builder.emit_func_output(builder.emit(body))
                    relax.transform.LegalizeOps()(builder.get())
                except Exception:
                    return f"{call.op.name} at {binding.var.name_hint} of function {gv.name_hint}"
    return ""


def _swap(expr: relax.Expr, old: list[relax.Var], new: list[relax.Var]) -> relax.Expr:
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_swap(field, old, new) for field in expr.fields])
    for a, b in zip(old, new):
        if expr.same_as(a):
            return b
    return expr


def LegalizeNamed() -> tvm.transform.Pass:
    """Return TVM's LegalizeOps whose failure names the operator and the binding.

    Raises
    ------
    UnsupportedModel
        When an operator has no kernel, or not for these dtypes and shapes.
    """

    @tvm.transform.module_pass(opt_level=0, name="LegalizeNamed")
    def legalize(mod: tvm.ir.IRModule, _: tvm.transform.PassContext) -> tvm.ir.IRModule:
        try:
            return relax.transform.LegalizeOps()(mod)
        except Exception as error:
            where = _failing_binding(mod) or "an operator"
            last = str(error).strip().splitlines()[-1][:_MESSAGE_CHARS] if str(error).strip() else "no message"
            raise UnsupportedModel(
                f"cannot lower {where}: {last}", "change the operator, its dtype or shape, or its importer"
            ) from error

    return legalize


def cpu_lowering_passes(target: tvm.target.Target | None = None) -> list[tvm.transform.Pass]:
    """Return the passes from a Relax module (composites allowed) to scheduled TIR, in order.

    Parameters
    ----------
    target : tvm.target.Target or None
        For the schedules; None takes the current target when the passes run.
    """
    # Imported here: schedules hold kernels, and only this list needs the passes around them.
    from crossloom.passes.accumulate_matmul_fp32 import AccumulateMatmulInFloat32
    from crossloom.passes.inline_composites import InlineComposites
    from crossloom.passes.schedule_cpu import ScheduleCPU

    return [
        # Composites hide their operators from everything below.
        InlineComposites(),
        # While operators are still operators: TIR no longer says what is a sum of halves.
        AccumulateMatmulInFloat32(),
        LegalizeNamed(),
        # FuseOps reads the patterns that AnnotateTIROpPattern writes on legalized kernels.
        relax.transform.AnnotateTIROpPattern(),
        # Before FuseOps, so that constant subgraphs aren't fused into kernels that run each time.
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        # Kernels that fusion replaced go before they cost scheduling time.
        relax.transform.DeadCodeElimination(),
        ScheduleCPU(target),
    ]
