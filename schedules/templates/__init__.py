"""Fusion templates: from a chain of operators and a target to the one kernel that computes it, or the limit it passes.

    template(["load", "multiply", "add", "store"], get_target("rk3588"), unit="cpu")    # one loop, all in registers
    template(["rms_norm", "linear", "silu", "gate"], get_target("host"))                # a fused linear kernel
    template(["linear", "gelu", "linear"], get_target("apple-m4"))                      # a region of the Neural Engine

What a unit keeps together is data: the ``[[fusion]]`` rows of the target's capability table, each with its source.
There are three kinds of chain.  *Elementwise*: operators between one load and one store.  *Linear*: a norm, a linear
layer, and the steps behind its sums.  *Region*: a unit with a compiler of its own is given the whole chain as one
program, and no kernel is written here.
"""

from .choose import Template, allowed, template
from .elementwise import ElementwiseTemplate
from .limits import admitted, target_of
from .linear import LinearTemplate, chain_of
from .region import RegionTemplate

__all__ = [
    "ElementwiseTemplate",
    "LinearTemplate",
    "RegionTemplate",
    "Template",
    "admitted",
    "allowed",
    "chain_of",
    "target_of",
    "template",
]
