"""Replace fused convolution regions by kernels.

    y = fused_conv(x, w, b, r)            # Composite = "crossloom.fused_conv"
->  p = R.permute_dims(R.reshape(w, ...), ...)    # on the weight alone: folded when a model is built
    y = R.call_tir(fused_conv_kernel, (x, p, b, r), ...)

Fires for every region that :mod:`crossloom.passes.regions.conv` can read: one convolution, then steps on its sums.
Never for a region that holds anything else, nor for a target of kind ``c``, whose compilers are given no vectors and
whose memory has no room for a copy of x, nor for results of fewer places than a register holds (four registers where
each output channel has one of its own): the kernel has places in vectors, and the schedule rules' is faster there.
Such a region stays executable as it is, and the verdict says what it was.

Numerics: reassociates (sums of products in another order, float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.fused_conv import kernel, pack_channels, pack_weights, plan
from crossloom.schedules.machine import Machine
from crossloom.verdict import Verdict, accept, refuse

from .regions.conv import CONV_REGION, ConvRegion, read_conv
from .regions.lowering import Outer, lowering_pass

_NAME = "lower-fused-conv"
#: Registers of places that a channel takes which shares no value of x with others (measured: 16 places are slower than
#: the schedule rule's kernel, 49 faster, in registers of 8).
_REGISTERS_BY_CHANNEL = 4


def _legal(region: ConvRegion, target: tvm.target.Target) -> Verdict:
    if target.kind.name != "llvm":
        return refuse("no-vectors", target.kind.name, "the kernel's copy of x pays where products are of vectors")
    spec = region.spec
    places = math.prod(spec.result) if all(isinstance(extent, int) for extent in spec.result) else None
    least = Machine.of(target).lanes(spec.sum_dtype) * (_REGISTERS_BY_CHANNEL if spec.groups == spec.channels else 1)
    if isinstance(places, int) and 0 < places < least:
        return refuse("few-places", str(places), f"fewer than {least}: vectors of them would not be full")
    return accept()


def _lower(site: Site, region: ConvRegion, outer: Outer, machine: Machine) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    spec, builder = region.spec, site.builder
    operands = [outer(region.x), pack_weights(builder, spec, plan(spec, machine), outer(region.weight))]
    taking = [step for step in spec.steps if step.takes]
    for step, operand in zip(taking, map(outer, region.operands), strict=True):
        operands.append(pack_channels(builder, spec, operand) if step.takes == "channels" else operand)
    return kernel(spec, machine), operands


def LowerFusedConv(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
    """Return the pass.

    Parameters
    ----------
    target : tvm.target.Target or None
        Registers and vectors are its; None takes the current target.

    Raises
    ------
    UnsupportedTarget
        When the pass runs and there is neither.
    """
    return lowering_pass(_NAME, CONV_REGION, read_conv, _lower, target, _legal)


PASS = PassInfo(_NAME, LowerFusedConv, "lower", REASSOCIATES, doc="Fused convolution regions become kernels.")
