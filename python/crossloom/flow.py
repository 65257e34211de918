"""Pipelines: one commented, ordered list of passes a target, their text form, and the hook by which TVM finds them.

``tvm.compile(mod, target, relax_pipeline=crossloom.pipeline("rk3588"))`` runs the whole flow;
``relax_pipeline="crossloom"`` does the same for the target TVM was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from .errors import UsageError
from .options import PassText, format_pipeline, parse_pipeline
from .registry import PassInfo, get_pass
from .reshapes import rewrite_reshapes
from .restrict import restrict_single_arguments

#: From a graph to scheduled TIR on any CPU.  Order matters where a comment says so.
CPU: tuple[str, ...] = (
    # Before all that reads shapes.
    "match-data-dependent-shapes",
    # Recognise norms, rotary, attention, MLPs, linears and embeddings while the importer's spelling is intact.
    "canonicalize-transformer",
    # Tables that every layer looks up anew are looked up once; behind recognition, which follows values by their only
    # reader.
    "share-equal-bindings",
    # Attention over many windows is one attention: before anything asks what a layer is.
    "batch-attention-windows",
    # Caches that are appended to layer by layer and stacked: one append to the stack.
    "lift-cache-stack",
    # What each composite belongs to (tower, projector, layer): while there is a composite for each.
    "annotate-semantic-regions",
    # Batch norms leave before regions grow: what stood behind them then stands behind a layer.
    "fold-batch-norm",
    # Behind what tells a picture by its convolutions, and behind image normalization's way into their weights; the
    # linear layers that come of it grow regions like all others.
    "lower-patch-embedding",
    # What crosses modalities, before the layers on either side grow regions of their own.
    "fuse-cross-modal-embedding",
    "fuse-semantic-gate",
    "fuse-cross-attention-kv",
    # Feed-forward blocks come apart into two linear layers: a norm can join the first, a residual the second.
    "fuse-gated-mlp",
    # A factor of each column behind a layer (LayerScale) goes into its weights, before the residual sum joins it.
    "fold-scale-into-linear",
    # One weight over several modalities' rows, read once.
    "fuse-shared-projections",
    # Linear layers of one value side by side, and regions that grow from them: what follows each layer, then the
    # norm in front of all of them, which has to find its readers in as few regions as there will be.
    "fuse-parallel-projections",
    "fuse-rotary-projection",
    "fuse-rotary-mlp",
    "fuse-linear-epilogue",
    "fold-norm-into-linear",
    # Convolutions and what follows each; those of patches are linear layers by now.
    "fuse-conv-epilogue",
    # Norms that found no linear layer.
    "fuse-residual-norm",
    # Both layers of a feed-forward block: nothing grows either of them any more.
    "fuse-feed-forward",
    # Layers that nothing has joined.
    "fuse-single-linear",
    "fuse-attention",
    # What attention left of a cache that grows.
    "fuse-cache-append",
    # Regions to kernels: while composites say what is in them.
    "lower-fused-sequence",
    "lower-fused-gate",
    "lower-fused-feed-forward",
    "lower-fused-linear",
    "lower-fused-residual-norm",
    "lower-fused-conv",
    "lower-fused-attention",
    "lower-fused-append",
    # Composites nobody claimed become plain operators again: before anything that walks operators.
    "inline-composites",
    # What the kernels' weights are put in order by, where they are constants: before it becomes kernels of its own.
    "fold-constants",
    # Before legalization, which fixes the accumulator's dtype.
    "accumulate-matmul-fp32",
    # Operators to TIR, then fusion of what is next to each other: TVM's CPU default leaves this out.
    "legalize-ops",
    "relax.AnnotateTIROpPattern",
    "relax.FoldConstant",
    "relax.FuseOps",
    "relax.FuseTIR",
    # Kernels that fusion replaced go before they cost scheduling time.
    "relax.DeadCodeElimination",
    # Last: it looks at the fused loops.
    "schedule-cpu",
)


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline: its text, what the registry knows of it, and the pass itself."""

    text: PassText
    info: PassInfo
    run: tvm.transform.Pass


def default_text(target: Any = None) -> str:
    """Return the text of a target's pipeline: so far every target's is that of its CPU."""
    return ",".join(CPU)


def steps(target: Any = None, text: str | None = None, disabled: Iterable[str] = ()) -> list[Step]:
    """Build a pipeline's passes.

    Parameters
    ----------
    target : crossloom.targets.Target, tvm.target.Target, str or None
        Given to passes that ask for one.
    text : str or None
        Textual pipeline; the target's own when None.
    disabled : iterable of str
        Names to leave out.

    Raises
    ------
    UsageError
        For an unknown pass or option, or a disabled name that is not in the pipeline.
    """
    tvm_target = resolve_target(target)
    parsed = parse_pipeline(default_text(target) if text is None else text)
    left_out = set(disabled)
    unknown = left_out - {p.name for p in parsed}
    if unknown:
        raise UsageError(
            f"cannot disable {', '.join(sorted(unknown))}: not in the pipeline", f"it is: {format_pipeline(parsed)}"
        )
    out = []
    for item in parsed:
        if item.name not in left_out:
            info = get_pass(item.name)
            out.append(Step(item, info, info.make(dict(item.options), tvm_target)))
    return out


def resolve_target(target: Any) -> tvm.target.Target | None:
    """Return the TVM target of a name, one of our targets, or a TVM target; None stays None."""
    if target is None or isinstance(target, tvm.target.Target):
        return target
    if isinstance(target, str):
        from .targets import get_target

        target = get_target(target)
    return target.tvm_target()


def vm_lowering() -> Sequence[tvm.transform.Pass]:
    """Return TVM's own last steps, from Relax with calls to TIR to what the virtual machine runs."""
    t = relax.transform
    return (
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        # For what the dispatches made.
        t.LegalizeOps(),
        rewrite_reshapes(),
        t.ToNonDataflow(),
        t.RemovePurityChecking(),
        t.CallTIRRewrite(),
        t.StaticPlanBlockMemory(),
        t.LowerAllocTensor(),
        t.KillAfterLastUse(),
        t.LowerRuntimeBuiltin(),
        t.ComputePrimValue(),
        t.VMShapeLower(),
        t.AttachGlobalSymbol(),
        # Last: the function that computes shapes is made here, and costs every kernel its registers otherwise.
        restrict_single_arguments(),
    )


def pipeline(target: Any = None, text: str | None = None, disabled: Iterable[str] = ()) -> tvm.transform.Pass:
    """Return the whole flow as one TVM pass, for ``tvm.compile(..., relax_pipeline=...)``.

    Parameters
    ----------
    target, text, disabled
        As for :func:`steps`; a target of None means the one in scope when the pass runs.
    """
    fixed = steps(target, text, disabled) if target is not None else None

    @tvm.transform.module_pass(opt_level=0, name="crossloom")
    def run(mod: tvm.ir.IRModule, ctx: tvm.transform.PassContext) -> tvm.ir.IRModule:
        chosen = fixed if fixed is not None else steps(tvm.target.Target.current(allow_none=True), text, disabled)
        for step in chosen:
            mod = step.run(mod)
        for low in vm_lowering():
            mod = low(mod)
        return mod

    return run
